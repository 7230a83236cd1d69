"""What torch allocates during a capture lies in the capture's arena.

A dispatch mode sees each operator of the capture's thread, below autograd and wherever it is called from.  Memory that
an operator returns and that is nobody's yet is moved into the arena; memory that an operator writes is noted as
written, so that a kernel that reads what nobody wrote is found.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..arena import Arena
from .modes import Unseen

BUILTIN = ("aten", "prim", "prims")          # torch's own operators: they run on the CPU
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
UNOWNED = {"lift_fresh"}                     # they return what torch.tensor has just made
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
CANNOT_GROW = "resize storage that is not resizable"


class OperatorFacts(NamedTuple):
    """About an operator."""

    program: bool                            # it is the program's own: what it calls is seen, too
    empty: bool                              # it writes nothing
    fresh: bool                              # it may return new memory
    unowned: bool                            # that of its argument is new, too
    written: tuple[tuple[int, str], ...]     # arguments that it writes: positions and names


@functools.lru_cache(maxsize=4096)
def _facts(func: Any) -> OperatorFacts:
    name, schema = func._schema.name.partition("::")[2], func._schema
    aliases = ((i, argument.name, argument.alias_info) for i, argument in enumerate(schema.arguments))
    written = tuple((i, argument) for i, argument, alias in aliases if alias is not None and alias.is_write)
    unowned = name in UNOWNED
    fresh = unowned or any(result.alias_info is None for result in schema.returns)
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    composite = func.namespace not in BUILTIN and has_kernel(func.name(), "CPU")
    return OperatorFacts(composite, name in EMPTY, fresh, unowned, written)


class Allocations(Unseen):
    """The mode of one capture."""

    def __init__(self, arena: Arena):
        super().__init__()
        self.arena = arena

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile works as it does without the mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not PLAIN.issuperset(types):      # tensors of another kind call operators on plain ones
            return NotImplemented
        kwargs, facts = kwargs or {}, _facts(func)
        if facts.program:
            with self:                       # torch switches a mode off inside of itself
                result = func.redispatch(CPU, *args, **kwargs)
        else:
            result = self._called(func, facts, args, kwargs)
        for tensor in _written(facts, args, kwargs):
            if (block := self.arena.block_at(tensor.data_ptr())) is not None:
                block.wrote_tensor(tensor)
        if facts.fresh:
            self._take_in(result, facts.empty, () if facts.unowned else args)
        return result

    def _called(self, func: Any, facts: OperatorFacts, args: tuple, kwargs: dict) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if CANNOT_GROW not in str(error):
                raise
        for tensor in _written(facts, args, kwargs):                           # torch's own memory can grow
            if self.arena.block_at(tensor.data_ptr()) is not None:
                tensor.set_(tensor.clone(memory_format=torch.preserve_format))  # type: ignore[call-overload]
        return func(*args, **kwargs)

    def _take_in(self, result: Any, empty: bool, args: tuple) -> None:
        """Move memory that nobody has yet into the arena."""
        moved: dict[int, torch.UntypedStorage] = {}
        given = None
        for x in _tensors(result):
            if type(x) is not torch.Tensor or not _plain(x):
                continue
            size, begin = x.untyped_storage().nbytes(), x.untyped_storage().data_ptr()
            if not size or self.arena.block_at(begin) is not None:
                continue
            if given is None:
                given = {y.untyped_storage().data_ptr() for y in _tensors(args) if _plain(y)}
            if begin in given:
                continue
            if begin not in moved:
                memory = self.arena.memory(size, written=not empty)
                if not empty:
                    ctypes.memmove(memory.data_ptr(), begin, size)
                moved[begin] = memory.untyped_storage()
            x.set_(moved[begin], x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]


def _written(facts: OperatorFacts, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    for i, name in facts.written:
        given = args[i] if i < len(args) else kwargs.get(name)
        yield from filter(_plain, _tensors(given))


def _plain(x: torch.Tensor) -> bool:
    """Return whether a tensor has memory here."""
    return x.device.type == "cpu" and x.layout == torch.strided and not x._is_zerotensor()


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for each in result:
            yield from _tensors(each)
