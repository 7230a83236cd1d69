"""Launches on the GPU, through the driver's library.

What does not change from one launch of a kernel to the next is made ready once: the loaded kernel, the configuration
with its attributes, a buffer for the arguments and a pointer to each. A launch then fills in grid, stream and
arguments. Numbers and layouts are those of the CUDA driver API; tests/ptxkit/compile compiles its header against them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

from ptxkit.temporary import replaced

from .code import Code, Dim3
from .errors import BuildError

# The driver's own numbers.
DTYPES = {
    "uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7,
    "float64": 8, "bfloat16": 9, "float32_ftz": 10, "tfloat32": 11, "tfloat32_ftz": 12,
    "16u4_align8b": 13, "16u4_align16b": 14,
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3, "128/32": 4, "128/32+8": 5, "128/64": 6}
COOPERATIVE, CLUSTER, PDL = 2, 4, 6          # attributes of a launch
DYNAMIC_SHARED, ANY_CLUSTER = 8, 14          # attributes of a kernel: most dynamic shared memory, clusters above 8
CC_MAJOR, CC_MINOR = 75, 76                  # attributes of a device
NO_CONTEXT = 201
MAP_ALIGNMENT = 64                           # alignment of a tensor map in memory, in bytes

_P, _HANDLE = c_void_p, POINTER(c_void_p)
FUNCTIONS: dict[str, tuple] = {
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuCtxSetCurrent": (_P,),
    "cuDevicePrimaryCtxRetain": (_HANDLE, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuKernelSetAttribute": (c_int, c_int, _P, c_int),
    "cuLaunchKernelEx": (_P, _P, _P, _P),
    "cuLibraryGetKernel": (_HANDLE, _P, c_char_p),
    "cuLibraryLoadData": (_HANDLE, c_char_p, _P, _P, c_uint, _P, _P, c_uint),
    "cuTensorMapEncodeTiled": (
        _P, c_int, c_uint32, _P, *(POINTER(c_uint64),) * 2, *(POINTER(c_uint32),) * 2, *(c_int,) * 4,
    ),
}


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes, of which at most three numbers matter here."""

    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", c_uint),
        ("grid_y", c_uint),
        ("grid_z", c_uint),
        ("block", c_uint * 3),
        ("dynamic_shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(Attribute)),
        ("count", c_uint),
    )


class LaunchShape(NamedTuple):
    """What launches share that differ in grid, arguments and stream alone."""

    block: Dim3                              # threads of a CTA
    cluster: Dim3 = (1, 1, 1)                # CTAs of a cluster
    dynamic_shared: int = 0                  # bytes of a CTA
    pdl: bool = False                        # may start before the launch ahead of it has ended
    cooperative: bool = False                # all CTAs run at once


class _Slot:
    """What one launch hands to the driver; threads that launch at once have one each."""

    def __init__(self, kernel: Code, shape: LaunchShape):
        size = kernel.layout.size
        memory = ctypes.create_string_buffer(size + MAP_ALIGNMENT)
        self.buffer = (ctypes.c_char * size).from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)
        address = ctypes.addressof(self.buffer)
        self.params = (c_void_p * len(kernel.params))(*(address + param.offset for param in kernel.params))
        attributes = _attributes(shape)
        self.config = LaunchConfig(
            block=shape.block, dynamic_shared=shape.dynamic_shared, attributes=attributes, count=len(attributes)
        )
        self.pointers = ctypes.addressof(self.config), ctypes.addressof(self.params)


class _Ready:
    """A kernel that a device has loaded, for launches of one shape."""

    def __init__(self, kernel: Code, shape: LaunchShape, device: int):
        self.kernel, self.shape, self.device = kernel, shape, device         # an id in _READY is of a kernel that lives
        self.handle = _handle(kernel, device).allowing(shape)
        self.call = _cuda().cuLaunchKernelEx
        self.attributes = _attributes(shape)                                 # C reads them as long as this lives
        self.idle: list[_Slot] = []

    def described(self, grid: Dim3) -> tuple[int, ...]:
        """Return what does not change from one launch to the next, as launch_list.c reads it."""
        x, y, z = self.shape.block
        return (*grid, x, y, z, self.shape.dynamic_shared, ctypes.addressof(self.attributes), len(self.attributes))

    def launch(self, grid: Dim3, values: Sequence[Any], args: Sequence[Any], stream: int) -> None:
        try:
            slot = self.idle.pop()
        except IndexError:
            slot = _Slot(self.kernel, self.shape)
        config, (config_at, params_at) = slot.config, slot.pointers
        config.grid_x, config.grid_y, config.grid_z = grid
        config.stream = stream
        self.kernel.write(slot.buffer, values, args)
        code = self.call(config_at, self.handle, params_at, None)
        if code == NO_CONTEXT:                                               # this thread has not used CUDA yet
            make_current(self.device)
            code = self.call(config_at, self.handle, params_at, None)
        self.idle.append(slot)
        if code:
            check(code, f"launching {self.kernel.name}")
        ACCEPTED[0] += 1


class _Handle(NamedTuple):
    """A kernel that a device has loaded."""

    kernel: Code
    device: int
    handle: int
    attributes: dict[int, int]                     # what the driver was told about it

    def allowing(self, shape: LaunchShape) -> int:
        """Allow this kernel the shared memory and the cluster of a launch."""
        x, y, z = shape.cluster
        for attribute, value in ((DYNAMIC_SHARED, shape.dynamic_shared), (ANY_CLUSTER, int(x * y * z > 8))):
            if value > self.attributes.get(attribute, 0):
                doing = f"allowing {self.kernel.name} {shape.dynamic_shared} bytes and clusters of {x * y * z}"
                check(_cuda().cuKernelSetAttribute(attribute, value, self.handle, self.device), doing)
                self.attributes[attribute] = value
        return self.handle


# id of a kernel, device, shape of its launches
_READY: dict[tuple[int, int, LaunchShape], _Ready] = {}
# id of a kernel, device
_HANDLES: dict[tuple[int, int], _Handle] = {}
_LOADING = threading.RLock()
ACCEPTED = [0]                               # launches that the driver has accepted, without those of launch_list.c
PRETENDED = -1                               # the number of a device that is not there
_torch: Any = None                           # torch._C, once torch uses CUDA


def launch(
    kernel: Code, grid: Dim3, shape: LaunchShape, values: Sequence[Any], args: Sequence[Any], stream: int | None = None,
    ready_on: dict[int, _Ready] | None = None,
) -> None:
    """Start a kernel on the current device, on `stream` or on torch's current one; `values` are `addresses(args)`.

    `ready_on` is where launches that share kernel and shape find what is ready, by device.
    """
    try:
        device, stream = current(stream)
    except BuildError:
        kernel.write(bytearray(kernel.layout.size), values, args)            # a wrong argument is named first
        raise
    loaded = None if ready_on is None else ready_on.get(device)
    if loaded is None:
        loaded = ready(kernel, shape, device)
        if ready_on is not None:
            ready_on[device] = loaded
    loaded.launch(grid, values, args, stream)


def ready(kernel: Code, shape: LaunchShape, device: int) -> _Ready:
    """Return the kernel as the device has loaded it, for launches of one shape."""
    try:
        return _READY[id(kernel), device, shape]
    except KeyError:
        with _LOADING:
            return _READY.setdefault((id(kernel), device, shape), _Ready(kernel, shape, device))


def tensor_map(
    *, address: int, dtype: str, dims, strides, box, element_strides=None, swizzle: int | str = 0, fill: str = "zero"
) -> bytes:
    """cuTensorMapEncodeTiled.  Dimension 0 is the contiguous one; strides are bytes, of dimensions 1 and up."""
    rank = len(dims)
    memory = ctypes.create_string_buffer(128 + MAP_ALIGNMENT)
    address_of_map = ctypes.addressof(memory) + -ctypes.addressof(memory) % MAP_ALIGNMENT
    code = _cuda().cuTensorMapEncodeTiled(
        address_of_map,
        DTYPES[dtype],
        rank,
        address,
        (c_uint64 * rank)(*dims),
        (c_uint64 * rank)(*strides),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*(element_strides or [1] * rank)),
        0,                                                                   # interleave: none
        SWIZZLES[swizzle],
        2,                                                                   # promoted to 128 bytes, as Triton asks
        int(fill == "nan"),
    )
    check(code, f"encoding a tensor map of {tuple(dims)} {dtype}")
    return ctypes.string_at(address_of_map, 128)


def current(stream: int | None = None) -> tuple[int, int]:
    """Return the current device, and the stream there: `stream`, or torch's current one."""
    global _torch
    if _torch is None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            device = c_int()
            check(_cuda().cuCtxGetDevice(device), "asking for the current device")
            return device.value, stream or 0
        _torch = torch._C
    device = _torch._cuda_getDevice()
    return device, _torch._cuda_getCurrentRawStream(device) if stream is None else stream


def make_current(device: int) -> None:
    """Give this thread the context that torch uses on the device."""
    context = c_void_p()
    check(_cuda().cuDevicePrimaryCtxRetain(context, device), "asking for the device's context")
    check(_cuda().cuCtxSetCurrent(context), "making the device's context current")


def _handle(kernel: Code, device: int) -> _Handle:
    if device == PRETENDED:
        return _Handle(kernel, device, 0, {})
    if (id(kernel), device) not in _HANDLES:
        handle, library = c_void_p(), _load(kernel, device)
        check(_cuda().cuLibraryGetKernel(handle, library, kernel.name.encode()), f"finding {kernel.name}")
        _HANDLES[id(kernel), device] = _Handle(kernel, device, handle.value, {})  # type: ignore[arg-type]
    return _HANDLES[id(kernel), device]


def _load(kernel: Code, device: int) -> c_void_p:
    """The cubin where it was built for this very device; else the PTX, which the driver finishes itself."""
    cc, value = [], c_int()
    for attribute in (CC_MAJOR, CC_MINOR):
        check(_cuda().cuDeviceGetAttribute(value, attribute, device), "asking for the compute capability")
        cc.append(value.value)
    if kernel.target.spelling[-1] == "a" and tuple(cc) != kernel.target.cc:
        raise BuildError(
            f"{kernel.name} was built for {kernel.target.spelling}, which {kernel.target.examples} alone run; this GPU "
            f"is an sm_{cc[0]}{cc[1]}. Build it for that."
        )
    image = kernel.cubin if kernel.cubin and tuple(cc) == kernel.target.cc else kernel.ptx.encode()
    library = c_void_p()
    code = _cuda().cuLibraryLoadData(library, image, None, None, 0, None, None, 0)
    if code == NO_CONTEXT:
        make_current(device)
        code = _cuda().cuLibraryLoadData(library, image, None, None, 0, None, None, 0)
    check(code, f"loading {kernel.name} for {kernel.target.spelling}")
    return library


class _Pretended:
    """The driver and torch's part in launches, for a device that is not there: every function does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0

    def _cuda_getDevice(self) -> int:
        return PRETENDED


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Let launches inside the block do all but call the driver, as if there were a GPU: to time the host's part."""
    nothing = _Pretended()
    with replaced(sys.modules[__name__], _torch=nothing, _cuda=lambda: nothing):
        yield


def function_that_launches() -> int | None:
    """Return the address of cuLaunchKernelEx; None where launches are pretended."""
    function = _cuda().cuLaunchKernelEx
    return ctypes.cast(function, c_void_p).value if isinstance(function, ctypes._CFuncPtr) else None  # type: ignore


def _attributes(shape: LaunchShape) -> ctypes.Array:
    attributes = []
    if shape.cluster != (1, 1, 1):
        attributes.append(Attribute(CLUSTER, 0, shape.cluster))
    if shape.pdl:
        attributes.append(Attribute(PDL, 0, (1,)))
    if shape.cooperative:
        attributes.append(Attribute(COOPERATIVE, 0, (1,)))
    return (Attribute * len(attributes))(*attributes)


@functools.cache
def _cuda() -> Any:
    """The driver's library."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise BuildError(
            "launching a kernel needs the NVIDIA driver; found no libcuda here. "
            "`with ptxkit.capture(...)` runs launches on the CPU."
        ) from error
    for name, types in FUNCTIONS.items():
        try:
            getattr(cuda, name).argtypes = types
        except AttributeError as error:
            raise BuildError(f"the NVIDIA driver here has no {name}: it is older than CUDA 12.0. Update it.") from error
    return cuda


def check(code: int, doing: str) -> None:
    """A code that is not success is an error."""
    if code != 0:
        name = c_char_p()
        _cuda().cuGetErrorName(code, name)
        hint = {
            3: "CUDA is not in use: make a CUDA tensor first. `ptxkit.capture` runs launches on the CPU.",
            100: "There is no GPU: `ptxkit.capture` runs launches on the CPU.",
            201: "No CUDA context is current: make a CUDA tensor in this thread first.",
            209: "The kernel was built for another arch: build it for this GPU's.",
            222: "The driver is older than the compiler: update it, or install an older compiler.",
        }.get(code, "See the CUDA driver API's error of that name.")
        named = (name.value or b"an unknown error").decode()
        raise BuildError(f"{doing}: the driver answered {named} ({code}). {hint}")
