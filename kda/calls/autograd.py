"""The registered operators torch.ops.kda.*, their fake implementations and the links between forward and backward.

  chunk_forward   the inputs and options of chunk_kda -> o, final states, intermediate states, Saved
  chunk_backward  the same with do, dht and Saved     -> Grads
  chunk_forward_  of chunk_kda with a pool of states, which it writes -> o
  recurrent       of fused_recurrent_kda              -> o, final states
  recurrent_      the same, states written in place   -> o
  put             of fused_recurrent_kda compiled: o -> out
  gate            of fused_kda_gate, with gate_backward

An output that was not requested is an empty tensor, because an operator cannot return None.  Calls are checked here,
below autograd and torch.compile, so every entry point has the same checks; the backend is chosen here as well.
`save`, a word of bundles.Save, is what `chunk_forward` saves for its backward beside the inputs.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kda.checks.calls import (
    INTERMEDIATE_STATES,
    KIND,
    OUT,
    TRAINING_OUT,
    TRAINING_POOL,
    WRITTEN_STATE,
    Call,
    Requirement,
    autocasts,
    check,
    is_training,
    problem_of,
    refuse,
)
from kda.errors import KdaError
from kda.model import gates, transforms
from kda.model.bundles import Grads, OpaqueSaved, Outputs, Products, Save, Saved, saved_outlines
from kda.model.force import forced, with_force
from kda.model.gates import wide_dtype
from kda.model.problem import Inputs, Options, Problem
from kda.model.transforms import Links
from kda.routing.dispatch import (
    backend_asked,
    backend_of_backward,
    capability,
    choose,
    launcher,
    route,
)

if TYPE_CHECKING:
    from kda.backends.protocol import LaunchModule

Tensor = torch.Tensor

INPUTS = Inputs._fields[:10]
RECURRENT_INPUTS = Inputs._fields[:12]
POOL_INPUTS = (*Inputs._fields[:11], *Inputs._fields[12:])
OPTIONS = tuple(name for name in Options._fields if name != "inplace_final_state")
POOL_OPTIONS = tuple(name for name in OPTIONS if name not in (
    "output_final_state", "disable_recompute", "return_intermediate_states"
))
RECURRENT_OPTIONS = (
    "scale", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "lower_bound", "state_v_first", "batch_invariant", "backend",
)

AS_IT_IS = contextlib.nullcontext()
_SCHEMA_TYPES = {
    "float": "float", "bool": "bool", "int": "int", "float | None": "float?", "str | None": "str?",
    "bool | str": "bool",                                                      # `save` has what no bool says
}


def schema_of_tensors(names: tuple[str, ...], written: str | None = None) -> str:
    kinds = {name: "Tensor" if name in Inputs._fields[:5] else "Tensor?" for name in names}
    return ", ".join(f"{'Tensor(a!)' if name == written else kind} {name}" for name, kind in kinds.items())


def schema_of_options(names: tuple[str, ...]) -> str:
    types = typing.get_type_hints(Options)
    spelled = {name: str(t) if not isinstance(t, type) else t.__name__ for name, t in types.items()}
    return ", ".join(f"{_SCHEMA_TYPES[spelled[name]]} {name}" for name in names)


def autocast_off(x: Tensor) -> contextlib.AbstractContextManager:
    """Return a context without autocast: inside an operator a product must not be recast."""
    if autocasts(x):
        return torch.autocast(x.device.type, enabled=False)
    return AS_IT_IS


def without_autograd() -> contextlib.AbstractContextManager:
    """Records nothing for backward().  torch.func.grad records all that happens inside of it, also in backwards that it
    runs: there an operator's links give the derivative, or refuse it once somebody asks for it."""
    return AS_IT_IS if transforms.differentiated() else torch.no_grad()


def _launch(c: Call, problem: Problem) -> LaunchModule:
    return launcher(choose(problem, backend_asked(c.options.backend)).backend)


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def or_none(x: Tensor | None) -> Tensor | None:
    """Undo `or_empty` for gradients of outputs that were not requested."""
    return None if x is None or x.dim() == 1 else x


# chunk_forward


def call_of(args: tuple, op: str = "chunk_kda", **others: Tensor | None) -> Call:
    options = Options(**dict(zip(OPTIONS, args[len(INPUTS):])))
    return Call(op, Inputs(*args[: len(INPUTS)]), options, **others)


_SAVES = {save.value: save for save in Save}


def forward(c: Call, save: Save) -> Outputs:
    problem = problem_of(c)
    backend = _writer(c, problem, save)
    with autocast_off(c.inputs.q):
        return launcher(backend).forward(problem, c.inputs, save)


def _writer(c: Call, problem: Problem, save: Save) -> str:
    """Return the backend of a forward that saves this."""
    backend = route(problem, backend_asked(c.options.backend), training=save.kind is not None, save=save).backend
    if save.kind is OpaqueSaved and not capability(backend).saves_opaque:
        raise KdaError(f"chunk_forward: save={save.value!r} asks for what a backend keeps for itself; {backend} keeps "
                       "nothing of its own. Pass 'all'.")
    return backend


def outlines_of(c: Call, save: Save, backend: str = "") -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each tensor that a forward saves; `backend` has a layout of its own for some."""
    if save.kind is None:
        return []
    if save.kind is OpaqueSaved:
        return [((launcher(backend).saved_bytes(problem_of(c), save),), torch.uint8)]
    dtype = c.inputs.q.dtype
    packed = c.inputs.cu_seqlens is not None
    outlines = saved_outlines(c, c.options.chunk_size, packed, dtype, wide_dtype(dtype))
    return [outlines[name] for name in save.kind._fields]


def _chunk_forward(*args):
    *args, word = args
    c = call_of(args)
    out, q = forward(c, _SAVES[word]), c.inputs.q
    return out.o, or_empty(out.final_state, q), or_empty(out.h, q), list(out.saved or ())


def chunk_forward_fake(*args):
    *args, word = args
    c = call_of(args)
    check(c, KIND)
    q, o = c.inputs.q, c.options
    packed = c.inputs.cu_seqlens is not None
    ht = q.new_empty(c.states, dtype=wide_dtype(q.dtype)) if o.output_final_state else q.new_empty(0)
    h = q.new_empty(0)
    if o.return_intermediate_states:
        chunks = torch.library.get_ctx().new_dynamic_size() if packed else (c.T + o.chunk_size - 1) // o.chunk_size
        h = q.new_empty(c.B, chunks, *c.states[1:])
    save = _SAVES[word]
    backend = _writer(c, problem_of(c), save) if save.kind is OpaqueSaved else ""
    saved = [q.new_empty(shape, dtype=dtype) for shape, dtype in outlines_of(c, save, backend)]
    return q.new_empty(c.B, c.T, c.HV, c.V), ht, h, saved


def for_backward(options: Options) -> Options:
    """Return the options of a backward: they name the backend in force, because it may run in another thread."""
    return options._replace(backend=backend_of_backward(backend_asked(options.backend)))


def _chunk_setup(ctx, inputs, output):
    *args, _ = inputs
    c, saved = call_of(args), output[3]
    ctx.mark_non_differentiable(*saved)
    if c.options.return_intermediate_states and any(ctx.needs_input_grad):
        refuse(c, INTERMEDIATE_STATES, "gradients recorded")
    ctx.options, ctx.force = for_backward(c.options), forced()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*args[: len(INPUTS)], *saved)
    if transforms.active():
        ctx.save_for_forward(*args[: len(INPUTS)], *saved)


def _chunk_link(ctx, do, dht, dh, *dsaved):
    with with_force(ctx.force):
        grads = gradients(ctx.saved_tensors, ctx.options, do, dht, ctx.needs_input_grad)
    return *grads, *[None] * (len(OPTIONS) + 1)


def gradients(
    tensors: Sequence[Tensor], options: Options, do: Tensor | None, dht: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of the inputs from the operator; `tensors` are those that the forward saved."""
    if transforms.batched((do, dht)):
        return transforms.one_by_one(lambda do, dht: gradients(tensors, options, do, dht, needs), (do, dht))
    settings = [getattr(options, name) for name in OPTIONS]
    inputs, saved = tensors[: len(INPUTS)], tensors[len(INPUTS):]
    return wanted_of(call("chunk_backward", *inputs, *settings, do, or_none(dht), *saved), needs)


def wanted_of(grads: Iterable[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """A gradient for each of the inputs that needs one; offsets have none."""
    wanted = [grad if need else None for grad, need in zip(grads, needs)]
    return wanted + [None] * (len(INPUTS) - len(wanted))


def _chunk_jvp(ctx, *tangents):
    tensors = ctx.saved_tensors
    inputs, saved = tensors[: len(INPUTS)], tensors[len(INPUTS):]
    options = [getattr(ctx.options, name) for name in OPTIONS]
    tangents_of_outputs = call("chunk_tangent", *inputs, *options, *tangents[: len(INPUTS)])
    return *tangents_of_outputs, *map(torch.zeros_like, saved)


def _chunk_tangent(*args):
    """The tangents of o, of the final states and of the intermediate ones."""
    tangents = args[-len(INPUTS):]
    c = call_of([*args[: -len(INPUTS)]])
    problem = problem_of(c)
    chosen = choose(problem, backend_asked(c.options.backend)).backend
    if not capability(chosen).composite:
        raise KdaError(_NO_TANGENT.format(chosen))

    def outputs(*tensors):
        out = launcher(chosen).forward(problem, Inputs(*tensors))
        return [or_empty(x, c.inputs.q) for x in (out.o, out.final_state, out.h)]

    with autocast_off(c.inputs.q):
        return transforms.pushforward(outputs, args[: len(INPUTS)], tangents)


# chunk_backward


_BUNDLES = {len(save.kind._fields): save.kind for save in Save if save.kind}


def bundled(saved: Sequence[Tensor]) -> Saved | Products | OpaqueSaved | None:
    return _BUNDLES[len(saved)](*saved) if saved else None


def backward(c: Call, saved: Any) -> Grads:
    """Return the gradients; `saved` is a bundle, or what `begin_backward` returned."""
    problem = problem_of(c, "backward")
    with autocast_off(c.inputs.q):
        return _launch(c, problem).backward(problem, c.inputs, _do_of(c), c.dht, saved)


def begin_backward(c: Call, saved: Saved | Products | OpaqueSaved | None) -> tuple[Tensor, Any] | None:
    """Return the gradients of the states that enter as far as `c.dht` tells, and what `backward` goes on with; None if
    the backend does all at once."""
    problem = problem_of(c, "backward")
    backend = choose(problem, backend_asked(c.options.backend)).backend
    if "begin" not in capability(backend).maps:  # type: ignore[arg-type]
        return None
    with autocast_off(c.inputs.q):
        return launcher(backend).begin_backward(problem, c.inputs, _do_of(c), c.dht, saved)


def _do_of(c: Call) -> Tensor:
    return torch.zeros_like(c.inputs.v) if c.do is None else c.do


def _chunk_backward(*args):
    *args, do, dht, saved = args
    grads = backward(call_of(args, "chunk_kda_bwd", do=do, dht=dht), bundled(saved))
    return tuple(or_empty(g, args[0]) for g in grads)


def chunk_backward_fake(*args):
    *args, do, dht, _ = args
    c = call_of(args, "chunk_kda_bwd", do=do, dht=dht)
    check(c, KIND)
    return tuple(
        c.inputs.q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in c.inputs[: len(Grads._fields)]
    )


# chunk_forward_, of a pool


def _pool_call(args: tuple) -> Call:
    options = Options(**dict(zip(POOL_OPTIONS, args[len(POOL_INPUTS):])), inplace_final_state=True)
    return Call("chunk_kda", Inputs(**dict(zip(POOL_INPUTS, args))), options)


def prefill(c: Call) -> Tensor:
    problem = problem_of(c)
    with autocast_off(c.inputs.q):
        o = _launch(c, problem).prefill(problem, c.inputs)
    _written(c.inputs.initial_state)
    return o


def _written(x: Tensor) -> None:
    """A kernel writes where torch does not see."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def _chunk_forward_(*args):
    return prefill(_pool_call(args))


def _fake_of(call_of: Callable[[tuple], Call]) -> Callable[..., Tensor]:
    """Return the fake implementation of an operator that returns o and writes states in place."""

    def fake(*args):
        c = call_of(args)
        check(c, KIND)
        return c.inputs.q.new_empty(c.B, c.T, c.HV, c.V)

    return fake


# recurrent


def _recurrent_call(args: tuple, inplace: bool = False) -> Call:
    options = Options(**dict(zip(RECURRENT_OPTIONS, args[len(RECURRENT_INPUTS):])), inplace_final_state=inplace)
    return Call("fused_recurrent_kda", Inputs(*args[: len(RECURRENT_INPUTS)]), options)


_recurrent_call_ = functools.partial(_recurrent_call, inplace=True)


def recurrent(c: Call) -> tuple[Tensor, Tensor | None]:
    problem = problem_of(c)
    with autocast_off(c.inputs.q):
        outputs = _launch(c, problem).recurrent(problem, c.inputs)
    if problem.inplace:
        _written(c.inputs.initial_state)
    return outputs


def _recurrent(*args):
    c = _recurrent_call(args, inplace=False)
    o, ht = recurrent(c)
    return o, or_empty(ht, c.inputs.q)


def _recurrent_(*args):
    return recurrent(_recurrent_call_(args))[0]


def _writing(name: str, call_of: Callable[[tuple], Call], row: Requirement) -> Callable:
    """An operator that writes into an argument cannot have torch.library.register_autograd."""

    def autograd(*args):
        c = call_of(args)
        if is_training(c.inputs):
            check(c, (row,))
            return _FUNCTIONS[name].apply(*args)[0]
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.kda, name)(*args)

    return autograd


def _recurrent_fake(*args):
    c = _recurrent_call(args, inplace=False)
    check(c, KIND)
    q = c.inputs.q
    ht = q.new_empty(c.states, dtype=wide_dtype(q.dtype)) if c.options.output_final_state else q.new_empty(0)
    return q.new_empty(c.B, c.T, c.HV, c.V), ht


def _put(out, o, training):
    c = Call("fused_recurrent_kda", Inputs(o, o, o, o, o), Options(1.0), out=out)
    if training:
        refuse(c, TRAINING_OUT, "gradients recorded")
    check(c, OUT)


def _put_real(out, o, training):
    _put(out, o, training)
    out.copy_(o)


# gate


def _gate_tensors(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None):
    """Return them in float32 (float64 for float64), in shapes that broadcast against g (.., HV, K)."""
    dtype = wide_dtype(g.dtype)
    return (
        g.to(dtype),
        None if A_log is None else A_log.to(dtype).reshape(g.shape[-2], 1),
        None if dt_bias is None else dt_bias.to(dtype).reshape(g.shape[-2:]),
    )


def _gate(g, A_log, dt_bias, lower_bound, dtype):
    with autocast_off(g):
        return gates.decay(*_gate_tensors(g, A_log, dt_bias), lower_bound).to(dtype).contiguous()


def _gate_fake(g, A_log, dt_bias, lower_bound, dtype):
    return torch.empty_like(g, dtype=dtype, memory_format=torch.contiguous_format)


def _gate_backward(dy, g, A_log, dt_bias, lower_bound):
    with autocast_off(g):
        x, rate, bias = _gate_tensors(g, A_log, dt_bias)
        dx, dA_terms = gates.decay_bwd(dy.to(x.dtype), x, rate, bias, lower_bound)
        heads = dx.reshape(-1, *g.shape[-2:])
        dA_log = None if A_log is None else dA_terms.reshape(heads.shape).sum((0, 2)).view(A_log.shape).to(A_log.dtype)
        ddt_bias = None if dt_bias is None else heads.sum(0).view(dt_bias.shape).to(dt_bias.dtype)
        return dx.to(g.dtype).contiguous(), or_empty(dA_log, g), or_empty(ddt_bias, g)


def _gate_backward_fake(dy, g, A_log, dt_bias, lower_bound):
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(g, memory_format=contiguous),
        *(g.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in (A_log, dt_bias)),
    )


def _gate_setup(ctx, inputs, output):
    *tensors, ctx.lower_bound, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)
    if transforms.active():
        ctx.save_for_forward(*tensors)


def _gate_link(ctx, dy):
    grads = call("gate_backward", dy, *ctx.saved_tensors, ctx.lower_bound)
    return (*(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), None, None)


def _gate_jvp(ctx, *tangents):
    return call("gate_tangent", *ctx.saved_tensors, ctx.lower_bound, ctx.dtype, *tangents[:3])


def _gate_tangent(g, A_log, dt_bias, lower_bound, dtype, *tangents):
    def output(*tensors):
        return (_gate(*tensors, lower_bound, dtype),)

    return transforms.pushforward(output, (g, A_log, dt_bias), tangents)


# operators without a derivative raise an error; otherwise autograd would silently omit the gradient


def no_second(function: str, *backward: str) -> str:
    """Return an error's text. `backward`: operators of the backward, and functions that call them."""
    return (
        f"{function} has no second derivative, and its backward ({', '.join(backward)}) no first one. Compute its "
        "gradient without create_graph=True, or write the recurrence in plain torch."
    )


_NO_SECOND = {
    "chunk": no_second("chunk_kda", "chunk_kda_bwd", "torch.ops.kda.chunk_backward"),
    "gate": no_second("fused_kda_gate", "torch.ops.kda.gate_backward"),
}
_NO_DERIVATIVE = {
    **{
        name: f"fused_recurrent_kda, fused_recurrent_kda_fwd and torch.ops.kda.{name} are for inference and have no "
              "derivative. Train with chunk_kda, their equal; decode under torch.no_grad()."
        for name in ("recurrent", "recurrent_")
    },
    "chunk_forward_": "chunk_kda and torch.ops.kda.chunk_forward_ have no derivative through a pool of states. Pass "
                      "chunk_kda initial_state=pool[slots] to train.",
    **{f"{name}_{kind}": message for name, message in _NO_SECOND.items() for kind in ("backward", "tangent")},
}
_NO_TANGENT = (
    "chunk_kda: forward-mode AD was requested; found backend {!r}, whose kernels have no such derivative. Pass "
    "backend='reference', or use reverse mode: backward(), torch.func.vjp or torch.func.jacrev."
)


_LINKS = {
    "chunk_forward": Links(_chunk_setup, _chunk_link, _chunk_jvp),
    "gate": Links(_gate_setup, _gate_link, _gate_jvp),
    **{name: Links.none(message) for name, message in _NO_DERIVATIVE.items()},
}


# under torch.func and forward-mode AD: operators without lists of tensors, and what computes tangents


def _flat_chunk_forward(*args):
    o, ht, h, saved = torch.ops.kda.chunk_forward(*args)
    return o, ht, h, *saved


def _flat_chunk_backward(*args):
    last = len(INPUTS) + len(OPTIONS) + 2
    return torch.ops.kda.chunk_backward(*args[:last], list(args[last:]))


def _flat_chunk_setup(ctx, inputs, output):
    _chunk_setup(ctx, inputs, (*output[:3], output[3:]))


_FLAT = {
    "chunk_forward": _flat_chunk_forward,
    "chunk_backward": _flat_chunk_backward,
    "chunk_forward_": lambda *args: (torch.ops.kda.chunk_forward_(*args),),
    "recurrent": lambda *args: torch.ops.kda.recurrent(*args),
    "recurrent_": lambda *args: (torch.ops.kda.recurrent_(*args),),
    "gate": lambda *args: (torch.ops.kda.gate(*args),),
    "gate_backward": lambda *args: torch.ops.kda.gate_backward(*args),
    "chunk_tangent": _chunk_tangent,
    "gate_tangent": _gate_tangent,
}
_FLAT_LINKS = _LINKS | {"chunk_forward": _LINKS["chunk_forward"]._replace(setup=_flat_chunk_setup)}
_WRITTEN = {
    name: transforms.Written(INPUTS.index("initial_state"), f"{function}: under torch.func.vmap all calls would write "
                             f"into one initial_state. Map over initial_state as well, or pass {instead}.")
    for name, function, instead in (
        ("chunk_forward_", "chunk_kda", "initial_state=pool[slots] without ssm_state_indices"),
        ("recurrent_", "fused_recurrent_kda", "inplace_final_state=False"),
    )
}
_AUTOGRAD = {
    "chunk_forward_": _writing("chunk_forward_", _pool_call, TRAINING_POOL),
    "recurrent_": _writing("recurrent_", _recurrent_call_, WRITTEN_STATE),
}
_FUNCTIONS = {
    name: transforms.function(name, run, *_FLAT_LINKS[name], written=_WRITTEN.get(name)) for name, run in _FLAT.items()  # type: ignore[arg-type]
}


def call(name: str, *args):
    """The outputs of an operator, through an autograd.Function where torch.func or forward-mode AD is active."""
    if torch.compiler.is_compiling():
        if transforms.transforming():
            raise KdaError(transforms.NOT_TRACED)                              # torch.compile leaves this call out
        return _FLAT[name](*args)
    if not transforms.active():
        return _FLAT[name](*args)
    return _FUNCTIONS[name].apply(*args)


def _register() -> None:
    chunk = f"{schema_of_tensors(INPUTS)}, {schema_of_options(OPTIONS)}"
    pool = f"{schema_of_tensors(POOL_INPUTS, 'initial_state')}, {schema_of_options(POOL_OPTIONS)}"
    recurrent_options = schema_of_options(RECURRENT_OPTIONS)
    gate = "Tensor g, Tensor? A_log, Tensor? dt_bias, float? lower_bound"
    operators = {
        f"chunk_forward({chunk}, str save) -> (Tensor, Tensor, Tensor, Tensor[])":
            ("chunk_kda", _chunk_forward, chunk_forward_fake),
        f"chunk_backward({chunk}, Tensor? do, Tensor? dht, Tensor[] saved) -> ({', '.join(['Tensor'] * 8)})":
            ("chunk_kda_bwd", _chunk_backward, chunk_backward_fake),
        f"chunk_forward_({pool}) -> Tensor":
            ("chunk_kda", _chunk_forward_, _fake_of(_pool_call)),
        f"recurrent({schema_of_tensors(RECURRENT_INPUTS)}, {recurrent_options}) -> (Tensor, Tensor)":
            ("fused_recurrent_kda", _recurrent, _recurrent_fake),
        f"recurrent_({schema_of_tensors(RECURRENT_INPUTS, 'initial_state')}, {recurrent_options}) -> Tensor":
            ("fused_recurrent_kda", _recurrent_, _fake_of(_recurrent_call_)),
        "put(Tensor(a!) out, Tensor o, bool training) -> ()":
            ("fused_recurrent_kda", _put_real, _put),
        f"gate({gate}, ScalarType dtype) -> Tensor": ("fused_kda_gate", _gate, _gate_fake),
        f"gate_backward(Tensor dy, {gate}) -> (Tensor, Tensor, Tensor)":
            ("fused_kda_gate", _gate_backward, _gate_backward_fake),
    }
    real: Any
    fake: Any
    for schema, (op, real, fake) in operators.items():
        name = schema.partition("(")[0]
        transforms.register(schema, op, real, fake, _LINKS.get(name), _AUTOGRAD.get(name))


_register()
