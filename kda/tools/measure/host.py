"""What calls cost the host: `kda bench --host`.

  idle   the GPU has nothing to do when a call begins, as in decoding and small models: what a caller waits for
  busy   it waits in a kernel that was given to it first, as in training, where the host has only to keep ahead

Without a GPU, launches do all but call the driver, and tensors are on the CPU.  Times are held against those of an
empty `torch.autograd.Function` with the same tensors, which allocates the same results: the least that a Function in
Python takes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import kda
from kda.calls import node
from kda.model.host import host_of, standing_in
from kda.tools.verify.cases import Case
from kda.tools.verify.definition import by_gradient, leaves_of
from ptxkit.compile import driver
from ptxkit.compile.launch_list import launched
from ptxkit.compile.target import Target
from ptxkit.temporary import uncollected

from .clocks import CudaClock, Timings

Tensor = torch.Tensor
Call = Callable[[], Any]

WARMUPS = 5
LAYERS = 16                                  # calls of a layer that are recorded in one graph
QUEUE = 400                                  # launches that wait on a GPU; of about 1,000 the host waits for room
SPARE = 20                                   # launches of a call that torch may add
ALLOCATES = ("aten::empty", "aten::empty_strided")    # every allocation of torch's goes through these


class HostCost(NamedTuple):
    """The host's cost of one call of a backend, or of one training step."""

    direction: str
    backend: str
    idle: Timings
    empty: Timings                           # those of the empty Function, in turn with the others
    busy: Timings | None                      # None without a GPU
    launches: int                            # launches of our kernels
    of_torch: int | None                     # kernels, copies and fills of torch's; None where no profiler sees them
    allocations: int

    @property
    def ratio(self) -> float:
        """How many times the empty Function's time a call takes."""
        return self.idle.median / self.empty.median


class StandIn:
    """A GPU that is not here."""

    def __init__(self, target: Target):
        self.host = host_of(target.spelling)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let dispatch see that GPU inside the block; launches are pretended."""
        with driver.pretended(), standing_in(self.host):
            yield

    def wait(self) -> None:
        """Return at once: there is nothing to wait for."""

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


class Empty(torch.autograd.Function):
    """Allocate the results of a call, and its gradients."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, state: Tensor | None, *others: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(v, state, *others)
        ctx.set_materialize_grads(False)
        return v.new_empty(v.shape), None if state is None else state.new_empty(state.shape)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.new_empty(x.shape) for x in ctx.saved_tensors)


class Timed(NamedTuple):
    """A call, the same of the empty Function, and how many layers each of them has."""

    call: Call
    empty: Call
    layers: int = 1


def calls(backend: str, case: Case, **options: Any) -> dict[str, Timed]:
    """Return a forward without gradients; a training step, which is a training forward and the gradients of all its
    inputs; and layers of which each takes the output of the one before as its v, forward and backward."""
    plain: dict[str, Any] = {n: x.detach() if isinstance(x, Tensor) else x for n, x in case.keywords.items()} | options
    leaves = leaves_of(plain)
    recorded, wanted = plain | leaves, list(by_gradient(leaves).values())
    others = [x for name, x in leaves.items() if isinstance(x, Tensor) and name not in ("v", "initial_state")]

    def empty(v: Tensor) -> Any:
        return Empty.apply(v, leaves.get("initial_state"), *others)

    def one(v: Tensor) -> Any:
        return kda.chunk_kda(**recorded | {"v": v}, backend=backend)

    def forward() -> Any:
        with torch.no_grad():
            return kda.chunk_kda(**plain, backend=backend)

    def forward_of_nothing() -> Any:
        with torch.no_grad():
            return empty(leaves["v"])

    def step(of_a_layer: Callable[[Tensor], Any]) -> Any:
        o, states = of_a_layer(leaves["v"])
        outputs, grads = ((o,), (case.do,)) if states is None else ((o, states), (case.do, case.dht))
        return torch.autograd.grad(outputs, wanted, grads, allow_unused=True)

    def layers(of_a_layer: Callable[[Tensor], Any]) -> Any:
        x = leaves["v"]
        for _ in range(LAYERS):
            x, _ = of_a_layer(x)
        return torch.autograd.grad(x, leaves["v"], case.do)

    return {
        "forward": Timed(forward, forward_of_nothing),
        "step": Timed(lambda: step(one), lambda: step(empty)),
        "layer": Timed(lambda: layers(one), lambda: layers(empty), LAYERS),
    }


def launches_of(call: Call) -> int:
    """Return the launches of a call, in every thread: a backward runs in one of autograd's."""
    before = launched()
    call()
    return launched() - before


def cost(direction: str, backend: str, timed: Timed, gpu: PresentGpu | StandIn, repeats: int) -> HostCost:
    """Measure the host's cost of a call, for each of its layers; this must run inside `gpu.used()`."""
    call, empty, layers = timed
    node.wait()                                                                # calls run there from then on
    for _ in range(WARMUPS):
        call()
        empty()
    gpu.wait()
    launches = launches_of(call)
    of_torch, allocations = gpu.of_torch(call, launches), gpu.allocations_of(call)
    idle, nothing = [], []
    with uncollected():
        for _ in range(repeats):
            gpu.wait()
            idle.append(taken(call) / layers)
            gpu.wait()
            nothing.append(taken(empty) / layers)
        alone = Timings(tuple(idle))
        busy = gpu.while_busy(call, repeats, launches, alone.median) if layers == 1 else None
    gpu.wait()
    return HostCost(direction, backend, alone, Timings(tuple(nothing)), busy, launches // layers, of_torch,
                    allocations // layers)
