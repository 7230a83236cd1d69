"""What kernels that both archs launch are built for.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kda.model.problem import Problem

from ..arguments import Argument, Arguments, KernelConfig, number, tensor
from .barriers import LANES_OF_A_WARP, Arrivals, NamedBarrier, Pipeline
from .fields import Struct, array
from .tile import HEAD_SIZES, MIN_GATE_ONE_PRODUCT, WARPS, C

COMPOSED = 16                                # columns of the states that a CTA of compose has
JOIN_ROWS = 256                              # rows of o that a CTA of join has
SLICES = 8                                   # slices into which shares divides the chunks
# tables
THREADS = 256
RUN = 16                                     # chunks of every sequence that a program writes
# Named barriers of a CTA of eight warps that make a chunk, and of the first four of them.
WHOLE_CTA = NamedBarrier("sync_threads", 0, 32 * WARPS)
FIRST_FOUR = NamedBarrier("FIRST_FOUR", 1, 128)

# What the forwards round: operands of products, and results; decays, norms, the inverse and the state stay float32.
ROUNDED_TO = dict.fromkeys(("A_qk", "A_inv", "qg", "kb", "kg", "h", "v_new", "o"), "bfloat16")


def wrong_head_sizes(K: int, V: int) -> Iterator[str]:
    """Yield a sentence for each of K and V for which there is no kernel."""
    for name, found in (("K", K), ("V", V)):
        if found not in HEAD_SIZES:
            yield f"{name} must be {' or '.join(map(str, HEAD_SIZES))}; found {found}"


class HeadsConfig(KernelConfig):
    """A kernel for the sizes of heads that layouts hold, with `struct` in shared memory."""

    K: int
    V: int
    if TYPE_CHECKING:

        @property
        def struct(self) -> Struct: ...

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.K, self.V

    @property
    def shared(self) -> int:
        return self.struct.end

    def broken_limits(self) -> Iterator[str]:
        yield from wrong_head_sizes(*self.head_sizes)
        yield from super().broken_limits()


class WalkedConfig(HeadsConfig):
    """A kernel that walks over the chunks of segments."""

    walk: str                                # "sequences", "carry", "segments"

    @property
    def carry(self) -> bool:
        return self.walk == "carry"


class ChunkInputs(Arguments):
    """The arguments of every kernel that reads rows of a chunk."""

    q = tensor("bfloat16")                   # (B, T, H, K)
    k = tensor("bfloat16")
    g = tensor(dtype_from="g_dtype")         # (B, T, HV, K), or (B, T, HV) of `per_head`
    beta = tensor(dtype_from="beta_dtype")   # (B, T, HV)
    A_log = tensor("float32")                # (HV)
    dt_bias = tensor("float32")              # (HV, K), or (HV)


class TilesArguments(ChunkInputs):
    """The arguments of every kernel that makes tiles of chunks."""

    tiles = tensor("uint8")                  # (chunks, HV) tiles
    o = tensor("bfloat16")                   # (B, T, HV, V): cleared for tokens outside every sequence
    chunk_table = tensor("int64")            # (chunks, 3), of packed sequences
    T = number("int32")
    chunks = number("int32")                 # entries of the table
    H = number("int32")
    HV = number("int32")
    scale = number("float32")
    lower_bound = number("float32")


@dataclass(frozen=True)
class ChunkConfig(HeadsConfig):
    """The options with which a chunk's operands are made (gate.py, pairs.py, inverse.py)."""

    K: int
    V: int
    gate: str                                # "bounded", "softplus", "given"
    one_product: bool                        # all C rows at once: a bounded gate, normalised q and k
    norm: bool
    rate: bool                               # A_log is there
    bias: bool                               # dt_bias is there
    beta: str                                # "given", "sigmoid", "2*sigmoid"
    grouped: bool                            # value heads share q and k
    g_dtype: str
    beta_dtype: str
    per_head: bool = field(default=False, kw_only=True)    # g and dt_bias have one number for all channels of a head

    @property
    def gate_width(self) -> int:
        """Elements of g of a token and value head, and of dt_bias of a value head."""
        return 1 if self.per_head else self.K


def chunk_options(p: Problem) -> dict[str, Any]:
    """The fields of ChunkConfig for a problem."""
    one_product = p.gate == "bounded" and p.lower_bound >= MIN_GATE_ONE_PRODUCT and p.qk_l2norm
    return dict(
        K=p.K, V=p.V, gate=p.gate, one_product=one_product, norm=p.qk_l2norm, rate=p.A_log, bias=p.dt_bias,
        beta=p.beta, grouped=p.HV != p.H, g_dtype=p.g_dtype, beta_dtype=p.beta_dtype,
        per_head=p.gate_per_head,
    )


def checkpoint_arguments(dtype_from: str = "checkpoints") -> dict[str, Argument]:
    """Return the arguments of a kernel that stores some of the states that enter chunks."""
    return dict(
        pool=tensor(dtype_from=dtype_from),          # states in the caller's layout
        place=tensor("int64"),               # (chunks): the element of the pool where the state that enters goes, or -1
    )


def ring_of_tiles(
    role: str, rows: str, stages: int, read: tuple[Arrivals, ...], says: str
) -> tuple[Pipeline, Pipeline]:
    """Return the pipelines between LOAD and the role that walks over tiles, with rows of v or do."""
    copies = (
        Arrivals(1, "LOAD", bytes="the tile"),
        Arrivals(LANES_OF_A_WARP, "LOAD", f"each lane with its pieces of {rows}"),
    )
    return Pipeline("full", copies, role, "a chunk is there", stages), Pipeline("empty", read, "LOAD", says, stages)


class ComposeArguments(Arguments):
    M = tensor("float32")                    # (segments, HV, K, K), transposed
    added = tensor("float32")                # (segments, HV, K, V)
    h0 = tensor(dtype_from="h0")             # (N, HV, K, V), or (N, HV, V, K): entering, or gradients leaving
    edge = tensor("float32")                 # (segments, HV, K, V)
    ht = tensor("float32")                   # as h0
    first_segment = tensor("int32")          # (N + 1), of packed sequences
    segments = number("int32")               # segments of each sequence, unless packed
    HV = number("int32")


@dataclass(frozen=True)
class ComposeConfig(HeadsConfig):
    arguments = ComposeArguments
    K: int
    V: int
    packed: bool
    h0: str | None
    v_first: bool
    begun: bool = False                      # first segments began with the states that enter sequences: no M of theirs
    ht: bool = False                         # also the state that leaves the last segment
    back: bool = False                       # gradients of states, from the last segment to the first

    @property
    def strips(self) -> int:
        return self.V // COMPOSED

    @property
    def threads(self) -> int:
        return 2 * self.K

    @property
    def pdl(self) -> bool:
        return self.begun

    @property
    def pitch(self) -> int:
        """Elements from a row of M to the next one in shared memory."""
        return self.K + 4

    @cached_property
    def struct(self) -> Struct:
        M, added = array("float32", 2, self.K, self.pitch), array("float32", 2, self.K, COMPOSED)
        columns = array("float32", self.K, COMPOSED)
        return Struct(M=M, added=added, h=columns, halves=columns)


def join_states_config(p: Problem) -> ComposeConfig:
    return ComposeConfig(p.K, p.V, packed=False, h0=None, v_first=p.state_v_first, begun=True, ht=p.final_state)


class JoinArguments(Arguments):
    response = tensor("bfloat16")            # (B, T, HV, K)
    edge = tensor("float32")                 # (N * segments, HV, K, V)
    o = tensor("bfloat16")                   # (B, T, HV, V)
    cu_seqlens = tensor("int64", dtype_from="offsets")
    T = number("int32")
    HV = number("int32")
    segments = number("int32")                # segments of every sequence


@dataclass(frozen=True)
class JoinConfig(HeadsConfig):
    offsets: str | None                      # dtype of cu_seqlens, of packed sequences
    K: int
    V: int
    unit: int                                # tokens: segments have a multiple of so many
    pdl = True
    arguments = JoinArguments
    threads = 32 * WARPS
    launch_options = MappingProxyType({"min_blocks_per_mp": 2, "preferred_smem_carveout": 40})

    @property
    def shared(self) -> int:
        return self.K * self.V * 2


class ChunkTable:
    """Columns of the table of chunks (tables.py)."""

    TOKEN, TOKENS, NUMBER = range(3)
    WIDTH = 3


class SegmentTable:
    """Columns of the table of segments (tables.py)."""

    SEQUENCE, NUMBER, TOKEN, TOKENS_LEFT, CHUNK, STATE = range(6)
    WIDTH = 6


class TablesArguments(Arguments):
    cu_seqlens = tensor(dtype_from="offsets")  # (N + 1)
    chunk_table = tensor("int64")
    segment_table = tensor("int64")
    first_segment = tensor("int32")          # (N + 1)
    T = number("int32")
    N = number("int32")
    segment = number("int32")                # chunks of a segment
    every = number("int32")                  # chunks of a kept state
    chunk_entries = number("int32")          # entries of the table of chunks
    segment_entries = number("int32")


@dataclass(frozen=True)
class TablesConfig(KernelConfig):
    offsets: str                             # dtype of cu_seqlens
    rows: int = C                            # rows of a chunk
    segments: bool = True                    # their table is also made
    arguments = TablesArguments
    threads = THREADS
    shared = 4 * (THREADS // 32)


def pitch_of_shares(K: int, over_h: bool) -> int:
    """Return the elements from a chunk's shares, of one value head, to those of the next; K = V."""
    return K * K // 2 if over_h else K


class SharesArguments(Arguments):
    of_A_log = tensor("float32")             # (chunks, HV, K)
    of_dt_bias = tensor("float32")
    dA_log = tensor("float32")               # (HV)
    ddt_bias = tensor("float32")             # (HV, K), or (HV)
    chunks = number("int32")                 # chunks of all rows
    HV = number("int32")


@dataclass(frozen=True)
class SharesConfig(HeadsConfig):
    K: int
    rate: bool                               # A_log is there
    bias: bool                               # dt_bias is there
    per_head: bool = False                   # it has a number for each head
    over_h: bool = False                     # a chunk's shares lie where its h was
    arguments = SharesArguments

    @property
    def pitch(self) -> int:
        return pitch_of_shares(self.K, self.over_h)

    @property
    def threads(self) -> int:
        return SLICES * self.K

    @cached_property
    def struct(self) -> Struct:
        each = dict.fromkeys(("of_A", "of_bias"), array("float32", SLICES, self.K))
        return Struct(**each, of_warps=array("float32", self.K // 32))

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.K, self.K
