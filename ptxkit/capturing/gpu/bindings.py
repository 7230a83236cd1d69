"""cuda-python during a capture: which answer each function of cuda.bindings.driver and .runtime gives.

A function without an answer refuses by its name: with a driver's handles that are not the driver's, it would crash.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ..devices import ATTRIBUTES, PROPERTIES
from ..session import CaptureError
from . import driver as d
from . import images
from .patching import Patches, Table
from .state import Gpu


class Made(NamedTuple):
    """An answer whose value is of a type of cuda-python."""

    kind: str
    answer: Callable[..., Any]


def _nothing(gpu: Gpu, *args: Any) -> None:
    """Do nothing: this is done already, or means nothing here."""


def _of(value: Any) -> Callable[..., Any]:
    return lambda gpu, *args: value


def _fill(width: int) -> Callable[..., Any]:
    return lambda gpu, to, value, count, *stream: d.fill(gpu, to, value, count, width)


NOTHING = (
    "StreamDestroy", "EventDestroy", "FuncSetAttribute", "FuncSetCacheConfig", "LibraryUnload", "ProfilerStart",
    "ProfilerStop", "GraphDestroy", "GraphExecDestroy", "GraphUpload",
)
# what the driver and the runtime call alike: cuStreamCreate, cudaStreamCreate
SHARED: dict[str, Any] = dict.fromkeys(NOTHING, _nothing) | {
    "DeviceGetAttribute": d.attribute,
    "DeviceCanAccessPeer": _of(0),
    "DeviceGetPCIBusId": _of(b"0000:00:00.0"),
    **dict.fromkeys(("StreamCreate", "StreamCreateWithPriority"), Made("stream", d.create_stream)),
    **dict.fromkeys(("StreamSynchronize", "StreamQuery"), d.await_stream),
    "StreamWaitEvent": d.wait,
    "StreamBeginCapture": d.begin_capture,
    "StreamEndCapture": Made("graph", d.end_capture),
    "EventCreate": Made("event", d.create_event),
    **dict.fromkeys(("EventRecord", "EventRecordWithFlags"), d.record),
    **dict.fromkeys(("EventSynchronize", "EventQuery"), d.await_event),
    "EventElapsedTime": d.elapsed,
    **dict.fromkeys(("GraphInstantiate", "GraphInstantiateWithFlags"),
                    Made("graphExec", lambda gpu, graph, flags: int(graph))),
    "GraphGetNodes": d.nodes,
    "GraphLaunch": d.replay,
    "MemGetInfo": d.memory_info,
    "LibraryLoadData": Made("library", d.load),
    "LibraryLoadFromFile": Made("library", d.load_file),
    "LibraryGetKernel": Made("kernel", images.function),
    "LibraryEnumerateKernels": Made("kernel", lambda gpu, count, library: images.functions(gpu, library, count)),
    **{f"OccupancyMaxActiveBlocksPerMultiprocessor{flags}": d.blocks for flags in ("", "WithFlags")},
    "OccupancyAvailableDynamicSMemPerBlock": d.spare_shared,
}


def _shared(prefix: str, kind: Callable[[str], str]) -> dict[str, Any]:
    """Return the shared answers under one API's names; `kind` is how it calls a type."""
    named = {each: Made(kind(a.kind), a.answer) if isinstance(a, Made) else a for each, a in SHARED.items()}
    return {prefix + each: answer for each, answer in named.items()}


DRIVER: dict[str, Any] = _shared("cu", lambda kind: f"CU{kind}") | dict.fromkeys((
    "cuInit", "cuCtxDestroy", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxSetLimit",
    "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset", "cuModuleUnload", "cuFuncLoad", "cuKernelSetAttribute",
    "cuMemHostRegister", "cuMemHostUnregister",
), _nothing) | {
    "cuDriverGetVersion": Made("CUDA_VERSION", _nothing),
    "cuDeviceGetCount": _of(1),
    "cuDeviceGet": Made("CUdevice", lambda gpu, ordinal: int(ordinal)),
    "cuDeviceGetName": lambda gpu, length, device: gpu.name.encode()[:length],
    "cuDeviceTotalMem": lambda gpu, device: gpu.memory,
    "cuDeviceComputeCapability": lambda gpu, device: gpu.chip.target.cc,
    **dict.fromkeys((
        "cuDevicePrimaryCtxRetain", "cuCtxCreate", "cuCtxGetCurrent", "cuCtxPopCurrent", "cuStreamGetCtx",
    ), Made("CUcontext", _of(d.CONTEXT))),
    "cuDevicePrimaryCtxGetState": _of((0, 1)),
    "cuCtxGetDevice": Made("CUdevice", _of(0)),
    "cuCtxGetStreamPriorityRange": _of((0, 0)),
    "cuCtxGetLimit": _of(0),
    "cuCtxSynchronize": d.await_all,
    "cuStreamIsCapturing": lambda gpu, stream: _capturing("driver", gpu),
    **dict.fromkeys(("cuMemAlloc", "cuMemAllocAsync", "cuMemAllocManaged"), Made("CUdeviceptr", d.allocate)),
    **dict.fromkeys(("cuMemAllocHost", "cuMemHostAlloc"), d.allocate),
    **dict.fromkeys(("cuMemFree", "cuMemFreeAsync", "cuMemFreeHost"), d.free),
    **{f"cuMemsetD{8 * n}{late}": _fill(n) for n in (1, 2, 4) for late in ("", "Async")},
    **{f"cuMemcpy{way}{late}": d.copy for way in ("", "HtoD", "DtoH", "DtoD") for late in ("", "Async")},
    "cuModuleLoad": Made("CUmodule", d.load_file),
    **dict.fromkeys(("cuModuleLoadData", "cuModuleLoadDataEx"), Made("CUmodule", d.load)),
    "cuModuleGetFunction": Made("CUfunction", images.function),
    "cuLibraryGetModule": Made("CUmodule", lambda gpu, library: int(library)),
    "cuLibraryGetKernelCount": lambda gpu, library: len(images.functions(gpu, library, 1 << 30)),
    "cuKernelGetFunction": Made("CUfunction", lambda gpu, kernel: int(kernel)),
    **dict.fromkeys(("cuKernelGetAttribute", "cuFuncGetAttribute"), d.function_attribute),
    **dict.fromkeys(("cuFuncGetName", "cuKernelGetName"), d.name_of),
    "cuOccupancyMaxActiveClusters": d.clusters,
    "cuOccupancyMaxPotentialClusterSize": d.largest_cluster,
    "cuLaunchKernel": d.launch,
    "cuLaunchKernelEx": d.launch_ex,
    "cuTensorMapEncodeTiled": d.tensor_map,
    "cuTensorMapEncodeIm2col": d.im2col_map,
}

RUNTIME: dict[str, Any] = _shared("cuda", lambda kind: f"cuda{kind[0].upper()}{kind[1:]}_t") | dict.fromkeys((
    "cudaSetDevice", "cudaInitDevice", "cudaDeviceReset", "cudaGetLastError", "cudaPeekAtLastError", "cudaHostRegister",
    "cudaHostUnregister", "cudaDeviceSetLimit", "cudaKernelSetAttributeForDevice", "cudaCtxResetPersistingL2Cache",
), _nothing) | {
    "cudaDriverGetVersion": Made("CUDART_VERSION", _nothing),
    "cudaRuntimeGetVersion": Made("CUDART_VERSION", _nothing),
    "cudaGetDeviceCount": _of(1),
    "cudaGetDevice": _of(0),
    "cudaGetDeviceProperties": lambda gpu, device: _properties(gpu),
    "cudaDeviceGetStreamPriorityRange": _of((0, 0)),
    "cudaDeviceGetLimit": _of(0),
    "cudaStreamCreateWithFlags": Made("cudaStream_t", d.create_stream),
    "cudaDeviceSynchronize": d.await_all,
    "cudaStreamIsCapturing": lambda gpu, stream: _capturing("runtime", gpu),
    "cudaEventCreateWithFlags": Made("cudaEvent_t", d.create_event),
    **dict.fromkeys(("cudaMalloc", "cudaMallocAsync", "cudaMallocManaged", "cudaMallocHost", "cudaHostAlloc"),
                    d.allocate),
    **dict.fromkeys(("cudaFree", "cudaFreeAsync", "cudaFreeHost"), d.free),
    **dict.fromkeys(("cudaMemcpy", "cudaMemcpyAsync"), d.copy),
    **dict.fromkeys(("cudaMemset", "cudaMemsetAsync"), _fill(1)),
}
ERRORS = {"cuGetErrorName", "cuGetErrorString", "cudaGetErrorName", "cudaGetErrorString"}


def put(patches: Patches) -> None:
    """Let cuda-python answer for the capture's GPU until `patches` are undone."""
    for name in ("driver", "runtime"):
        if table := _table(name):
            patches.answer(*table)


@functools.cache
def _table(name: str) -> tuple[Any, Table] | None:
    """Return the module, and an answer or a refusal for each of its functions; None without cuda-python."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return None
    module = importlib.import_module(f"cuda.bindings.{name}")
    success, prefix, table = (
        (module.CUresult.CUDA_SUCCESS, "cu", DRIVER) if name == "driver" else
        (module.cudaError_t.cudaSuccess, "cuda", RUNTIME)
    )
    functions = [each for each, member in vars(module).items() if callable(member) and not inspect.isclass(member)]
    called = [each for each in functions if re.match(f"{prefix}[A-Z]", each)]
    return module, {each: _answer(module, each, table.get(each), success) for each in called}


def _answer(module: Any, name: str, answer: Any, success: Any) -> Callable:
    if name in ERRORS:
        return lambda gpu, error: (success, _worded(error, name))
    if answer is None:

        def refuse(gpu: Gpu, *args: Any, **kwargs: Any) -> Any:
            raise CaptureError(
                f"the program called {name}, which a capture does not replace. Leave the call out inside a capture: "
                "ptxkit.standing.stand_in() tells whether there is one."
            )

        return refuse
    if isinstance(answer, Made) and not isinstance(kind := getattr(module, answer.kind), type):
        return lambda gpu, *args, **kwargs: (success, kind)                  # a constant of the module
    names = list(inspect.signature(getattr(module, name)).parameters)

    def answered(gpu: Gpu, *args: Any, **kwargs: Any) -> tuple:
        values = [*args, *(kwargs[each] for each in names[len(args) :] if each in kwargs)]
        if not isinstance(answer, Made):
            result = answer(gpu, *values)
            return (success,) if result is None else (success, *(result if isinstance(result, tuple) else [result]))
        result = answer.answer(gpu, *values)
        return success, [kind(each) for each in result] if isinstance(result, list) else kind(result)

    return answered


def _worded(error: Any, name: str) -> bytes:
    return str(error.name if name.endswith("Name") else f"{error.name}, in a capture").encode()


def _capturing(name: str, gpu: Gpu) -> Any:
    statuses, begin, *words = {
        "driver": ("CUstreamCaptureStatus", "CU_STREAM_CAPTURE_STATUS_", "NONE", "ACTIVE"),
        "runtime": ("cudaStreamCaptureStatus", "cudaStreamCaptureStatus", "None", "Active"),
    }[name]
    known = getattr(importlib.import_module(f"cuda.bindings.{name}"), statuses)
    return getattr(known, begin + words[bool(gpu.graph)])


def _properties(gpu: Gpu) -> Any:
    from cuda.bindings.runtime import cudaDeviceProp

    properties = cudaDeviceProp()
    properties.name, properties.totalGlobalMem = gpu.name.encode().ljust(256, b"\0"), gpu.memory
    for number, (_, name) in PROPERTIES.items():
        setattr(properties, name, ATTRIBUTES[number](gpu.chip))
    return properties
