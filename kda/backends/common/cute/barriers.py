"""Barriers by name, and rings of stages.  Only functions that a kernel calls use cutlass.

A named barrier of the hardware has an id (0 is `sync_threads`) and a number of threads that meet there.  A ring has one
mbarrier `full` and one `empty` for each stage: chunk c lies in stage c mod stages, for the (c div stages)-th time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class NamedBarrier(NamedTuple):
    id: int
    threads: int
    ids_per_group: int = 0                   # every group of warps has its own barrier, at so many ids from the last

    @cute.jit
    def sync(self, group=0):
        cute.arch.barrier(barrier_id=self.number(group), number_of_threads=self.threads)

    @cute.jit
    def arrive(self, group=0):
        """Without waiting for the others."""
        cute.arch.barrier_arrive(barrier_id=self.number(group), number_of_threads=self.threads)

    def number(self, group):
        return self.id if self.ids_per_group == 0 else self.id + self.ids_per_group * group


class Ring(NamedTuple):
    """The mbarriers of some stages."""

    full: Any
    empty: Any


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
