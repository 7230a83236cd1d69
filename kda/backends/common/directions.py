"""The two directions of a call as routines.  Whatever runs one, Python or the node in C++, reads this alone.

  forward    INPUTS, others                           -> o, final states, and more, of which `saved` is saved
  backward   INPUTS, do, dht, what was saved, others  -> Grads; those of q and k may be of each value head

A call of autograd has no tensors for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kda.model.bundles import Grads
from kda.model.problem import Inputs

from .routine import Routine
from .tensors import aligned, inputs_in_memory

Tensor = torch.Tensor


class Direction(NamedTuple):
    run: Routine
    saved: tuple[int, ...] = ()              # numbers of a forward's results that are saved; of saved tensors, to read


def run_forward(direction: Direction, x: Inputs, *others: Tensor | None) -> list[Any]:
    """Return all results."""
    return direction.run(x.q, [*inputs_in_memory(x), *others])


def run_backward(
    direction: Direction, x: Inputs, do: Tensor, dht: Tensor | None, saved: Sequence[Tensor | None] | None
) -> Grads:
    read = [aligned((saved or ())[i]) for i in direction.saved]
    tensors = [*inputs_in_memory(x), aligned(do, x.q.dtype), aligned(dht, torch.float32), *read]
    given = x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state
    grads: list[Any] = [as_given(y, each) for y, each in zip(direction.run(x.q, tensors), given)]
    return Grads(*grads)


def as_given(y: Tensor | None, x: Tensor | None) -> Tensor | None:
    """Return a gradient in the shape and dtype of its input; None if there is no such input.  Gradients of value heads
    that share a head of q and k are summed in order."""
    if y is None or x is None:
        return None
    if y.numel() != x.numel():
        B, T, H, K = x.shape
        return y.view(B, T, H, -1, K).sum(3, dtype=torch.float32).to(y.dtype)
    return y if y.shape == x.shape and y.dtype == x.dtype else y.view(x.shape).to(x.dtype)
