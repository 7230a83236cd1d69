"""What each kernel is built for, and the shared memory that it takes.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.cute.configs import Launched
from ..common.cute.tile import PAD, PITCH_X, WARPS, C, Tile

# pairs
PITCH_KEPT = C + 8                           # elements of a row of a half's A_inv: eight rows lie in other banks
# chain
COLUMNS = 64                                 # of the state, in one warpgroup
PITCH = COLUMNS + 8                          # elements between rows of v and o: eight rows lie in other banks
# fused
GROUPS = 2                                   # of WARPS warps, in a CTA
RING = 2 * GROUPS                            # one for each group of the cluster
# tables
THREADS = 256
RUN = 16
LIMIT = 65535                                # of grids in y and z


@dataclass(frozen=True)
class PrepareConfig(Launched):
    K: int
    V: int
    gate: str                                # "bounded", "softplus", "given"
    block: bool                              # all C rows at once: a bounded gate, normalised q and k
    norm: bool
    rate: bool                               # A_log is there
    bias: bool
    beta: str                                # "given", "sigmoid", "2*sigmoid"
    packed: bool
    grouped: bool                            # value heads share q and k
    g_dtype: str
    beta_dtype: str
    keep: int = 0                            # rows of the chunks whose A_qk and A_inv are kept; 0: of none

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def early(self) -> bool:
        return self.packed

    @property
    def on_an_sm(self) -> int:
        """CTAs at once: 80 registers, or 128."""
        return 3 if self.block else 2

    @property
    def rows_of_y(self) -> int:
        """k under the decay before each row, or a second buffer of both."""
        return C if self.block else 2 * C

    @property
    def shared(self) -> int:
        operands = (2 * C + self.rows_of_y) * self.K * 2
        sums = 4 * (WARPS + 2) * self.K
        return operands + sums + 4 * C * (PAD + PITCH_X) + 2 * C * C + 4 * C


@dataclass(frozen=True)
class PairsConfig(Launched):
    K: int
    beta: str
    packed: bool
    beta_dtype: str

    @property
    def threads(self) -> int:
        return 128

    @property
    def shared(self) -> int:
        return 3 * C * self.K * 2 + 2 * C * PITCH_KEPT * 2 + 4 * C * PAD + 8


@dataclass(frozen=True)
class ChainConfig(Launched):
    K: int
    V: int
    packed: bool
    walk: str                                # "sequences", "carry", "segments"
    h0: str | None                           # dtype of the states that they start from
    ht: bool
    v_first: bool                            # states of sequences are (V, K), and those that are kept
    h: bool                                  # states are kept, of those that enter chunks
    every: int                               # so many chunks
    stages: int

    @property
    def cluster(self) -> tuple[int, int, int] | int:
        """Two CTAs that read the same tiles lie together, and come to them together."""
        return (2, 1, 1) if not self.carry and self.parts == 2 else 1

    @property
    def carry(self) -> bool:
        return self.walk == "carry"

    @property
    def rows(self) -> int:
        """Of [kn 2^gc; scale qn 2^gc] that are multiplied."""
        return C if self.carry else 2 * C

    @property
    def parts(self) -> int:
        """CTAs of a head: columns of states, and of M."""
        return (self.V + self.K * self.carry) // COLUMNS

    @property
    def threads(self) -> int:
        return 160

    @property
    def shared(self) -> int:
        rows = 2 * C * PITCH                                                 # v of a stage, or o
        return self.stages * (Tile(self.K).bytes + rows + 16) + (0 if self.carry else 2 * rows)


@dataclass(frozen=True)
class FusedConfig(Launched):
    prepare: PrepareConfig
    chain: ChainConfig
    cluster = (2, 1, 1)

    @property
    def early(self) -> bool:
        return self.chain.packed

    @property
    def threads(self) -> int:
        return 128 + GROUPS * self.prepare.threads

    @property
    def shared(self) -> int:
        group = -(-(self.prepare.shared - 2 * C * C) // 1024) * 1024           # TB is made where it is read
        return self.chain.shared + GROUPS * group


@dataclass(frozen=True)
class TablesConfig(Launched):
    dtype: str                               # of cu_seqlens

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def shared(self) -> int:
        return 4 * (THREADS // 32)
