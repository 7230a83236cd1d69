"""Calls of `chunk_kda` that are known: one look-up finds a call that was checked and whose backends were chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from kda.checks.calls import Call, is_training, problem_of
from kda.checks.memo import Memo, are_plain
from kda.model.force import forced
from kda.model.host import stand_in
from kda.model.problem import Inputs, Options
from kda.routing.dispatch import backend_asked, route

from . import node
from .arguments import BOOL, operate, saves_states

if TYPE_CHECKING:
    from .plain import PlainCall

CALLS: Memo[PlainCall] = Memo()


def key_of(tensors: tuple, settings: tuple, flags: tuple) -> tuple | None:
    """Return the key by which a call of `chunk_kda` is remembered; None if it may not be: something looks at the call,
    an argument is no plain tensor, or a flag no bool, which may equal one."""
    if not BOOL.issuperset(map(type, flags)) or not nothing_looks() or torch._C._is_any_autocast_enabled():
        return None
    outlines = node.outlines(tensors)
    return outlines and (outlines, backend_asked(), stand_in(), forced(), flags, settings, *map(type, settings))


def find(key: tuple) -> PlainCall | None:
    """Return the call; torch.compile does not come here, and so does not compile again when another call is known."""
    try:
        return CALLS.get(key)
    except TypeError:                                                          # an option is not hashable
        return None


def remember(key: tuple, bound: PlainCall) -> None:
    with contextlib.suppress(TypeError):
        CALLS.remember(key, bound)


def bind(inputs: Inputs, options: Options) -> PlainCall | None:
    """Return a call with plain tensors, checked and with its backends chosen; None if an operator has to run it."""
    from .plain import ForwardCall, TrainingCall

    call, requested = Call("chunk_kda", inputs, options), backend_asked(options.backend)
    if is_training(inputs):
        if options.return_intermediate_states:
            return None
        problem = operate(problem_of, call, call)
        return TrainingCall(options, route(problem, requested, True, saves_states(options)))
    found = route(operate(problem_of, call, call), requested)
    return ForwardCall(options, found.forward, found.backend)


def is_unseen(inputs: Sequence[Any]) -> bool:
    """Whether a call has only plain tensors, and nothing looks at it."""
    return nothing_looks() and are_plain(map(type, inputs)) and not (inputs[0] is None or inputs[0].is_meta)


def nothing_looks() -> bool:
    """Whether no mode, transform, trace or profiler is active."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch.autograd._profiler_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )
