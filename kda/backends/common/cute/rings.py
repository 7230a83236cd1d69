"""Rings of stages: chunk c lies in stage c mod stages, for the (c div stages)-th time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


def stage_of(chunk, stages: int):
    """The stage in which a chunk lies."""
    return chunk % stages if stages & stages - 1 else chunk & stages - 1


def phase_of(chunk, stages: int):
    """The parity of the stage's phase in which it holds the chunk."""
    return (chunk // stages if stages & stages - 1 else chunk >> stages.bit_length() - 1) & 1


@cute.jit
def advance(stage, phase, stages: cutlass.Constexpr):
    """Return the next stage of a ring of any length, and its phase."""
    stage += 1
    wraps = stage == stages
    return (Int32(0) if wraps else stage), (phase ^ 1 if wraps else phase)
