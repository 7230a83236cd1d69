"""Which backend would run a call, without running it: `explain` for people, `rehearse` for registries of others."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from kda.checks.calls import CALLER, REQUIRED, TRAINING, Call, autocasts, check, is_training, problem_of
from kda.errors import InputError, InputTypeError, in_words
from kda.model.bundles import Save
from kda.model.host import Host, host_of, stand_in, standing_in, supposed
from kda.model.offsets import offsets_dtype
from kda.model.problem import Problem
from kda.routing.dispatch import (
    Choice,
    Route,
    backend_asked,
    check_backend_name,
    route,
    weigh_route,
)
from ptxkit.compile.target import TARGETS, Target, parse

from .api import bind_a_part, fused_recurrent_kda, fused_recurrent_kda_fwd, parallel, refuse_keywords
from .arguments import by_name, operate, prepare, saves_states
from .autograd import outlines_of

if TYPE_CHECKING:
    from kda.tools.verify.ran import RanKernels

    from .planned import Planned

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain` returns. Printed, it is its text; an interactive session shows that text, too."""

    forward: Choice
    backward: Choice | None = None           # None: no gradients are wanted
    notes: tuple[str, ...] = ()              # which backend runs a training forward, what is saved, how maps are made
    planned: tuple[Planned, ...] = ()        # what each direction launches, of backends with kernels
    ran: tuple[RanKernels, ...] = ()         # what of that ran on a GPU as it is

    @property
    def backend(self) -> str | None:
        """The forward's; None: no backend accepts the call."""
        return self.forward.backend

    def __str__(self) -> str:
        parts = self.forward, self.backward, *self.notes, *self.planned, *self.ran
        return "\n".join(str(part) for part in parts if part is not None)

    __repr__ = __str__


def explain(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *args: Any, arch: str | None = None, **keywords: Any
) -> Explanation:
    """Say which backend handles this call of `chunk_kda` and why each other one does not; nothing is computed.

    If an input requires a gradient, that includes the choice for the backward, which backend then runs the forward if
    that differs, and what is kept between the two. With a `cp_context` it also says which backend computes the
    maps of sequences that span several ranks. Of a GPU's kernels it says which are launched, in which form, and how
    many of them ran on a GPU as they are now. Tensors on meta count as tensors of the GPU, if there is one.

    Args:
        q, k, v, g, beta, args, keywords: the arguments of `chunk_kda`.
        arch: a GPU arch or card, such as "sm90" or "h100": explain the call on that GPU instead of this machine, with
            kda's requirements installed. Tensors may be on any device, also on meta.

    Returns:
        An `Explanation`: print it. Its `backend` is None if no backend accepts the call: that is not an error here.

    Raises:
        InputError: as `chunk_kda`; or no GPU is called as `arch` says.

    Example:
        >>> q, k, v, g = torch.randn(4, 1, 70, 2, 16).unbind()
        >>> found = explain(q, k, v, -g.abs(), torch.rand(1, 70, 2))
        >>> print(found)
        reference accepts chunk forward B=1 T=70 N=1 H=2 K=16 V=16 C=64 float32, cpu, given gate
        ...
        * reference  accepts it
        >>> found.backend
        'reference'
        >>> explain(q, k, v, -g.abs(), torch.rand(1, 70, 2), arch="h100").backend
        'triton'
    """
    inputs, options, context = bind_a_part("explain", q, k, v, g, beta, *args, **keywords)
    check(Call("explain", inputs, options), CALLER)
    if context is not None:
        parallel().operators.check_tokens("explain", context, inputs.q)
    requested = backend_asked(options.backend)
    check_backend_name(requested)                                              # before anything else is checked
    target = None if arch is None else _target(arch)
    call, training = Call("explain", inputs, options), is_training(inputs)
    problem = problem_of(call)
    offsets = offsets_dtype(inputs)
    with _machine(target):
        problem = dataclasses.replace(problem, device=_device(problem.device, target))
        found = weigh_route(problem, requested, training, saves_states(options))
        notes = _notes(found, call) if training and found.refused is None else []
        if context is not None and found.choices[0].backend:
            if training:
                number = len(context.parts) * problem.HV * problem.K * (problem.K + problem.V)
                size = parallel().operators.maps.wide_of(problem).itemsize * number
                notes.append(f"and {size / 2**20:,.1f} MiB for the exchange: the state that entered a part, and its M")
            notes.append(parallel().operators.maps.how(found.forward, requested))
        return _explained(found, training, offsets, notes, target)


def explain_problem(problem: Problem, requested: str, target: Target | None) -> Explanation:
    """Say the same of a call without gradients that is only described, such as one of `decode_step`."""
    with _machine(target):
        problem = dataclasses.replace(problem, device=_device(problem.device, target))
        return _explained(weigh_route(problem, requested), False, "int64" if problem.packed else None, [], target)


def _explained(
    found: Route, training: bool, offsets: str | None, notes: list[str], target: Target | None
) -> Explanation:
    from kda.tools.verify.ran import ran_of

    from .planned import planned_of

    choices = [choice.named_here() for choice in found.choices]
    planned = () if found.refused else planned_of(found, training, offsets)
    of_backends = {each.backend: [r for other in planned if other.backend == each.backend for r in other.recipes]
                   for each in planned}
    asked, host = target or _target_of(choices[0].host), choices[0].host
    if target:
        chip = host_of(target.name).name.removeprefix("simulated ")
        notes.append(f"{target.name} stands for {target.examples}; planned for the {host.sms} SMs of one {chip}")
    one_of = choices[0].problem.op != "chunk"          # by dtypes and layouts of its tensors, or their number
    ran = [each for backend, recipes in of_backends.items() for each in ran_of(backend, recipes, asked, one_of)]
    return Explanation(choices[0], choices[1] if training else None, tuple(notes), planned, tuple(ran))


def _target(arch: Any) -> Target:
    asked = "the name of a GPU arch or card, such as sm90 or h100"
    if not isinstance(arch, str):
        raise InputTypeError("explain", "arch", asked, in_words(arch), "Leave it out for this machine.", "arch.type")
    try:
        return parse(arch)
    except ValueError as error:
        raise InputError("explain", "arch", asked, repr(arch), f"{str(error)[:1].upper()}{str(error)[1:]}.",
                         "arch.name") from None


def _target_of(host: Host) -> Target | None:
    return next((target for target in TARGETS.values() if target.cc == host.cc), None)


@contextlib.contextmanager
def _machine(target: Target | None) -> Iterator[None]:
    """Let a machine with such a GPU stand in for this one inside the `with`."""
    with standing_in(supposed(target.name)) if target else contextlib.nullcontext():
        yield


def _device(name: str, target: Target | None) -> str:
    """Return the device of which a call is explained: that of its tensors, or a GPU for those that are nowhere."""
    if target is not None:
        return "cuda:0"
    if name == "meta" and stand_in() is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return name


def _notes(found: Route, call: Call) -> list[str]:
    """Say who runs the forward of a training call if it is not who accepts it, and what is kept for the backward."""
    chosen, backend = found.choices[0].backend, found.backend
    notes = []
    if backend != chosen:
        notes.append(f"{backend} also runs the forward: gradients are recorded, and {chosen} keeps nothing for them")
    if found.save is Save.NOTHING:
        return [*notes, "between forward and backward nothing is kept but the inputs"]
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in outlines_of(call, found.save, backend))
    return [*notes, f"between forward and backward {backend} keeps {size / 2**20:,.1f} MiB beside the inputs"]


def rehearse(function: str, /, *args: Any, **keywords: Any) -> tuple[Choice, ...]:
    """Say which backends would run a call: the forward's choice, and the backward's if gradients are recorded.

    Args:
        function: the name of the called function: `chunk_kda`, `fused_recurrent_kda`, `fused_recurrent_kda_fwd`.
        args, keywords: its arguments.

    Raises what the call would raise before it computes: InputError for invalid input, NoBackendError if no backend
    accepts it, TypeError for arguments that the function does not have.
    """
    try:
        call = _call_of(function, args, keywords)
        problem, requested = operate(problem_of, call, call), backend_asked(call.options.backend)
        check(call, TRAINING)
    except InputError as error:
        raise error.as_of(function) from None
    training = is_training(call.inputs) and not call.recurrent
    return route(problem, requested, training, saves_states(call.options)).choices


def _call_of(function: str, args: tuple, keywords: dict[str, Any]) -> Call:
    """A call with its arguments by name; nothing is cast for it."""
    args = (*map(_as_if_cast, args[:3]), *args[3:])
    keywords = keywords | {name: _as_if_cast(keywords[name]) for name in ("q", "k", "v") if name in keywords}
    if function == "chunk_kda":
        while len(args) < 5 and REQUIRED[len(args)] in keywords:              # _bind's fast path takes five positions
            args = (*args, keywords.pop(REQUIRED[len(args)]))
        inputs, options, _ = bind_a_part(function, *args, **keywords)
        return Call(function, inputs, options)
    if function == "fused_recurrent_kda_fwd" and args:
        given = _arguments(function, args, keywords)
        args, keywords = (), given | given.pop("keywords")
    elif function == "fused_recurrent_kda_fwd":
        keywords = {"inplace_final_state": True} | keywords
    given = _arguments("fused_recurrent_kda", args, keywords)
    out = given.pop("out")
    if unknown := given.pop("unknown"):
        refuse_keywords("fused_recurrent_kda", unknown)
    return Call("fused_recurrent_kda", *prepare("fused_recurrent_kda", *by_name(given)), out=out)


def _as_if_cast(x: Any) -> Any:
    """A tensor with the dtype and shape that torch.autocast would give it; its values do not matter."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 or not autocasts(x):
        return x
    dtype = torch.get_autocast_dtype(x.device.type)
    return x if x.dtype == dtype else x.new_empty((), dtype=dtype).expand(x.shape).requires_grad_(x.requires_grad)


def _arguments(function: str, args: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
    bound = _SIGNATURES[function].bind(*args, **keywords)
    bound.apply_defaults()
    return bound.arguments


_SIGNATURES = {f.__name__: inspect.signature(f) for f in (fused_recurrent_kda, fused_recurrent_kda_fwd)}
