"""The results of a call, by name.  Shapes: B, T, N, H, HV, K, V, C as in kda.model.problem; NC chunks in total."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from .problem import Inputs, Options


class Saved(NamedTuple):
    """What `disable_recompute=True` saves of the forward for the backward: one row per token or per chunk.

    Tensors have the dtype of q, so that a backend on a GPU saves little; the reference rounds to it as well.  `gc_last`
    is float32 (float64 for float64 inputs).  Rows past the last chunk are zero: T//C + N rows always hold the chunks of
    any N packed sequences, so no length has to be read to allocate them.
    """

    A_qk: Tensor                             # (B*T, HV, C)
    A_inv: Tensor                            # (B*T, HV, C)
    w: Tensor                                # (B*T, HV, K)
    qg: Tensor                               # (B*T, HV, K)
    kg: Tensor                               # (B*T, HV, K)
    v_new: Tensor                            # (B*T, HV, V)
    h: Tensor                                # (NC bound, HV, K, V)
    gc_last: Tensor                          # (NC bound, HV, K)


class Products(NamedTuple):
    """What a training forward on a GPU saves by default: small, and expensive to recompute.  Fields of Saved."""

    A_qk: Tensor
    A_inv: Tensor


class OpaqueSaved(NamedTuple):
    """What a backend saves for its own backward, in its own layout: everything, or states alone; other backends
    recompute."""

    memory: Tensor                           # uint8


class MadeWith(NamedTuple):
    """What a backward must have in common with the forward that saved something for it, under the names of arguments:
    options, and the dtype and shape of each tensor.  `offsets` are the numbers in cu_seqlens, if a CPU holds them."""

    scale: float
    lower_bound: float | None
    chunk_size: int
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    batch_invariant: bool
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    initial_state: Any
    cu_seqlens: Any
    offsets: list[int] | None

    @classmethod
    def of(cls, x: Inputs, o: Options, offsets: list[int] | None) -> MadeWith:
        tensors = [None if t is None else (t.dtype, tuple(t.shape)) for t in x[:9]]
        fields: tuple[Any, ...] = (
            o.scale, o.lower_bound, o.chunk_size, o.use_qk_l2norm_in_kernel, o.use_gate_in_kernel,
            o.use_beta_sigmoid_in_kernel, o.allow_neg_eigval, o.state_v_first, o.batch_invariant, *tensors, offsets,
        )
        return cls(*fields)


class Kept(NamedTuple):
    """What `chunk_kda_fwd` returns as `saved`, for `chunk_kda_bwd`: the intermediates, and the options that they were
    made with, which `chunk_kda_bwd` compares with its own."""

    tensors: Saved | OpaqueSaved
    made_with: MadeWith


class Save(str, Enum):
    """What a forward saves for its backward; the operator gets the word."""

    NOTHING = "nothing"
    PRODUCTS = "products"
    ALL = "all"
    OWN = "own"
    STATES = "states"  # the part of OWN that costs a walk over the sequence; operands are recomputed

    @property
    def kind(self) -> type[Products] | type[Saved] | type[OpaqueSaved] | None:
        return {Save.PRODUCTS: Products, Save.ALL: Saved, Save.OWN: OpaqueSaved, Save.STATES: OpaqueSaved}.get(self)

    @classmethod
    def of(cls, saved: Saved | Products | OpaqueSaved | None) -> Save:
        return next(save for save in cls if type(saved) is (save.kind or type(None)))


class Outputs(NamedTuple):
    """What a forward returns.  No tensor is a view of another: autograd refuses in-place changes of views, and callers
    may make them."""

    o: Tensor                                # (B, T, HV, V), dtype of q
    final_state: Tensor | None               # (N, HV, K, V) or (N, HV, V, K), float32
    h: Tensor | None                         # (B, NC, HV, K, V) or (.., V, K), dtype of q: states entering the chunks
    saved: Saved | Products | OpaqueSaved | Kept | None          # Kept, or None, of chunk_kda_fwd


class Grads(NamedTuple):
    """Each has the shape and dtype of its input and is not a view; None for inputs left out."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dA_log: Tensor | None
    ddt_bias: Tensor | None
    dh0: Tensor | None


class SegmentSummary(NamedTuple):
    """How a segment of a sequence maps the state that enters it, in float32: S -> M S + added.  Two neighbours map it
    to (M2 M1) S + (M2 added1 + added2), so summaries of segments and of the parts of several GPUs compose alike.
    For a gradient, which enters at the end, S is dS and M is transposed."""

    M: Tensor                                # (segments, HV, K, K); its transpose where `transposed`
    added: Tensor                            # (segments, HV, K, V)
    transposed: bool = False


def saved_outlines(
    p: Any, C: int, packed: bool, dtype: dtype, wide: dtype
) -> dict[str, tuple[tuple[int, ...], dtype]]:
    """The shape and dtype of each field of `Saved`.  `p` is a Problem or a Call; states of q of `dtype` are `wide`."""
    rows, chunks = (p.B * p.T, p.HV), (chunk_bound(p.B, p.T, p.N, C, packed), p.HV)
    shapes = {
        "A_qk": (*rows, C), "A_inv": (*rows, C), "w": (*rows, p.K), "qg": (*rows, p.K), "kg": (*rows, p.K),
        "v_new": (*rows, p.V), "h": (*chunks, p.K, p.V), "gc_last": (*chunks, p.K),
    }
    return {name: (shape, wide if name == "gc_last" else dtype) for name, shape in shapes.items()}


def chunk_bound(B: int, T: int, N: int, C: int, packed: bool) -> int:
    """Chunks of a batch; for packed sequences, the most that N of them can have in T tokens."""
    return T // C + N if packed else B * ((T + C - 1) // C)
