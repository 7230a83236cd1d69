"""Tensors of the CPU in the guise of a GPU's, for code that exchanges them by DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CPU, CUDA = 1, 2                             # kDLCPU, kDLCUDA


class Disguised:
    """A CPU tensor that claims to lie on a GPU: only the simulator follows the address."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **options: Any) -> Any:
        with torch._C.DisableTorchFunction():
            capsule = self.tensor.detach().__dlpack__()
        return _told(capsule, CUDA)


def unmasked(capsule: Any) -> Any:
    """Return a capsule that torch accepts, of a tensor that may be disguised."""
    return _told(capsule, CPU)


def _told(capsule: Any, device: int) -> Any:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    place = pointer(capsule, b"dltensor")
    ctypes.c_int.from_address(place + 8).value = device                         # DLTensor: data, then its device
    return capsule
