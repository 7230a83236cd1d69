"""What each kernel is built for, its arguments, and its shared memory.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from ..common.arguments import Arguments, KernelConfig, number, tensor
from ..common.cute.barriers import (
    LANES_OF_A_WARP,
    Arrivals,
    Meeting,
    NamedBarrier,
    Pipeline,
    mbarriers,
    of_a_lane,
    of_each_warp,
)
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
from ..common.cute.tile import OF_BLOCKS, PITCH_A, PITCH_INVERSE, SUM_CHANNELS, SUMS_OF_BLOCKS, WARPS, C
from ..common.cute.training import (
    LOAD_WARPS,
    TOKENS,
    ChainArguments,
    GradsOptions,
    WalkArguments,
)

CHANNELS_OF_ROWS = 128                       # the value of K for which common/cute/rows.py is used here
# pairs
PITCH_KEPT = C + 8                           # elements of a row of a half's A_inv: eight rows lie in other banks
# chain
COLUMNS = 64                                 # columns of the state in one warpgroup
PITCH_V = COLUMNS + 8                        # elements between rows of v and o: eight rows lie in other banks
CHAIN_WARPS = 4
LOAD_WARP = CHAIN_WARPS
# fused
GROUPS = 2                                   # groups of WARPS warps in a CTA
WALKING = 2                                  # CTAs of a cluster: the first ones, of COLUMNS columns each
RING = WALKING * GROUPS                      # stages: of two CTAs, one for each group
OUTPUTS = 2                                  # chunks of o that a CTA holds
FIRST_PRODUCER = CHAIN_WARPS                 # warp of the first group
RELAY, INVERSE, LOAD, STORE = range(FIRST_PRODUCER + WARPS, FIRST_PRODUCER + WARPS + 4)   # where a CTA walks, of 4
CLUSTER_SIZES = {1: (1, 2), 2: (2, 4)}       # CTAs of clusters that walk over so many times COLUMNS columns
TILES = 2                                    # tiles of each group of a CTA that does not walk
KEPT_COLUMNS = 16                            # columns of a state that a warp of CHAIN stores
# stream
STREAM_STAGES = 3                            # steps of TOKENS tokens that a CTA that walks holds
STREAM_LOAD, STREAM_VALUES, STREAM_STORE = range(FIRST_PRODUCER, FIRST_PRODUCER + 3)    # its warps beside CHAIN

# Named barriers.
CHAIN = NamedBarrier("CHAIN", 1, 32 * CHAIN_WARPS)
A_KK_THERE = NamedBarrier("A_KK_THERE", 1, 64)
# The warps of a group, some of them, or some with the warp of its inverse.
GROUP = NamedBarrier("GROUP", 2, 32 * WARPS, ids_per_group=2)
GROUP_PRODUCT = NamedBarrier("GROUP_PRODUCT", 3, 128 + 32 * (CHANNELS_OF_ROWS // SUM_CHANNELS), ids_per_group=2)
WHOLE_GROUP = NamedBarrier("WHOLE_GROUP", 6, 32 * WARPS, ids_per_group=1)
WHOLE_GROUP_INVERSE = NamedBarrier("WHOLE_GROUP_INVERSE", 6, 32 * WARPS + 32, ids_per_group=1)
JOINED = NamedBarrier("JOINED", 8, 32 * WARPS + 32, ids_per_group=1)
SCALED = NamedBarrier("SCALED", 10, 32 * WARPS + 32, ids_per_group=1)


def tile(K: int) -> Struct:
    """What PREPARE hands to CHAIN of one chunk and value head: operands as they lie in shared memory.  It is contiguous
    and a multiple of 1 KiB, so that one bulk copy puts it where swizzles, which look at addresses, find it as it was
    made.  Rows of no token are zero."""
    return Struct(
        align=1024,
        KQ=array("bfloat16", 2 * C, K),      # [kn 2^gc; scale qn 2^gc], swizzle_128B: halves of K one after the other
        KG=array("bfloat16", C, K),          # kn 2^(gc_last - gc), the same
        decay=array("float32", max(K, 128)),  # 2^gc_last, in the order of `decay_index`; at least 512 bytes
        TB=array("bfloat16", C, C),          # (A_inv b)^T, swizzle_64B
        A_qk=array("bfloat16", C, C),        # with scale, the same
    )


def state_image(K: int) -> StructField:
    """64 columns of a state, as bwd/grads has them in shared memory: halves of K one after the other, swizzle_128B."""
    return array("bfloat16", K // COLUMNS, COLUMNS, COLUMNS, align=1024)


PrepareArguments = TilesArguments.replacing(
    "PrepareArguments",
    o=dict(
        A_qk=tensor("bfloat16"),             # (B * T, HV, kept_C), kept for a backward
        A_inv=tensor("bfloat16"),
        o=TilesArguments.declared["o"],
    ),
)


@dataclass(frozen=True)
class PrepareConfig(ChunkConfig):
    packed: bool                             # chunks are found in the table
    kept_C: int = 0                          # rows of the chunks whose A_qk and A_inv are kept; 0: of none
    b_on_keys: bool = False                  # for a backward: b kg, A_qk b and (I + A_kk b)^-1 in the tile
    arguments = PrepareArguments
    threads = 32 * WARPS
    roles = MappingProxyType({"PREPARE": range(WARPS)})
    meetings = (
        Meeting(
            WHOLE_CTA, "PREPARE", "the sums of each warp's rows are there; those before each warp; both operands (by "
            "halving: of each level; in blocks of 8 rows: within them, that they were read, across them)"
        ),
        Meeting(FIRST_FOUR, "warps 0 to 3", "A_kk is there"),
    )

    @property
    def pdl(self) -> bool:
        return self.packed

    @property
    def launch_options(self) -> dict[str, int]:
        """The number of CTAs of an SM at once: 80 registers, or 128.  Without the carve-out the DSL asks the driver."""
        carveout = 60 if self.in_blocks else 50
        return {"min_blocks_per_mp": 3 if self.one_product else 2, "preferred_smem_carveout": carveout}

    @property
    def in_blocks(self) -> bool:
        """Pairs in blocks of 8 rows (common/cute/rows.py), where one product cannot make all of them."""
        return not self.one_product and self.K == CHANNELS_OF_ROWS

    @property
    def stageable(self) -> bool:
        """Whether rows of q, k and g can go through shared memory."""
        return self.g_dtype == "bfloat16" and not self.per_head

    @property
    def rows_of_sums(self) -> int:
        return SUMS_OF_BLOCKS if self.in_blocks else WARPS + 2                 # common/cute/rows.py, gate.py

    @property
    def rows_of_Y(self) -> int:
        """The rows of Y: k under the decay before each row, or a second buffer of k and q."""
        return C if self.one_product else 2 * C

    @cached_property
    def struct(self) -> Struct:
        return Struct(
            align=1024,
            X=array("bfloat16", 2 * C, self.K, align=1024),                    # rows of k, then of q, under a decay
            Y=array("bfloat16", self.rows_of_Y, self.K, align=1024),
            sums=array("float32", self.rows_of_sums, self.K),
            A_kk=array("float32", C, PITCH_A),
            columns=array("float32", C, PITCH_INVERSE),                        # columns of inverses
            TB=array("bfloat16", C, C),
            b=array("float32", C),
            **{"of_blocks": array("bfloat16", OF_BLOCKS, self.K)} if self.in_blocks else {},
        )


class PairsArguments(Arguments):
    tiles = tensor("uint8")                  # (chunks, HV) tiles
    beta = tensor(dtype_from="beta_dtype")   # (B, T, HV)
    A_qk = tensor("bfloat16")                # (B * T, HV, 2 C)
    A_inv = tensor("bfloat16")
    chunk_table = tensor("int64")
    T = number("int32")
    chunks = number("int32")
    HV = number("int32")


@dataclass(frozen=True)
class PairsConfig(HeadsConfig):
    K: int
    beta: str
    packed: bool
    beta_dtype: str
    arguments = PairsArguments
    threads = 128
    pipelines = (
        Pipeline("full", (
            Arrivals(1, "warp 0", bytes="the tiles' parts"),
            Arrivals(LANES_OF_A_WARP, "warp 0", "each lane with its pieces of X and Y"),
        ), "all", "operands are there"),
    )
    meetings = (Meeting(A_KK_THERE, "warps 0, 1", "A_kk is there"),)

    @cached_property
    def struct(self) -> Struct:
        return Struct(
            align=1024,
            KQ=array("bfloat16", 2 * C, self.K, align=1024),                   # KQ of the second half's tile
            KG=array("bfloat16", C, self.K, align=1024),                       # KG of the first half's tile
            X=array("bfloat16", C, PITCH_KEPT),                                # A_inv of the first half
            Y=array("bfloat16", C, PITCH_KEPT),                                # A_inv of the second half
            A_kk=array("float32", C, PITCH_A),
            **mbarriers(self.pipelines),
        )

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.K, self.K


# Such a chain has no r, M and h.
CheckpointArguments = ChainArguments.replacing("CheckpointArguments", r={}, M={}, h=checkpoint_arguments())


@dataclass(frozen=True)
class ChainConfig(WalkedConfig):
    K: int
    V: int
    packed: bool                             # segments are found in the table
    walk: str                                # "sequences", "carry", "segments"
    h0: str | None                           # dtype of the states that they start from
    ht: bool
    v_first: bool                            # states of sequences are (V, K), and those that are kept
    h: bool                                  # states that enter chunks are kept
    every: int                               # chunks from one kept state to the next
    stages: int
    o: bool = True                           # outputs are requested; `carry` has none
    recorded: bool = False                   # for a backward: r, h as bwd/grads has it, M of last segments; b on keys
    checkpoints: str | None = None           # dtype of a pool where some of the states that enter chunks are stored
    threads = 32 * (LOAD_WARP + 1)
    roles = MappingProxyType({"CHAIN": range(LOAD_WARP), "LOAD": range(LOAD_WARP, LOAD_WARP + 1)})
    meetings = (Meeting(CHAIN, "CHAIN", "o (r, and the state) is in shared memory, the o before last was read"),)

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        read = of_each_warp(CHAIN_WARPS, "CHAIN")
        return ring_of_tiles("CHAIN", "v", self.stages, read, "no warp reads the stage any more")

    @property
    def arguments(self) -> type[Arguments]:  # type: ignore[override]
        return CheckpointArguments if self.checkpoints else ChainArguments

    @property
    def cluster(self) -> tuple[int, int, int] | int:
        """Two CTAs that read the same tiles lie together, and come to them together."""
        return (2, 1, 1) if not self.carry and self.strips == 2 else 1

    @property
    def rows(self) -> int:
        """The rows of [kn 2^gc; scale qn 2^gc] that are multiplied."""
        return 2 * C if self.has_o else C

    @property
    def has_o(self) -> bool:
        return self.o and not self.carry

    @property
    def has_r(self) -> bool:
        return self.recorded and not self.carry

    @property
    def strips(self) -> int:
        """CTAs of a head: COLUMNS columns each of states, and of M."""
        return (self.V + self.K * self.carry) // COLUMNS

    @cached_property
    def struct(self) -> Struct:
        fields = dict(
            tiles=several(tile(self.K), self.stages),
            v=array("bfloat16", self.stages, C, PITCH_V),
        )
        if self.has_o:
            fields["o"] = array("bfloat16", 2, C, PITCH_V)
        if self.has_r:
            fields["r"] = array("bfloat16", 2, C, PITCH_V)
        fields |= mbarriers(self.pipelines)
        if self.has_r:
            fields["state"] = state_image(self.K)
        return Struct(align=1024, **fields)


@dataclass(frozen=True)
class WalkConfig(WalkedConfig):
    K: int
    V: int
    packed: bool
    walk: str                                # "sequences", "carry", "segments"
    dht: bool
    dh0: str | None                          # its dtype
    v_first: bool
    stages: int
    every = 2                                # chunks of a state
    arguments = WalkArguments
    threads = 32 * (LOAD_WARP + 1)
    roles = MappingProxyType({"WALK": range(LOAD_WARP), "LOAD": range(LOAD_WARP, LOAD_WARP + 1)})
    meetings = (
        Meeting(CHAIN, "WALK", "dv and dh are in shared memory, the dv before last was read; the dh before has gone"),
    )

    @property
    def cut(self) -> bool:
        return self.walk == "segments"

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        read = of_each_warp(CHAIN_WARPS, "WALK")
        return ring_of_tiles("WALK", "do", self.stages, read, "no warp reads the stage any more")

    @property
    def cluster(self) -> tuple[int, int, int] | int:
        """Two CTAs that read the same tiles lie together, and come to them together."""
        return (2, 1, 1) if self.strips == 2 else 1

    @property
    def strips(self) -> int:
        return self.V // COLUMNS

    @cached_property
    def struct(self) -> Struct:
        fields = dict(
            tiles=several(tile(self.K), self.stages),
            do=array("bfloat16", self.stages, C, PITCH_V),
        )
        if not self.carry:
            fields |= dict(dv=array("bfloat16", 2, C, PITCH_V), state=state_image(self.K))
        fields |= mbarriers(self.pipelines)
        return Struct(align=1024, **fields)


class ForwardArguments(Arguments):
    """The arguments of every forward in one kernel."""

    q = tensor("bfloat16")                   # (B, T, H, K)
    k = tensor("bfloat16")
    v = tensor("bfloat16")                   # (B, T, HV, V)
    g = tensor(dtype_from="prepare.g_dtype")  # (B, T, HV, K), or (B, T, HV)
    beta = tensor(dtype_from="prepare.beta_dtype")  # (B, T, HV)
    A_log = tensor("float32")                # (HV)
    dt_bias = tensor("float32")              # (HV, K), or (HV)
    h0 = tensor(dtype_from="chain.h0")       # (N, HV, K, V) in the caller's layout
    o = tensor("bfloat16")                   # (B, T, HV, V)
    ht = tensor("float32")                   # as h0
    segment_table = tensor("int64")          # (N, 6), of packed sequences
    T = number("int32")
    chunks = number("int32")                 # chunks of a row of T tokens, if not packed
    N = number("int32")
    H = number("int32")
    HV = number("int32")
    scale = number("float32")
    lower_bound = number("float32")


FusedArguments = ForwardArguments.and_more(
    "FusedArguments",
    edges=tensor("float32"),                 # (clusters, V / 64, 64, K): states that leave a share, of `wrapped`
    crossed=tensor("int32"),                 # (clusters, V / 64): 1 when they are there, at first 0
)


KeepingArguments = FusedArguments.and_more(  # for a kernel that keeps what a backward reads
    "KeepingArguments",
    tiles=tensor("uint8"),                   # (chunks, HV) tiles, with b on keys
    h=tensor("bfloat16"),                    # (states, HV, V, K): those that enter every two chunks
    r=tensor("bfloat16"),                    # as o
)


StatesArguments = FusedArguments.and_more(   # for a kernel that returns states that enter chunks
    "StatesArguments",
    h=tensor("bfloat16"),                    # (states, HV, K, V) in the caller's layout
)


StoringArguments = FusedArguments.and_more(  # for a kernel that stores states that enter chunks
    "StoringArguments",
    **checkpoint_arguments("chain.checkpoints"),
)


def rows_that_cannot_be_staged(config: FusedConfig | StreamConfig) -> Iterator[str]:
    if config.staged and config.prepare.g_dtype != "bfloat16":
        yield f"rows that go through shared memory must be bfloat16; found g of {config.prepare.g_dtype}"
    elif config.staged and config.prepare.per_head:
        yield "rows that go through shared memory must have g of each channel; found one number per head"


def meetings_of_makers(config: FusedConfig | StreamConfig) -> Iterator[Meeting]:
    """Yield where the warps of a group that makes tiles meet, some with the warp of its inverse."""
    yield Meeting(GROUP, "PREPARE", "as at prepare's sync_threads; dt_bias is there; operands of pairs were read")
    if config.prepare.in_blocks:
        says = "in blocks of 8 rows: Y was read, where 6 and 7 write"
        yield Meeting(GROUP_PRODUCT, "warps 0 to 3, 6 and 7 of PREPARE", says)
    if config.helped:
        yield Meeting(WHOLE_GROUP_INVERSE, "PREPARE, INVERSE", "all but TB is there, for INVERSE")
    else:
        yield Meeting(WHOLE_GROUP, "PREPARE", "all but a half of TB is there, for warp 1")


class ShareField:
    """The fields that describe a cluster's share of all walks (parts/share.py)."""

    SLOTS, BEGIN, END, RESUME, LIMIT = range(5)
    COUNT = 8


@dataclass(frozen=True)
class FusedConfig(KernelConfig):
    prepare: PrepareConfig
    chain: ChainConfig
    wrapped: bool = False                    # as many clusters as fit, of which each has an equal share of all walks
    ctas: int = WALKING                      # CTAs of a cluster: 1, 2, or 4; the first ones walk, all make tiles
    staged: bool = False                     # rows of q, k and g, of bfloat16, go through shared memory
    threads = 32 * (FIRST_PRODUCER + GROUPS * WARPS)
    roles = MappingProxyType({
        "CHAIN": range(FIRST_PRODUCER),
        **{f"PREPARE {n}": range(FIRST_PRODUCER + n * WARPS, FIRST_PRODUCER + (n + 1) * WARPS) for n in range(GROUPS)},
    })
    launch_options = MappingProxyType({"min_blocks_per_mp": 1})

    @property
    def pdl(self) -> bool:
        return self.chain.packed

    @property
    def cluster(self) -> tuple[int, int, int] | int:
        return (self.ctas, 1, 1) if self.ctas > 1 else 1

    @property
    def walking(self) -> int:
        """CTAs of the cluster, its first, that have 64 columns of the state each."""
        return self.chain.strips

    @property
    def helped(self) -> bool:
        """Whether warps without another role compute inverses, and move rows of v and o."""
        return self.ctas > WALKING

    @property
    def inverters_ahead(self) -> bool:
        """Whether rows of the two warps that compute an inverse go through shared memory."""
        return not (self.staged or self.helped or self.prepare.in_blocks)

    @property
    def keeps(self) -> bool:
        """Whether the kernel keeps what a backward reads: tiles whose keys are multiplied by b, r and h."""
        return self.chain.recorded

    @property
    def arguments(self) -> type[Arguments]:  # type: ignore[override]
        if self.chain.checkpoints:
            return StoringArguments
        if self.keeps:
            return KeepingArguments
        return StatesArguments if self.chain.h else FusedArguments

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.relayed_pipelines if self.helped else self.direct_pipelines

    @property
    def direct_pipelines(self) -> tuple[Pipeline, ...]:
        """Those of a CTA alone, or of a cluster of two."""
        handed_over = Arrivals(1, "PREPARE", "its warp 1; in its own CTA without bytes", "the copy")
        read = Arrivals(
            CHAIN_WARPS * self.walking, "CHAIN",
            "a lane of each warp of each CTA that walks, in the CTA that makes the stage's tiles",
        )
        says = "no warp reads the stage any more, in any CTA, and the copy is done"
        return (
            Pipeline("full", (handed_over,), "CHAIN", "a tile is there", self.stages),
            Pipeline("empty", (read, *self.kept_by("PREPARE")), "PREPARE", says, self.stages),
        )

    @property
    def relayed_pipelines(self) -> tuple[Pipeline, ...]:
        """Those of a cluster of four."""
        handed_over = Arrivals(1, "RELAY", "or INVERSE in its own CTA, without bytes", "the copy")
        copies = Arrivals(LANES_OF_A_WARP, "LOAD", "each lane with its pieces of v")
        relayed = Arrivals(WALKING, "RELAY", "of both CTAs that walk")
        read, stored = of_each_warp(CHAIN_WARPS, "CHAIN"), of_a_lane("STORE")
        solved = of_a_lane("INVERSE")
        kept = (Pipeline("stored", stored, "LOAD", "where tiles are kept: r was read, which lies where v was", RING),)
        return (
            Pipeline("full", (handed_over, copies), "CHAIN", "a tile and v are there", RING),
            Pipeline("read", read, "RELAY, LOAD", "tile and v were read in this CTA", RING),
            *(kept if self.keeps else ()),
            Pipeline("written", read, "STORE", "o (and r) of a chunk is in shared memory", OUTPUTS, "o"),
            Pipeline("taken", stored, "CHAIN", "it was read", OUTPUTS, "o"),
            Pipeline("credit", (relayed,), "INVERSE", "the stage of its next tile is free in both", GROUPS, "group"),
            Pipeline("solved", solved, "PREPARE", "INVERSE needs A_kk and b no more", GROUPS, "group"),
            Pipeline(
                "empty", (relayed, *self.kept_by("INVERSE")), "PREPARE", "both CTAs have read what was last in a tile",
                GROUPS, "group", TILES,
            ),
        )

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        says = "rows of v and o are in shared memory, in clusters of two; a state that crosses is"
        return Meeting(CHAIN, "CHAIN", says), *meetings_of_makers(self)

    def kept_by(self, role: str) -> tuple[Arrivals, ...]:
        """The arrivals, at `empty`, of who hands tiles over, where they are kept."""
        return (Arrivals(1, role, "where tiles are kept: the copy to memory has read it, too"),) * self.keeps

    @property
    def registers(self) -> tuple[int, int]:
        """The registers of CHAIN and of PREPARE, together all that 640 threads have at launch."""
        return (160, 80) if self.prepare.in_blocks else (192, 72)

    @property
    def makers(self) -> int:
        """Groups of the cluster that make tiles."""
        return GROUPS * self.ctas - WALKING * self.helped

    @property
    def stages(self) -> int:
        """Tiles that a CTA that walks holds."""
        return RING if self.helped else self.makers

    @cached_property
    def group(self) -> Struct:
        """The shared memory of one group of warps."""
        one_tile = several(tile(self.prepare.K), 1)
        tiles = {"tile": one_tile}                                             # the tile that the group makes
        if self.ctas == 2:
            tiles["neighbour"] = one_tile                                      # the neighbour's tile
        return Struct(
            align=1024,
            **tiles,
            X=array("bfloat16", 2 * C, self.prepare.K),
            Y=array("bfloat16", C, self.prepare.K),
            sums=array("float32", self.prepare.rows_of_sums, self.prepare.K),
            A_kk=array("float32", C, PITCH_A),
            columns=array("float32", C, PITCH_INVERSE),
            b=array("float32", C * (2 if self.keeps else 1)),                  # on keys: of this chunk and the last
            gate=array("float32", self.prepare.gate_width + 4),                # dt_bias, e^A_log
            **{"places": array("int64", TILES)} if self.keeps and self.helped else {},
        )

    @cached_property
    def struct(self) -> Struct:
        if self.helped:                                                        # behind a CTA's first group its second,
            fields = dict(groups=several(self.group, 1), stages=several(tile(self.prepare.K), RING))   # or stages
        else:
            fields = dict(groups=several(self.group, GROUPS))
        fields |= dict(v=array("bfloat16", RING, C, PITCH_V))                  # and r, where v was
        if self.chain.has_o:
            fields |= dict(o=array("bfloat16", OUTPUTS, C, PITCH_V))
        if self.keeps:
            fields |= dict(kept=array("bfloat16", FIRST_PRODUCER, KEPT_COLUMNS, 64))
        barriers = mbarriers(self.pipelines)
        order = ("full", "empty", "credit", "solved", "read", "written", "taken", "stored")
        fields |= {name: barriers[name] for name in order if name in barriers}
        if self.wrapped:
            fields["share"] = array("int32", ShareField.COUNT, align=16)
        return Struct(align=1024, **fields)

    @property
    def shared(self) -> int:
        return self.struct.end

    def broken_limits(self) -> Iterator[str]:
        yield from wrong_head_sizes(self.prepare.K, self.prepare.V)
        if self.ctas not in CLUSTER_SIZES[self.chain.strips]:
            sizes = " or ".join(map(str, CLUSTER_SIZES[self.chain.strips]))
            yield f"for V = {self.chain.V} a cluster has {sizes} CTAs; found {self.ctas}"
        yield from rows_that_cannot_be_staged(self)
        yield from super().broken_limits()


StreamArguments = ForwardArguments.and_more(
    "StreamArguments",
    tiles=tensor("uint8"),                   # (steps, HV) pairs of tiles
    ready=tensor("int32"),                   # (steps, HV): 1 when they are there, at first 0
    makers=number("int32"),                  # CTAs that make tiles; the others walk
)


CutArguments = StreamArguments.and_more(     # for a kernel that walks over segments
    "CutArguments",
    response=tensor("bfloat16"),             # (B, T, HV, K): rows of o of a state that enters the segment
    M=tensor("float32"),                     # (N * segments, HV, K, K), transposed; ht: (N * segments, HV, K, V)
    segments=number("int32"),                # segments of every sequence
)


@dataclass(frozen=True)
class StreamConfig(KernelConfig):
    prepare: PrepareConfig
    chain: ChainConfig
    staged: bool                             # rows of q, k and g, of bfloat16, go through shared memory
    cut: bool = False                        # sequences are walked over in segments
    threads = 32 * (FIRST_PRODUCER + GROUPS * WARPS)
    roles = MappingProxyType({
        "CHAIN": range(FIRST_PRODUCER),
        **{f"PREPARE {n}": range(FIRST_PRODUCER + n * WARPS, FIRST_PRODUCER + (n + 1) * WARPS) for n in range(GROUPS)},
    })
    launch_options = MappingProxyType({"min_blocks_per_mp": 1})
    helped = True                            # an inverse has a warp of its own (parts/making.py)
    inverters_ahead = False
    registers = (240, 56)                    # registers of CHAIN, and of the other warps of its CTA
    group_pipelines = (                      # in a CTA that makes tiles
        Pipeline("solved", of_a_lane("INVERSE"), "PREPARE", "TB is there; it needs A_kk and b no more", each="group"),
        Pipeline("taken", of_a_lane("INVERSE"), "PREPARE", "the copy to memory has read the tiles", each="group"),
        Pipeline("begun", of_a_lane("PREPARE 0"), "PREPARE 1", "it has made a chunk", each="group"),
    )
    walker_pipelines = (                     # in a CTA that walks
        Pipeline("full", (
            Arrivals(1, "LOAD", bytes="the copies"),
            Arrivals(LANES_OF_A_WARP, "VALUES", "each lane with its pieces of v"),
        ), "CHAIN", "tiles and v are there", STREAM_STAGES),
        Pipeline("read", of_each_warp(CHAIN_WARPS, "CHAIN"), "LOAD, VALUES", "both were read", STREAM_STAGES),
        Pipeline("written", of_each_warp(CHAIN_WARPS, "CHAIN"), "STORE", "o is in shared memory", OUTPUTS, "o"),
        Pipeline("taken", of_a_lane("STORE"), "CHAIN", "it was read", OUTPUTS, "o"),
    )

    @property
    def arguments(self) -> type[Arguments]:  # type: ignore[override]
        return CutArguments if self.cut else StreamArguments

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.group_pipelines + self.walker_pipelines

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        scaled = Meeting(SCALED, "PREPARE, INVERSE", "kE and qg of both chunks of the step are there")
        says = "the step's tiles are there, all but lam_a lam_b, and zeros for TB_b"
        return *meetings_of_makers(self), scaled, Meeting(JOINED, "PREPARE, INVERSE", says)

    def walks(self, segments: int) -> int:
        """CTAs that walk over one sequence and value head: all segments but the first have an M."""
        strips, of_M = self.chain.strips, self.chain.K // COLUMNS
        return strips + (segments - 1) * (strips + of_M)

    @property
    def pdl(self) -> bool:
        return self.chain.packed

    @cached_property
    def group(self) -> Struct:
        """The shared memory of one group of warps that makes tiles."""
        return Struct(
            align=1024,
            tiles=several(tile(self.prepare.K), 2),
            X=array("bfloat16", 2 * C, self.prepare.K),
            Y=array("bfloat16", C, self.prepare.K),
            sums=array("float32", self.prepare.rows_of_sums, self.prepare.K),
            A_kk=array("float32", C, PITCH_A),
            columns=array("float32", C, PITCH_INVERSE),
            G=array("bfloat16", C, C),                                         # parts/steps.py
            b=array("float32", C),
            **mbarriers(self.group_pipelines),
        )

    @cached_property
    def walker(self) -> Struct:
        """The shared memory of a CTA that walks."""
        return Struct(
            align=1024,
            tiles=several(tile(self.prepare.K), 2 * STREAM_STAGES),
            v=array("bfloat16", STREAM_STAGES, TOKENS, PITCH_V),
            o=array("bfloat16", OUTPUTS, TOKENS, PITCH_V),
            **mbarriers(self.walker_pipelines),
        )

    @property
    def shared(self) -> int:
        return max((GROUPS - 1) * self.group.bytes + self.group.end, self.walker.end)

    def broken_limits(self) -> Iterator[str]:
        yield from wrong_head_sizes(self.prepare.K, self.prepare.V)
        if self.prepare.K != CHANNELS_OF_ROWS:
            yield f"K must be {CHANNELS_OF_ROWS}; found {self.prepare.K}"
        yield from rows_that_cannot_be_staged(self)
        yield from super().broken_limits()


@dataclass(frozen=True)
class GradsConfig(GradsOptions):
    spares_L2 = True

    @property
    def threads(self) -> int:
        return 32 * (self.math_warps + LOAD_WARPS)

    @property
    def roles(self) -> dict[str, range]:
        return {"MATH": range(self.math_warps), "LOAD": range(self.math_warps, self.math_warps + LOAD_WARPS)}

    @property
    def registers(self) -> tuple[int, int]:
        """MATH's and LOAD's."""
        if self.panels == 1:
            return 232, 24
        return (232, 40) if self.one_product and not self.per_head else (240, 24)

    @property
    def few_registers(self) -> bool:  # type: ignore[override]
        return self.registers[1] < 40

    @property
    def ctas(self) -> int:  # type: ignore[override]
        return 2 // self.panels

    @property
    def launch_options(self) -> dict[str, int]:  # type: ignore[override]
        """Without the carve-out the DSL asks the driver."""
        return {"min_blocks_per_mp": 2, "preferred_smem_carveout": 100} if self.ctas > 1 else {"min_blocks_per_mp": 1}

    @cached_property
    def struct(self) -> Struct:
        values = dict.fromkeys(("do", "dv", "r"), array("bfloat16", TOKENS, self.V, align=1024))
        states = dict.fromkeys(("h", "dh"), array("bfloat16", self.V, self.K, align=1024))
        return Struct(align=1024, **values, **states, **self.more_fields)

    def broken_limits(self) -> Iterator[str]:
        yield from super().broken_limits()
        if self.K != self.V:
            yield f"K and V must be equal; found K = {self.K} and V = {self.V}"
        if self.ctas < 1:
            yield f"an SM must hold a CTA; found {self.ctas} of K = {self.K}"
