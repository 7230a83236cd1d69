"""The registered operators torch.ops.kda.*, their fake implementations and the links between forward and backward.

  chunk_forward   the inputs and options of chunk_kda -> o, final states, intermediate states, Saved
  chunk_backward  the same with do, dht and Saved     -> Grads
  recurrent       of fused_recurrent_kda              -> o, final states
  recurrent_      the same, states written in place   -> o
  gate            of fused_kda_gate, with gate_backward

An output that was not asked for is an empty tensor, for an operator cannot return None.  What a call asks for is
checked here, beneath autograd and torch.compile, so that every way in meets the same checks; the backend is chosen
here too.
`save` says what `chunk_forward` keeps for its backward beside the inputs: a word of bundles.Save.
"""

from __future__ import annotations

import contextlib
import typing
from types import ModuleType

import torch

from . import gates
from .bundles import Grads, Outputs, Products, Save, Saved, saved_dtypes, saved_shapes
from .checks import INTERMEDIATE_STATES, KIND, Call, autocasts, check, problem_of, refuse
from .dispatch import backend_asked, backend_of_backward, choose, launcher, recorder
from .errors import KdaError
from .gates import wide_dtype
from .problem import Inputs, Options, Problem

Tensor = torch.Tensor

INPUTS = Inputs._fields[:10]
RECURRENT_INPUTS = Inputs._fields
OPTIONS = tuple(name for name in Options._fields if name != "inplace_final_state")
RECURRENT_OPTIONS = (
    "scale", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "lower_bound", "state_v_first", "batch_invariant", "backend",
)  # fmt: skip

AS_IT_IS = contextlib.nullcontext()
_SCHEMA_TYPES = {"float": "float", "bool": "bool", "int": "int", "float | None": "float?", "str | None": "str?"}


def _tensors(names: tuple[str, ...], written: str | None = None) -> str:
    kinds = {name: "Tensor" if name in Inputs._fields[:5] else "Tensor?" for name in names}
    return ", ".join(f"{'Tensor(a!)' if name == written else kind} {name}" for name, kind in kinds.items())


def _options(names: tuple[str, ...]) -> str:
    types = typing.get_type_hints(Options)
    spelled = {name: str(t) if not isinstance(t, type) else t.__name__ for name, t in types.items()}
    return ", ".join(f"{_SCHEMA_TYPES[spelled[name]]} {name}" for name in names)


def _autocast_off(x: Tensor) -> contextlib.AbstractContextManager:
    """Inside an operator a product must not be recast."""
    if autocasts(x):
        return torch.autocast(x.device.type, enabled=False)
    return AS_IT_IS


def _launch(c: Call, problem: Problem, recorded: bool = False) -> ModuleType:
    chosen = choose(problem, backend_asked(c.options.backend)).backend
    return launcher(recorder(problem, chosen) if recorded else chosen)


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _or_none(x: Tensor | None) -> Tensor | None:
    """Undoes `_or_empty` for gradients of outputs that were not asked for."""
    return None if x is None or x.dim() == 1 else x


# chunk_forward


def _call(args: tuple, op: str = "chunk_kda", **others: Tensor | None) -> Call:
    options = Options(**dict(zip(OPTIONS, args[len(INPUTS):])))
    return Call(op, Inputs(*args[: len(INPUTS)]), options, **others)


def forward(c: Call, save: Save | str) -> Outputs:
    problem = problem_of(c)
    with _autocast_off(c.inputs.q):
        return _launch(c, problem, recorded=save == Save.PRODUCTS).forward(problem, c.inputs, Save(save))


def _chunk_forward(*args):
    *args, save = args
    c = _call(args)
    out, q = forward(c, save), c.inputs.q
    return out.o, _or_empty(out.final_state, q), _or_empty(out.h, q), list(out.saved or ())


def _chunk_forward_fake(*args):
    *args, save = args
    c = _call(args)
    check(c, KIND)
    q, o = c.inputs.q, c.options
    packed = c.inputs.cu_seqlens is not None
    ht = q.new_empty(c.states, dtype=wide_dtype(q.dtype)) if o.output_final_state else q.new_empty(0)
    h = q.new_empty(0)
    if o.return_intermediate_states:
        chunks = torch.library.get_ctx().new_dynamic_size() if packed else (c.T + o.chunk_size - 1) // o.chunk_size
        h = q.new_empty(c.B, chunks, *c.states[1:])
    saved, kept = [], Save(save).kind
    if kept is not None:
        shapes = saved_shapes(c.B, c.T, c.N, c.HV, c.K, c.V, o.chunk_size, packed)
        dtypes = saved_dtypes(q.dtype, wide_dtype(q.dtype))
        saved = [q.new_empty(getattr(shapes, name), dtype=getattr(dtypes, name)) for name in kept._fields]
    return q.new_empty(c.B, c.T, c.HV, c.V), ht, h, saved


def _chunk_setup(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[3])
    _keep(ctx, inputs, output[3])


def _keep(ctx, inputs, saved):
    *args, _ = inputs
    options = Options(**dict(zip(OPTIONS, args[len(INPUTS):])))
    if options.return_intermediate_states:
        refuse(Call("chunk_kda", Inputs(*args[: len(INPUTS)]), options), INTERMEDIATE_STATES, "gradients recorded")
    asked = backend_of_backward(backend_asked(options.backend))              # a backward may run in another thread
    ctx.options = options._replace(backend=asked)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*args[: len(INPUTS)], *saved)


def _chunk_link(ctx, do, dht, dh, dsaved):
    tensors = ctx.saved_tensors
    inputs, saved = tensors[: len(INPUTS)], tensors[len(INPUTS):]
    options = [getattr(ctx.options, name) for name in OPTIONS]
    grads = torch.ops.kda.chunk_backward(*inputs, *options, do, _or_none(dht), list(saved))
    by_input = dict(zip(INPUTS, grads))
    wanted = zip(INPUTS, ctx.needs_input_grad)
    return (*(by_input.get(name) if need else None for name, need in wanted), *([None] * (len(OPTIONS) + 1)))


class Recorded(torch.autograd.Function):
    """chunk_forward and its link without an operator between: torch takes half a millisecond for one that records."""

    @staticmethod
    def forward(ctx, *args):
        *outputs, saved = _chunk_forward(*args)
        _keep(ctx, args, saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, do, dht, dh):
        return _chunk_link(ctx, do, dht, dh, None)


# chunk_backward


def _bundled(saved: list[Tensor]) -> Saved | Products | None:
    return next((save.kind(*saved) for save in Save if save.kind and len(save.kind._fields) == len(saved)), None)


def _chunk_backward(*args):
    *args, do, dht, saved = args
    c = _call(args, "chunk_kda_bwd", do=do, dht=dht)
    problem = problem_of(c, "backward")
    do = torch.zeros_like(c.inputs.v) if do is None else do
    with _autocast_off(c.inputs.q):
        grads: Grads = _launch(c, problem).backward(problem, c.inputs, do, dht, _bundled(saved))
    return tuple(_or_empty(g, c.inputs.q) for g in grads)


def _chunk_backward_fake(*args):
    *args, do, dht, _ = args
    c = _call(args, "chunk_kda_bwd", do=do, dht=dht)
    check(c, KIND)
    return tuple(
        c.inputs.q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in c.inputs[: len(Grads._fields)]
    )


# recurrent


def _recurrent_call(args: tuple, inplace: bool) -> Call:
    options = Options(**dict(zip(RECURRENT_OPTIONS, args[len(RECURRENT_INPUTS):])), inplace_final_state=inplace)
    return Call("fused_recurrent_kda", Inputs(*args[: len(RECURRENT_INPUTS)]), options)


def _run_recurrent(c: Call) -> tuple[Tensor, Tensor | None]:
    problem = problem_of(c)
    with _autocast_off(c.inputs.q):
        return _launch(c, problem).recurrent(problem, c.inputs)


def _recurrent(*args):
    c = _recurrent_call(args, inplace=False)
    o, ht = _run_recurrent(c)
    return o, _or_empty(ht, c.inputs.q)


def _recurrent_(*args):
    return _run_recurrent(_recurrent_call(args, inplace=True))[0]


def _recurrent_fake(*args):
    c = _recurrent_call(args, inplace=False)
    check(c, KIND)
    q = c.inputs.q
    ht = q.new_empty(c.states, dtype=wide_dtype(q.dtype)) if c.options.output_final_state else q.new_empty(0)
    return q.new_empty(c.B, c.T, c.HV, c.V), ht


def _recurrent_fake_(*args):
    c = _recurrent_call(args, inplace=True)
    check(c, KIND)
    return c.inputs.q.new_empty(c.B, c.T, c.HV, c.V)


# gate


def _gate_tensors(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None):
    """In float32 (float64 for float64), shaped to broadcast against g (.., HV, K)."""
    dtype = wide_dtype(g.dtype)
    return (
        g.to(dtype),
        None if A_log is None else A_log.to(dtype).reshape(g.shape[-2], 1),
        None if dt_bias is None else dt_bias.to(dtype).reshape(g.shape[-2:]),
    )


def _gate(g, A_log, dt_bias, lower_bound, dtype):
    with _autocast_off(g):
        return gates.decay(*_gate_tensors(g, A_log, dt_bias), lower_bound).to(dtype).contiguous()


def _gate_fake(g, A_log, dt_bias, lower_bound, dtype):
    return torch.empty_like(g, dtype=dtype, memory_format=torch.contiguous_format)


def _gate_backward(dy, g, A_log, dt_bias, lower_bound):
    with _autocast_off(g):
        x, rate, bias = _gate_tensors(g, A_log, dt_bias)
        dx, dA_terms = gates.decay_bwd(dy.to(x.dtype), x, rate, bias, lower_bound)
        heads = dx.reshape(-1, *g.shape[-2:])
        dA_log = None if A_log is None else dA_terms.reshape(heads.shape).sum((0, 2)).view(A_log.shape).to(A_log.dtype)
        ddt_bias = None if dt_bias is None else heads.sum(0).view(dt_bias.shape).to(dt_bias.dtype)
        return dx.to(g.dtype).contiguous(), _or_empty(dA_log, g), _or_empty(ddt_bias, g)


def _gate_backward_fake(dy, g, A_log, dt_bias, lower_bound):
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(g, memory_format=contiguous),
        *(g.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in (A_log, dt_bias)),
    )


def _gate_setup(ctx, inputs, output):
    *tensors, ctx.lower_bound, _ = inputs
    ctx.save_for_backward(*tensors)


def _gate_link(ctx, dy):
    grads = torch.ops.kda.gate_backward(dy, *ctx.saved_tensors, ctx.lower_bound)
    return (*(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), None, None)


# what has no derivative says so, or autograd would leave the gradient out in silence

_NO_BACKWARD = {
    "recurrent": "fused_recurrent_kda is for inference and has no backward. Train with chunk_kda, its equal.",
    "chunk_backward": "chunk_kda has no second derivative.",
    "gate_backward": "fused_kda_gate has no second derivative.",
}


def _refuse_backward(name: str) -> None:
    def link(ctx, *grads):
        raise KdaError(_NO_BACKWARD[name])

    torch.library.register_autograd(f"kda::{name}", link, setup_context=lambda ctx, inputs, output: None)


def _register() -> None:
    chunk = f"{_tensors(INPUTS)}, {_options(OPTIONS)}"
    recurrent_options = _options(RECURRENT_OPTIONS)
    gate = "Tensor g, Tensor? A_log, Tensor? dt_bias, float? lower_bound"
    operators = {
        f"chunk_forward({chunk}, str save) -> (Tensor, Tensor, Tensor, Tensor[])":
            (_chunk_forward, _chunk_forward_fake),
        f"chunk_backward({chunk}, Tensor? do, Tensor? dht, Tensor[] saved) -> ({', '.join(['Tensor'] * 8)})":
            (_chunk_backward, _chunk_backward_fake),
        f"recurrent({_tensors(RECURRENT_INPUTS)}, {recurrent_options}) -> (Tensor, Tensor)":
            (_recurrent, _recurrent_fake),
        f"recurrent_({_tensors(RECURRENT_INPUTS, 'initial_state')}, {recurrent_options}) -> Tensor":
            (_recurrent_, _recurrent_fake_),
        f"gate({gate}, ScalarType dtype) -> Tensor": (_gate, _gate_fake),
        f"gate_backward(Tensor dy, {gate}) -> (Tensor, Tensor, Tensor)": (_gate_backward, _gate_backward_fake),
    }  # fmt: skip
    for schema, (real, fake) in operators.items():
        name = "kda::" + schema.partition("(")[0]
        torch.library.define(name, schema[schema.index("("):])
        torch.library.impl(name, "CompositeExplicitAutograd")(real)
        torch.library.register_fake(name)(fake)
    torch.library.register_autograd("kda::chunk_forward", _chunk_link, setup_context=_chunk_setup)
    torch.library.register_autograd("kda::gate", _gate_link, setup_context=_gate_setup)
    for name in _NO_BACKWARD:
        _refuse_backward(name)


_register()
