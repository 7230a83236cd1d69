"""The protocol of a kernel, declared once: mbarriers, by which warps hand something over, and named barriers, at which
they meet.

    LOADED = Arrivals(1, "LOAD", bytes="the tile"), Arrivals(32, "LOAD", "each lane with its pieces of v")
    full = Pipeline("full", LOADED, "CHAIN", "a chunk is there", stages=3)

A configuration has them as `pipelines` and `meetings`.  The mbarriers in its shared memory (`mbarriers`), their counts
(`initialise`), the table in the kernel's docstring (docs/pictures/protocols.py) and the arrows of its picture come from
there.  Only what a kernel calls imports cutlass.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

from .fields import StructField, array

LANES_OF_A_WARP = 32


class Arrivals(NamedTuple):
    """What one role adds to each phase of an mbarrier."""

    count: int
    role: str                                # who arrives
    how: str = ""
    bytes: str = ""                          # what a copy brings that the phase waits for, too
    commit: bool = False                     # the tensor core arrives, when it has done what the role issued

    def __str__(self) -> str:
        with_bytes = f" with the bytes of {self.bytes}" if self.bytes else ""
        how = "a commit" if self.commit else self.how
        return f"{self.role}{with_bytes}{', ' if how else ''}{how}"


class Pipeline(NamedTuple):
    """Mbarriers of one name: a phase ends when all have arrived, and the bytes that they bring."""

    name: str                                # field of shared memory
    arrivals: tuple[Arrivals, ...]
    waits: str                               # roles that wait for it: "RELAY, LOAD"
    says: str                                # what they know then
    stages: int = 1
    each: str = "stage"                      # what has one
    places: int = 1                          # mbarriers that each of these has

    @property
    def count(self) -> int:
        return sum(arrivals.count for arrivals in self.arrivals)

    @property
    def total(self) -> str:
        """What a phase waits for, in a word or two."""
        if any(arrivals.commit for arrivals in self.arrivals):
            return "commit"
        return f"{self.count}{' + bytes' if any(arrivals.bytes for arrivals in self.arrivals) else ''}"


class NamedBarrier(NamedTuple):
    """A barrier of the hardware: its id (0 is `sync_threads`), and the number of threads that meet there."""

    name: str
    id: int
    threads: int
    ids_per_group: int = 0                   # every group of warps has its own barrier, at so many ids from the last

    def sync(self, group: Any = 0) -> None:
        from cutlass import cute

        cute.arch.barrier(barrier_id=self.number(group), number_of_threads=self.threads)

    def arrive(self, group: Any = 0) -> None:
        """Without waiting for the others."""
        from cutlass import cute

        cute.arch.barrier_arrive(barrier_id=self.number(group), number_of_threads=self.threads)

    def number(self, group: Any) -> Any:
        return self.id if self.ids_per_group == 0 else self.id + self.ids_per_group * group


class Meeting(NamedTuple):
    """What warps know that have met at a named barrier."""

    barrier: NamedBarrier
    roles: str                               # who meets there
    says: str


def commit(role: str) -> tuple[Arrivals, ...]:
    return (Arrivals(1, role, commit=True),)


def of_each_warp(warps: int, role: str) -> tuple[Arrivals, ...]:
    return (Arrivals(warps, role, "a lane of each warp"),)


def of_a_lane(role: str) -> tuple[Arrivals, ...]:
    return (Arrivals(1, role, "a lane"),)


def mbarriers(pipelines: Iterable[Pipeline]) -> dict[str, StructField]:
    """Return the mbarriers of pipelines, as fields of shared memory."""
    return {p.name: array("int64", p.stages * p.places, align=8) for p in pipelines}


def mbarriers_among(s: Any, pipelines: Iterable[Pipeline]) -> Any:
    """Return the pointers to mbarriers, by name, out of those to all of shared memory."""
    found = {pipeline.name: getattr(s, pipeline.name) for pipeline in pipelines}
    return namedtuple("Mbarriers", found)(**found)


def initialise(s: Any, pipelines: Iterable[Pipeline]) -> None:
    """Initialise the mbarriers, by one thread; `s` has their pointers by name.  Pipelines take turns that follow each
    other and have one mbarrier for each of the same things."""
    from cutlass import cute

    for (stages, _), group in groupby(pipelines, key=lambda p: (p.stages, p.each)):
        together = list(group)
        for stage in range(stages):
            for pipeline in together:
                for place in range(pipeline.places):
                    mbarrier = getattr(s, pipeline.name) + (pipeline.places * stage + place)
                    cute.arch.mbarrier_init(mbarrier, pipeline.count)
