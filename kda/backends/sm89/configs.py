"""What each kernel is built for, and its shared memory.  No CUDA: a kernel in the store needs no compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kda.model.bundles import Save

from ..common.arguments import Arguments, KernelConfig, number, tensor

SMALLEST = 99 << 10                          # bytes of shared memory that every GPU from sm_89 up allows a CTA
SLICE = 32                                   # channels of K in a pass of `prepare`
COLUMNS = (32, 16, 8)                        # columns of a state in a CTA: the first that leaves few SMs idle
WIDEST_BACK = 16                             # columns in a backward: more would not fit
SIZES = {"K": (64, 128), "V": (64, 128), "C": (32, 64)}                      # for which kernels are written
GATES = {"given": "GIVEN", "softplus": "SOFTPLUS", "bounded": "BOUNDED"}
BETAS = {"given": "AS_IT_IS", "sigmoid": "SIGMOID", "2*sigmoid": "TWICE_SIGMOID"}
OFFSETS = {None: 0, "int32": 32, "int64": 64}                                # dtypes of cu_seqlens, and their bits
# The macro that a kernel has for a field of its configuration, and its value.
MACROS: dict[str, tuple[str, Callable[[Any], int | str]]] = {
    "K": ("HEAD_K", int), "V": ("HEAD_V", int), "C": ("CHUNK", int), "columns": ("COLUMNS", int),
    "slots": ("RING", int), "gate": ("GATE_IS", GATES.__getitem__), "beta": ("BETA_IS", BETAS.__getitem__),
    "norm": ("NORM", int), "rate": ("RATE", int), "bias": ("BIAS", int), "offsets": ("PACKED", OFFSETS.__getitem__),
    "save": ("PRODUCTS", lambda save: int(save is Save.PRODUCTS)), "backward": ("FOR_BACKWARD", int),
    "v_first": ("STATES_V_FIRST", int), "output": ("OUTPUT", int), "per_head": ("PER_HEAD", int),
}


class FloatArguments(Arguments):
    """Every argument of the kernels, by its one name.  Operands of chunks are tiles, one of a chunk and value head
    after the other, with all of a chunk's rows; see fwd/prepare.cu."""

    q = k = dq = dk = tensor()               # (tokens, H, K)
    v = d_o = v_new = dv = dv_new = P = tensor()    # (tokens, HV, V)
    o = tensor()                             # (tokens, HV, V): zeros for tokens outside every sequence
    g = dg = tensor()                        # (tokens, HV, K), or with one gate per head (tokens, HV)
    dg_shares = tensor()                     # (K / SLICE, tokens, HV): with one gate per head, of each slice of K
    beta = dbeta = tensor()                  # (tokens, HV)
    db = tensor()                            # (1 + K / SLICE, tokens, HV): a row of v, and one for each slice of K
    A_log = dA_log = tensor()                # (HV)
    dt_bias = ddt_bias = tensor()            # (HV, K), or (HV)
    of_A_log = of_dt_bias = tensor()         # (chunks, HV, K)
    h0 = ht = dh0 = dht = tensor()           # (N, HV, K, V), or (N, HV, V, K)
    h = dh = tensor()                        # (chunks, HV, K, V): states that enter chunks, gradients of what leaves
    dqn = dkn = tensor()                     # (tokens, HV, K)
    saved_A_qk = saved_A_inv = tensor()      # (tokens, HV, C)
    cu_seqlens = tensor(dtype_from="offsets")  # (N + 1)
    first_chunk = tensor("int64")            # (N + 1)
    # operands of chunks
    w = kg = tensor()                        # (C, K)
    w_t = qg_t = kg_t = tensor()             # (K, C)
    qg = tensor()                            # (C, K); for a backward (K, C)
    u = tensor()                             # (C, V)
    A_qk_t = A_inv = dA_qk = dA_kk = tensor()    # (C, C)
    A_qk = tensor()                          # (C, C); for a backward transposed
    gc_last = tensor()                       # (K)
    of_rows = tensor()                       # (3, C): 1 / |q|, 1 / |k|, b
    T = tokens = N = H = HV = number("int64")
    chunks = number("int64")                 # chunks of a row of T tokens; for `sum_chunks`, of the whole batch
    scale = lower_bound = number("float32")


def arguments_of(kernel: str, names: str) -> type[Arguments]:
    """Return the Arguments of a kernel: `names`, in its order."""
    return type(f"{kernel}Arguments", (Arguments,), {n: FloatArguments.declared[n] for n in names.split()})


class Sized(KernelConfig):
    """A configuration with some of K, V and C."""

    @property
    def defines(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]  # a subclass is a dataclass
        names += ["slots"] * hasattr(self, "slots")
        return {MACROS[name][0]: MACROS[name][1](getattr(self, name)) for name in names}

    def broken_limits(self) -> Iterator[str]:
        sizes = {name: getattr(self, name) for name in SIZES if hasattr(self, name)}
        for name, size in sizes.items():
            if size not in SIZES[name]:
                yield f"{name} must be {' or '.join(map(str, SIZES[name]))}; found {size}"
        K, V = sizes.get("K"), sizes.get("V")
        if K and V and K != V:
            yield f"K and V must be equal; found K = {K} and V = {V}"
        yield from super().broken_limits()


@dataclass(frozen=True)
class TablesConfig(Sized):
    C: int
    offsets: str | None                      # dtype of cu_seqlens of packed sequences
    kernel = "tables"
    arguments = arguments_of("Tables", "cu_seqlens first_chunk N")
    file = "fwd/tables.cu"
    threads = 256
    shared = 0


class OfChunks(Sized):
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
    per_head: bool = False                   # one gate for all channels of a head
    kernel = "prepare"
    arguments = arguments_of(
        "Prepare",
        "q k v g beta A_log dt_bias cu_seqlens first_chunk w qg kg_t u A_qk gc_last saved_A_qk saved_A_inv o "
        "w_t kg A_inv of_rows T N chunks H HV scale lower_bound",
    )
    file = "fwd/prepare.cu"

    @property
    def shared(self) -> int:
        C, levels = self.C, self.C.bit_length() - 4
        far = levels - 1 + C // 32                                             # tiles of pairs of a warp
        slices = levels * (C + C // 2) * (SLICE + 8) + far * 4 * self.threads
        matrix = C * (C + 8)
        place = max(slices, matrix + max(2 * matrix, C * (self.V + 4)))
        return 4 * (C * (self.K + 4) + place + C // 8 * SLICE + 3 * C)


@dataclass(frozen=True)
class _Chain(OfChunks):
    """A walk over the chunks of a sequence."""

    K: int
    V: int
    C: int
    columns: int                             # columns of the state, or of its gradient, in a CTA
    offsets: str | None
    v_first: bool                            # states are (V, K)
    widest = COLUMNS[0]                      # the most columns that a CTA may have
    if TYPE_CHECKING:

        @property
        def slots(self) -> int: ...

    def broken_limits(self) -> Iterator[str]:
        if self.columns not in COLUMNS or self.columns > self.widest:
            allowed = " or ".join(str(columns) for columns in reversed(COLUMNS) if columns <= self.widest)
            yield f"a CTA holds {allowed} columns of a state; found {self.columns}"
        yield from super().broken_limits()

    @property
    def parts(self) -> int:
        """Return how many CTAs share a state."""
        return self.V // self.columns

    @property
    def rings(self) -> int:
        """Return the bytes of the rings of all warps."""
        return self.C // 8 * self.slots * 1024


@dataclass(frozen=True)
class ChainConfig(_Chain):
    output: bool = True                      # o is requested
    kernel = "chain"
    arguments = arguments_of(
        "Chain", "w qg kg_t u A_qk gc_last h0 cu_seqlens first_chunk o v_new h ht T chunks HV scale"
    )
    file = "fwd/chain.cu"

    @property
    def slots(self) -> int:
        """Return the KiB of a warp's ring."""
        return 4 if self.columns == 32 else 8

    @property
    def shared(self) -> int:
        of_o = 4 * self.C * self.columns if self.output else 256 * self.C // 8
        return self.rings + 8 * (self.K + self.C) * (self.columns + 1) + of_o


@dataclass(frozen=True)
class ChainBwdConfig(_Chain):
    widest = WIDEST_BACK
    kernel = "chain_bwd"
    arguments = arguments_of(
        "ChainBwd",
        "A_qk_t qg_t kg w_t gc_last d_o dht cu_seqlens first_chunk dv_new dh dh0 T chunks HV scale",
    )
    file = "bwd/chain.cu"

    @property
    def slots(self) -> int:
        """Return the KiB of a warp's ring: as many as there is room for."""
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
    arguments = arguments_of(
        "Wy",
        "v A_inv of_rows v_new dv_new d_o cu_seqlens first_chunk P dv dA_qk dA_kk db T N chunks HV scale",
    )
    file = "bwd/wy.cu"

    @property
    def K(self) -> int:
        return self.V

    @property
    def shared(self) -> int:
        return 4 * self.C * (self.C + 4 + SLICE + 8 + 2 * (SLICE + 4 + 2 * (SLICE + 8)) + 2)


_INTRA = (
    "q k g A_log dt_bias of_rows h dh v_new d_o P dA_qk dA_kk cu_seqlens first_chunk dqn dkn {} db "
    "of_A_log of_dt_bias T tokens N chunks H HV scale lower_bound"
)
INTRA, INTRA_OF_HEADS = (arguments_of("Intra", _INTRA.format(name)) for name in ("dg", "dg_shares"))
_NORMS = "q k beta dqn dkn db cu_seqlens dq dk dbeta {} tokens N H HV"
NORMS, NORMS_OF_HEADS = (arguments_of("Norms", _NORMS.format(names)) for names in ("", "dg_shares dg"))


@dataclass(frozen=True)
class IntraConfig(OfChunks):
    K: int
    V: int
    C: int
    gate: str
    rate: bool
    bias: bool
    offsets: str | None
    per_head: bool = False
    kernel = "intra_bwd"
    file = "bwd/intra.cu"

    @property
    def arguments(self) -> type[Arguments]:  # type: ignore[override]
        return INTRA_OF_HEADS if self.per_head else INTRA

    @property
    def shared(self) -> int:
        C, warps, levels = self.C, self.C // 8, self.C.bit_length() - 4
        place = max(2 * (3 * C + 2 * SLICE) * (SLICE + 8), 2 * C * (C + 4) + 3 * C * (SLICE + 4))
        return 4 * (place + SLICE * (warps * (levels + 5) + 1))


@dataclass(frozen=True)
class NormsConfig(Sized):
    K: int
    norm: bool
    beta: str
    offsets: str | None
    per_head: bool = False
    kernel = "norms_bwd"
    file = "bwd/norms.cu"
    threads = 256
    shared = 0

    @property
    def arguments(self) -> type[Arguments]:  # type: ignore[override]
        return NORMS_OF_HEADS if self.per_head else NORMS


@dataclass(frozen=True)
class SumsConfig(Sized):
    K: int
    rate: bool
    bias: bool
    offsets: str | None
    per_head: bool = False
    kernel = "sum_chunks"
    arguments = arguments_of("Sums", "of_A_log of_dt_bias first_chunk dA_log ddt_bias N chunks HV")
    file = "bwd/sums.cu"
    threads = 512
    shared = 0


Config = (
    TablesConfig | PrepareConfig | ChainConfig | ChainBwdConfig | WyConfig | IntraConfig | NormsConfig | SumsConfig
)
