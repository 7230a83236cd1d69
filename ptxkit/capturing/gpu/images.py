"""Modules that host code loads through the driver's API, and launches of their kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from ptxkit.compile.code import Dim3, entries
from ptxkit.compile.driver import CLUSTER, COOPERATIVE, PDL
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.launching import Launch

from ... import launches
from ..runtime import packed
from ..session import CaptureError
from .state import Gpu


class Image(NamedTuple):
    """A module or library: PTX, or machine code, which nobody here can run."""

    kernels: dict[str, Kernel] | None


class LoadedFunction(NamedTuple):
    """A kernel of an image."""

    name: str
    kernel: Kernel | None                    # None: there is machine code alone

    @property
    def registers(self) -> int | None:
        return self.kernel.registers if self.kernel else None

    @property
    def shared(self) -> int | None:
        return self.kernel.shared if self.kernel else None


def load(gpu: Gpu, data: Any) -> int:
    """Return the handle of a module whose bytes are given, or their address."""
    code = ctypes.string_at(data) if isinstance(data, int) else bytes(data)
    text = code.rstrip(b"\0")
    kernels = None
    if b".version" in text and b".target" in text and not text.startswith(b"\x7fELF"):
        ptx, target = text.decode(), gpu.chip.target
        kernels = {name: Kernel.of(name, ptx, None, target) for name in entries(ptx)}
    return keep(gpu, Image(kernels))


def keep(gpu: Gpu, thing: Any) -> int:
    handle = gpu.handle()
    gpu.objects[handle] = thing
    return handle


def function(gpu: Gpu, image: Any, name: Any) -> int:
    """Return the handle of a kernel; machine code has one by any name."""
    kernels = object_of(gpu, image, Image).kernels
    wanted = name.decode() if isinstance(name, bytes) else str(name)
    if kernels is not None and wanted not in kernels:
        raise CaptureError(f"the PTX has no kernel {wanted!r}; it has {', '.join(kernels)}.")
    return keep(gpu, LoadedFunction(wanted, kernels[wanted] if kernels is not None else None))


def functions(gpu: Gpu, image: Any, count: int) -> list[int]:
    kernels = object_of(gpu, image, Image).kernels
    known = {"a kernel of machine code": None} if kernels is None else kernels
    return [keep(gpu, LoadedFunction(name, kernel)) for name, kernel in known.items()][:count]


def object_of(gpu: Gpu, handle: Any, kind: type) -> Any:
    """Return what a handle stands for."""
    thing = gpu.objects.get(int(handle))
    if not isinstance(thing, kind):
        what = "function" if kind is LoadedFunction else kind.__name__.lower()
        raise CaptureError(
            f"handle {int(handle):#x} is no {what} of this capture. Load modules, and create events, inside the block."
        )
    return thing


def launch(
    gpu: Gpu, handle: Any, grid: Dim3, block: Dim3, dynamic_shared: int, params: Any, extra: Any,
    attributes: dict[int, Any] | None = None, stream: int | None = None,
) -> None:
    """Do what cuLaunchKernel does."""
    name, kernel = object_of(gpu, handle, LoadedFunction)
    if kernel is None:
        fix = "Load the PTX (nvrtcGetPTX), or compile through ptxkit.compile.nvrtc."
        raise CaptureError(f"{name} was loaded as machine code; a capture runs PTX. {fix}")
    if extra:
        raise CaptureError(f"{name} was launched with `extra`; a capture reads kernelParams. Pass parameters there.")
    options = attributes or {}
    cluster = options.get(CLUSTER) or launches.own_cluster(kernel.ptx, name, gpu.session.arch)
    args = packed(kernel, _values(params, [param.size for param in kernel.params], name))
    pdl, cooperative = (bool(options.get(key)) for key in (PDL, COOPERATIVE))
    described = Launch(kernel, grid, block, cluster, dynamic_shared, args, None, pdl, cooperative, stream=stream)
    gpu.session.launch(described)


def _values(params: Any, sizes: Sequence[int], name: str) -> list[bytes]:
    """Return the bytes of each parameter: from (values, their ctypes types), or from an array of pointers to them."""
    if isinstance(params, tuple | list):
        values, types = params
        if len(values) != len(sizes):
            raise CaptureError(f"{len(values)} parameters; {name} has {len(sizes)}.")
        return [_bytes(value, kind, size) for value, kind, size in zip(values, types, sizes)]
    if not params:
        return [b""] * len(sizes)
    pointers = (ctypes.c_void_p * len(sizes)).from_address(int(params))
    return [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes)]


def _bytes(value: Any, kind: Any, size: int) -> bytes:
    if hasattr(value, "getPtr"):             # an object of cuda.bindings: a pointer, a tensor map
        return ctypes.string_at(int(value.getPtr()), size)
    if isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
        return bytes(value)[:size]
    return bytes(kind(value))[:size] if kind is not None else int(value).to_bytes(size, "little", signed=False)
