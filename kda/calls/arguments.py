"""What turns the arguments of a public function into `Inputs` and `Options`, and checks those that are not tensors."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from kda.checks.calls import CALLER, NUMBERS, Call, autocasts, check, number
from kda.checks.memo import are_plain
from kda.errors import InputError, InputTypeError, KdaError
from kda.model.bundles import Save
from kda.model.problem import Inputs, Options

Tensor = torch.Tensor


def operate(operator: Any, call: Call, *arguments: Any) -> Any:
    """Call an operator or a check; if it fails on its arguments, report which one has the wrong type."""
    if torch.compiler.is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except KdaError:
        raise
    except Exception:
        check(call, CALLER)
        raise


def is_sharded(inputs: Iterable[Any]) -> bool:
    """Whether a tensor is a DTensor; recognised by name, because nothing else needs its module."""
    if not torch.compiler.is_compiling() and are_plain(map(type, inputs)):
        return False
    return "DTensor" in [type(x).__name__ for x in inputs]


def without_mesh(op: str, name: str) -> InputError:
    return InputError(op, name, "given without DTensors", "a DTensor", "Use chunk_kda, or pass x.to_local() of each.",
                      "mesh.op")


def saves_states(options: Options) -> bool:
    return options.disable_recompute == Save.STATES


class Extras(NamedTuple):
    """Arguments that are no inputs and no options: they are checked, and most of them then have no effect."""

    cp_context: Any = None
    use_graph: Any = False
    max_num_seqs: Any = None
    transpose_state_layout: Any = None       # the old name of state_v_first


NO_EXTRAS = Extras()
_EXTRAS = frozenset(Extras._fields)
_DEFAULTS = Inputs._field_defaults | Options._field_defaults | {"scale": None, "inplace_final_state": None}


def scale_of(scale: Any, q: Any) -> Any:
    """Return the scale of q: the one that was passed, or that which None means."""
    if scale is not None:
        return scale
    K = q.shape[-1] if isinstance(q, Tensor) and q.dim() and not q.is_nested else 0
    return float(K) ** -0.5 if K else 1.0


def by_name(given: dict[str, Any]) -> tuple[Inputs, Options, Extras]:
    """Return what a function was given, by the names of its arguments; those left out have their defaults."""
    extras = NO_EXTRAS if _EXTRAS.isdisjoint(given) else Extras(**{x: given[x] for x in Extras._fields if x in given})
    given = _DEFAULTS | given
    given["scale"] = scale_of(given["scale"], given["q"])
    if given["inplace_final_state"] is None:
        given["inplace_final_state"] = given["ssm_state_indices"] is not None
    get: Callable[[str], Any] = given.get
    return Inputs(*map(get, Inputs._fields)), Options(*map(get, Options._fields)), extras


def prepare(op: str, inputs: Inputs, options: Options, extras: Extras = NO_EXTRAS) -> tuple[Inputs, Options]:
    """What every function does first: it checks arguments that are not tensors, and casts as torch.autocast does."""
    cp_context, use_graph, max_num_seqs, transpose_state_layout = extras
    if cp_context is not None:
        raise InputError(op, "cp_context", "None", type(cp_context).__name__,
                         "Use chunk_kda, whose backward is the mirror of its forward.", "cp_context.none")
    if use_graph is not False or max_num_seqs is not None:
        _check_graph(op, use_graph, max_num_seqs, inputs.cu_seqlens)
    if transpose_state_layout is not None:
        options = options._replace(state_v_first=_old_layout_name(op, options.state_v_first, transpose_state_layout))
    if isinstance(inputs.q, Tensor) and autocasts(inputs.q):
        dtype = torch.get_autocast_dtype(inputs.q.device.type)
        q, k, v = (_autocast(x, dtype) for x in inputs[:3])
        inputs = inputs._replace(q=q, k=k, v=v)
    if op not in _ON_A_MESH and is_sharded(inputs[:8]):
        raise without_mesh(op, "q")
    if not BOOL.issuperset(map(type, options[-len(_FLAGS):])):
        flags: Any = {name: _flag(op, name, getattr(options, name), _OTHER.get(name)) for name in _FLAGS}
        options = options._replace(**flags)
    if type(options.scale) is float and type(options.chunk_size) is int and type(options.lower_bound) in _BOUND:
        return inputs, options
    scale, lower_bound, chunk_size = map(number, options[:3])
    options = Options(scale, lower_bound, chunk_size, *options[3:])
    _check_numbers(Call(op, inputs, options))
    return inputs, options


def _check_numbers(call: Call) -> None:
    """Check numbers before known calls are looked up by their values: there True equals 1.0, and 64.0 equals 64."""
    o = call.options
    if not torch.compiler.is_compiling():
        check(call, NUMBERS)
    elif bool in (type(o.scale), type(o.lower_bound), type(o.chunk_size)):                # others the operator refuses
        raise TypeError(f"{call.op}: scale, lower_bound and chunk_size must be numbers; found a bool.")


_ON_A_MESH = ("chunk_kda", "fused_recurrent_kda")
_FLAGS = Options._fields[Options._fields.index("output_final_state"):]
BOOL = {bool}
_BOUND = (float, type(None))
_OTHER = {"disable_recompute": Save.STATES.value}                             # other values than a bool that flags take


def _flag(op: str, name: str, x: Any, other: str | None = None) -> bool | str:
    """A bool, or `other`; None, 0 and 1, which occur in configurations, and numpy's bools are accepted."""
    if x is True or x is False or (isinstance(x, str) and x == other):
        return x
    of_numpy = type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_")
    if x is None or of_numpy or (isinstance(x, numbers.Integral) and x in (0, 1)):
        return bool(x)
    asked, fix = "True or False", "Pass a bool."
    if other is not None:
        asked, fix = f"True, False or {other!r}", "Pass one of them."
    raise InputTypeError(op, name, asked, f"{type(x).__name__} {x!r:.60}", fix, "flag.type")


def _check_graph(op: str, use_graph: Any, max_num_seqs: Any, cu_seqlens: Any) -> None:
    """Check arguments without effect: they must still be valid."""
    _flag(op, "use_graph", use_graph)
    most = number(max_num_seqs)
    if isinstance(most, bool) or not isinstance(most, int | None):
        raise InputTypeError(op, "max_num_seqs", "an int or None", f"{type(most).__name__} {most!r:.60}",
                             "Leave it out: kda does not need it.", "max_num_seqs.type")
    N = cu_seqlens.numel() - 1 if isinstance(cu_seqlens, Tensor) else 0
    if most is not None and most < N:
        asked = f"at least the number of sequences, {N}" if N else "0 or more"
        raise InputError(op, "max_num_seqs", asked, str(most),
                         "Raise it, or leave it out: kda does not need it.", "max_num_seqs.value")


def _old_layout_name(op: str, state_v_first: bool, transpose_state_layout: bool) -> bool:
    if state_v_first:
        raise InputError(op, "transpose_state_layout", "left out beside state_v_first", "both",
                         "state_v_first is its new name; pass that alone.", "state_layout.both")
    warnings.warn(f"{op}: transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=4)
    return bool(transpose_state_layout)


def _autocast(x: Any, dtype: torch.dtype) -> Any:
    """Cast x like torch.autocast casts the operands of a product; float64 is unchanged."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(dtype)
    return x
