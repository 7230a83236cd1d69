"""`kda bench --host`: what a forward and a training step cost the host.  Imports torch when it runs."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kda.errors import NoBackendError
from kda.routing.dispatch import backend_asked, capability, route
from kda.tools.measure.shapes import BenchShape, with_gate
from ptxkit.commands.layout import row_lines
from ptxkit.commands.render import OK, CannotJudge, Screen, heading
from ptxkit.compile.target import code_for

from ..options import must_have_kernels
from .asked import problem_of, setting, shapes_asked, spec_of
from .report import machine_line

if TYPE_CHECKING:
    from kda.tools.measure.host import HostCost, PresentGpu, StandIn
    from kda.tools.measure.timing import Machine

DEFAULT = {"few tokens": BenchShape("the host alone is seen where a GPU has little to do", T=1024, H=16)}
DIRECTIONS = ("forward", "step", "layer")     # one layer of several in a graph, forward and backward
HEAD = ("", "backend", "GPU idle", "p20-p80", "empty", "x empty", "GPU busy", "p20-p80", "launches", "of torch",
        "allocations")
SPREADS = (3, 7)                             # columns that -v adds
REPEATS = 200


def host(screen: Screen, options: dict[str, Any]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")     # otherwise torch's profiler writes into the progress
    from kda.tools.measure.host import PresentGpu, StandIn, calls, cost
    from kda.tools.measure.timing import this_machine
    from kda.tools.verify.cases import make
    from kda.tools.verify.doors import default_device

    device = default_device()
    target = options["arch"]
    if target is None and device == "cpu":
        raise CannotJudge(
            "--host needs a GPU that calls are launched to; found none. --arch sm90 sends the launches of that GPU's "
            "backends to a stand-in, so that all but the driver's part is timed"
        )
    name = options["backend"]
    if target and name and (archs := capability(name).archs) and code_for(target.cc, archs) is None:
        must_have_kernels(name, target)
    machine = this_machine("cpu" if target else device)
    gpu = StandIn(target) if target else PresentGpu(device)
    tensors_on = "cpu" if target else device
    shapes = shapes_asked(options, "gpu", DEFAULT)
    asked_to_keep = setting(options["disable_recompute"])
    saving = {"disable_recompute": asked_to_keep} if asked_to_keep else {}
    costs: list[tuple[BenchShape, HostCost]] = []
    steps = len(shapes) * len(directions_of(options)) * (1 + bool(options["against"]))
    with gpu.used(), screen.progress("drawing inputs", steps) as tell:
        for shape in shapes.values():
            spec = spec_of(shape, "slow")
            names = [options["backend"], *filter(None, [options["against"]])]
            backends = {name: taken_by(spec, name, tensors_on, asked_to_keep is True) for name in names}
            case = make(spec).map(lambda x: x.to(tensors_on))
            for name, backend in backends.items():
                for direction, call in calls(name or backend_asked(), case, **saving).items():
                    if direction in directions_of(options):
                        tell.step(f"{shape.label}: {direction} of {backend}")
                        costs.append((shape, cost(direction, backend, call, gpu, options["repeats"] or REPEATS)))
    report(screen, machine, gpu, costs, options)
    return OK


def directions_of(options: dict[str, Any]) -> tuple[str, ...]:
    return tuple(way for way in DIRECTIONS if way in options["directions"]) or DIRECTIONS


def taken_by(spec: Any, requested: str | None, device: str, saves: bool) -> str:
    """Return the backend of a step's forward, and that of its backward where that is another."""
    step = dataclasses.replace(problem_of(spec, "forward", device), disable_recompute=saves)
    try:
        found = route(step, backend_asked(requested), training=True)
    except NoBackendError as error:
        raise CannotJudge(*str(error).splitlines()) from None
    return ", ".join(dict.fromkeys(str(choice.backend) for choice in found.choices))


# ---------------------------------------------------------------------------------------------- reporting


def report(
    screen: Screen, machine: Machine, gpu: PresentGpu | StandIn, costs: Sequence[tuple[BenchShape, HostCost]],
    options: dict[str, Any],
) -> None:
    from kda.calls import node

    stand_in, why_python = getattr(gpu, "host", None), node.why_not()
    lines = [machine_line(screen, machine), "microseconds of the host per call, beside an empty autograd "
             "Function with the same tensors; results are not compared"]
    if stand_in:
        name = stand_in.name.removeprefix("simulated ")
        lines.append(f"launches go to a stand-in of {name}: the driver's part is left out, and tensors lie on the CPU")
    lines += ["", *table_lines(screen, costs, options["verbose"])]
    lines += [
        f"{screen.sign('warn')} {cost.direction} of {cost.backend}: the call waits for the GPU, or that ran dry; its "
        "time with a busy GPU is not the host's alone" for _, cost in costs if cost.busy and cost.busy.host_inside
    ]
    if why_python:
        lines.append(f"{screen.sign('warn')} calls run in Python: {why_python.splitlines()[0]}")
    if machine.crowded:
        lines.append(f"{screen.sign('warn')} other processes kept the cores busy (a load of {machine.load:.1f} on "
                     f"{machine.cores}): these times can be many times too long")
    settings = {"disable_recompute": setting(options["disable_recompute"])}
    found = heading("bench", OK, host=machine._asdict(), stand_in=stand_in and stand_in.name, settings=settings,
                    calls_in="Python" if why_python else "C++",
                    rows=[as_json(shape, cost) for shape, cost in costs])
    screen.answer(found, lines)


def table_lines(screen: Screen, costs: Sequence[tuple[BenchShape, HostCost]], verbose: bool) -> Iterator[str]:
    """Yield a heading for each shape, and a row for each of its calls."""
    shown = [i for i in range(len(HEAD)) if verbose or i not in SPREADS]
    rows = [[row[i] for i in shown] for row in cells(costs)]
    top, *printed = row_lines(rows, [HEAD[i] for i in shown], "llrrrrrrrrr", 2, screen.width)
    yield from top
    shape = None
    for (other, _), lines in zip(costs, printed):
        if other != shape:
            shape = other
            yield screen.paint(with_gate(shape.label), bold=True)
        yield from lines


def cells(costs: Sequence[tuple[BenchShape, HostCost]]) -> Iterator[tuple[str, ...]]:
    for _, cost in costs:
        busy = ("-", "-") if cost.busy is None else (us(cost.busy.median), spread(cost.busy))
        torch = "-" if cost.of_torch is None else str(cost.of_torch)
        yield (cost.direction, cost.backend, us(cost.idle.median), spread(cost.idle), us(cost.empty.median),
               f"{cost.ratio:.2f}", *busy,
               str(cost.launches), torch, str(cost.allocations))


def us(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}"


def spread(timing: Any) -> str:
    return f"{us(timing.quantile(0.2))}-{us(timing.quantile(0.8))}"


def as_json(shape: BenchShape, cost: HostCost) -> dict[str, Any]:
    """Return the costs as JSON, with times in seconds."""
    return {
        "problem": shape.label, "direction": cost.direction, "backend": cost.backend, "launches": cost.launches,
        "launches_of_torch": cost.of_torch, "allocations": cost.allocations,
        "ratio_to_empty_function": cost.ratio, "empty": of_timing(cost.empty),
        "idle": of_timing(cost.idle), "busy": cost.busy and of_timing(cost.busy),
    }


def of_timing(timing: Any) -> dict[str, Any]:
    return {"calls": len(timing.seconds), "median": timing.median, "p20": timing.quantile(0.2),
            "p80": timing.quantile(0.8), "mean": statistics.fmean(timing.seconds),
            "host_inside": timing.host_inside}
