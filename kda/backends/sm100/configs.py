"""What the kernel is built for, and its shared and tensor memory.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.cute.configs import Launched
from ..common.cute.tile import PAD, PITCH_X, WARPS, C

COLUMNS = 64                                 # of the state, in a CTA
CTAS = 2                                     # of a cluster: all columns
GROUPS = 2                                   # of WARPS warps, in a CTA
RING = CTAS * GROUPS                         # stages: one for each group of the cluster
AHEAD = 3                                    # rows of v of so many chunks are there or on their way
K = V = 128
ITEM = 64                                    # bytes that a group keeps of a sequence and head
ROWS = 256                                   # of o, that a CTA of join has
TMEM = 512                                   # columns: all there are


@dataclass(frozen=True)
class FusedConfig(Launched):
    gate: str                                # "bounded", "softplus", "given"
    block: bool                              # all C rows at once: a bounded gate, normalised q and k
    norm: bool
    rate: bool                               # A_log is there
    bias: bool
    beta: str                                # "given", "sigmoid", "2*sigmoid"
    grouped: bool                            # value heads share q and k
    g_dtype: str
    beta_dtype: str
    offsets: str | None                      # dtype of cu_seqlens
    h0: str | None                           # dtype of initial states
    ht: bool
    v_first: bool                            # states are (V, K)
    cut: bool = False                        # sequences are walked over in segments
    K: int = K
    V: int = V
    keep: int = 0                            # nothing is kept for a backward

    @property
    def threads(self) -> int:
        return 128 + GROUPS * 32 * WARPS

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (CTAS, 1, 1)

    @property
    def shared(self) -> int:
        return Shared.end


@dataclass(frozen=True)
class JoinConfig(Launched):
    offsets: str | None                      # dtype of cu_seqlens
    K: int = K
    V: int = V
    early = True

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def shared(self) -> int:
        return self.K * self.V * 2


class Tile:
    """Bytes in what PREPAREs hand to CHAINs of a chunk: WQ, where [kE; qg] was (2 C, K); kg (C, K); A1^T (C, 2 C);
    2^gc_last (K) float32."""

    KG = 2 * C * K * 2
    TB = KG + C * K * 2                      # where A1 is
    DECAY = TB + 2 * C * C * 2
    end = DECAY + 4 * K
    bytes = -(-end // 1024) * 1024


class Shared:
    """Bytes from the first, which is a multiple of 1 KiB."""

    X = 2 * Tile.bytes                       # of a group: its tile, the neighbour's, operands of its product
    Y = X + 2 * C * K * 2
    sums = Y + C * K * 2
    A_kk = sums + 4 * (WARPS + 2) * K
    columns = A_kk + 4 * C * PAD
    b = columns + 4 * C * PITCH_X
    group = -(-(b + 4 * C) // 1024) * 1024
    S = GROUPS * group                       # of the CTA: the state, rounded; rows of v, and v_new; of o; [0; -1]
    v = S + K * COLUMNS * 2
    o = v + AHEAD * C * COLUMNS * 2
    minus_one = o + C * COLUMNS * 2
    barriers = minus_one + 2 * C * C * 2
    begin = barriers + 8 * (2 * RING + 2 + 2 * GROUPS)                         # a 16th of the address of all this
    tmem = begin + 4
    items = -(-(tmem + 4) // 16) * 16        # of each group: where its rows are, tokens, rate
    numbers = items + GROUPS * ITEM          # of warps
    end = numbers + 4 * (4 + GROUPS * WARPS)


class Columns:
    """Of tensor memory."""

    out = 0                                  # [v_new; o] of even and of odd chunks
    S = 2 * COLUMNS
    pairs = 3 * COLUMNS                      # of each group: [A_kk / b; A_qk]
    WQ = pairs + GROUPS * C                  # of each group: [w; -Q]
    end = WQ + GROUPS * K
