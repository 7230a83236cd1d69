"""Results that Python remembers by the kind of a call: its options, and the outlines of its tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
LIMIT = 4096                                 # results; a program that has more kinds of calls computes them again
# Whether types are those of plain tensors and of None.  Every call asks, so no function stands around it.
are_plain = frozenset({Tensor, torch.nn.Parameter, type(None)}).issuperset
_outline = operator.attrgetter("shape", "dtype", "device")


class Outline(NamedTuple):
    """The properties of a tensor that a Problem contains."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def dim(self) -> int:
        return len(self.shape)


def kind_of_call(tensors: Iterable[Any], *options: Any) -> tuple:
    """Return the key of a call; an AttributeError means that a value is no tensor."""
    return (*options, *[x if x is None else _outline(x) for x in tensors])


class Memo(dict[tuple, T], Generic[T]):
    """Results by `kind_of_call`; the look-up is that of a dict, because every call makes one."""

    def remember(self, key: tuple, result: T) -> T:
        if len(self) >= LIMIT:
            self.clear()
        self[key] = result
        return result
