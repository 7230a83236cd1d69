"""What each kernel is built for, and its shared memory.  No CUDA: a kept kernel needs no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda.bundles import Save

from ..common.arguments import Arguments, Launched, number, tensor

SMALLEST = 99 << 10                          # bytes of shared memory that every GPU from sm_89 up allows a CTA
SLICE = 32                                   # channels of K in a pass of `prepare`
WORDS = {
    "given": "GIVEN", "softplus": "SOFTPLUS", "bounded": "BOUNDED",
}  # fmt: skip
BETAS = {"given": "AS_IT_IS", "sigmoid": "SIGMOID", "2*sigmoid": "TWICE_SIGMOID"}
OFFSETS = {None: 0, "int32": 32, "int64": 64}                                # dtypes of cu_seqlens, and their bits


class TablesArguments(Arguments):
    cu_seqlens = tensor(of="offsets")        # (N + 1)
    first_chunk = tensor("int64")            # (N + 1)
    N = number("int64")


class PrepareArguments(Arguments):
    """Tiles of a chunk and value head one after the other, with all of a chunk's rows; see fwd/prepare.cu."""

    q = tensor()                             # (tokens, H, K)
    k = tensor()
    v = tensor()                             # (tokens, HV, V)
    g = tensor()                             # (tokens, HV, K)
    beta = tensor()                          # (tokens, HV)
    A_log = tensor()                         # (HV)
    dt_bias = tensor()                       # (HV, K)
    cu_seqlens = tensor(of="offsets")
    first_chunk = tensor("int64")
    w = tensor()                             # (C, K)
    qg = tensor()                            # (C, K); for a backward (K, C)
    kg_t = tensor()                          # (K, C)
    u = tensor()                             # (C, V)
    A_qk = tensor()                          # (C, C); for a backward transposed
    gc_last = tensor()                       # (K)
    saved_A_qk = tensor()                    # (tokens, HV, C)
    saved_A_inv = tensor()                   # (tokens, HV, C)
    o = tensor()                             # (tokens, HV, V): zeros where tokens are no sequence's
    w_t = tensor()                           # (K, C)
    kg = tensor()                            # (C, K)
    A_inv = tensor()                         # (C, C)
    of_rows = tensor()                       # (3, C): 1 / |q|, 1 / |k|, b
    T = number("int64")
    N = number("int64")
    chunks = number("int64")
    H = number("int64")
    HV = number("int64")
    scale = number("float32")
    lower_bound = number("float32")


class ChainArguments(Arguments):
    w = tensor()
    qg = tensor()
    kg_t = tensor()
    u = tensor()
    A_qk = tensor()
    gc_last = tensor()
    h0 = tensor()                            # (N, HV, K, V), or (N, HV, V, K)
    cu_seqlens = tensor(of="offsets")
    first_chunk = tensor("int64")
    o = tensor()                             # (tokens, HV, V)
    v_new = tensor()                         # (tokens, HV, V)
    h = tensor()                             # (chunks, HV, K, V): states that enter chunks
    ht = tensor()                            # as h0
    T = number("int64")
    chunks = number("int64")
    HV = number("int64")
    scale = number("float32")


class ChainBwdArguments(Arguments):
    A_qk_t = tensor()                        # (C, C)
    qg_t = tensor()                          # (K, C)
    kg = tensor()                            # (C, K)
    w_t = tensor()                           # (K, C)
    gc_last = tensor()
    d_o = tensor()                           # (tokens, HV, V)
    dht = tensor()                           # as dh0
    cu_seqlens = tensor(of="offsets")
    first_chunk = tensor("int64")
    dv_new = tensor()                        # (tokens, HV, V)
    dh = tensor()                            # (chunks, HV, K, V)
    dh0 = tensor()                           # (N, HV, K, V), or (N, HV, V, K)
    T = number("int64")
    chunks = number("int64")
    HV = number("int64")
    scale = number("float32")


class WyArguments(Arguments):
    v = tensor()
    A_inv = tensor()
    of_rows = tensor()
    v_new = tensor()
    dv_new = tensor()
    d_o = tensor()
    cu_seqlens = tensor(of="offsets")
    first_chunk = tensor("int64")
    P = tensor()                             # (tokens, HV, V)
    dv = tensor()                            # (tokens, HV, V)
    dA_qk = tensor()                         # (C, C)
    dA_kk = tensor()                         # (C, C)
    db = tensor()                            # (1 + K / SLICE, tokens, HV): the first row, of v
    T = number("int64")
    N = number("int64")
    chunks = number("int64")
    HV = number("int64")
    scale = number("float32")


class IntraArguments(Arguments):
    q = tensor()
    k = tensor()
    g = tensor()
    A_log = tensor()
    dt_bias = tensor()
    of_rows = tensor()
    h = tensor()
    dh = tensor()
    v_new = tensor()
    d_o = tensor()
    P = tensor()
    dA_qk = tensor()
    dA_kk = tensor()
    cu_seqlens = tensor(of="offsets")
    first_chunk = tensor("int64")
    dqn = tensor()                           # (tokens, HV, K)
    dkn = tensor()                           # (tokens, HV, K)
    dg = tensor()                            # (tokens, HV, K)
    db = tensor()                            # a row for each slice of K
    of_A_log = tensor()                      # (chunks, HV, K)
    of_dt_bias = tensor()                    # (chunks, HV, K)
    T = number("int64")
    tokens = number("int64")
    N = number("int64")
    chunks = number("int64")
    H = number("int64")
    HV = number("int64")
    scale = number("float32")
    lower_bound = number("float32")


class NormsArguments(Arguments):
    q = tensor()
    k = tensor()
    beta = tensor()
    dqn = tensor()
    dkn = tensor()
    db = tensor()
    cu_seqlens = tensor(of="offsets")
    dq = tensor()
    dk = tensor()
    dbeta = tensor()
    tokens = number("int64")
    N = number("int64")
    H = number("int64")
    HV = number("int64")


class SumsArguments(Arguments):
    of_A_log = tensor()
    of_dt_bias = tensor()
    first_chunk = tensor("int64")
    dA_log = tensor()                        # (HV)
    ddt_bias = tensor()                      # (HV, K)
    N = number("int64")
    chunks = number("int64")                 # of all rows of the batch
    HV = number("int64")


@dataclass(frozen=True)
class TablesConfig(Launched):
    C: int
    offsets: str | None                      # dtype of cu_seqlens of packed sequences
    kernel = "tables"
    arguments = TablesArguments
    file = "fwd/tables.cu"
    threads = 256
    shared = 0

    @property
    def defines(self) -> dict[str, Any]:
        return {"CHUNK": self.C, "PACKED": OFFSETS[self.offsets]}


class OfChunks(Launched):
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
    offsets: str | None                      # dtype of cu_seqlens of packed sequences
    save: Save                               # by this forward, or by that of this backward; not ALL
    backward: bool
    kernel = "prepare"
    arguments = PrepareArguments
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
            "PACKED": OFFSETS[self.offsets], "PRODUCTS": int(self.save is Save.PRODUCTS),
            "FOR_BACKWARD": int(self.backward),
        }  # fmt: skip


@dataclass(frozen=True)
class _Chain(OfChunks):
    """A walk over the chunks of a sequence."""

    K: int
    V: int
    C: int
    columns: int                             # of the state, or of its gradient, in a CTA
    offsets: str | None
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
            "PACKED": OFFSETS[self.offsets], "STATES_V_FIRST": int(self.v_first),
        }  # fmt: skip


@dataclass(frozen=True)
class ChainConfig(_Chain):
    output: bool = True                      # o is asked for
    kernel = "chain"
    arguments = ChainArguments
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
    arguments = ChainBwdArguments
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
    offsets: str | None
    kernel = "wy_bwd"
    arguments = WyArguments
    file = "bwd/wy.cu"

    @property
    def K(self) -> int:
        return self.V

    @property
    def shared(self) -> int:
        return 4 * self.C * (self.C + 4 + SLICE + 8 + 2 * (SLICE + 4 + 2 * (SLICE + 8)) + 2)

    @property
    def defines(self) -> dict[str, Any]:
        return {"HEAD_V": self.V, "CHUNK": self.C, "PACKED": OFFSETS[self.offsets]}


@dataclass(frozen=True)
class IntraConfig(OfChunks):
    K: int
    V: int
    C: int
    gate: str
    rate: bool
    bias: bool
    offsets: str | None
    kernel = "intra_bwd"
    arguments = IntraArguments
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
            "BIAS": int(self.bias), "PACKED": OFFSETS[self.offsets],
        }  # fmt: skip


@dataclass(frozen=True)
class NormsConfig(Launched):
    K: int
    norm: bool
    beta: str
    offsets: str | None
    kernel = "norms_bwd"
    arguments = NormsArguments
    file = "bwd/norms.cu"
    threads = 256
    shared = 0

    @property
    def defines(self) -> dict[str, Any]:
        return {"HEAD_K": self.K, "NORM": int(self.norm), "BETA_IS": BETAS[self.beta], "PACKED": OFFSETS[self.offsets]}


@dataclass(frozen=True)
class SumsConfig(Launched):
    K: int
    rate: bool
    bias: bool
    offsets: str | None
    kernel = "sum_chunks"
    arguments = SumsArguments
    file = "bwd/sums.cu"
    threads = 512
    shared = 0

    @property
    def defines(self) -> dict[str, Any]:
        return {"HEAD_K": self.K, "RATE": int(self.rate), "BIAS": int(self.bias), "PACKED": OFFSETS[self.offsets]}


Config = (
    TablesConfig | PrepareConfig | ChainConfig | ChainBwdConfig | WyConfig | IntraConfig | NormsConfig | SumsConfig
)
