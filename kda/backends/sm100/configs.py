"""What the kernels are built for, their arguments, and their shared and tensor memory.  No cutlass: a kept kernel needs
none."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from ..common.arguments import Arguments, number, tensor
from ..common.cute.barriers import Arrivals, Meeting, NamedBarrier, Pipeline, commit, mbarriers, of_each_warp
from ..common.cute.configs import (
    FIRST_FOUR,
    WHOLE_CTA,
    ChunkConfig,
    HeadsConfig,
    TilesArguments,
    WalkedConfig,
    checkpoint_arguments,
    ring_of_tiles,
    wrong_head_sizes,
)
from ..common.cute.fields import Struct, StructField, array, several
from ..common.cute.tile import HALF, PITCH_A, PITCH_INVERSE, SUMS, WARPS, C
from ..common.cute.training import (
    LOAD_WARPS,
    TOKENS,
    ChainArguments,
    GradsArguments,
    GradsOptions,
    WalkArguments,
)

CTAS = 2                                     # CTAs of a cluster: each has the same share of the state's columns
GROUPS = 2                                   # groups of WARPS warps in a CTA
RING = CTAS * GROUPS                         # stages: one for each group of the cluster
AHEAD = 3                                    # chunks whose rows of v are there or on their way
CHAIN_WARPS = 4
FIRST_PRODUCER = CHAIN_WARPS                 # warp of the first group
TMEM = 512                                   # columns: all there are
STATE_WARPS = 8                              # warps that have the state, in record and walk
EPILOGUE_WARPS = 4                           # warps of EPILOGUE in record

# Named barriers of CHAIN in fused, of its groups, and of the eight warps that have the state in record and walk.
STATE_ROUNDED = NamedBarrier("STATE_ROUNDED", 1, 32 * CHAIN_WARPS)
X_THERE = NamedBarrier("X_THERE", 2, 32 * CHAIN_WARPS)
GROUP = NamedBarrier("GROUP", 4, 32 * WARPS, ids_per_group=3)
GROUP_FIRST_FOUR = NamedBarrier("GROUP_FIRST_FOUR", 5, 128, ids_per_group=3)
GROUP_LAST_SIX = NamedBarrier("GROUP_LAST_SIX", 6, 192, ids_per_group=3)
GROUP_TILE = NamedBarrier("GROUP_TILE", 10, 32 * WARPS, ids_per_group=1)
IMAGE_THERE = NamedBarrier("IMAGE_THERE", 1, 32 * STATE_WARPS)
ROWS_THERE = NamedBarrier("ROWS_THERE", 2, 32 * STATE_WARPS)


class Shared(NamedTuple):
    """Shared memory of fwd/fused.py."""

    tile: Struct
    group: Struct
    A_kk: StructField                        # in a group, over X, which was read by then
    cta: Struct

# What a group keeps of the piece of a walk that it works on: addresses of rows, and numbers.
ITEM = Struct(
    q=array("int64", 1),
    k=array("int64", 1, align=8),
    g=array("int64", 1, align=8),
    beta=array("int64", 1, align=8),
    bias=array("int64", 1, align=8),
    tiles=array("int64", 1, align=8),        # where the first chunk's tile is kept
    tokens=array("int32", 1, align=4),
    rate=array("float32", 1, align=4),
    scale=array("float32", 1, align=4),
    lower_bound=array("float32", 1, align=4),
)


class ShareField:
    """The fields that describe a cluster's share of all walks (parts/walks.py)."""

    SLOTS, BEGIN, END, RESUME, LIMIT, CLUSTER, OF_SEQUENCE = range(7)
    COUNT = 8


class PieceField:
    """The fields that describe a piece of a share (parts/walks.py)."""

    NEXT, WALK, HEAD, SKIPPED, CHUNKS, ENTERS, LEAVES, ITEM = range(8)
    COUNT = 8
    FROM_MEMORY, FROM_CLUSTER, NOWHERE = range(3)    # where a state comes from, ENTERS, and goes to, LEAVES


class FirstRow:
    """The addresses that CHAIN has of a piece: of its first token; KEPT: of the first state that is kept."""

    V, O, R, KEPT = range(4)                 # V: 0 for zeros
    COUNT = 4


OF_CHAIN = 2                                 # pieces: CHAIN's and the next one; behind them, one of each group


CTA_PIPELINES = (
    Pipeline(
        "full", (Arrivals(1, "PREPARE", "its warp 4; in its own CTA without bytes", "the copy"),), "CHAIN",
        "a tile is there: kE, qg, KT, A2, 2^gc_last", RING,
    ),
    Pipeline("out", commit("CHAIN"), "CHAIN", "-X is there, S was read"),
    Pipeline("added", commit("CHAIN"), "CHAIN", "where one product makes pairs: S has KT^T @ X"),
    Pipeline("o_done", commit("CHAIN"), "CHAIN", "S and o are there; X and the tile were read"),
)
READ = Arrivals(
    CHAIN_WARPS * CTAS, "CHAIN", "a lane of each warp of both CTAs, in the CTA that makes the stage's tiles"
)
GROUP_PIPELINES = (
    Pipeline("empty", (READ,), "PREPARE", "no warp reads the stage any more; the copy is done", each="group"),
    Pipeline("pairs_done", commit("PREPARE"), "PREPARE", "the product of pairs is there", each="group"),
    Pipeline("KT_done", commit("PREPARE"), "PREPARE", "KT is in tensor memory", each="group"),
)

# The same where a kernel keeps what a backward reads; KT is made by warps.
TILE_SENT = Arrivals(1, "PREPARE", "a lane of its warp 4, where tiles are kept: the copy to memory has read it, too")
KEEPING_GROUP_PIPELINES = (GROUP_PIPELINES[0]._replace(arrivals=(READ, TILE_SENT)), GROUP_PIPELINES[1])


@functools.cache
def shared_memory(K: int, columns: int) -> Shared:
    """Return the shared memory of a CTA that has `columns` columns of the state."""
    tile = Struct(                           # what PREPAREs hand to CHAINs of a chunk
        align=1024,
        KQ=array("bfloat16", 2 * C, K),      # [kE; qg]
        KG=array("bfloat16", C, K),          # kg, then KT in its place
        TA=array("bfloat16", C, 2 * C),      # [TB; A2], transposed
        decay=array("float32", K),           # 2^gc_last
    )
    group = Struct(                          # what one group of warps has
        align=1024,
        tile=several(tile, 1),               # that the group makes
        neighbour=several(tile, 1),          # that the neighbour's group makes
        X=array("bfloat16", 2 * C, K),       # operands of its products
        Y=array("bfloat16", C, K),           # and, once it was read, what blocks of any gate have
        sums=array("float32", SUMS, K),      # common/cute/rows.py
        columns=array("float32", C, PITCH_INVERSE),
        b=array("float32", 2, C),            # b of this chunk, and of the one before
        **mbarriers(GROUP_PIPELINES),
    )
    cta = Struct(
        align=1024,
        groups=several(group, GROUPS),
        S=array("bfloat16", K, columns),     # the state, rounded
        v=array("bfloat16", AHEAD, C, columns),   # rows of v, and -X in their place
        minus_one=array("bfloat16", C, 2 * C),    # [-1; 0], transposed
        **mbarriers(CTA_PIPELINES),
        base_desc=array("uint32", 1, align=4),    # the address of all this / 16, as descriptors have it
        tmem=array("uint32", 1, align=4),    # where tensor memory begins: at 0
        share=array("int32", ShareField.COUNT),
        pieces=array("int32", OF_CHAIN + GROUPS, PieceField.COUNT),
        first_rows=array("int64", OF_CHAIN, FirstRow.COUNT),
        tokens=array("int32", OF_CHAIN),
        items=several(ITEM, GROUPS),
        places=array("int32", FIRST_PRODUCER + GROUPS * WARPS),
    )
    return Shared(tile, group, array("float32", C, PITCH_A)._replace(offset=group.X.offset), cta)


class Columns:
    """The columns of tensor memory of a CTA that has `columns` columns of the state."""

    OF_KT = 4 * C                            # a group has KT, transposed; behind it, for any gate, pairs across blocks

    def __init__(self, columns: int):
        self.out = 0                         # [-X; o] of even and of odd chunks
        self.S = 2 * columns
        self.pairs = 3 * columns             # each group has [A_kk / b; A_qk]
        self.KT = self.pairs + GROUPS * C
        self.end = self.KT + GROUPS * self.OF_KT


class FusedArguments(Arguments):
    q = tensor("bfloat16")                   # (B, T, H, K)
    k = tensor("bfloat16")
    v = tensor("bfloat16")                   # (B, T, HV, V)
    g = tensor(dtype_from="g_dtype")         # (B, T, HV, K), or (B, T, HV)
    beta = tensor(dtype_from="beta_dtype")   # (B, T, HV)
    A_log = tensor("float32")                # (HV)
    dt_bias = tensor("float32")              # (HV, K), or (HV)
    h0 = tensor(dtype_from="h0")             # (N, HV, K, V) in the caller's layout
    o = tensor("bfloat16")                   # (B, T, HV, V)
    response = tensor("bfloat16")            # as o: rows of o of a state that enters the segment
    ht = tensor("float32")                   # as h0; of segments what one adds, (N * segments, HV, K, V)
    M = tensor("float32")                    # (N * segments, HV, K, K), transposed
    h = tensor("bfloat16")                   # (states, HV, K, V): one before every `every` chunks
    edges = tensor("float32")                # (clusters, CTAS, K, V / CTAS): states that leave a share inside a walk
    crossed = tensor("int32")                # (clusters, CTAS): 1 when they are there, at first 0
    cu_seqlens = tensor("int64", dtype_from="offsets")  # (N + 1), of packed sequences
    T = number("int32")
    N = number("int32")
    H = number("int32")
    HV = number("int32")
    segments = number("int32")               # segments per sequence
    every = number("int32")                  # chunks of a kept state; 0: none is kept
    scale = number("float32")
    lower_bound = number("float32")


# With checkpoints no sequence is cut, and `every` is 1.
CheckpointArguments = FusedArguments.replacing("CheckpointArguments", response={}, M={}, h=checkpoint_arguments())


# For a kernel that keeps what a backward reads.
KeepingArguments = FusedArguments.replacing(
    "KeepingArguments",
    response={}, M={}, every={},
    h=dict(
        tiles=tensor("uint8"),               # (chunks, HV) tiles, with b on keys
        h=tensor("bfloat16"),                # (states, HV, K, V): those that enter every two chunks, as images
        r=tensor("bfloat16"),                # as o
    ),
    cu_seqlens=dict(segment_table=tensor("int64")),      # (N, 6), of packed sequences
    segments=dict(chunks=number("int32")),   # chunks of a row of T tokens, if not packed
)


@dataclass(frozen=True)
class FusedConfig(ChunkConfig):
    offsets: str | None                      # dtype of cu_seqlens, of packed sequences
    h0: str | None                           # dtype of initial states
    ht: bool
    v_first: bool                            # states are (V, K)
    cut: bool = False                        # sequences are walked over in segments
    checkpoints: str | None = None           # dtype of a pool where some of the states that enter chunks are stored
    keeps = False                            # what a backward reads
    o = True                                 # outputs are requested
    threads = 32 * (FIRST_PRODUCER + GROUPS * WARPS)
    cluster = (CTAS, 1, 1)
    launch_options = MappingProxyType({"min_blocks_per_mp": 1})
    roles: ClassVar[Mapping[str, Any]] = MappingProxyType({
        "CHAIN": range(CHAIN_WARPS),
        "PREPARE 0": (*range(4, 8), *range(16, 20)), "PREPARE 1": range(8, 16),     # parts/teams.py
    })
    group_pipelines: ClassVar[tuple[Pipeline, ...]] = GROUP_PIPELINES
    meetings = (
        Meeting(STATE_ROUNDED, "CHAIN", "S is in shared memory, 2^gc_last S in tensor memory; before a piece: CHAIN is "
                "done with the one before; the next one is known, and rows of v are there; a state that crosses is"),
        Meeting(X_THERE, "CHAIN", "for warps 0 and 1: -X is in shared memory, and rows of v of the next chunk; warps 2 "
                "and 3 arrive: o of the chunk before was read from tensor memory"),
        Meeting(GROUP, "PREPARE", "as barrier 0 of fwd/operands.py"),
        Meeting(GROUP_FIRST_FOUR, "warps 0 to 3 of PREPARE", "A_kk is there; TB is"),
        Meeting(GROUP_TILE, "PREPARE", "where one product makes pairs, for warps 0 and 4: kE, qg, kg are there"),
        Meeting(GROUP_LAST_SIX, "warps 2 to 7 of PREPARE", "KT and A2 are in the tile, for warp 4"),
    )

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.cta_pipelines + self.group_pipelines

    @property
    def cta_pipelines(self) -> tuple[Pipeline, ...]:
        return tuple(one for one in CTA_PIPELINES if self.releases_late or one.name != "added")

    @property
    def releases_late(self) -> bool:
        """Whether CHAIN goes on with the next tile before it lets go of one; else PREPARE takes longer than CHAIN, and
        gets the stage back first."""
        return self.one_product

    @property
    def arguments(self) -> type[Arguments]:  # type: ignore[override]
        return CheckpointArguments if self.checkpoints else FusedArguments

    @property
    def packed(self) -> bool:
        return self.offsets is not None

    @property
    def columns(self) -> int:
        """The number of columns of the state that a CTA has."""
        return self.V // CTAS

    @property
    def memory(self) -> Shared:
        return shared_memory(self.K, self.columns)

    @property
    def struct(self) -> Struct:
        return self.memory.cta

    @property
    def shared(self) -> int:
        return self.struct.end

    @property
    def tmem(self) -> Columns:
        return Columns(self.columns)

    def broken_limits(self) -> Iterator[str]:
        if self.K != self.V:
            yield f"K and V must be equal; found K = {self.K} and V = {self.V}"
        yield from wrong_head_sizes(self.K, self.V)
        if self.tmem.end > TMEM:
            yield f"there are at most {TMEM} columns of tensor memory; found {self.tmem.end}"
        yield from super().broken_limits()


# A step that records gradients, forward and backward: operands, then record or walk; or the one kernel, then walk.

# What operands hands to record and walk, of one chunk and value head, as it lies in shared memory.  It is contiguous
# and a multiple of 1 KiB, so that one bulk copy puts it where swizzles, which look at addresses, find it as it was
# made.  Rows of no token are zero, in KQ and KT.
@functools.cache
def record_tile(K: int) -> Struct:
    return Struct(
        align=1024,
        KQ=array("bfloat16", 2 * C, K),      # [-kn 2^gc; scale qn 2^gc], swizzle_128B: halves of K one after the other
        KT=array("bfloat16", C, K),          # T'^T (b kn 2^(gc_last - gc)), the same
        TA=array("bfloat16", C, 2 * C),      # [T' - I | A2], A2 = A_qk b T', transposed: a column of both in a row
        decay=array("float32", K),           # 2^gc_last, in the order of `decay_index`
    )


# Every CTA has these, as in `shared_memory`; the tensor memory of operands begins wherever some is free.
OF_CTA = dict.fromkeys(("base_desc", "tmem"), array("uint32", 1, align=4))


class TrainedConfig(HeadsConfig):
    @property
    def tile(self) -> Struct:
        return record_tile(self.K)

    def broken_limits(self) -> Iterator[str]:
        if self.K != self.V:
            yield f"K and V must be equal; found K = {self.K} and V = {self.V}"
        yield from super().broken_limits()


@dataclass(frozen=True)
class OperandsConfig(TrainedConfig, ChunkConfig):
    packed: bool                             # chunks are found in the table
    arguments = TilesArguments
    threads = 32 * WARPS
    roles = MappingProxyType({"OPERANDS": range(WARPS)})
    pipelines = (
        Pipeline("done", commit("OPERANDS"), "OPERANDS", "the product of pairs is there (by halving: of each level)"),
    )
    meetings = (
        Meeting(
            WHOLE_CTA, "OPERANDS", "the sums of each warp's rows are there, and what is set up once; those before each "
            "warp; operands (by halving: of each level, and the one before was read); T'; all of the tile"
        ),
        Meeting(FIRST_FOUR, "warps 0 to 3", "A_kk is there"),
    )

    @property
    def pdl(self) -> bool:
        return self.packed

    @property
    def ctas(self) -> int:
        """The number of CTAs that an SM has at once: 80 registers, or 128;  of 64 channels 48, or 64."""
        most = 5 if self.K == 64 else 3
        return most if self.one_product else most - 1

    @property
    def launch_options(self) -> dict[str, int]:
        """Without the carve-out the DSL asks the driver."""
        return {"min_blocks_per_mp": self.ctas, "preferred_smem_carveout": 100}

    @property
    def columns(self) -> int:
        """The columns of tensor memory, a power of two: C for each product of pairs."""
        return C if self.one_product else 4 * C

    @cached_property
    def struct(self) -> Struct:
        return Struct(
            align=1024,
            tile=several(self.tile, 1),
            X=array("bfloat16", 2 * C, self.K, align=1024),                    # A_kk is over it, as in a GROUP
            Y=array("bfloat16", C, self.K, align=1024),
            sums=array("float32", SUMS, self.K),
            columns=array("float32", C, PITCH_INVERSE),                        # columns of inverses
            b=array("float32", C),
            **mbarriers(self.pipelines),
            **OF_CTA,
        )


# A chunk, as LOAD brings it to record or walk.
@functools.cache
def stage_of_chunk(K: int, V: int) -> Struct:
    return Struct(
        align=1024,
        tile=several(record_tile(K), 1),
        rows=array("bfloat16", C, V),        # rows of v or do, swizzle_128B: halves of V one after the other
    )


class RecordColumns:
    """The columns of tensor memory in record and walk."""

    def __init__(self, V: int):
        self.S = 0                           # the state: lanes are channels
        self.out = V                         # [r; o], transposed, of even and of odd chunks; dv, transposed
        self.end = self.out + 2 * 2 * C


class StateConfig(TrainedConfig, WalkedConfig):
    """A kernel that walks with the state of one value head."""

    @property
    def stage(self) -> Struct:
        return stage_of_chunk(self.K, self.V)

    @property
    def tmem(self) -> RecordColumns:
        return RecordColumns(self.V)

    @property
    def ctas(self) -> int:
        """The number of CTAs that an SM has at once."""
        return 2 if self.K == 64 else 1

    @property
    def allocated(self) -> int:
        """The columns of tensor memory that a CTA allocates: all, unless another one has its own beside it."""
        return TMEM // self.ctas

    @property
    def launch_options(self) -> dict[str, int]:
        """Without the carve-out the DSL asks the driver."""
        return {"min_blocks_per_mp": 2, "preferred_smem_carveout": 100} if self.ctas > 1 else {"min_blocks_per_mp": 1}


# Those of EPILOGUE; a stage is that of even or of odd chunks.
RESULTS = (
    Pipeline("done", commit("CHAIN"), "EPILOGUE", "r^T and o^T are there", 2),
    Pipeline("read", of_each_warp(EPILOGUE_WARPS, "EPILOGUE"), "CHAIN", "they were read", 2),
)


@dataclass(frozen=True)
class RecordConfig(StateConfig):
    packed: bool                             # segments are found in the table
    walk: str                                # "sequences", "carry", "segments"
    h0: str | None                           # dtype of the states that they start from
    ht: bool
    v_first: bool                            # states of sequences are (V, K)
    o: bool = True                           # outputs are requested; `carry` has none
    stages: int = 3
    K: int = 128
    V: int = 128
    every = 2                                # chunks of a kept state
    arguments = ChainArguments
    threads = 32 * (STATE_WARPS + EPILOGUE_WARPS + 1)
    roles = MappingProxyType({
        "CHAIN": range(STATE_WARPS), "EPILOGUE": range(STATE_WARPS, STATE_WARPS + EPILOGUE_WARPS),
        "LOAD": range(STATE_WARPS + EPILOGUE_WARPS, STATE_WARPS + EPILOGUE_WARPS + 1),
    })
    meetings = (
        Meeting(IMAGE_THERE, "CHAIN", "S is rounded and decayed"),
        Meeting(ROWS_THERE, "CHAIN", "X is in shared memory, out was read"),
    )

    @property
    def state_pipelines(self) -> tuple[Pipeline, ...]:
        return (
            *ring_of_tiles("CHAIN", "v", self.stages, commit("CHAIN"), "no product reads the stage any more"),
            Pipeline("out", commit("CHAIN"), "CHAIN", "X^T is there, S rounded was read"),
            Pipeline("added", commit("CHAIN"), "CHAIN", "S is that which leaves the chunk"),
        )

    @property
    def epilogue_pipelines(self) -> tuple[Pipeline, ...]:
        return () if self.carry else RESULTS

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.state_pipelines + self.epilogue_pipelines

    @property
    def strips(self) -> int:
        """CTAs of a head: one for the state, one for M."""
        return 1 + self.carry

    @property
    def columns(self) -> int:
        """The number of columns of [X | qg h], and of [r | o]."""
        return 2 * C if self.o and not self.carry else C

    @cached_property
    def struct(self) -> Struct:
        fields = dict(
            stages=several(self.stage, self.stages),
            S=array("bfloat16", 2, self.K, self.V, align=1024),                # rounded, of even and of odd chunks
            X=array("bfloat16", C, self.V, align=1024),
            one=array("bfloat16", C, 2 * C, align=1024),                       # [1 | 0]
        )
        if not self.carry:
            fields["rows"] = array("bfloat16", self.columns, self.V, align=1024)    # rows of r, and of o
        return Struct(align=1024, **fields, **mbarriers(self.state_pipelines + RESULTS), **OF_CTA)


@dataclass(frozen=True)
class KeepingConfig(FusedConfig):
    """The one kernel that keeps what a backward reads: what operands and record make of whole sequences."""

    packed: bool = False                     # sequences are found in the table of segments
    o: bool = True
    keeps = True
    every = 2
    arguments = KeepingArguments             # type: ignore[assignment]
    group_pipelines = KEEPING_GROUP_PIPELINES

    @property
    def pdl(self) -> bool:
        return self.packed

    def broken_limits(self) -> Iterator[str]:
        yield from super().broken_limits()
        if self.cut or self.checkpoints or self.offsets:
            yield "the kernel that keeps what a backward reads walks over whole sequences of the table, for no pool"
        if self.columns != HALF:
            yield f"a CTA has the state in panels of {HALF} columns, as it is kept; found {self.columns}"


@dataclass(frozen=True)
class WalkConfig(StateConfig):
    packed: bool
    walk: str                                # "sequences", "carry", "segments"
    dht: bool
    dh0: str | None                          # its dtype
    v_first: bool
    stages: int = 3
    K: int = 128
    V: int = 128
    every = 2
    arguments = WalkArguments
    threads = 32 * (STATE_WARPS + 1)
    roles = MappingProxyType({"WALK": range(STATE_WARPS), "LOAD": range(STATE_WARPS, STATE_WARPS + 1)})
    meetings = (
        Meeting(IMAGE_THERE, "WALK", "dh is rounded and decayed, the dv before was read"),
        Meeting(ROWS_THERE, "WALK", "dv is in shared memory, out was read"),
    )
    strips = 1                               # CTAs of a head

    @property
    def cut(self) -> bool:
        return self.walk == "segments"

    @property
    def state_pipelines(self) -> tuple[Pipeline, ...]:
        return (
            *ring_of_tiles("WALK", "do", self.stages, commit("WALK"), "no product reads the stage any more"),
            Pipeline("out", commit("WALK"), "WALK", "dv^T is there, dh rounded was read"),
            Pipeline("added", commit("WALK"), "WALK", "dh is that which enters the chunk; dv was read"),
        )

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.state_pipelines

    @cached_property
    def memory(self) -> Struct:
        """What the walk has beside mbarriers."""
        return Struct(
            align=1024,
            stages=several(self.stage, self.stages),
            S=array("bfloat16", 2, self.K, self.V, align=1024),                # rounded, of every other chunk
            dv=array("bfloat16", C, self.V, align=1024),
        )

    @cached_property
    def struct(self) -> Struct:
        return Struct(align=1024, **self.memory.fields, **mbarriers(self.pipelines), **OF_CTA)


OTHER_LANES = 16 << 16                       # from 16 lanes of a warp to the other 16


class GradsColumns:
    """The columns of tensor memory in bwd/grads.  Products of 64 rows have 16 of each warp's 32 lanes; in the other 16
    lie dv r^T, and what MATH puts aside."""

    def __init__(self, K: int):
        self.G = 0                           # [do r^T; dv r^T]
        self.up1 = TOKENS                    # h do^T
        self.up2 = 2 * TOKENS                # h dv^T
        self.down = 3 * TOKENS               # dh r^T
        self.slopes = self.G                 # those of gates (bwd/rows.py), where G was read
        # Then 2^x and 2^-x, 32 columns for each step; and operands in words, for which MATH has no registers all the
        # time: Kd is read first, and may lie where dv r^T was.
        if K == 64:
            self.Kd = OTHER_LANES + TOKENS // 2
            self.decays = OTHER_LANES + TOKENS
            self.Qu = self.decays + 2 * TOKENS
            self.end = 4 * TOKENS
        else:
            self.decays = 4 * TOKENS
            self.Qu = self.decays + 2 * TOKENS
            self.Kd = self.Qu + TOKENS
            self.end = self.Kd + TOKENS // 2
        self.Ku = self.Qu + TOKENS // 2


@dataclass(frozen=True)
class GradsConfig(TrainedConfig, GradsOptions):
    rows_of_values = MappingProxyType({"do": 2 * TOKENS, "dv": 2 * TOKENS, "r": TOKENS})
    pieces = 8                               # a panel's row has so many: a thread has one place in all panels
    product_pipelines = (
        Pipeline("products", commit("MATH"), "MATH", "first: G is in tensor memory; second: products of states are", 2),
    )

    @property
    def threads(self) -> int:
        return 32 * (self.math_warps + LOAD_WARPS)

    @property
    def roles(self) -> dict[str, range]:
        return {"MATH": range(self.math_warps), "LOAD": range(self.math_warps, self.math_warps + LOAD_WARPS)}

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.ring_pipelines + self.product_pipelines

    @property
    def registers(self) -> tuple[int, int]:
        """MATH's and LOAD's."""
        return (224, 32) if self.ctas > 1 else (224, 56)

    @property
    def few_registers(self) -> bool:  # type: ignore[override]
        return self.ctas > 1

    @property
    def ctas(self) -> int:  # type: ignore[override]
        return 2 // self.panels

    @property
    def launch_options(self) -> dict[str, int]:  # type: ignore[override]
        """Without the carve-out the DSL asks the driver."""
        return {"min_blocks_per_mp": 2, "preferred_smem_carveout": 100} if self.ctas > 1 else {"min_blocks_per_mp": 1}

    @property
    def tmem(self) -> GradsColumns:
        return GradsColumns(self.K)

    @property
    def allocated(self) -> int:
        """The columns of tensor memory that a CTA allocates, as in StateConfig."""
        return TMEM // self.ctas

    @cached_property
    def struct(self) -> Struct:
        states = dict.fromkeys(("h", "dh"), array("bfloat16", self.V // 64, self.K, 64, align=1024))
        return Struct(
            align=1024,
            do_dv=array("bfloat16", self.V // 64, 2 * TOKENS, 64, align=1024),
            r=array("bfloat16", self.V // 64, TOKENS, 64, align=1024),
            **states,
            **self.more_fields,
            tensors=array("int64", len(GradsArguments.tensor_names()), align=8),    # their addresses
            **mbarriers(self.product_pipelines),
            base_desc=array("uint32", 1, align=4),           # the address of all this / 16, as descriptors have it
            tmem=array("uint32", 1, align=4),                # where tensor memory begins: all of it at 0
            threads=array("uint8", 32 * self.math_warps, align=1),    # their numbers
        )
