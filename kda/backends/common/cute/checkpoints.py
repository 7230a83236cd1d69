"""States that a walk stores in a pool on its way."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from .copies import load_one


@cute.jit
def place_of_checkpoint(c: cutlass.Constexpr, x, first, i, steps):
    """The element of the pool where the state that enters chunk i of a walk begins, chunk 0 of which is number `first`;
    -1: it is not stored."""
    place = Int64(-1)
    if cutlass.const_expr(c.checkpoints is not None):
        if i < steps:
            place = load_one(x.place + (first + i))
    return place
