"""cuda-python during a capture: which answer each function of cuda.bindings.driver and .runtime gives.

A function without an answer refuses by its name: with a driver's handles that are not the driver's, it would crash.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from ..session import CaptureError
from . import driver as d
from . import images
from .patching import Patches, Table
from .state import Gpu


class Made:
    """An answer whose value is of a type of cuda-python."""

    def __init__(self, kind: str, answer: Callable[..., Any]):
        self.kind, self.answer = kind, answer


def _nothing(gpu: Gpu, *args: Any) -> None:
    """Do nothing: this is done already, or means nothing here."""


def _of(value: Any) -> Callable[..., Any]:
    return lambda gpu, *args: value


def _context(*args: Any) -> int:
    return d.CONTEXT


def _handle(gpu: Gpu, *args: Any) -> int:
    return gpu.handle()


def _name(gpu: Gpu, *args: Any) -> bytes:
    return gpu.name.encode()


def _fill(width: int) -> Callable[..., Any]:
    return lambda gpu, to, value, count, *stream: d.fill(gpu, to, value, count, width)


NOTHING = dict.fromkeys((
    "cuInit", "cuCtxDestroy", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxSetLimit",
    "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset", "cuStreamDestroy",
    "cuEventDestroy", "cuModuleUnload", "cuLibraryUnload",
    "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuFuncLoad", "cuKernelSetAttribute", "cuMemHostRegister",
    "cuMemHostUnregister", "cuProfilerStart", "cuProfilerStop", "cuGraphDestroy", "cuGraphExecDestroy", "cuGraphUpload",
), _nothing)
DRIVER: dict[str, Any] = NOTHING | {
    "cuDriverGetVersion": Made("CUDA_VERSION", _nothing),
    "cuDeviceGetCount": _of(1),
    "cuDeviceGet": Made("CUdevice", lambda gpu, ordinal: int(ordinal)),
    "cuDeviceGetName": lambda gpu, length, device: gpu.name.encode()[:length],
    "cuDeviceTotalMem": lambda gpu, device: gpu.memory,
    "cuDeviceGetAttribute": d.attribute,
    "cuDeviceComputeCapability": lambda gpu, device: gpu.chip.target.cc,
    "cuDeviceCanAccessPeer": _of(0),
    "cuDeviceGetPCIBusId": _of(b"0000:00:00.0"),
    "cuDevicePrimaryCtxRetain": Made("CUcontext", _context),
    "cuDevicePrimaryCtxGetState": _of((0, 1)),
    "cuCtxCreate": Made("CUcontext", _context),
    "cuCtxGetCurrent": Made("CUcontext", _context),
    "cuCtxPopCurrent": Made("CUcontext", _context),
    "cuCtxGetDevice": Made("CUdevice", _of(0)),
    "cuCtxGetStreamPriorityRange": _of((0, 0)),
    "cuCtxGetLimit": _of(0),
    "cuStreamCreate": Made("CUstream", d.create_stream),
    "cuStreamCreateWithPriority": Made("CUstream", d.create_stream),
    "cuStreamGetCtx": Made("CUcontext", _context),
    "cuCtxSynchronize": d.await_all,
    "cuStreamSynchronize": d.await_stream,
    "cuStreamQuery": d.await_stream,
    "cuStreamWaitEvent": d.wait,
    "cuEventSynchronize": d.await_event,
    "cuEventQuery": d.await_event,
    "cuStreamIsCapturing": lambda gpu, stream: _capturing("driver", gpu),
    "cuEventCreate": Made("CUevent", d.create_event),
    "cuEventRecord": d.record,
    "cuEventRecordWithFlags": d.record,
    "cuEventElapsedTime": d.elapsed,
    "cuStreamBeginCapture": d.begin_capture,
    "cuStreamEndCapture": Made("CUgraph", d.end_capture),
    "cuGraphInstantiate": Made("CUgraphExec", lambda gpu, graph, flags: int(graph)),
    "cuGraphInstantiateWithFlags": Made("CUgraphExec", lambda gpu, graph, flags: int(graph)),
    "cuGraphGetNodes": d.nodes,
    "cuGraphLaunch": d.replay,
    "cuMemAlloc": Made("CUdeviceptr", d.allocate),
    "cuMemAllocAsync": Made("CUdeviceptr", d.allocate),
    "cuMemAllocManaged": Made("CUdeviceptr", d.allocate),
    "cuMemAllocHost": d.allocate,
    "cuMemHostAlloc": d.allocate,
    "cuMemFree": d.free,
    "cuMemFreeAsync": d.free,
    "cuMemFreeHost": d.free,
    "cuMemGetInfo": d.memory_info,
    "cuMemsetD8": _fill(1), "cuMemsetD8Async": _fill(1),
    "cuMemsetD16": _fill(2), "cuMemsetD16Async": _fill(2),
    "cuMemsetD32": _fill(4), "cuMemsetD32Async": _fill(4),
    "cuModuleLoad": Made("CUmodule", d.load_file),
    "cuModuleLoadData": Made("CUmodule", d.load),
    "cuModuleLoadDataEx": Made("CUmodule", d.load),
    "cuModuleGetFunction": Made("CUfunction", images.function),
    "cuLibraryLoadData": Made("CUlibrary", d.load),
    "cuLibraryLoadFromFile": Made("CUlibrary", d.load_file),
    "cuLibraryGetKernel": Made("CUkernel", images.function),
    "cuLibraryGetModule": Made("CUmodule", lambda gpu, library: int(library)),
    "cuLibraryGetKernelCount": lambda gpu, library: len(images.functions(gpu, library, 1 << 30)),
    "cuLibraryEnumerateKernels": Made("CUkernel", lambda gpu, count, library: images.functions(gpu, library, count)),
    "cuKernelGetFunction": Made("CUfunction", lambda gpu, kernel: int(kernel)),
    "cuKernelGetAttribute": d.function_attribute,
    "cuFuncGetAttribute": d.function_attribute,
    "cuFuncGetName": d.name_of,
    "cuKernelGetName": d.name_of,
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": d.blocks,
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": d.blocks,
    "cuOccupancyMaxActiveClusters": d.clusters,
    "cuOccupancyMaxPotentialClusterSize": d.largest_cluster,
    "cuOccupancyAvailableDynamicSMemPerBlock": d.spare_shared,
    "cuLaunchKernel": d.launch,
    "cuLaunchKernelEx": d.launch_ex,
    "cuTensorMapEncodeTiled": d.tensor_map,
    "cuTensorMapEncodeIm2col": d.im2col_map,
}
DRIVER |= {f"cuMemcpy{way}{late}": d.copy for way in ("", "HtoD", "DtoH", "DtoD") for late in ("", "Async")}

RUNTIME: dict[str, Any] = dict.fromkeys((
    "cudaSetDevice", "cudaInitDevice", "cudaDeviceReset", "cudaStreamDestroy",
    "cudaEventDestroy",
    "cudaGetLastError", "cudaPeekAtLastError", "cudaFuncSetAttribute", "cudaHostRegister",
    "cudaHostUnregister", "cudaProfilerStart", "cudaProfilerStop", "cudaLibraryUnload", "cudaDeviceSetLimit",
    "cudaGraphDestroy", "cudaGraphExecDestroy", "cudaGraphUpload",
    "cudaKernelSetAttributeForDevice", "cudaCtxResetPersistingL2Cache", "cudaFuncSetCacheConfig",
), _nothing) | {
    "cudaDriverGetVersion": Made("CUDART_VERSION", _nothing),
    "cudaRuntimeGetVersion": Made("CUDART_VERSION", _nothing),
    "cudaGetDeviceCount": _of(1),
    "cudaGetDevice": _of(0),
    "cudaDeviceGetAttribute": d.attribute,
    "cudaGetDeviceProperties": lambda gpu, device: _properties(gpu),
    "cudaDeviceCanAccessPeer": _of(0),
    "cudaDeviceGetPCIBusId": _of(b"0000:00:00.0"),
    "cudaDeviceGetStreamPriorityRange": _of((0, 0)),
    "cudaDeviceGetLimit": _of(0),
    "cudaStreamCreate": Made("cudaStream_t", d.create_stream),
    "cudaStreamCreateWithFlags": Made("cudaStream_t", d.create_stream),
    "cudaStreamCreateWithPriority": Made("cudaStream_t", d.create_stream),
    "cudaDeviceSynchronize": d.await_all,
    "cudaStreamSynchronize": d.await_stream,
    "cudaStreamQuery": d.await_stream,
    "cudaStreamWaitEvent": d.wait,
    "cudaEventSynchronize": d.await_event,
    "cudaEventQuery": d.await_event,
    "cudaStreamIsCapturing": lambda gpu, stream: _capturing("runtime", gpu),
    "cudaEventCreate": Made("cudaEvent_t", d.create_event),
    "cudaEventCreateWithFlags": Made("cudaEvent_t", d.create_event),
    "cudaEventRecord": d.record,
    "cudaEventRecordWithFlags": d.record,
    "cudaEventElapsedTime": d.elapsed,
    "cudaStreamBeginCapture": d.begin_capture,
    "cudaStreamEndCapture": Made("cudaGraph_t", d.end_capture),
    "cudaGraphInstantiate": Made("cudaGraphExec_t", lambda gpu, graph, flags: int(graph)),
    "cudaGraphInstantiateWithFlags": Made("cudaGraphExec_t", lambda gpu, graph, flags: int(graph)),
    "cudaGraphGetNodes": d.nodes,
    "cudaGraphLaunch": d.replay,
    "cudaMalloc": d.allocate,
    "cudaMallocAsync": d.allocate,
    "cudaMallocManaged": d.allocate,
    "cudaMallocHost": d.allocate,
    "cudaHostAlloc": d.allocate,
    "cudaFree": d.free,
    "cudaFreeAsync": d.free,
    "cudaFreeHost": d.free,
    "cudaMemGetInfo": d.memory_info,
    "cudaMemcpy": d.copy,
    "cudaMemcpyAsync": d.copy,
    "cudaMemset": _fill(1),
    "cudaMemsetAsync": _fill(1),
    "cudaLibraryLoadData": Made("cudaLibrary_t", d.load),
    "cudaLibraryLoadFromFile": Made("cudaLibrary_t", d.load_file),
    "cudaLibraryGetKernel": Made("cudaKernel_t", images.function),
    "cudaLibraryEnumerateKernels": Made("cudaKernel_t", lambda gpu, n, library: images.functions(gpu, library, n)),
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor": d.blocks,
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": d.blocks,
    "cudaOccupancyAvailableDynamicSMemPerBlock": d.spare_shared,
}
ERRORS = {"cuGetErrorName", "cuGetErrorString", "cudaGetErrorName", "cudaGetErrorString"}


def put(patches: Patches) -> None:
    """Let cuda-python answer for the capture's GPU until `patches` are undone."""
    for name in ("driver", "runtime"):
        if found := _table(name):
            patches.answer(*found)


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
    found: dict[str, Callable] = {}
    for each, member in vars(module).items():
        called = each.startswith(prefix) and each[len(prefix) : len(prefix) + 1].isupper()
        if not called or inspect.isclass(member) or not callable(member):
            continue
        if each in ERRORS:
            found[each] = lambda gpu, error, name=each: (success, _worded(error, name))
        else:
            found[each] = _answer(module, each, table.get(each), success)
    return module, found


def _answer(module: Any, name: str, answer: Any, success: Any) -> Callable:
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
    module: Any = importlib.import_module(f"cuda.bindings.{name}")
    statuses = module.CUstreamCaptureStatus if name == "driver" else module.cudaStreamCaptureStatus
    active = "CU_STREAM_CAPTURE_STATUS" if name == "driver" else "cudaStreamCaptureStatus"
    word = ("ACTIVE" if gpu.graph else "NONE") if name == "driver" else ("Active" if gpu.graph else "None")
    return getattr(statuses, active + ("_" if name == "driver" else "") + word)


def _properties(gpu: Gpu) -> Any:
    from cuda.bindings.runtime import cudaDeviceProp

    chip, found = gpu.chip, cudaDeviceProp()
    found.name, found.totalGlobalMem = gpu.name.encode().ljust(256, b"\0"), gpu.memory
    found.major, found.minor = chip.target.cc
    found.multiProcessorCount, found.l2CacheSize, found.warpSize = chip.sms, chip.l2, 32
    found.sharedMemPerBlock, found.sharedMemPerBlockOptin = 48 << 10, chip.shared
    found.sharedMemPerMultiprocessor, found.maxThreadsPerMultiProcessor = chip.shared_sm, chip.threads_sm
    found.regsPerBlock = found.regsPerMultiprocessor = 65536
    found.maxThreadsPerBlock, found.clusterLaunch = 1024, int(chip.cluster > 1)
    return found
