"""One direction of a call, ready to run: the memory that it allocates, its launches in order, and its results.

A backend describes it once for all calls of a class, with Locations where a call has tensors:

    draft = Draft(kernel, ("q", "h0"))
    scratch, o = draft.memory(), draft.tensor((B, T, HV, V), "bfloat16")
    draft.launch(config, grid, T=T, q=draft["q"], tiles=scratch.part(size), o=o)
    ready = draft.done(o)
    (o,) = ready(q, [q, h0])
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ptxkit.compile.kernel import Kernel
from ptxkit.compile.launch_list import LaunchList, Location

from .arguments import TILE_ALIGNMENT, KernelConfig

if TYPE_CHECKING:
    from ptxkit.compile.triton import TritonKernel

Tensor = torch.Tensor

Described = TypeVar("Described", bound=Callable[..., Any])
_MEMOS: list[Any] = []


def described_once(describe: Described) -> Described:
    """Remember the routines that a function returns, by its arguments."""
    memo: Any = functools.lru_cache(maxsize=1024)(describe)
    _MEMOS.append(memo)
    return memo


def forget_routines() -> None:
    """Let every routine be described again, because something changed that is no argument."""
    for memo in _MEMOS:
        memo.cache_clear()


class Allocation(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]                 # torch makes a tensor faster if it knows them
    dtype: torch.dtype
    zeroed: bool

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype, zeroed: bool = False) -> Allocation:
        sizes = [max(size, 1) for size in shape]
        strides = tuple(math.prod(sizes[i + 1:]) for i in range(len(sizes)))
        return cls(tuple(shape), strides, dtype, zeroed)


class Phase(NamedTuple):
    """Tensors to allocate, launches, and the slots that no later launch reads."""

    tensors: tuple[Allocation, ...]
    launches: LaunchList
    freed: tuple[int, ...]


class Routine(NamedTuple):
    phases: tuple[Phase, ...]
    results: tuple[int | None, ...]          # slots
    inputs: int                              # number of slots that a call fills

    def __call__(self, like: Tensor, tensors: list[Tensor | None]) -> list[Any]:
        """Run it with the tensors that its Draft names, of which the last may be left out, and return the results; None
        for one that there is not."""
        device = like.device
        tensors += [None] * (self.inputs - len(tensors))
        for phase in self.phases:
            for shape, strides, dtype, zeroed in phase.tensors:
                x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                tensors.append(x.zero_() if zeroed else x)
            phase.launches(tensors)
            for slot in phase.freed:
                tensors[slot] = None
        return [None if slot is None else tensors[slot] for slot in self.results]


class Memory:
    """Bytes that parts are taken from, one after the other, while a routine is described."""

    def __init__(self, slot: int):
        self.slot, self.size = slot, 0

    def part(self, size: int) -> Location:
        begin = self.size
        self.size += -(-size // TILE_ALIGNMENT) * TILE_ALIGNMENT
        return Location(self.slot, begin, size)


class Draft:
    """A Routine that is being described.  Memory is allocated ahead of the launches that follow it, or with them."""

    def __init__(self, kernel: Callable[[Any], Kernel] | None, inputs: Sequence[str]):
        self._kernel: Any = kernel                                             # from a configuration; None for Triton
        self._slots = dict(zip(inputs, itertools.count()))
        self._inputs = self._count = len(inputs)
        self._phases: list[tuple[list[Allocation | Memory], LaunchList]] = []
        self._tensors: list[Allocation | Memory] = []
        self._launches: list[tuple[Any, list[Location | None]]] = []

    def __getitem__(self, name: str) -> Location:
        """Return the whole of an input."""
        return Location(self._slots[name])

    def only(self, *names: str) -> dict[str, Location]:
        return {name: self[name] for name in names}

    def tensor(self, shape: Sequence[int], dtype: str, zeroed: bool = False) -> Location:
        """Return a tensor that each call allocates: a result, or what is zero at the beginning."""
        self._tensors.append(Allocation.contiguous(shape, getattr(torch, dtype), zeroed))
        return Location(self._next_slot())

    def memory(self) -> Memory:
        """Return memory that each call allocates at once, however many parts are taken from it."""
        memory = Memory(self._next_slot())
        self._tensors.append(memory)
        return memory

    def launch(self, config: KernelConfig | None, grid: tuple[int, int, int], **arguments: Any) -> None:
        """Add a launch, if there is a kernel and a CTA of it.  A tensor that is not named, or None, is null."""
        if config is None:
            return
        config.require_valid()
        declared = config.arguments.declared
        if unknown := arguments.keys() - declared.keys():
            known = ", ".join(declared)
            raise TypeError(f"{type(config).__name__} has no arguments {sorted(unknown)}; it has {known}")
        if 0 in grid:
            return
        numbers = {name: arguments[name] for name in config.arguments.number_names()}
        bound = config.bound(self._kernel(config), grid, **numbers)
        self._launches.append((bound, [arguments.get(name) for name in config.arguments.tensor_names()]))

    def launch_triton(self, kernel: TritonKernel, programs: int, values: Mapping[str, Any]) -> None:
        """Add a launch of a kernel of Triton, if there are programs, with its arguments from `values` by name."""
        if programs:
            numbers = {name: values[name] for name in kernel.names if name not in kernel.tensors}
            self._launches.append((kernel.bound(programs, **numbers), [values[name] for name in kernel.tensors]))

    def free_here(self) -> None:
        """Let go here of all that no later launch reads and that is no result, so that what is allocated next may lie
        there."""
        self._phases.append((self._tensors, LaunchList(self._launches, self._count)))
        self._tensors, self._launches = [], []

    def list(self) -> LaunchList:
        """Return the launches alone, of a draft that allocates nothing."""
        return LaunchList(self._launches, self._count)

    def done(self, *results: Location | None) -> Routine:
        """Return the routine; a result is a whole tensor."""
        self.free_here()
        slots = tuple(None if location is None else location.slot for location in results)
        phases: list[Phase] = []
        needed = {*slots}                                                      # by what follows
        for tensors, launches in reversed(self._phases):
            allocated = [Allocation.contiguous((x.size,), torch.uint8) if isinstance(x, Memory) else x for x in tensors]
            freed = tuple(slot for slot in range(launches.slots) if slot not in needed) if phases else ()
            phases.append(Phase(tuple(allocated), launches, freed))
            needed |= {location.slot for _, locations in launches.launches for location in locations if location}
        return Routine(tuple(reversed(phases)), slots, self._inputs)

    def _next_slot(self) -> int:
        self._count += 1
        return self._count - 1
