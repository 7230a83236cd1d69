"""Copies of tensors that are aligned as CUDA aligns memory, for host code that asks for it; results go back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

ALIGNMENT = 512                              # CUDA's, in bytes; torch aligns to 64 bytes on a CPU


class Copies:
    """Aligned copies of whole storages, so that tensors that share memory still do."""

    def __init__(self):
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # (own bytes, copy, as it was)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same tensor in a storage that is aligned."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._made:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
            room = torch.empty(storage.nbytes() + ALIGNMENT, dtype=torch.uint8)
            copy = room[-room.data_ptr() % ALIGNMENT :][: storage.nbytes()]
            self._made[storage.data_ptr()] = whole, copy.copy_(whole), whole.clone()
        _, copy, _ = self._made[storage.data_ptr()]
        first = copy.data_ptr() - copy.untyped_storage().data_ptr()
        offset = first // tensor.itemsize + tensor.storage_offset()
        return torch.empty(0, dtype=tensor.dtype).set_(copy.untyped_storage(), offset, tensor.shape, tensor.stride())

    def give_back(self) -> None:
        """Copy back what was written into copies; other storages stay as they are, for others may have written them."""
        for whole, copy, before in self._made.values():
            if not torch.equal(copy, before):
                whole.copy_(copy)


@contextlib.contextmanager
def aligned(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Arguments with copies for tensors; what is written into those is in the tensors at the end of the block."""
    copies = Copies()
    yield [copies.copy_of(value.detach()) if isinstance(value, torch.Tensor) else value for value in values]
    copies.give_back()
