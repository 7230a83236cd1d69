"""A backward in two halves, for a rank whose tokens are one piece of a sequence.

The first half makes what the forward did not keep and walks back, before the gradient of the final state has come from
other ranks: the gradient of the state that enters is what these wait for.  The second half makes nothing of it again.
Backends whose `maps` have "halves" do this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kda.calls.autograd import autocast_off, bundled
from kda.checks.calls import Call, problem_of
from kda.model.bundles import Grads
from kda.routing.dispatch import backend_asked, capability, choose, launcher

Tensor = torch.Tensor


class FirstHalf(NamedTuple):
    backend: str
    dh0: Tensor                              # gradients of the states that enter, as far as the call's dht tells
    begun: Any                               # what the second half reads

    def finish(self, c: Call) -> Grads:
        """Return the gradients of the same call, whose dht is whole now."""
        with autocast_off(c.inputs.q):
            return launcher(self.backend).finish_backward(
                problem_of(c, "backward"), c.inputs, do_of(c), c.dht, self.begun)


def begin(c: Call, saved: Sequence[Tensor]) -> FirstHalf | None:
    """Return the first half of a call's backward; None if its backend does all at once."""
    problem = problem_of(c, "backward")
    backend: str = choose(problem, backend_asked(c.options.backend)).backend  # type: ignore[assignment]
    if "halves" not in capability(backend).maps:
        return None
    with autocast_off(c.inputs.q):
        found = launcher(backend).begin_backward(problem, c.inputs, do_of(c), c.dht, bundled(saved))
    return found and FirstHalf(backend, *found)


def do_of(c: Call) -> Tensor:
    return torch.zeros_like(c.inputs.v) if c.do is None else c.do
