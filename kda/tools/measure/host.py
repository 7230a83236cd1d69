"""What calls cost the host: `kda bench --host`.

  idle   the GPU has nothing to do when a call begins, as in decoding and small models: what a caller waits for
  busy   it waits in a kernel that was given to it first, as in training, where the host has only to keep ahead

Without a GPU, launches go to a stand-in that counts them: the driver's part is left out, and tensors are on the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import kda
from kda.model.host import host_of, standing_in
from kda.tools.verify.cases import Case
from kda.tools.verify.definition import by_gradient, leaves_of
from ptxkit.compile import driver
from ptxkit.compile.launching import Launch, redirect
from ptxkit.compile.target import Target

from .clocks import CudaClock, Timings

Tensor = torch.Tensor
Call = Callable[[], Any]

WARMUPS = 5
QUEUE = 400                                  # launches that wait on a GPU; of about 1,000 the host waits for room
SPARE = 20                                   # launches of a call that torch may add
ALLOCATES = ("aten::empty", "aten::empty_strided")    # every allocation of torch's goes through these


class HostCost(NamedTuple):
    """The host's cost of one call of a backend, or of one training step."""

    direction: str
    backend: str
    idle: Timings
    busy: Timings | None                      # None without a GPU
    launches: int                            # launches of our kernels
    of_torch: int | None                     # kernels, copies and fills of torch's; None where no profiler sees them
    allocations: int


class Nowhere:
    """Accepts launches instead of the driver, and only counts them."""

    def __init__(self) -> None:
        self.launches = 0

    def launch(self, launch: Launch) -> None:
        self.launches += 1

    def call(self, compiled: Any, args: tuple, kwargs: dict) -> None:
        self.launches += 1

    def tensor_map(self, **fields: Any) -> bytes:
        return bytes(128)


class StandIn:
    """A GPU that is not here."""

    def __init__(self, target: Target):
        self.host = host_of(target.spelling)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let dispatch see that GPU inside the block; launches go nowhere."""
        self.sink = Nowhere()
        with redirect(self.sink), standing_in(self.host):
            yield

    def wait(self) -> None:
        """Return at once: there is nothing to wait for."""

    def launches_of(self, call: Call) -> int:
        before = self.sink.launches
        call()
        return self.sink.launches - before

    def of_torch(self, call: Call, ours: int) -> None:
        """Return None: what torch does on a CPU is no launch."""

    def allocations_of(self, call: Call) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            call()
        return sum(event.name in ALLOCATES for event in seen.events())

    def while_busy(self, call: Call, repeats: int, launches: int, seconds: float) -> None:
        """Return None: a stand-in is never busy."""


class PresentGpu:
    """The one that is here."""

    def __init__(self, device: str):
        self.device, self.clock = device, CudaClock(device)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            yield

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def launches_of(self, call: Call) -> int:
        """Count launches in every thread: a backward runs in one of autograd's."""
        launch = driver.launch
        counted: list[Any] = []

        def counting(*args: Any, **options: Any) -> None:
            counted.append(None)
            launch(*args, **options)

        driver.launch = counting
        try:
            call()
        finally:
            driver.launch = launch
        return len(counted)

    def of_torch(self, call: Call, ours: int) -> int | None:
        """Count what the GPU did besides our launches."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            call()
            self.wait()
        done = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())
        return done - ours if done >= ours else None

    def allocations_of(self, call: Call) -> int:
        def so_far() -> int:
            return torch.cuda.memory_stats(self.device)["allocation.all.allocated"]

        before = so_far()
        call()
        return so_far() - before

    def while_busy(self, call: Call, repeats: int, launches: int, seconds: float) -> Timings:
        """Time batches of calls behind a kernel that takes longer than the host; one call should take `seconds`."""
        batch, late = max(1, QUEUE // (launches + SPARE)), 0
        times: list[Any] = []
        while len(times) < repeats:
            self.wait()
            self.clock.busy(min(3 * batch * seconds + 2e-3, 1.0))
            ended = torch.cuda.Event()
            ended.record()
            times += [taken(call) for _ in range(batch)]
            late += ended.query()
        return Timings(tuple(times), host_inside=2 * batch * late > len(times))


def taken(call: Call) -> float:
    """Return the seconds until it returns; what it returns is let go of afterwards."""
    began = time.perf_counter()
    result = call()
    took = time.perf_counter() - began
    del result
    return took


def calls(backend: str, case: Case, **options: Any) -> dict[str, Call]:
    """Return a forward without gradients, and a training step: a training forward and the gradients of all its
    inputs."""
    plain: dict[str, Any] = {n: x.detach() if isinstance(x, Tensor) else x for n, x in case.keywords.items()} | options
    leaves = leaves_of(plain)
    recorded, wanted = plain | leaves, list(by_gradient(leaves).values())

    def forward() -> Any:
        with torch.no_grad():
            return kda.chunk_kda(**plain, backend=backend)

    def step() -> Any:
        return torch.autograd.grad(kda.chunk_kda(**recorded, backend=backend), wanted, (case.do, case.dht))

    return {"forward": forward, "step": step}


def cost(direction: str, backend: str, call: Call, gpu: PresentGpu | StandIn, repeats: int) -> HostCost:
    """Measure the host's cost of a call; this must run inside `gpu.used()`."""
    for _ in range(WARMUPS):
        call()
    gpu.wait()
    launches = gpu.launches_of(call)
    of_torch, allocations = gpu.of_torch(call, launches), gpu.allocations_of(call)
    collects, idle = gc.isenabled(), []
    gc.disable()
    try:
        for _ in range(repeats):
            gpu.wait()
            idle.append(taken(call))
        alone = Timings(tuple(idle))
        busy = gpu.while_busy(call, repeats, launches, alone.median)
    finally:
        if collects:
            gc.enable()
    gpu.wait()
    return HostCost(direction, backend, alone, busy, launches, of_torch, allocations)
