"""Runs launches in the simulator instead of the driver, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...compile.call_sites import CallSites
from ...compile.launching import Launch
from ...errors import KdaError
from .. import launches, tensormap
from ..chips import Chip
from ..findings import SimulationError
from ..timing.clock import together
from . import memory
from .devices import runs


class CaptureError(KdaError, RuntimeError):
    """A launch that cannot be captured."""


class Session:
    """The runs of all launches so far, in order."""

    def __init__(self, device: Chip, options: dict[str, Any]):
        self.device = device
        self.options = options               # of kda.simulator.launch
        self.launches: list[Launch] = []
        self.runs: list[Any] = []            # kda.simulator.Run
        self.hosts: dict[int, Any] = {}      # host functions of the CuTe DSL, linked for this session
        self.gpu: Any = None                 # what stands in for the GPU, while the block lasts
        self.call_sites = CallSites()        # of what the CuTe DSL compiles inside the block
        # a hook for each launch: gets a function that simulates it, with its own PTX or another; None: it did not run
        self.around: Callable[[Launch, Callable[..., Any]], Any] = lambda launch, simulate: simulate()

    @property
    def arch(self) -> str:
        return self.device.target.spelling

    @property
    def findings(self) -> list[Any]:
        """The errors in all runs."""
        return [finding for run in self.runs for finding in run.findings]

    @property
    def notes(self) -> list[Any]:
        """Broken rules in all runs that hardware and compilers tolerate; errors if the capture is strict."""
        return [note for run in self.runs for note in run.notes]

    @property
    def milliseconds(self) -> float:
        """The predicted time of all launches so far, one after the other."""
        if not self.options.get("clock"):
            raise CaptureError("this capture has no clock. Use capture(..., clock=True), or the name of a chip.")
        return 1e3 * together([run for run in self.runs if run.clock])

    def launch(self, launch: Launch) -> Any:
        """Simulate a launch; its tensors are written in place."""
        kernel = launch.kernel
        if not runs(kernel.ptx, self.device.target):
            raise CaptureError(
                f"{kernel.name} was built for {kernel.target.spelling}; this capture stands in for {self.arch}, which "
                f"cannot run it. Build it for {self.arch}, or capture(arch={kernel.target.spelling!r})."
            )
        if self.gpu is not None and self.gpu.graph is not None:
            self.gpu.graph.launched(launch)
            return None
        if launch.tensors is not None and (known := memory.behind(launch.tensors)) is not launch.tensors:
            launch = replace(launch, tensors=known)
        tensors = memory.live() if launch.tensors is None else memory.with_pointees(launch.tensors)
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                raise CaptureError(
                    f"{kernel.name} was given {name} on {tensor.device}; a capture needs CPU tensors. Use .cpu()."
                )
        self.launches.append(launch)
        order = self.gpu.order if self.gpu is not None else None
        watching = order is not None and order.watching
        regions = memory.with_tensors(tensors) if launch.tensors is None else memory.regions(tensors)
        run = self.around(launch, functools.partial(self._simulated, launch, regions, accesses=watching))
        if self.runs:
            self.runs[-1].left = []          # no other launch can overlap with it
        if run is not None:
            self.runs.append(run)
        if run is not None and order is not None and watching:
            stream = self.gpu.stream_number if launch.stream is None else launch.stream
            found = order.launched(stream, run, tensors.values())
            run.findings = [*run.findings, *found]
            run.accesses = []                # they are the order's now
            if found and self.options.get("raises"):
                raise SimulationError(found)
        return run

    def _simulated(
        self, launch: Launch, regions: list[memory.Region], ptx: str | None = None, accesses: bool = False
    ) -> Any:
        kernel, behind = launch.kernel, self.runs[-1] if launch.pdl and self.runs else None
        gpu, self.gpu = self.gpu, None       # what simulates sees the machine as it is
        try:
            return launches.launch(
                ptx or kernel.ptx,
                kernel.name,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.cluster,
                dynamic_shared=launch.dynamic_shared,
                args=launch.args,
                arch=self.arch,
                memory=regions,
                registers=kernel.registers,
                behind=behind,
                accesses=accesses,
                **{"config": launch.config} | self.options,
            )
        finally:
            self.gpu = gpu

    def tensor_map(self, **fields: Any) -> bytes:
        return tensormap.encode(**fields)
