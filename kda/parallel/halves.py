"""A forward and a backward in two halves each, for a rank whose tokens are one piece of a sequence.

  forward   the first half makes tiles before the state that enters has come from other ranks, and the map, if others
            wait for that; the second half walks over the tiles
  backward  the first half makes what the forward did not keep and walks back, before the gradient of the final state
            has come: the gradient of the state that enters is what others wait for

A second half makes nothing again.  Backends whose `maps` have "forward in halves" or "backward in halves" do this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kda.calls.autograd import autocast_off, bundled
from kda.checks.calls import Call, problem_of
from kda.model.bundles import Grads, OpaqueSaved, Outputs, Save, SegmentSummary
from kda.routing.dispatch import backend_asked, capability, choose, launcher, route

Tensor = torch.Tensor


class HalfForward(NamedTuple):
    backend: str
    map: SegmentSummary | None               # if it was asked for
    begun: Any                               # what the second half reads

    def finish(self, c: Call) -> Outputs:
        """Return the results of the same call, from the states that have entered."""
        with autocast_off(c.inputs.q):
            return launcher(self.backend).finish_forward(problem_of(c), c.inputs, self.begun)


def begin_forward(c: Call, save: Save, of_map: bool) -> HalfForward | None:
    """Return the first half of a call whose tokens are all of one sequence; None if its backend does all at once.  It
    does not read the initial state.  `of_map`: the map of these tokens is wanted."""
    problem = problem_of(c)
    backend = route(problem, backend_asked(c.options.backend), training=save.kind is not None, save=save).backend
    can = capability(backend)
    if "forward in halves" not in can.maps or (save.kind is OpaqueSaved and not can.saves_opaque):
        return None
    with autocast_off(c.inputs.q):
        found = launcher(backend).begin_forward(problem, c.inputs, save, of_map)
    return found and HalfForward(backend, *found)


class HalfBackward(NamedTuple):
    backend: str
    dh0: Tensor                              # gradients of the states that enter, as far as the call's dht tells
    begun: Any                               # what the second half reads

    def finish(self, c: Call) -> Grads:
        """Return the gradients of the same call, whose dht is whole now."""
        with autocast_off(c.inputs.q):
            return launcher(self.backend).finish_backward(
                problem_of(c, "backward"), c.inputs, do_of(c), c.dht, self.begun)


def begin_backward(c: Call, saved: Sequence[Tensor]) -> HalfBackward | None:
    """Return the first half of a call's backward; None if its backend does all at once."""
    problem = problem_of(c, "backward")
    backend: str = choose(problem, backend_asked(c.options.backend)).backend  # type: ignore[assignment]
    if "backward in halves" not in capability(backend).maps:
        return None
    with autocast_off(c.inputs.q):
        found = launcher(backend).begin_backward(problem, c.inputs, do_of(c), c.dht, bundled(saved))
    return found and HalfBackward(backend, *found)


def do_of(c: Call) -> Tensor:
    return torch.zeros_like(c.inputs.v) if c.do is None else c.do
