"""The CUDA runtime that a host function of the CuTe DSL sees during a capture.

Compiled host code never calls the driver: it calls `_cudaLibraryLoadData`, `_cudaLaunchKernelEx` and a few more by
name, and whoever links it decides what those are. Here they are Python functions, given to the linker as C callbacks
before it looks anywhere else, so no driver is asked. A CUDA function that is not in the table below is linked to a
refusal that names it.

An exception must not cross the C frames in between. A callback keeps it, answers with an error code, and `raised`
gives it back once the host function has returned.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from ptxkit.compile.driver import CLUSTER, COOPERATIVE, DTYPES, PDL, SWIZZLES, Attribute
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.launching import Launch

from ..tensormap import INTERLEAVES, encode
from .devices import ATTRIBUTES, resident
from .session import CaptureError, Session

SUCCESS = 0
SHARED_SIZE = 1                              # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
# What cuTensorMapEncodeTiled calls them, in its own order.
DRIVER_DTYPES, DRIVER_SWIZZLES = (*DTYPES, "16u6_align16b"), (*SWIZZLES,)


class RuntimeLaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        *((name, c_uint * 3) for name in ("grid", "block")),
        ("dynamic_shared", c_size_t), ("stream", c_void_p), ("attributes", POINTER(Attribute)), ("count", c_uint),
    )


class Callbacks:
    """Python functions that C code calls."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self._callbacks: dict[str, Any] = {}

    def callback(self, name: str, answer: Callable, types: Sequence[Any], returns: Any = c_int) -> int:
        """Return the address of a C function; it lives as long as this object."""
        self._callbacks[name] = ctypes.CFUNCTYPE(returns, *types)(self._guarded(answer))
        return ctypes.cast(self._callbacks[name], c_void_p).value or 0

    def tensor_map(self, to: int, dtype: int, rank: int, address: int, dims: Any, strides: Any, box: Any, steps: Any,
                   *more: int) -> None:
        """Do what cuTensorMapEncodeTiled does."""
        raw = encoded(dtype, address or 0, dims[:rank], strides[: rank - 1], box[:rank], steps[:rank], *more)
        ctypes.memmove(to, raw, len(raw))

    def raised(self) -> BaseException | None:
        """Return the exception of a callback since the last time, for the caller to raise."""
        error, self._raised = self._raised, None
        return error

    def _guarded(self, answer: Callable) -> Callable:
        def callback(*args):
            if self._raised is None:
                try:
                    return answer(*args) or SUCCESS
                except BaseException as error:
                    self._raised = error                                     # `raised` hands it over
            return SUCCESS                                                   # some host functions abort otherwise

        return callback


class Runtime(Callbacks):
    """The stand-in for one host function: its kernels, by the handles it was given."""

    def __init__(self, session: Session, kernels: dict[str, Kernel]):
        super().__init__()
        self.session, self.kernels = session, kernels
        self.tensors: Any = None             # what the call under way was given
        self._handles: dict[int, Kernel] = {}

    def address(self, name: str) -> int:
        """Return the address of a C function of this name; it lives as long as this object."""
        types, method = FUNCTIONS.get(name, ((), None))
        return self.callback(name, getattr(self, method) if method else functools.partial(self._refuse, name), types)

    def _refuse(self, name: str) -> None:
        raise CaptureError(
            f"the host function called {name.lstrip('_')}, which a capture does not replace. Make that call outside "
            "the compiled function."
        )

    # libraries and kernels

    def load(self, library, code, *options):
        library[0] = 1

    def get_kernel(self, handle, library, name):
        if (kernel := self.kernels.get(name.decode())) is None:
            raise CaptureError(f"the PTX has no kernel {name.decode()!r}; it has {', '.join(self.kernels)}.")
        handle[0] = number = len(self._handles) + 1
        self._handles[number] = kernel

    def kernel_attribute(self, value, attribute, kernel, device):
        value[0] = (self._handles[kernel].shared or 0) if attribute == SHARED_SIZE else 0

    def nothing(self, *args):
        """A setting that means nothing here: opting in to shared memory, the current device, a stream to wait for."""

    def init_library_once(self, state, init, load, error):
        """Answer tvm-ffi before each launch.  `state` stays zero: what it holds is unloaded from CUDA one day."""
        if not self._handles:
            library = c_void_p()
            ctypes.CFUNCTYPE(c_int, c_void_p)(init)(ctypes.addressof(library))
            ctypes.CFUNCTYPE(c_int, c_void_p, c_int)(load)(ctypes.addressof(library), 0)

    # the device

    def get_device(self, device):
        device[0] = 0

    def device_count(self, count):
        count[0] = 1

    def device_attribute(self, value, attribute, device):
        if attribute not in ATTRIBUTES:
            raise CaptureError(
                f"the host function asked for device attribute {attribute}, which a capture does not know. It "
                f"knows {', '.join(map(str, ATTRIBUTES))}."
            )
        value[0] = ATTRIBUTES[attribute](self.session.device)

    def occupancy(self, blocks, kernel, threads, dynamic_shared):
        loaded = self._handles[kernel]
        blocks[0] = resident(self.session.device, loaded.registers, loaded.shared, threads, dynamic_shared)

    # launches

    def launch_ex(self, config, kernel, params):
        c = config[0]
        self._launch(kernel, tuple(c.grid), tuple(c.block), c.dynamic_shared, params, attributes_of(c), c.stream)

    def launch(self, kernel, gx, gy, gz, bx, by, bz, params, dynamic_shared, stream):
        self._launch(kernel, (gx, gy, gz), (bx, by, bz), dynamic_shared, params, {}, stream)

    def _launch(self, handle, grid, block, dynamic_shared, params, attributes, stream):
        """`params` points at one pointer for each parameter; no stream is the current one."""
        kernel, cluster = self._handles[handle], attributes.get(CLUSTER, (1, 1, 1))
        pointers = zip(params[: len(kernel.params)], kernel.params)
        args = packed(kernel, (ctypes.string_at(pointer, param.size) for pointer, param in pointers))
        options = {"pdl": attributes.get(PDL, False), "cooperative": attributes.get(COOPERATIVE, False)}
        self.session.launch(Launch(kernel, grid, block, cluster, dynamic_shared, args, self.tensors, **options,
                                   stream=stream or None))


def attributes_of(config: RuntimeLaunchConfig) -> dict[int, Any]:
    """Return those attributes of a launch that mean something here."""
    values = {config.attributes[i].id: config.attributes[i].value for i in range(config.count)}
    attributes: dict[int, Any] = {key: bool(values[key][0]) for key in (PDL, COOPERATIVE) if key in values}
    return attributes | ({CLUSTER: tuple(values[CLUSTER][:3])} if CLUSTER in values else {})


def packed(kernel: Kernel, values: Iterable[bytes]) -> bytes:
    """Return the parameter buffer of a launch, from the bytes of each parameter."""
    buffer = bytearray(kernel.layout.size)
    for param, value in zip(kernel.params, values):
        buffer[param.offset : param.offset + param.size] = value
    return bytes(buffer)


def encoded(
    dtype: int, address: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], steps: Sequence[int],
    interleave: int, swizzle: int, promotion: int, fill: int, **im2col: Any,
) -> bytes:
    """Return a tensor map, from what cuTensorMapEncodeTiled is given; `im2col`: what makes it one of that mode."""
    if dtype >= len(DRIVER_DTYPES) or swizzle >= len(DRIVER_SWIZZLES):
        raise CaptureError(
            f"a tensor map of dtype {dtype} and swizzle {swizzle}, in the driver's numbers, is not simulated. Use one "
            f"of {', '.join(DRIVER_DTYPES)} and a swizzle among {', '.join(map(str, DRIVER_SWIZZLES))}."
        )
    return encode(
        address=address, dims=tuple(dims), strides=tuple(strides), box=tuple(box), element_strides=tuple(steps),
        dtype=DRIVER_DTYPES[dtype], swizzle=DRIVER_SWIZZLES[swizzle], fill=("zero", "nan")[fill],
        interleave=tuple(INTERLEAVES)[interleave], l2=promotion, **im2col,
    )


_P, _OUT, _HANDLE = c_void_p, POINTER(c_int), POINTER(c_void_p)
ENCODED = (_P, c_int, c_int, _P, *(POINTER(c_uint64),) * 2, *(POINTER(c_uint32),) * 2, *(c_int,) * 4)
# what host code calls -> its parameters, the method that answers
FUNCTIONS: dict[str, tuple[tuple, str]] = {
    "_cudaLibraryLoadData": ((_HANDLE, _P, _P, _P, c_uint, _P, _P, c_uint), "load"),
    "_cudaLibraryGetKernel": ((_HANDLE, _P, c_char_p), "get_kernel"),
    "_cuKernelGetAttribute": ((_OUT, c_int, _P, c_int), "kernel_attribute"),
    "_cudaFuncSetAttribute": ((_P, c_int, c_int), "nothing"),
    "_cudaKernelSetAttributeForDevice": ((_P, c_int, c_int, c_int), "nothing"),
    "_cudaGetDevice": ((_OUT,), "get_device"),
    "_cudaSetDevice": ((c_int,), "nothing"),
    "_cudaGetDeviceCount": ((_OUT,), "device_count"),
    "_cudaDeviceGetAttribute": ((_OUT, c_int, c_int), "device_attribute"),
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": ((_OUT, _P, c_int, c_size_t), "occupancy"),
    "_cudaLaunchKernelEx": ((POINTER(RuntimeLaunchConfig), _P, _HANDLE), "launch_ex"),
    "_cudaLaunchKernel": ((_P, *(c_int,) * 6, _HANDLE, c_size_t, _P), "launch"),
    "_cudaStreamSynchronize": ((_P,), "nothing"),
    "_cudaDeviceSynchronize": ((), "nothing"),
    "cuda_dialect_init_library_once": ((_P, _P, _P, _P), "init_library_once"),
    "_cuTensorMapEncodeTiled": (ENCODED, "tensor_map"),
}
