"""Calls with plain tensors, at which nothing looks: they need no operator, and node.cpp runs them as soon as it can.

  ForwardCall    saves nothing
  TrainingCall   is one node of autograd: that of node.cpp, or ChunkKda, which does the same in Python
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kda.backends.common.tensors import on_device_of
from kda.model import transforms
from kda.model.bundles import Save
from kda.model.force import with_force
from kda.model.host import stand_in
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Options, Problem
from kda.routing.dispatch import Route, launcher
from ptxkit.compile.launching import launch_sink

from . import ahead, autograd, node

if TYPE_CHECKING:
    from kda.backends.common.directions import Direction

Tensor = torch.Tensor


class ChunkKda(torch.autograd.Function):
    """The forward and its backward without an operator: torch takes half a millisecond for one with gradients."""

    @staticmethod
    def forward(ctx, call: TrainingCall, *tensors):
        x = Inputs(*tensors)
        with autograd.autocast_off(x.q):
            out = launcher(call.route.backend).forward(call.route.forward, x, call.route.save)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(out.saved or ()))
        return out.o, out.final_state

    @staticmethod
    def backward(ctx, do, dht):
        needs, tensors, call = ctx.needs_input_grad[1:], ctx.saved_tensors, ctx.call
        if (grads := gradients_for_others(call.options, call.route, tensors, do, dht, needs)) is not None:
            return None, *grads
        x, saved = Inputs(*tensors[: len(autograd.INPUTS)]), tensors[len(autograd.INPUTS):]
        do = torch.zeros_like(x.v) if do is None else do
        with autograd.autocast_off(x.q):
            grads = launcher(call.route.reader).backward(call.route.backward, x, do, dht, autograd.bundled(saved))
        return None, *autograd.wanted_of(grads, needs)


class PlainCall(abc.ABC):
    """A call with plain tensors only."""

    def __init__(self, options: Options, *backends: str):
        self.options = options
        self._of_routines = all(hasattr(launcher(backend), "forward_direction") for backend in backends)
        self._runs: dict[bool, Callable] = {}  # whether a simulator takes the driver's place -> what runs it

    def __call__(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return o, the final states and, if they are requested, those that enter chunks."""
        try:
            run = self._runs[launch_sink() is not None]
        except KeyError:
            run = self._prepared(tensors)
        return run(tensors)

    @on_device_of(lambda self, tensors: tensors[0])
    def _prepared(self, tensors: tuple[Tensor | None, ...]) -> Callable:
        """Return what runs the call; it is remembered unless node.cpp is still being built."""
        offsets = offsets_dtype(Inputs(*tensors))
        self._build(offsets)
        if not self._of_routines:
            run = None
        elif node.is_being_built():
            return self._in_python
        else:
            run = self._in_cpp(offsets)
        self._runs[launch_sink() is not None] = run = run or self._in_python
        return run

    @abc.abstractmethod
    def _build(self, offsets: str | None) -> None:
        """Build kernels that are worth building together, ahead of their launches."""

    @abc.abstractmethod
    def _in_cpp(self, offsets: str | None) -> Callable | None:
        """Return what runs the call in C++; `offsets` is the dtype of cu_seqlens."""

    @abc.abstractmethod
    def _in_python(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Run the call."""


class TrainingCall(PlainCall):
    """A call that autograd records."""

    def __init__(self, options: Options, route: Route):
        self.route = route
        super().__init__(options, route.backend, route.reader)

    def _build(self, offsets: str | None) -> None:
        """Build the kernels of both directions; only here is a compiler needed."""
        if offsets not in self.route.built and stand_in() is None:
            ahead.build(self.route, offsets)
        self.route.built.add(offsets)

    def _in_cpp(self, offsets: str | None) -> Callable | None:
        route = self.route                                                     # what C++ holds must not hold this call

        def forward() -> Direction:
            return launcher(route.backend).forward_direction(route.forward, route.save, offsets)

        def backward(dht: bool) -> Direction:
            return launcher(route.reader).backward_direction(route.backward, route.save, offsets, dht)

        call = node.call(forward, backward, functools.partial(gradients_for_others, self.options, route))
        return call and call.recorded

    def _in_python(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
        return ChunkKda.apply(self, *tensors)


class ForwardCall(PlainCall):
    """A call that saves nothing."""

    def __init__(self, options: Options, problem: Problem, backend: str):
        super().__init__(options, backend)
        self.problem, self.backend = problem, backend

    def _build(self, offsets: str | None) -> None:
        """Leave it to the launches, which are few."""

    def _in_cpp(self, offsets: str | None) -> Callable | None:
        if self.problem.intermediate_states:
            return None
        describe = functools.partial(launcher(self.backend).forward_direction, self.problem, Save.NOTHING, offsets)
        call = node.call(describe)
        return call and call.unrecorded

    def _in_python(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        x = Inputs(*tensors)
        with autograd.autocast_off(x.q):
            out = launcher(self.backend).forward(self.problem, x, Save.NOTHING)
        return (out.o, out.final_state, out.h)[: 2 + self.problem.intermediate_states]


def gradients_for_others(
    options: Options, route: Route, tensors: Sequence[Tensor], do: Tensor | None, dht: Tensor | None,
    needs: Sequence[bool],
) -> list[Tensor | None] | None:
    """Return the gradients from the operator if a derivative, a transform or a mode looks at the backward."""
    if _nothing_follows() and not transforms.batched((do, dht)):
        return None
    options = options._replace(backend=route.requested, disable_recompute=route.save is Save.ALL)
    with with_force(route.backward.force):
        return autograd.gradients(tensors, options, do, dht, needs)


def _nothing_follows() -> bool:
    """Whether no derivative of a backward is recorded, and no mode or transform is active."""
    return (
        not torch.is_grad_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )
