"""What kernels of recorded calls (forwards that keep, and their backwards) have in common on both archs: sizes,
arguments, and the configuration of bwd/grads.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from ..arguments import Arguments, number, tensor
from .barriers import Arrivals, Meeting, NamedBarrier, Pipeline, mbarriers, of_a_lane, of_each_warp
from .configs import ChunkConfig, ChunkInputs, pitch_of_shares
from .fields import Struct, StructField, array, several

TOKENS = 64                                  # tokens of a chunk of grads, two of the forward's; each has a kept state
STEP = 16                                    # tokens of one step of a product
TOKEN_FACTORS = 3                            # 1 / |q|, 1 / |k|, b
PLACE = 4                                    # numbers of an item: its chunk, value head, first token and tokens
PLACES = 4                                   # items whose places a CTA has: MATH's and those beside it, in a ring
CHANNELS = 64                                # channels of a panel; each of four warps of MATH has 16
LOAD_WARPS = 4
LOADERS = 32 * LOAD_WARPS
LOAD = NamedBarrier("LOAD", 2, LOADERS)


SEGMENTS = dict(                             # the last arguments of kernels that walk over segments
    segment_table=tensor("int64"),           # (segments, 6), of packed sequences
    T=number("int32"),
    chunks=number("int32"),                  # chunks of a row of T tokens
    segments=number("int32"),                # segments of a row
    segment=number("int32"),                 # chunks of a segment
    HV=number("int32"),
)
ChainArguments = Arguments.and_more(
    "ChainArguments",
    tiles=tensor("uint8"),                   # (chunks, HV) tiles
    v=tensor("bfloat16"),                    # (B, T, HV, V)
    h0=tensor(dtype_from="h0"),              # (N, HV, K, V) in the caller's layout; (segments, HV, K, V) of segments
    o=tensor("bfloat16"),                    # (B, T, HV, V)
    r=tensor("bfloat16"),                    # as o
    ht=tensor("float32"),                    # as h0; of `carry` what a segment adds, (segments, HV, K, V)
    M=tensor("float32"),                     # (segments, HV, K, K), transposed
    h=tensor("bfloat16"),                    # (states, HV, K, V): those that enter every so many chunks
    **SEGMENTS,
)


WalkArguments = Arguments.and_more(
    "WalkArguments",
    tiles=tensor("uint8"),                   # (chunks, HV) tiles, with b on keys
    do=tensor("bfloat16"),                   # (B, T, HV, V)
    dht=tensor("float32"),                   # (N, HV, K, V) in the caller's layout; (segments, HV, K, V) of segments
    dv=tensor("bfloat16"),                   # (B, T, HV, V)
    dh=tensor("bfloat16"),                   # (states, HV, V, K): leaving every two chunks
    dh0=tensor(dtype_from="dh0"),            # (N, ..) as dht; of `carry` what a segment adds, (segments, HV, K, V)
    **SEGMENTS,
)


class GradsArguments(ChunkInputs):
    do = tensor("bfloat16")                  # (B, T, HV, V)
    dv = tensor("bfloat16")
    r = tensor("bfloat16")
    h = tensor("bfloat16")                   # (chunks, HV, V, K), entering a chunk
    dh = tensor("bfloat16")                  # leaving it
    dq = tensor("bfloat16")                  # (B, T, HV, K), of each value head
    dk = tensor("bfloat16")
    dg = tensor(dtype_from="g_dtype")        # (B, T, HV, K); of a gate per head (B, T, HV), as g
    dbeta = tensor(dtype_from="beta_dtype")  # (B, T, HV)
    of_A_log = tensor("float32")             # (chunks, HV, K): shares of dA_log and ddt_bias
    of_dt_bias = tensor("float32")
    chunk_table = tensor("int64")            # (chunks, 3), of packed sequences
    T = number("int32")
    chunks = number("int32")                 # chunks of a row of T tokens; if packed, entries of the table
    items = number("int32")                  # chunks and value heads, of all rows
    H = number("int32")
    HV = number("int32")
    scale = number("float32")
    lower_bound = number("float32")
    one = number("float32")                  # 1, which no compiler knows


@dataclass(frozen=True)
class GradsOptions(ChunkConfig):
    """The options of bwd/grads.  An arch adds its threads, and `struct`: values and states, then `more_fields`."""

    packed: bool
    shares_over_h: bool = False              # an item's shares of dA_log and ddt_bias lie where its h was
    arguments = GradsArguments
    rows_of_values = MappingProxyType(dict.fromkeys(("do", "dv", "r"), TOKENS))    # rows in panels of 64 columns
    ctas = 1                                 # CTAs that an SM has at once
    launch_options = MappingProxyType({"min_blocks_per_mp": 1})
    few_registers = False                    # LOAD computes addresses anew for each tensor
    spares_L2 = False                        # what LOAD moves leaves L2 first, for items that wait; dh is discarded

    @property
    def share_pitch(self) -> int:
        return pitch_of_shares(self.K, self.shares_over_h)

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes of a row that threads of LOAD copy at a time: 8, or all of them."""
        return self.K // 8

    @property
    def panels(self) -> int:
        return self.K // CHANNELS

    @property
    def math_warps(self) -> int:
        return 4 * self.panels

    @property
    def math(self) -> NamedBarrier:
        return NamedBarrier("MATH", 1, 32 * self.math_warps)

    @property
    def ring_pipelines(self) -> tuple[Pipeline, ...]:
        """Those between LOAD and MATH."""
        values = (
            Arrivals(LOADERS, "LOAD", "each thread with its pieces of do, dv and r"),
            Arrivals(1, "LOAD", bytes="h and dh"),
        )
        rows, read = (Arrivals(LOADERS, "LOAD", "each thread"),), of_each_warp(self.math_warps, "MATH")
        return (
            Pipeline("values_full", values, "MATH", "do, dv, r, h and dh of a chunk are there"),
            Pipeline("values_empty", read, "LOAD", "all products and sums that read them are done"),
            Pipeline("rows_full", rows, "MATH", "q, k, g and of_tokens are there", 2),
            Pipeline("rows_done", read, "LOAD", "dq, dk and dg stand where q, k and g stood", 2),
            Pipeline("placed", of_a_lane("LOAD"), "MATH, LOAD", "where an item lies, or that there is none", 2),
        )

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.ring_pipelines

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        says = "G is there; it was read; partial sums are there; projections are"
        return Meeting(self.math, "MATH", says), Meeting(LOAD, "LOAD", "rows are there")

    @property
    def block(self) -> int:
        """Tokens whose decays are counted from their middle: of any gate fewer, each floored (grads/gate.FLOOR)."""
        return STEP if self.one_product else STEP // 2

    @property
    def sums(self) -> list[str]:
        """The sums over channels of each token: qn . dqn and kn . (-2^x up2) with l2norms, and b db."""
        return ["q", "k"] * self.norm + ["b"]

    @property
    def of_no_token(self) -> float:
        """What counts as g where there is no token: a logit, or a decay, by which nothing decays."""
        return 0.0 if self.gate == "given" else -math.inf

    @property
    def wide_g(self) -> bool:
        """Whether g is float32: there is no shared memory for it then."""
        return self.g_dtype == "float32"

    @cached_property
    def rows(self) -> Struct:
        """q, k and g of a chunk; MATH reads a g that is not there in global memory."""
        names = ("q", "k") if self.wide_g or self.per_head else ("q", "k", "g")
        return Struct(align=1024, **dict.fromkeys(names, array("bfloat16", TOKENS, self.K, align=1024)))

    @property
    def more_fields(self) -> dict[str, StructField]:
        return dict(
            rows=several(self.rows, 2),
            G=array("bfloat16", 2, TOKENS, TOKENS, align=1024),
            of_tokens=array("float32", 2, TOKEN_FACTORS, TOKENS),
            through_b=array("float32", TOKENS),
            projected=array("float32", 2, TOKENS),
            **dict(dg_of_warps=array("float32", self.math_warps, TOKENS)) if self.per_head else {},
            places=array("int64", PLACES, PLACE, align=16),
            **mbarriers(self.ring_pipelines),
        )
