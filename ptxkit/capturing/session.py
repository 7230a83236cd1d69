"""Runs launches in the simulator instead of the driver, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from ptxkit.compile.call_sites import CallSites
from ptxkit.compile.launching import Launch, redirect
from ptxkit.errors import PtxkitError

from .. import advice, launches, tensormap
from ..chips import Chip
from ..findings import FREED, Finding, SimulationError, of_launch
from ..timing.clock import together
from . import memory
from .arena import Heap
from .devices import runs
from .turns import Turns, in_turn
from .unwritten import Trial

PATIENCE = 100_000                           # instructions that a launch may run more when it is repeated


class CaptureError(PtxkitError, RuntimeError):
    """A launch that cannot be captured."""


class Session(Turns):
    """The runs of all launches so far, in order."""

    def __init__(self, device: Chip, options: dict[str, Any]):
        super().__init__()
        self.device = device
        self.options = options               # what ptxkit.launch takes
        self.launches: list[Launch] = []
        self.runs: list[Any] = []            # ptxkit.Run
        self.hosts: dict[int, Any] = {}      # host functions of the CuTe DSL, linked for this session
        self.gpu: Any = None                 # what stands in for the GPU, while the block lasts
        self.call_sites = CallSites()        # for what the CuTe DSL compiles inside the block
        # a hook for each launch: gets a function that simulates it, with its own PTX or another; None: it did not run
        self.around: Callable[[Launch, Callable[..., Any]], Any] = lambda launch, simulate: simulate()

    @property
    def arch(self) -> str:
        return self.device.target.spelling

    @property
    def findings(self) -> list[Any]:
        """Return the errors in all runs."""
        return [finding for run in self.runs for finding in run.findings]

    @property
    def notes(self) -> list[Any]:
        """Return the broken rules in all runs that hardware and compilers tolerate; errors if the capture is strict."""
        return [note for run in self.runs for note in run.notes]

    @property
    def milliseconds(self) -> float:
        """Return the predicted time of all launches so far, one after the other."""
        if not self.options.get("clock"):
            raise CaptureError("this capture has no clock. Use capture(..., clock=True), or the name of a chip.")
        return 1e3 * together([run for run in self.runs if run.clock])

    @in_turn
    def launch(self, launch: Launch, lost: frozenset[int] = frozenset()) -> Any:
        """Simulate a launch; its tensors are written in place.  `lost` is Heap's."""
        kernel = launch.kernel
        if not runs(kernel.ptx, self.device.target):
            raise CaptureError(
                f"{kernel.name} was built for {kernel.target.spelling}; this capture stands in for {self.arch}, which "
                f"cannot run it. Build it for {self.arch}, or capture(arch={kernel.target.spelling!r})."
            )
        if self.gpu.graph is not None:
            self.gpu.graph.launched(launch)
            return None
        if launch.tensors is not None and (known := memory.behind(launch.tensors)) is not launch.tensors:
            launch = replace(launch, tensors=known)
        tensors = memory.live() if launch.tensors is None else memory.with_pointees(launch.tensors)
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                where = f"{name} on {tensor.device}"
                raise CaptureError(f"{kernel.name} was given {where}; a capture needs CPU tensors. Use .cpu().")
        self.launches.append(replace(launch, tensors=None))                    # they would keep memory
        order, heap = self.gpu.order, Heap.from_args(self.gpu.arena, launch.args, lost)
        watching = order.watching
        regions = memory.with_tensors(tensors) if launch.tensors is None else memory.regions(tensors)
        regions = heap.regions(regions)
        run = self.around(launch, functools.partial(self._simulated, launch, regions, heap, accesses=watching))
        if self.runs:
            self.runs[-1].left = []          # no other launch can overlap with it
        if run is None:
            return None
        self.runs.append(run)
        if watching:
            stream = self.gpu.stream_number if launch.stream is None else launch.stream
            findings = order.launched(stream, run, tensors.values(), heap.arena)
            run.findings = [*run.findings, *findings]
            run.accesses = []                # they are the order's now
            if findings and self.options.get("raises"):
                raise SimulationError(findings)
        return run

    def _lost_arguments(self, run: Any, heap: Heap) -> list[Finding]:
        """Return arguments that point into freed memory which the kernel has not touched."""
        touched = [*heap.arena.among(finding.address for finding in run.findings if finding.kind == FREED.id)]
        lost = [block for block in heap.given if heap.is_gone(block) and block not in touched]
        return [of_launch(FREED.id, f"an argument points into memory of {block}", run, address=block.address,
                          advice=advice.FREED) for block in lost]

    def _simulated(
        self, launch: Launch, regions: list[memory.Region], heap: Heap, ptx: str | None = None,
        accesses: bool = False,
    ) -> Any:
        kernel, behind = launch.kernel, self.runs[-1] if launch.pdl and self.runs else None
        trial, options = Trial(heap, regions), {"config": launch.config} | self.options | {"raises": False}

        def simulate(**more: Any) -> Any:
            return launches.launch(
                ptx or kernel.ptx, kernel.name, grid=launch.grid, block=launch.block, cluster=launch.cluster,
                dynamic_shared=launch.dynamic_shared, args=launch.args, arch=self.arch, memory=regions,
                registers=kernel.registers, behind=behind, **options | more,
            )

        with redirect(cast(Any, None)):      # what simulates sees the machine as it is
            run = simulate(accesses=accesses, heap=heap)
            trial.judge(run, lambda: simulate(timeline=False, limit=PATIENCE + 2 * run.counters["warp_instructions"]))
        if lost := self._lost_arguments(run, heap):
            run.findings = [*run.findings, *lost]
        if run.findings and self.options.get("raises"):
            raise SimulationError(run.findings)
        return run

    def tensor_map(self, **fields: Any) -> bytes:
        return tensormap.encode(**fields)
