"""Launches on the GPU, through the driver as cuda-python shows it."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any

from .errors import BuildError, MissingCompilerError

if TYPE_CHECKING:
    from .kernel import Kernel
    from .launching import Launch

# The driver's own numbers.
DTYPES = {
    "uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7,
    "float64": 8, "bfloat16": 9, "float32_ftz": 10, "tfloat32": 11, "tfloat32_ftz": 12,
}  # fmt: skip
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3, "128/32": 4, "128/32+8": 5, "128/64": 6}

# id of a kernel -> (the kernel, kept alive; its loaded library)
_LIBRARIES: dict[int, tuple[Kernel, Any]] = {}
# (id of a kernel, device) -> (its handle; what that device was told about it)
_HANDLES: dict[tuple[int, int], tuple[Any, dict[Any, int]]] = {}


def launch(launch: Launch, stream: int | None = None) -> None:
    """Start a kernel on the current device, on `stream` or on torch's current one."""
    cu = _cuda()
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.dynamic_shared
    config.hStream = cu.CUstream(_stream() if stream is None else stream)
    config.attrs = attributes = _attributes(cu, launch)
    config.numAttrs = len(attributes)
    buffer = ctypes.create_string_buffer(launch.args, len(launch.args) + 128)
    start = ctypes.addressof(buffer)
    params = (ctypes.c_void_p * len(launch.kernel.params))(*(start + param.offset for param in launch.kernel.params))
    function = cu.CUfunction(int(_handle(launch)))
    _check(cu.cuLaunchKernelEx(config, function, ctypes.addressof(params), 0), f"launching {launch.kernel.name}")


def tensor_map(
    *, address: int, dtype: str, dims, strides, box, element_strides=None, swizzle: int | str = 0, fill: str = "zero"
) -> bytes:
    """cuTensorMapEncodeTiled.  Dimension 0 is the contiguous one; strides are bytes, of dimensions 1 and up."""
    cu = _cuda()
    rank = len(dims)
    found = _check(
        cu.cuTensorMapEncodeTiled(
            cu.CUtensorMapDataType(DTYPES[dtype]),
            rank,
            address,
            [cu.cuuint64_t(d) for d in dims],
            [cu.cuuint64_t(s) for s in strides] or [cu.cuuint64_t(0)],
            [cu.cuuint32_t(b) for b in box],
            [cu.cuuint32_t(s) for s in element_strides or [1] * rank],
            cu.CUtensorMapInterleave(0),
            cu.CUtensorMapSwizzle(SWIZZLES[swizzle]),
            cu.CUtensorMapL2promotion(2),                                    # 128 bytes, as Triton asks
            cu.CUtensorMapFloatOOBfill(int(fill == "nan")),
        ),
        f"encoding a tensor map of {tuple(dims)} {dtype}",
    )
    return ctypes.string_at(found.getPtr(), 128)


def _handle(launch: Launch) -> Any:
    """The loaded kernel, allowed the shared memory and the cluster that the launch asks for on the current device."""
    cu, kernel = _cuda(), launch.kernel
    device = int(_check(cu.cuCtxGetDevice(), "asking for the current device"))
    if id(kernel) not in _LIBRARIES:
        _LIBRARIES[id(kernel)] = (kernel, _load(cu, kernel, device))
    if (id(kernel), device) not in _HANDLES:
        library = _LIBRARIES[id(kernel)][1]
        found = _check(cu.cuLibraryGetKernel(library, kernel.name.encode()), f"finding {kernel.name}")
        _HANDLES[id(kernel), device] = (found, {})
    handle, told = _HANDLES[id(kernel), device]
    attributes, (x, y, z) = cu.CUfunction_attribute, launch.cluster
    for attribute, value in (
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.dynamic_shared),
        (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, int(x * y * z > 8)),
    ):
        if value > told.get(attribute, 0):
            result = cu.cuKernelSetAttribute(attribute, value, handle, cu.CUdevice(device))
            _check(result, f"allowing {kernel.name} {launch.dynamic_shared} bytes and clusters of {x * y * z}")
            told[attribute] = value
    return handle


def _load(cu: Any, kernel: Kernel, device: int) -> Any:
    """The cubin where it was built for this very device; else the PTX, which the driver finishes itself."""
    attributes = cu.CUdevice_attribute
    cc = tuple(
        _check(cu.cuDeviceGetAttribute(a, cu.CUdevice(device)), "asking for the compute capability")
        for a in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    if kernel.target.spelling[-1] == "a" and cc != kernel.target.cc:
        raise BuildError(
            f"{kernel.name} was built for {kernel.target.spelling}, which {kernel.target.examples} alone run; this GPU "
            f"is an sm_{cc[0]}{cc[1]}. Build it for that."
        )
    image = kernel.cubin if kernel.cubin and cc == kernel.target.cc else kernel.ptx.encode() + b"\0"
    result = cu.cuLibraryLoadData(image, [], [], 0, [], [], 0)
    return _check(result, f"loading {kernel.name} for {kernel.target.spelling}")


def _attributes(cu: Any, launch: Launch) -> list[Any]:
    kinds, found = cu.CUlaunchAttributeID, []
    if launch.cluster != (1, 1, 1):
        cluster = cu.CUlaunchAttribute()
        cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = launch.cluster
        found.append(cluster)
    if launch.pdl:
        pdl = cu.CUlaunchAttribute()
        pdl.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        pdl.value.programmaticStreamSerializationAllowed = 1
        found.append(pdl)
    if launch.cooperative:
        cooperative = cu.CUlaunchAttribute()
        cooperative.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        found.append(cooperative)
    return found


def _stream() -> int:
    torch = sys.modules.get("torch")
    return torch.cuda.current_stream().cuda_stream if torch and torch.cuda.is_initialized() else 0


@functools.cache
def _cuda() -> Any:
    try:
        import cuda.bindings.driver as cu
    except ImportError as error:
        raise MissingCompilerError("launching a kernel", "cuda-python", "pip install cuda-python") from error
    try:
        cu.cuDriverGetVersion()
    except RuntimeError as error:                                            # cuda-python is there, libcuda is not
        raise BuildError(
            "launching a kernel needs the NVIDIA driver; found no libcuda here. "
            "`with kda.simulator.capture(...)` runs launches on the CPU."
        ) from error
    return cu


def _check(result: tuple, asked: str) -> Any:
    """The value that came with a result code; a code that is not success is an error."""
    code, *values = result
    if int(code) != 0:
        hint = {
            100: "There is no GPU: `kda.simulator.capture` runs launches on the CPU.",
            201: "No CUDA context is current: make a CUDA tensor in this thread first.",
            209: "The kernel was built for another arch: build it for this GPU's.",
            222: "The driver is older than the compiler: update it, or install an older compiler.",
        }.get(int(code), "See the CUDA driver API's error of that name.")
        raise BuildError(f"{asked}: the driver answered {code.name} ({int(code)}). {hint}")
    return values[0] if values else None
