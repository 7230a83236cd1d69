"""Launches that a mutant does not change are not simulated again: their recorded writes are replayed.

Calls are deterministic.  So until a changed kernel leaves different memory than the unchanged one, every launch of
another kernel does what it did when it was recorded under the same schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ptxkit.compile.launching import Launch

from ..capturing import memory
from ..findings import SimulationError
from .sites import Mutant

Tensors = Mapping[str, torch.Tensor]


class RecordedLaunch(NamedTuple):
    """One launch of an unchanged kernel."""

    kernel: tuple[str, str]                  # PTX and name
    pdl: bool                                # may overlap the launch ahead of it
    executed: frozenset[int]                 # lines of the PTX
    wrote: dict[str, torch.Tensor] | None    # its tensors afterwards; None where they are not known

    def pairs(self, tensors: Tensors | None) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Return each of these tensors with what this launch left in it; None if that is not known."""
        if self.wrote is None or tensors is None or self.wrote.keys() != tensors.keys():
            return None
        return [(x, self.wrote[name]) for name, x in tensors.items()]

    def holds(self, tensors: Tensors | None) -> bool:
        """Return whether a launch with these tensors left the same memory as this one."""
        return (pairs := self.pairs(tensors)) is not None and all(equal(*pair) for pair in pairs)

    def repeat(self, tensors: Tensors | None) -> bool:
        """Replay its writes, if they are known."""
        pairs = self.pairs(tensors)
        for x, wrote in pairs or ():
            x.detach().copy_(wrote)
        return pairs is not None


class Recorder:
    """Wraps the launches of a session and records each."""

    def __init__(self):
        self.launches: list[RecordedLaunch] = []

    def __call__(self, launch: Launch, simulate: Callable[..., Any]) -> Any:
        run, tensors = simulate(), launch.tensors
        wrote = None
        if tensors is not None and memory.with_pointees(tensors).keys() == tensors.keys():
            wrote = {name: x.detach().clone() for name, x in tensors.items()}
        key = launch.kernel.ptx, launch.kernel.name
        self.launches.append(RecordedLaunch(key, launch.pdl, frozenset(run.executed), wrote))
        return run


class Player:
    """Wraps the launches of a session with one changed kernel; raises a launch's findings."""

    def __init__(self, mutant: Mutant, recorded: list[RecordedLaunch]):
        self.mutant, self.recorded = mutant, recorded
        self.position = -1
        self.same = True                     # the memory is the same as when the launches were recorded

    def __call__(self, launch: Launch, simulate: Callable[..., Any]) -> Any:
        self.position += 1
        before = self.recorded[self.position] if self.position < len(self.recorded) else None
        changed = self._is_changed(launch.kernel.ptx, launch.kernel.name)
        if self.same and before and not changed and not self._meets_a_changed_one() and before.repeat(launch.tensors):
            return None
        run = simulate(self.mutant.changed if changed else None)
        if run.findings:
            raise SimulationError(run.findings)
        self.same = self.same and before is not None and before.holds(launch.tensors)
        return run

    def _is_changed(self, ptx: str, kernel: str) -> bool:
        return (ptx, kernel) == (self.mutant.ptx, self.mutant.kernel)

    def _meets_a_changed_one(self) -> bool:
        """Return whether a changed kernel may start before this launch has ended: all up to it may start early."""
        early = itertools.takewhile(lambda after: after.pdl, self.recorded[self.position + 1 :])
        return any(self._is_changed(*after.kernel) for after in early)


def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether both are equal in every bit: a nan is equal to itself."""
    bits = (each.detach().contiguous().flatten().view(torch.uint8) for each in (x, y))
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(*bits)
