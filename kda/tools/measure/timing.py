"""What `kda bench` times: only calls that are right, in turns, and what they return is looked at again.

The calls that are compared alternate launch by launch, on the same tensors; `clocks` holds the watch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kda.model.host import detect, installed_versions
from kda.model.problem import name_of_dtype
from kda.model.stages import in_order
from kda.tools.verify.budget import Budget, Scale
from kda.tools.verify.cases import Case, Spec, make
from kda.tools.verify.definition import budgets, by_gradient, definition, leaves_of, stored_as
from kda.tools.verify.doors import Door
from kda.tools.verify.literal import one_thread
from kda.tools.verify.parity import ParityRow, judge
from kda.tools.verify.parity import direction as direction_of

from .clocks import CannotCapture, CpuClock, CudaClock, Timings, interleaved
from .shapes import BenchShape, bytes_moved, flops, walks_exactly

Tensor = torch.Tensor
Results = dict[str, Tensor]

SAMPLE_TOKENS, SAMPLE_HEADS = 512, 4         # a smaller case shows how large errors are
COARSE = 1000                                # a budget of so many ulps of the reference leaves its errors out


# ---------------------------------------------------------------------------------------------- right or wrong


class Expectation(NamedTuple):
    """What the results of one backend have to be."""

    says: str
    budgets: dict[str, Budget]

    def judge(self, results: Results, case: Case) -> list[ParityRow]:
        return [judge(direction_of(n), n, self.budgets[n], x, case, whole=True) for n, x in results.items()]


def standard(door: Door, case: Case, backward: bool) -> Expectation:
    p = case.problem()
    if walks_exactly(p.B * p.T, p.HV, p.K, p.V):
        return Expectation("the recurrence in float64", budgets(case, door.rounding(case), backward))
    return from_the_reference(door, case, backward)


def from_the_reference(door: Door, case: Case, backward: bool) -> Expectation:
    """Return the standard of a case too large to walk token by token: the reference, with a budget from a small case of
    its kind.

    The largest of n errors is assumed to grow as log n, and is never below the ulp, as stored, of the loudest element.
    """
    reference = Door("reference", door.device)
    dtype = torch.float64 if door.name == "reference" else torch.float32
    wide, rooms, limits = cast(case, dtype), rooms_of(door, sample(case.spec), dtype, backward), {}
    for name, exact in reference.results(wide, backward).items():
        room, exact = rooms[name], exact.double()
        growth = math.log(exact.numel() + 8) / math.log(room.exact.numel() + 8)
        stored = torch.finfo(stored_as(case, name)).eps * Scale.of(exact).loudest
        limits[name] = room._replace(peak=max(room.peak * max(growth, 1.0), stored)).around(exact)
    return Expectation(f"the reference in {str(dtype).removeprefix('torch.')}", limits)


@functools.lru_cache(maxsize=64)
@one_thread()
def rooms_of(door: Door, spec: Spec, dtype: torch.dtype, backward: bool) -> dict[str, Budget]:
    """Return the budgets between the backend and the reference in `dtype`; errors of the latter count if a budget is
    nearly as small."""
    small, reference = make(spec), Door("reference", door.device)
    exact = definition(small, torch.float64, backward)
    rooms = budgets(small, door.rounding(small), backward, exact)
    if min(room.norm for room in rooms.values()) > COARSE * torch.finfo(dtype).eps:
        return rooms
    wide = cast(small, dtype)
    its = budgets(wide, reference.rounding(wide), backward, exact)
    return {name: room + its[name] for name, room in rooms.items()}


def cast(case: Case, dtype: torch.dtype) -> Case:
    wide = case.map(lambda x: x.to(dtype) if x.is_floating_point() else x)
    return dataclasses.replace(wide, spec=dataclasses.replace(case.spec, dtype=name_of_dtype(dtype)))


def sample(spec: Spec) -> Spec:
    """Return a small case of the same kind: few heads, and at most the tokens of the first sequence that has any."""
    tokens = spec.T if spec.lengths is None else next(filter(None, spec.lengths), 1)
    H = min(spec.H, SAMPLE_HEADS)
    return dataclasses.replace(spec, lengths=None, B=1, T=min(tokens, SAMPLE_TOKENS), H=H, HV=H * spec.heads // spec.H,
                               padding=0)


# ---------------------------------------------------------------------------------------------- measuring


class Checked(NamedTuple):
    """One backend's results against its standard."""

    backend: str
    against: str
    rows: list[ParityRow]

    @property
    def wrong(self) -> list[ParityRow]:
        return [row for row in self.rows if row.wrong]


class How(NamedTuple):
    """How a case is measured."""

    repeats: int
    seconds: float
    stages: bool = False                     # whether each stage is timed alone, too
    graph: bool = False                      # replay calls from a CUDA graph
    disable_recompute: bool | str = False    # the value that calls are given


class CallMemory(NamedTuple):
    """Bytes of a GPU's memory that a call takes."""

    peak: int                                # at the peak of a call, beyond what was allocated before
    given: int                               # bytes of the tensors that the call was given

    @property
    def total(self) -> int:
        return self.peak + self.given


@dataclass
class Measured:
    """One case: parity of each backend, then its timings by direction, in the order of the backends."""

    checks: list[Checked]
    timings: dict[str, list[Timings]] = field(default_factory=dict)
    memory: dict[str, list[CallMemory | None]] = field(default_factory=dict)       # like the timings
    not_captured: dict[str, tuple[str, str]] = field(default_factory=dict)     # by direction: a backend, why
    timed_wrong: list[Checked] = field(default_factory=list)    # timed launches that returned something else
    stages: dict[str, Timings] = field(default_factory=dict)     # each stage of the first backend, run alone

    @property
    def right(self) -> bool:
        return not self.timed_wrong and not any(check.wrong for check in self.checks)


def measure(
    doors: Sequence[Door], case: Case, directions: Sequence[str], clock: CpuClock | CudaClock, how: How,
    tell: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Check parity first; a case on which a backend is wrong is not timed."""
    backward = set(directions) != {"forward"}
    options = {"disable_recompute": how.disable_recompute} if how.disable_recompute else {}
    standards, judged, checks = [], [], []
    for door in doors:
        tell(f"comparing {door.name}")
        standards.append(standard(door, case, backward))
        judged.append(door.results(case, backward, **options))
        checks.append(Checked(door.name, standards[-1].says, standards[-1].judge(judged[-1], case)))
    measured = Measured(checks)
    if not measured.right:
        return measured
    moved = case.map(lambda x: x.to(doors[0].device))
    moved = dataclasses.replace(moved, keywords=moved.keywords | options)
    for way in directions:
        tell(f"timing {way}")
        memory, calls = [memory_of(door, moved, way, clock) for door in doors], []
        try:
            for door in doors:
                make = functools.partial(launch, door, moved, way)
                calls.append(clock.captured(make) if how.graph else make())  # type: ignore[union-attr]
        except CannotCapture as refusal:
            measured.not_captured[way] = (door.name, str(refusal))
            continue
        timed = interleaved(calls, clock, how.repeats, how.seconds)
        measured.memory[way], measured.timings[way] = memory, [timing for timing, _ in timed]
        for door, held, right, (_, results) in zip(doors, standards, judged, timed):
            check = Checked(door.name, held.says, held.judge(differing(results, right), case))
            measured.timed_wrong += [check] if check.wrong else []
    if how.stages and measured.right:
        tell("timing stages")
        measured.stages = stage_timings(doors[0], case, directions, clock, how.repeats, how.seconds)
    return measured


def differing(results: Results, judged: Results) -> Results:
    """Return those that do not equal the results that were judged before."""
    return {name: x for name, x in results.items() if name not in judged or not torch.equal(x, judged[name])}


def stage_timings(
    door: Door, case: Case, directions: Sequence[str], clock: CpuClock | CudaClock, repeats: int, seconds: float
) -> dict[str, Timings]:
    """Time each stage that the backend can run alone, on what its own stages before it made; what a run of them keeps
    inside and a later one reads is made by the reference."""
    compute = door.rounding(case).compute
    tensors = {n: None if x is None else x.to(door.device) for n, x in case.stage_tensors(compute).items()}
    timings = {}
    reference = Door("reference", door.device)
    for stage in in_order(door.stages):
        if stage.backward and (tuple(directions) == ("forward",) or door.against(case, "backward")):
            continue
        if not all(name in tensors for name in stage.reads):
            continue
        call = functools.partial(door.stage_call(stage.name, case), {name: tensors[name] for name in stage.reads})
        timings[stage.name], written = interleaved([call], clock, repeats, seconds)[0]
        tensors |= written
        for part in stage.run:
            tensors = reference.stage_call(part.name, case)(tensors) | tensors
    return timings


def launch(door: Door, case: Case, direction: str) -> Callable[[], Results]:
    """Return what is timed: the forward, what autograd runs for the backward, or both."""
    if direction == "forward":
        return functools.partial(_forward, door, case)
    if direction == "step":
        return functools.partial(_step, door, case)
    return functools.partial(_backward, *_training_forward(door, case), (case.do, case.dht))


def memory_of(door: Door, case: Case, direction: str, clock: CpuClock | CudaClock) -> CallMemory | None:
    """Return the memory of a forward, or of it and its backward; o, final states and gradients are alive at the end."""
    forward = direction == "forward"
    peak = clock.peak_memory(functools.partial(_forward if forward else _step, door, case))
    given = [*case.keywords.values(), *(() if forward else (case.do, case.dht))]
    return None if peak is None else CallMemory(peak, sum(x.nbytes for x in given if isinstance(x, Tensor)))


def _forward(door: Door, case: Case) -> Results:
    """Run a forward, without autograd unless more is to be saved: only a training forward saves anything."""
    if case.keywords.get("disable_recompute"):
        (o, ht), _ = _training_forward(door, case)
        return {"o": o.detach(), "ht": ht.detach()}
    with torch.no_grad():
        o, ht = door.chunk_kda(**case.keywords)
    return {"o": o, "ht": ht}


def _training_forward(door: Door, case: Case) -> tuple[tuple[Tensor, ...], Results]:
    """Run a training forward: what it returned, and the leaves by the names of their gradients."""
    leaves = leaves_of(case.keywords)
    return door.chunk_kda(**case.keywords | leaves), by_gradient(leaves)


def _backward(outputs: tuple[Tensor, ...], wanted: Results, cotangents: tuple[Tensor, ...], again=True) -> Results:
    grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, retain_graph=again)
    return dict(zip(wanted, grads))


def _step(door: Door, case: Case) -> Results:
    return _backward(*_training_forward(door, case), (case.do, case.dht), again=False)


# ---------------------------------------------------------------------------------------------- the machine


class Machine(NamedTuple):
    """The machine for which the numbers hold."""

    device: str                              # "NVIDIA H200", or the CPU's name
    kind: str                                # "gpu" or "cpu"
    threads: int | None = None               # torch's threads, on a CPU
    cores: int | None = None
    load: float | None = None                # processes that wanted a core before this one did
    driver: str | None = None
    clock: int | None = None                 # MHz of the SMs, busy, after the timings
    highest_clock: int | None = None
    copy: float | None = None                # bytes a second of a large copy
    versions: Mapping[str, str] = {}
    commit: str | None = None                # the checkout's, if there is one

    @property
    def crowded(self) -> bool:
        """Whether more threads want to run than there are cores."""
        return bool(self.load and self.cores and self.load + (self.threads or 1) > self.cores + 0.5)

    def differs(self, old: Mapping[str, Any]) -> str | None:
        mine = (self.device, self.threads)
        theirs = (old.get("device"), old.get("threads"))
        words = [f"{name}, {threads} threads" if threads else str(name) for name, threads in (mine, theirs)]
        return None if mine == theirs else f"this is {words[0]}, the saved results are of {words[1]}"


def this_machine(device: str) -> Machine:
    versions = dict(installed_versions())
    if not device.startswith("cuda"):
        return Machine(cpu_name(), "cpu", torch.get_num_threads(), os.cpu_count(), load(), versions=versions,
                       commit=commit())
    return Machine(detect(device).name, "gpu", versions=versions, commit=commit())


def load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def output_of(argv: Sequence[str], timeout: float) -> str:
    """Return what a program prints; nothing if it fails."""
    how: dict[str, Any] = dict(capture_output=True, text=True, errors="replace", timeout=timeout, check=True)
    try:
        return subprocess.run(argv, **how).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str | None:
    """Return the commit of the checkout that contains this file; None if there is no checkout."""
    root, git = Path(__file__).parents[3], shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    questions = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
    head, changed = (output_of([git, "-C", str(root), *words], 10).strip() for words in questions)
    return (head + ", changed" if changed else head) or None


def ask_clocks(machine: Machine, clock: CudaClock, device: str) -> Machine:
    """Return driver and clocks of a GPU, queried while it is busy."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return machine
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = [f"--id=GPU-{uuid}"] if uuid else []
    clock.busy(1.0)
    fields = "--query-gpu=driver_version,clocks.sm,clocks.max.sm"
    answer = output_of([program, *which, fields, "--format=csv,noheader,nounits"], 15)
    torch.cuda.synchronize(device)
    lines = answer.splitlines()
    words = [word.strip() for word in lines[0].split(",")] if len(lines) == 1 else []
    if len(words) != 3:
        return machine
    sm, highest = (int(word) if word.isdigit() else None for word in words[1:])
    return machine._replace(driver=words[0], clock=sm, highest_clock=highest)


# ---------------------------------------------------------------------------------------------- results


@dataclass
class MeasuredShape:
    name: str                                # the shape's
    shape: BenchShape
    regime: str
    measured: Measured

    @property
    def checks(self) -> list[Checked]:
        return self.measured.timed_wrong or self.measured.checks


@dataclass(frozen=True)
class TimedLine:
    """One timing, as it is printed, saved and compared."""

    shape: str
    problem: str
    regime: str
    direction: str
    backend: str
    launches: int
    median: float                            # seconds
    p20: float
    p80: float
    flops: int
    bytes: int
    host_inside: bool
    floor: float | None                      # seconds
    baseline: dict[str, Any] | None          # None unless both were right
    memory: int | None = None                # bytes at the peak, beyond what was allocated before; None on a CPU
    memory_with_inputs: int | None = None

    @property
    def ratio(self) -> float | None:
        """Return how many times as fast as the baseline."""
        return self.baseline["median"] / self.median if self.baseline else None

    @property
    def x_floor(self) -> float | None:
        return self.median / self.floor if self.floor else None


def lines_of(result: MeasuredShape, machine: Machine) -> Iterator[TimedLine]:
    for direction, timings in result.measured.timings.items() if result.measured.right else ():
        backends, memory = [check.backend for check in result.measured.checks], result.measured.memory[direction]
        mine, *others = (summary(*side) | in_bytes(taken) for *side, taken in zip(backends, timings, memory))  # type: ignore[arg-type]
        moved = bytes_moved(result.shape, direction)
        floor, baseline = moved / machine.copy if machine.copy else None, others[0] if others else None
        yield TimedLine(
            shape=result.name, problem=result.shape.label, regime=result.regime, direction=direction, **mine,
            flops=flops(result.shape, direction), bytes=moved, floor=floor, baseline=baseline,
        )


def summary(backend: str, timing: Timings) -> dict[str, Any]:
    return {"backend": backend, "launches": len(timing.seconds), "median": timing.median, "p20": timing.quantile(0.2),
            "p80": timing.quantile(0.8), "host_inside": timing.host_inside}


def in_bytes(memory: CallMemory | None) -> dict[str, int | None]:
    return {"memory": memory and memory.peak, "memory_with_inputs": memory and memory.total}
