"""The clocks of `kda bench`: one launch, launches in turns, a replay from a CUDA graph, the peak of device memory.

  CPU    perf_counter around a call, garbage collection off; caches and allocator are warm
  CUDA   events around a call.  Ahead of them the device is given something to wait in, so that the host has issued all
         of the call before it begins (`host_inside` where it had not), and a buffer larger than L2 is overwritten
"""

from __future__ import annotations

import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

LEAST = 3                                    # launches, whatever their duration


class CannotCapture(Exception):
    """A call cannot become a CUDA graph, and why."""


class Timings(NamedTuple):
    """The seconds that every launch took."""

    seconds: tuple[float, ...]
    host_inside: bool = False                # the device ran dry before the host had issued the call

    def quantile(self, share: float) -> float:
        ordered, position = sorted(self.seconds), share * (len(self.seconds) - 1)
        low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
        return low + (high - low) * (position - math.floor(position))

    @property
    def median(self) -> float:
        return self.quantile(0.5)


class CpuClock:
    warmups = 1

    def once(self, call: Callable[[], Any]) -> tuple[float, Any, bool]:
        """Return seconds, what the call returned, whether host time is inside though it should not be."""
        began = time.perf_counter()
        result = call()
        return time.perf_counter() - began, result, False

    def peak_memory(self, call: Callable[[], Any]) -> None:
        """Return None: a CPU's memory is not counted."""


class CudaClock:
    warmups = 5
    longest_wait = 0.2

    def __init__(self, device: str):
        self.device = torch.device(device)
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
        self.flush = torch.empty(4 * l2, dtype=torch.uint8, device=device)
        self.waits: weakref.WeakKeyDictionary[Callable[[], Any], float] = weakref.WeakKeyDictionary()
        self.failed: str | None = None       # why a capture broke off
        cycles = 10_000_000
        self._seconds(lambda: torch.cuda._sleep(cycles))
        self.cycles_per_second = cycles / self._seconds(lambda: torch.cuda._sleep(cycles))

    def _seconds(self, call: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def once(self, call: Callable[[], Any]) -> tuple[float, Any, bool]:
        wait = self.waits.setdefault(call, 1e-3)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(wait * self.cycles_per_second))
        self.flush.zero_()
        start.record()
        result = call()
        end.record()
        late = start.query()
        end.synchronize()
        if late:
            self.waits[call] = min(2 * wait, self.longest_wait)
        return start.elapsed_time(end) / 1e3, result, late

    def captured(self, make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
        """Return a call that replays what the made one does from a CUDA graph, into the same results every time."""
        if self.failed:                      # torch's allocator takes that capture to be under way until the end
            raise CannotCapture(f"not tried, for an earlier capture broke off: {self.failed}")
        side, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):        # autograd runs a backward on the stream of its forward: make it here, too
            call = make()
            call()
            with refusing_to_wait():
                call()
            try:
                with torch.cuda.graph(graph, stream=side):
                    results = call()
            except RuntimeError as error:
                first = error.__context__ or error                    # leaving a broken capture raises one more
                self.failed = str(first).partition("\n")[0] or type(first).__name__
                raise CannotCapture(self.failed) from error
        torch.cuda.current_stream(self.device).wait_stream(side)
        return Replay(graph, call, results)

    def peak_memory(self, call: Callable[[], Any]) -> int:
        """Return the peak bytes of torch's allocator during a warm call, above those allocated before."""
        call()
        gc.collect()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device) - before

    def copy_bandwidth(self) -> float:
        """Return bytes a second, read and written, of a large copy."""
        n = min(2 << 30, torch.cuda.mem_get_info(self.device)[0] // 8)
        a, b = (torch.empty(n, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * n / sorted(self._seconds(lambda: b.copy_(a)) for _ in range(7))[3]

    def busy(self, seconds: float) -> None:
        """Give the device something to do, without waiting for it."""
        torch.cuda._sleep(int(seconds * self.cycles_per_second))


class Replay:
    def __init__(self, graph: torch.cuda.CUDAGraph, call: Callable[[], Any], results: Any):
        self.graph, self.results = graph, results
        self.call = call                     # owns tensors that the graph reads

    def __call__(self) -> Any:
        self.graph.replay()
        return self.results


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """A call that makes the host wait for the device is found out before it breaks a capture off."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise CannotCapture("it waits for the GPU") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def clock_of(device: str) -> CpuClock | CudaClock:
    return CudaClock(device) if device.startswith("cuda") else CpuClock()


def interleaved(
    calls: Sequence[Callable[[], Any]], clock: CpuClock | CudaClock, repeats: int, seconds: float
) -> list[tuple[Timings, Any]]:
    """Return the timing of each call, and what its last launch returned."""
    taken: list[list[float]] = [[] for _ in calls]
    late, results = [0] * len(calls), [None] * len(calls)
    began, collects = time.perf_counter(), gc.isenabled()
    gc.disable()
    try:
        for call in calls:
            for _ in range(clock.warmups):
                clock.once(call)
        for launch in range(repeats):
            if launch >= LEAST and time.perf_counter() - began > seconds * len(calls):
                break
            for n, call in enumerate(calls):
                results[n] = None
                took, results[n], was_late = clock.once(call)
                taken[n].append(took)
                late[n] += was_late
    finally:
        if collects:
            gc.enable()
    return [(Timings(tuple(t), 10 * n > len(t)), result) for t, n, result in zip(taken, late, results)]
