"""What the driver's and the runtime's API answer, by what is asked: each function of cuda-python is one of these."""

from __future__ import annotations

import ctypes
import math
import pathlib
from collections.abc import Callable
from typing import Any

from ..devices import ATTRIBUTES, UNKNOWN_REGISTERS, resident
from ..runtime import encoded
from ..session import CaptureError
from . import images
from .graphs import CUDAGraph
from .images import LoadedFunction
from .order import Mark
from .state import Gpu

CONTEXT = 1                                  # the one handle of a context
NON_BLOCKING = 1                             # flag of a stream that does not wait for the default stream
MAX_THREADS, SHARED_SIZE, REGISTERS, MAX_DYNAMIC = 0, 1, 4, 8  # attributes of a function


class Moment:
    """An event: launches before it, and what it comes after."""

    runs_before: int | None = None
    mark: Mark | None = None


def attribute(gpu: Gpu, which: Any, device: Any = 0) -> int:
    if int(which) not in ATTRIBUTES:
        asked, known = f"device attribute {which!s} was requested", ", ".join(map(str, ATTRIBUTES))
        raise CaptureError(f"{asked}, which a capture does not know. It knows {known}.")
    return ATTRIBUTES[int(which)](gpu.chip)


def create_event(gpu: Gpu, flags: int = 0) -> int:
    return images.keep(gpu, Moment())


def record(gpu: Gpu, event: Any, stream: Any = 0, flags: int = 0) -> None:
    moment = images.object_of(gpu, event, Moment)
    moment.runs_before, moment.mark = len(gpu.session.runs), gpu.order.reached(int(stream or 0))


def wait(gpu: Gpu, stream: Any, event: Any, flags: int = 0) -> None:
    gpu.order.wait(int(stream or 0), images.object_of(gpu, event, Moment).mark)


def await_event(gpu: Gpu, event: Any) -> None:
    gpu.order.host_waits(images.object_of(gpu, event, Moment).mark or {})


def await_stream(gpu: Gpu, stream: Any) -> None:
    gpu.order.host_waits(gpu.order.reached(int(stream or 0)))


def await_all(gpu: Gpu, *args: Any) -> None:
    gpu.order.host_waits()


def create_stream(gpu: Gpu, flags: int = 0, *priority: Any) -> int:
    return gpu.new_stream(blocking=not int(flags) & NON_BLOCKING)


def elapsed(gpu: Gpu, start: Any, end: Any) -> float:
    first, last = (images.object_of(gpu, event, Moment).runs_before for event in (start, end))
    if first is None or last is None:
        raise CaptureError("both events must be recorded before their time is requested")
    return gpu.milliseconds(first, last)


def begin_capture(gpu: Gpu, stream: Any, *mode: Any) -> None:
    CUDAGraph().capture_begin()


def end_capture(gpu: Gpu, stream: Any) -> int:
    if (graph := gpu.graph) is None:
        raise CaptureError("the end of a graph's capture was requested, which has not begun")
    graph.capture_end()
    return images.keep(gpu, graph)


def nodes(gpu: Gpu, graph: Any, count: int = 0) -> tuple[list[int], int]:
    """Return one number for each step of the graph, at most `count`, and how many steps there are."""
    steps = len(images.object_of(gpu, graph, CUDAGraph).steps)
    return [*range(1, steps + 1)][: int(count) or None], steps


def replay(gpu: Gpu, graph: Any, stream: Any) -> None:
    images.object_of(gpu, graph, CUDAGraph).replay()


# ---- memory


def allocate(gpu: Gpu, size: int, *more: Any) -> int:
    whole = gpu.arena.memory(max(int(size), 1))
    gpu.allocations[whole.data_ptr()] = whole
    return whole.data_ptr()


def free(gpu: Gpu, address: Any, *stream: Any) -> None:
    number = int(address or 0)
    if number and gpu.allocations.pop(number, None) is None:
        raise CaptureError(f"{number:#x} was freed, which this capture has not allocated")


def copy(gpu: Gpu, to: Any, source: Any, size: int, *more: Any) -> None:
    await_all(gpu)                           # asynchronous copies, too: races with them are not looked for
    if size:
        ctypes.memmove(_address(to), _address(source), int(size))
        gpu.arena.wrote(_address(to), int(size))


def _address(what: Any) -> int:
    """Return the address in a pointer of any form: a number, an object of cuda.bindings, or memory of Python."""
    if hasattr(what, "__int__"):
        return int(what)
    if memoryview(what).readonly:
        return ctypes.cast(ctypes.c_char_p(bytes(what)), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(what)))


def fill(gpu: Gpu, to: Any, value: int, count: int, width: int) -> None:
    if count:
        pattern = (int(value) & ((1 << 8 * width) - 1)).to_bytes(width, "little") * int(count)
        ctypes.memmove(int(to), pattern, len(pattern))
        gpu.arena.wrote(int(to), len(pattern))


def memory_info(gpu: Gpu) -> tuple[int, int]:
    return max(gpu.memory - gpu.allocated(), 0), gpu.memory


# ---- code


def load(gpu: Gpu, data: Any, *options: Any) -> int:
    return images.load(gpu, data)


def load_file(gpu: Gpu, path: Any, *options: Any) -> int:
    return images.load(gpu, pathlib.Path(path.decode() if isinstance(path, bytes) else path).read_bytes())


def function_attribute(gpu: Gpu, which: Any, function: Any, *device: Any) -> int:
    loaded = images.object_of(gpu, function, LoadedFunction)
    known = {MAX_THREADS: 1024, SHARED_SIZE: loaded.shared, REGISTERS: loaded.registers or UNKNOWN_REGISTERS,
             MAX_DYNAMIC: gpu.chip.shared - (loaded.shared or 0)}
    return known.get(int(which)) or 0


def name_of(gpu: Gpu, function: Any) -> bytes:
    return images.object_of(gpu, function, LoadedFunction).name.encode()


def blocks(gpu: Gpu, function: Any, threads: int, dynamic_shared: int, *flags: Any) -> int:
    loaded = images.object_of(gpu, function, LoadedFunction)
    return resident(gpu.chip, loaded.registers, loaded.shared, int(threads), int(dynamic_shared))


def clusters(gpu: Gpu, function: Any, config: Any) -> int:
    """Return how many clusters run at once, where every multiprocessor has room for its share."""
    threads = config.blockDimX * config.blockDimY * config.blockDimZ
    size = math.prod(_attributes(config).get(images.CLUSTER, (1, 1, 1)))
    if size > gpu.chip.cluster:
        return 0
    return blocks(gpu, function, threads, config.sharedMemBytes) * gpu.chip.sms // size


def largest_cluster(gpu: Gpu, function: Any, config: Any) -> int:
    return gpu.chip.cluster


def spare_shared(gpu: Gpu, function: Any, count: int, threads: int) -> int:
    """Return the dynamic shared memory of each of `count` CTAs on one multiprocessor."""
    static = images.object_of(gpu, function, LoadedFunction).shared or 0
    return min(gpu.chip.shared, gpu.chip.shared_sm // int(count) - 1024) - static


def launch(gpu: Gpu, f: Any, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, dynamic_shared: int, stream: Any,
           params: Any, extra: Any = 0) -> None:
    images.launch(gpu, f, (gx, gy, gz), (bx, by, bz), int(dynamic_shared), params, extra, stream=int(stream or 0))


def launch_ex(gpu: Gpu, config: Any, f: Any, params: Any, extra: Any = 0) -> None:
    grid = config.gridDimX, config.gridDimY, config.gridDimZ
    block = config.blockDimX, config.blockDimY, config.blockDimZ
    images.launch(
        gpu, f, grid, block, config.sharedMemBytes, params, extra, _attributes(config), int(config.hStream or 0)
    )


def _attributes(config: Any) -> dict[int, Any]:
    """Return those attributes of a launch that mean something here."""
    readers: dict[int, Callable[[Any], Any]] = {
        images.CLUSTER: lambda value: (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z),
        images.PDL: lambda value: value.programmaticStreamSerializationAllowed,
        images.COOPERATIVE: lambda value: value.cooperative,
    }
    values = ((int(each.id), each.value) for each in config.attrs or ())
    return {which: readers[which](value) for which, value in values if which in readers}


def tensor_map(gpu: Gpu, dtype: Any, rank: int, address: Any, dims: Any, strides: Any, box: Any, steps: Any,
               interleave: Any, swizzle: Any, promotion: Any, out_of_bounds: Any, **im2col: Any) -> Any:
    from cuda.bindings.driver import CUtensorMap

    dims, strides, box, steps = ([int(n) for n in numbers or ()] for numbers in (dims, strides, box, steps))
    raw = encoded(int(dtype), int(address), dims[:rank], strides[: rank - 1], box[:rank], steps[:rank],
                  int(interleave), int(swizzle), int(promotion), int(out_of_bounds), **im2col)
    encoded_map = CUtensorMap()
    ctypes.memmove(int(encoded_map.getPtr()), raw, len(raw))
    return encoded_map


def im2col_map(gpu: Gpu, dtype: Any, rank: int, address: Any, dims: Any, strides: Any, lower: Any, upper: Any,
               channels: int, pixels: int, *more: Any) -> Any:
    lower, upper = ([int(n) for n in corner][: rank - 2] for corner in (lower, upper))
    return tensor_map(gpu, dtype, rank, address, dims, strides, [channels], *more, lower=lower, upper=upper,
                      pixels=int(pixels))
