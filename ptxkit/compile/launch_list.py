"""Several launches as one call: a list is made once, and C runs it where there is a C compiler.

    ready = LaunchList([(scale, (Location(0), Location(1, 1024))), (add, (Location(1, 1024), None))], slots=2)
    ready([x, memory])                       # a tensor, or None, for each slot

Each argument of a launch is a Location: an address in the memory of one of the tensors that a call passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from . import c_compiler, driver, extension
from .code import Place
from .errors import BuildError
from .kernel import Bound
from .launching import launch_sink

SOURCE = Path(__file__).with_suffix(".c")
PROMISE_BROKEN = -1                          # an address is no multiple of 16
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra",
         *(f"-Wno-{what}" for what in ("unused-parameter", "cast-function-type", "missing-field-initializers")))
_first: dict[str, ModuleType | None] = {}    # two modules would count launches apart


class Location(NamedTuple):
    """A part of the memory of the tensor in a slot."""

    slot: int
    offset: int = 0                          # bytes
    size: int | None = None                  # None: the whole tensor


class LaunchList:
    """Launches in order, which read and write the tensors of a call."""

    def __init__(self, launches: Sequence[tuple[Bound, Sequence[Location | None]]], slots: int):
        self.launches, self.slots = tuple((bound, tuple(locations)) for bound, locations in launches), slots
        self._in_c: dict[int, Any] = {}                                      # device -> the list in C, or None

    def __call__(self, tensors: list[Any]) -> None:
        """Launch all of them on the current stream; there is a tensor, a Place or None for each slot."""
        if (sink := launch_sink()) is not None:
            for bound, locations in self.launches:
                bound.send(sink, [part_of(tensors, location) for location in locations])
            return
        device, stream = driver.current()
        in_c = self.in_c_on(device)
        if in_c is None:
            self._run(tensors, stream)
        elif failed := in_c.run(0, stream, tensors):
            self.go_on(in_c, device, stream, tensors, *failed)

    def in_c_on(self, device: int) -> Any:
        """Return the list in C for a device; None if there is none."""
        try:
            return self._in_c[device]
        except KeyError:
            return self._in_c.setdefault(device, self._made_in_c(device))

    def _run(self, tensors: Sequence[Any], stream: int) -> None:
        """Do without C what it does."""
        for bound, locations in self.launches:
            bound.start(self._addresses(tensors, locations), stream)

    @staticmethod
    def _addresses(tensors: Sequence[Any], locations: Sequence[Location | None]) -> list[int]:
        found = [None if location is None else tensors[location.slot] for location in locations]
        return [0 if x is None else x.data_ptr() + location.offset  # type: ignore[union-attr]
                for x, location in zip(found, locations)]

    def go_on(self, in_c: Any, device: int, stream: int, tensors: list[Any], failed: int, answer: int) -> None:
        """Give this thread its context if that was missing, and launch what is left."""
        if answer == driver.NO_CONTEXT:
            driver.make_current(device)
            again = in_c.run(failed, stream, tensors)
            if again is None:
                return
            failed, answer = again
        bound, locations = self.launches[failed]
        if answer == PROMISE_BROKEN:
            bound.start(self._addresses(tensors, locations), stream)           # which says what is wrong
        driver.check(answer, f"launching {bound.kernel.name}")

    def _made_in_c(self, device: int) -> Any:
        """Return the list for a device; None if there is no C compiler, or C has no room for it."""
        module = in_c()
        if module is None:
            return None
        described = tuple(bound.described(device, [None if s is None else (s.slot, s.offset) for s in locations])
                          for bound, locations in self.launches)
        try:
            return module.make(driver.function_that_launches() or module.NOTHING, self.slots, described)
        except ValueError:
            return None


def part_of(tensors: Sequence[Any], location: Location | None) -> Any:
    if location is None:
        return None
    tensor = tensors[location.slot]
    if location.size is None or tensor is None:
        return tensor
    return Place(tensor, tensor.data_ptr() + location.offset, location.size)


def settled(tensors: list[Any]) -> bool:
    """Return whether each is None, or its numbers lie in memory, contiguous, from a multiple of 16 bytes on."""
    if (module := in_c()) is not None:
        return module.settled(tensors)
    return all(x is None or (x.is_contiguous() and x.data_ptr() and not x.data_ptr() % 16 and not x.is_neg())
               for x in tensors)


def launched() -> int:
    """Return how many launches the driver has accepted in this process."""
    module = in_c()
    return driver.ACCEPTED[0] + (module.launched() if module else 0)


@functools.cache
def in_c() -> ModuleType | None:
    """Return the module in C that runs lists, built once for this Python; None where that cannot be built."""
    return _first.setdefault("module", _built())


def _built() -> ModuleType | None:
    try:
        return extension.module("launch_list", SOURCE, c_compiler.required("A list of launches"), FLAGS)
    except (BuildError, OSError):
        return None
