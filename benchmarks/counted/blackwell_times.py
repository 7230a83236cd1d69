"""What the clock of a B200 predicts of the kernels for Blackwell, beside what is counted and what peers publish."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from kda.model.force import forcing
from kda.tools.measure.peers import published_on_blackwell
from kda.tools.measure.predicted import Prediction, family_of, predict
from kda.tools.measure.shapes import SHAPES

from ..pages import table_row
from . import blackwell, blackwell_step

FORWARDS = "h64-8k", "h96-8k", "h32-8k", "h16-8k", "h12-8k", "h12-512", "h8-64k", "h64-8x1k", "h64-8k-64"
STEPS = "h64-8k", "h96-8k", "h32-8k", "h16-8k"
COMPARED = "h64-8k"                          # the shape whose kernels are counted and predicted one by one
FORWARD_OFF, STEP_OFF = 1.25, 1.31           # an H200's times over the clock's: 0.310 for 0.249 ms, 1.19 for 0.910
OF_FORWARDS = "| forward, ms | the clock | if as far off as on Hopper | published |"
OF_STEPS = "| step that keeps, ms | its forward | the clock | if as far off as on Hopper | published |"
OF_BOTH = "| kernel, H = 64 | counted, ms | what limits it | the clock, ms |"


@functools.cache
def predicted(shape: str, step: bool = False) -> Prediction:
    return predict("sm_100a", "b200", "sm100", SHAPES[shape], step, keeps=step)


def published(shape: str, direction: str) -> str:
    found = published_on_blackwell(shape, direction)
    return "; ".join(f"{one.ms:g} {one.peer}, {one.chip} ({one.source})" for one in found)


def row(shape: str, times: Iterable[float], others: str) -> str:
    label = SHAPES[shape].label.removesuffix(" bf16").removesuffix(" K=V=128")
    return table_row(label, *(f"{time:.3g}" if time < 0.1 else f"{time:.3f}" for time in times), others)


def of_forwards() -> Iterator[str]:
    for name in FORWARDS:
        time = predicted(name).milliseconds()
        yield row(name, [time, FORWARD_OFF * time], published(name, "forward"))


def of_steps() -> Iterator[str]:
    for name in STEPS:
        one = predicted(name, step=True)
        time = one.milliseconds()
        yield row(name, [one.milliseconds(False), time, STEP_OFF * time], published(name, "step"))


def milliseconds(one: Prediction) -> dict[str, float]:
    """Return the time of each kernel of a call, by what it is called."""
    found: dict[str, float] = {}
    for launch in one.launches:
        name = family_of(launch.kernel)
        found[name] = found.get(name, 0.0) + launch.milliseconds
    return found


def compared() -> dict[str, tuple[float, str, float]]:
    """Return each kernel of a forward and of a step that keeps, launched alone: the counted time, what limits it, the
    clock's time."""
    shape, counts = SHAPES[COMPARED], blackwell_step.counts()
    counted = {name: (1e3 * time, why)
               for name, (time, why) in blackwell_step.seconds(counts, shape.T, shape.H).items()}
    one = blackwell.chunk(blackwell.of_a_chunk())
    counted["fused"] = 1e3 * blackwell.seconds(one, shape.T, shape.H)[0], one.binds
    with forcing(form="two kernels", reverse=False):                           # for the forward that keeps
        step = predict("sm_100a", "b200", "sm100", shape, True, keeps=True)
    clocks = milliseconds(step) | milliseconds(predicted(COMPARED))
    return {name: (*counted[name], clocks[name]) for name in clocks}


def of_both() -> Iterator[str]:
    for name, (time, why, clock) in compared().items():
        yield table_row(name, f"{time:.3f}", why, f"{clock:.3f}")
