"""What is asked of memory that a call writes: each element once, seen by no other tensor of the call, as it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

SHARED = "in memory of its own, because the call writes it"
SHARED_FIX = "Pass tensors of their own, or a clone() of one of them."
NEGATED = "memory that holds the numbers themselves, because it is written"
NEGATED_FIX = "Use x.resolve_neg() once, for all calls."


def may_overlap(x: torch.Tensor) -> bool:
    """Whether the stride of some axis is smaller than the extent of the axes with smaller strides."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n > 1):
        if stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False


def shared(tensors: Sequence[torch.Tensor | None], names: Sequence[str], written: Iterable[str]) -> str | None:
    """The first of the tensors called `written` that has an element in common with another one."""
    storages = [0 if x is None else x.untyped_storage().data_ptr() for x in tensors]
    held = [storage for storage in storages if storage]
    if len({*held}) == len(held):
        return None
    for name in written:
        i = names.index(name)
        for other, y, storage in zip(names, tensors, storages):
            if storage and storage == storages[i] and other != name and _meet(tensors[i], y):
                return f"{name} in the memory of {other}"
    return None


def negated(x: torch.Tensor | None) -> str | None:
    """Whether torch reads memory as the negative of what is there, which a kernel that writes it does not see."""
    return "a view that negates its memory (is_neg())" if x is not None and x.is_neg() else None


def _meet(x: Any, y: Any) -> bool:
    """Whether two tensors of one storage may have an element in common.

    Views that take turns in every row of a buffer have none: below a stride of which all larger strides are multiples,
    each tensor covers one range of bytes, the same in every row.
    """
    gap, axes, others = y.data_ptr() - x.data_ptr(), _axes(x), _axes(y)
    if not (x.numel() and y.numel()) or gap >= _reach(x, axes) or -gap >= _reach(y, others):
        return False
    for row in {stride for stride, _ in (*axes, *others)}:
        if not any(stride % row for stride, _ in (*axes, *others) if stride > row):
            place = gap % row  # offset of y's first element in a row of x
            if _reach(x, axes, row) <= place and place + _reach(y, others, row) <= row:
                return False
    return True


def _axes(x: torch.Tensor) -> list[tuple[int, int]]:
    """Bytes from one element to the next, and the number of elements."""
    return [(stride * x.itemsize, n) for stride, n in zip(x.stride(), x.shape) if n > 1 and stride]


def _reach(x: torch.Tensor, axes: Iterable[tuple[int, int]], below: float = math.inf) -> int:
    """Bytes from the first element to the end of the last one, along the axes with strides smaller than `below`."""
    return x.itemsize + sum(stride * (n - 1) for stride, n in axes if stride < below)
