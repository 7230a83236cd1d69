"""What each kernel is built for, and its shared memory.  No CUDA: a kept kernel needs no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMALLEST = 99 << 10                          # bytes of shared memory that every GPU from sm_89 up allows a CTA
SLICE = 32                                   # channels of K in a pass of `prepare`
WORDS = {
    "given": "GIVEN", "softplus": "SOFTPLUS", "bounded": "BOUNDED",
}  # fmt: skip
BETAS = {"given": "AS_IT_IS", "sigmoid": "SIGMOID", "2*sigmoid": "TWICE_SIGMOID"}


@dataclass(frozen=True)
class TablesConfig:
    C: int
    packed: int                              # bits of cu_seqlens
    kernel = "tables"
    file = "fwd/tables.cu"
    threads = 256
    shared = 0

    @property
    def defines(self) -> dict[str, Any]:
        return {"CHUNK": self.C, "PACKED": self.packed}


class OfChunks:
    """A CTA has a warp for 8 rows of a chunk."""

    C: int

    @property
    def threads(self) -> int:
        return 4 * self.C


@dataclass(frozen=True)
class PrepareConfig(OfChunks):
    K: int
    V: int
    C: int
    gate: str                                # "given", "softplus", "bounded"
    norm: bool
    rate: bool                               # A_log is there
    bias: bool
    beta: str                                # "given", "sigmoid", "2*sigmoid"
    packed: int                              # bits of cu_seqlens, 0 without
    keep: int                                # 1: A_qk and A_inv go to rows of tokens, too; 2: what a backward reads;
                                             # 3: the same, from A_qk and A_inv as 1 kept them
    kernel = "prepare"
    file = "fwd/prepare.cu"

    @property
    def shared(self) -> int:
        C, levels = self.C, self.C.bit_length() - 4
        far = levels - 1 + C // 32                                             # tiles of pairs of a warp
        slices = levels * (C + C // 2) * (SLICE + 8) + far * 4 * self.threads
        matrix = C * (C + 8)
        place = max(slices, matrix + max(2 * matrix, C * (self.V + 4)))
        return 4 * (C * (self.K + 4) + place + C // 8 * SLICE + 3 * C)

    @property
    def defines(self) -> dict[str, Any]:
        return {
            "HEAD_K": self.K, "HEAD_V": self.V, "CHUNK": self.C, "GATE_IS": WORDS[self.gate],
            "BETA_IS": BETAS[self.beta], "NORM": int(self.norm), "RATE": int(self.rate), "BIAS": int(self.bias),
            "PACKED": self.packed, "KEEP": int(self.keep),
        }  # fmt: skip


@dataclass(frozen=True)
class _Chain(OfChunks):
    """A walk over the chunks of a sequence."""

    K: int
    V: int
    C: int
    columns: int                             # of the state, or of its gradient, in a CTA
    packed: int
    v_first: bool                            # states are (V, K)

    @property
    def parts(self) -> int:
        """CTAs that share a state."""
        return self.V // self.columns

    @property
    def rings(self) -> int:
        """Bytes of those of all warps."""
        return self.C // 8 * self.slots * 1024

    @property
    def defines(self) -> dict[str, Any]:
        return {
            "HEAD_K": self.K, "HEAD_V": self.V, "CHUNK": self.C, "COLUMNS": self.columns, "RING": self.slots,
            "PACKED": self.packed, "STATES_V_FIRST": int(self.v_first),
        }  # fmt: skip


@dataclass(frozen=True)
class ChainConfig(_Chain):
    output: bool = True                      # o is asked for
    kernel = "chain"
    file = "fwd/chain.cu"

    @property
    def slots(self) -> int:
        """KiB of a warp's ring."""
        return 4 if self.columns == 32 else 8

    @property
    def shared(self) -> int:
        of_o = 4 * self.C * self.columns if self.output else 256 * self.C // 8
        return self.rings + 8 * (self.K + self.C) * (self.columns + 1) + of_o

    @property
    def defines(self) -> dict[str, Any]:
        return super().defines | {"OUTPUT": int(self.output)}


@dataclass(frozen=True)
class ChainBwdConfig(_Chain):
    kernel = "chain_bwd"
    file = "bwd/chain.cu"

    @property
    def slots(self) -> int:
        """KiB of a warp's ring: as many as there is room for."""
        return 8 if self.columns == 8 else 6

    @property
    def shared(self) -> int:
        handed = self.K if self.K // 16 <= self.C // 16 else 1
        return self.rings + 4 * (self.columns + 1) * (2 * self.K + 7 * self.C + handed)


@dataclass(frozen=True)
class WyConfig(OfChunks):
    V: int
    C: int
    packed: int
    kernel = "wy_bwd"
    file = "bwd/wy.cu"

    @property
    def K(self) -> int:
        return self.V

    @property
    def shared(self) -> int:
        return 4 * self.C * (self.C + 4 + SLICE + 8 + 2 * (SLICE + 4 + 2 * (SLICE + 8)) + 2)

    @property
    def defines(self) -> dict[str, Any]:
        return {"HEAD_V": self.V, "CHUNK": self.C, "PACKED": self.packed}


@dataclass(frozen=True)
class IntraConfig(OfChunks):
    K: int
    V: int
    C: int
    gate: str
    rate: bool
    bias: bool
    packed: int
    kernel = "intra_bwd"
    file = "bwd/intra.cu"

    @property
    def shared(self) -> int:
        C, warps, levels = self.C, self.C // 8, self.C.bit_length() - 4
        place = max(2 * (3 * C + 2 * SLICE) * (SLICE + 8), 2 * C * (C + 4) + 3 * C * (SLICE + 4))
        return 4 * (place + SLICE * (warps * (levels + 5) + 1))

    @property
    def defines(self) -> dict[str, Any]:
        return {
            "HEAD_K": self.K, "HEAD_V": self.V, "CHUNK": self.C, "GATE_IS": WORDS[self.gate], "RATE": int(self.rate),
            "BIAS": int(self.bias), "PACKED": self.packed,
        }  # fmt: skip


@dataclass(frozen=True)
class NormsConfig:
    K: int
    norm: bool
    beta: str
    packed: int
    kernel = "norms_bwd"
    file = "bwd/norms.cu"
    threads = 256
    shared = 0

    @property
    def defines(self) -> dict[str, Any]:
        return {"HEAD_K": self.K, "NORM": int(self.norm), "BETA_IS": BETAS[self.beta], "PACKED": self.packed}


@dataclass(frozen=True)
class SumsConfig:
    K: int
    rate: bool
    bias: bool
    packed: int
    kernel = "sum_chunks"
    file = "bwd/sums.cu"
    threads = 512
    shared = 0

    @property
    def defines(self) -> dict[str, Any]:
        return {"HEAD_K": self.K, "RATE": int(self.rate), "BIAS": int(self.bias), "PACKED": self.packed}


Config = (
    TablesConfig | PrepareConfig | ChainConfig | ChainBwdConfig | WyConfig | IntraConfig | NormsConfig | SumsConfig
)
