"""Whether the clock prefers what an H200 preferred, of configurations that were timed beside each other.  No GPU:

    python -m benchmarks write --only pairs       # writes rows of docs/data/clock.json, and how many pairs are right

The times are those of docs/results and docs/decisions for B1 T8192 H64, where today's kernel can be built so and is the
one that was timed, or a near relative (`older`: an earlier form of it).
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

from kda.backends.triton.configs import choose
from kda.model.force import forcing
from kda.model.host import host_of
from kda.model.problem import Problem
from kda.tools.measure import predicted as predictions
from kda.tools.measure.shapes import SHAPES

from . import predicted as rows
from .clock_page import DATA, OF_PAIRS, PAGE
from .pages import with_data, with_figures

APART = 0.03                                 # pairs closer than this were not told apart


class Way(NamedTuple):
    kernel: str
    changes: dict[str, Any]
    measured: float                          # microseconds
    older: bool = False


WAYS = (
    Way("state", {"stages": 1}, 630),
    Way("state", {"stages": 2}, 350),
    Way("state", {"stages": 3}, 230),
    Way("state", {"num_warps": 8}, 460),
    Way("state", {"BV": 32}, 360),
    Way("prepare", {}, 738),
    Way("prepare", {"BV": 64}, 757),
    Way("prepare", {"maxnreg": 168}, 1520),
    Way("prepare", {"num_warps": 8}, 850),
    Way("wy_bwd", {"stages": 1}, 410, True),
    Way("wy_bwd", {"stages": 2}, 320, True),
    Way("wy_bwd", {"stages": 1, "BV": 128}, 330, True),
    Way("wy_bwd", {"stages": 1, "BV": 32}, 640, True),
    Way("wy_bwd", {"stages": 2, "BV": 32}, 350, True),
)
SPILLING = {"maxnreg": 168}                  # one of the ways: ptxas spills for it, which costs nothing in the model
SENTENCE = "# of # such pairs are predicted in the order in which they were timed; # of # without"


def predicted(way: Way) -> float:
    """Microseconds."""
    family = way.kernel.removesuffix("_bwd") if way.kernel == "wy_bwd" else way.kernel
    shape, step = SHAPES["h64-8k"], way.kernel.endswith("_bwd")
    usual = choose(family, Problem(K=shape.K, V=shape.V), host_of(rows.ARCH))
    predictions.forget()
    with forcing(configs=((family, dataclasses.replace(usual, **way.changes)),)):
        prediction = predictions.predict(rows.ARCH, rows.CHIP, "triton", shape, step)
    predictions.forget()
    return 1e3 * prediction.kernel(way.kernel, step).milliseconds


def pairs(ways: list[tuple[Way, float]]) -> list[tuple[Way, Way, bool]]:
    """Two ways of one kernel whose times are told apart, and whether the predictions have their order."""
    return [
        (a, b, (a.measured < b.measured) == (p < q))
        for (a, p), (b, q) in itertools.combinations(ways, 2)
        if a.kernel == b.kernel and abs(a.measured / b.measured - 1) > APART
    ]


def row(way: Way, predicted_us: float) -> str:
    changes = ", ".join(f"{name.removeprefix('num_')} {value}" for name, value in way.changes.items()) or "as shipped"
    return f"| {way.kernel} | {changes} | {way.measured:,.0f} | {predicted_us:,.0f} |"


def written(page: str, ways: list[tuple[Way, float]]) -> str:
    """Return the page with the number of pairs that are predicted right."""

    def right(predictions: list[tuple[Way, float]]) -> list[str]:
        judged = pairs(predictions)
        return [f"{sum(good for *_, good in judged)}", f"{len(judged)}"]

    without = [(way, us) for way, us in ways if way.changes != SPILLING]
    return with_figures(page, SENTENCE, [*right(ways), *right(without)])


def texts() -> dict[Path, str]:
    """Return the page and the data of another as the predictions have them."""
    ways = [(way, predicted(way)) for way in WAYS]
    return {
        DATA: with_data(DATA.read_text(), OF_PAIRS, (row(*each) for each in ways)),
        PAGE: written(PAGE.read_text(), ways),
    }
