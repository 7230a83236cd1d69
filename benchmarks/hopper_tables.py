"""The tables of docs/results/sm90.md, from what `benchmarks/everything.sh tables` saved:

    python -m benchmarks write --only sm90

A figure is the median of replays of a CUDA graph, in milliseconds; two regimes of gates stand as slow, fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kda.tools.measure.shapes import gate_in

from . import common, times
from .pages import table_row, with_rows

PAGE = common.ROOT / "docs" / "results" / "sm90.md"
FORWARD = "| forward | floor | bounded gates: slow, fast | times the floor | softplus |"
STEP = "| step | floor | everything saved | times the floor | nothing saved | everything saved, softplus |"
PROFILE = "| kernel | ms | memory | instructions a clock | shared memory | warps wait for |"
MISSING = "-"
SHORT = 1e-5                                 # seconds


class Timing(NamedTuple):
    problem: str
    floor: float                             # seconds, as medians are
    medians: Mapping[str, float]             # by regime

    def __str__(self) -> str:
        return ", ".join(ms(self.medians[regime]) for regime in ("slow", "fast") if regime in self.medians)


def ms(seconds: float) -> str:
    """Return milliseconds with three digits that count, at most three behind the point."""
    value = 1e3 * seconds
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def timings(name: str, direction: str) -> dict[str, Timing]:
    """Return what a file of benchmarks/results says of each shape; nothing where there is no such file."""
    found: dict[str, Timing] = {}
    for row in saved(name):
        if row["direction"] == direction:
            medians = found[row["shape"]].medians if row["shape"] in found else {}
            found[row["shape"]] = Timing(row["problem"], row["floor"], {**medians, row["regime"]: row["median"]})
    return found


def saved(name: str) -> list[dict[str, Any]]:
    return (times.document(f"h200-sm90-{name}") or {"rows": []})["rows"]


def label(problem: str) -> str:
    """Return "B=1 T=8192 H=64 K=V=128 bf16, bounded gate" as a row of the table says it."""
    for leaving in (f", {gate_in(problem)} gate", " bf16", " K=V=128"):
        problem = problem.removesuffix(leaving)
    words = problem.removeprefix("B=1 ").split(" ")
    return " ".join(word.replace("=", "") if word[:2] in ("B=", "T=", "H=") else word for word in words)


def of_the_floor(timing: Timing) -> str:
    return f"{max(timing.medians.values()) / timing.floor:.1f}"


def forward() -> Iterator[str]:
    softplus = timings("forward-softplus", "forward")
    for shape, timing in timings("forward", "forward").items():
        yield table_row(label(timing.problem), ms(timing.floor), f"**{timing}**", of_the_floor(timing),
                        softplus.get(shape, MISSING))


def step() -> Iterator[str]:
    softplus, nothing = timings("kept-softplus", "step"), timings("step", "step")
    for shape, timing in timings("kept", "step").items():
        yield table_row(label(timing.problem), ms(timing.floor), f"**{timing}**", of_the_floor(timing),
                        nothing.get(shape, MISSING), softplus.get(shape, MISSING))


def profile() -> Iterator[str]:
    """Yield what ncu said of each kernel of a call, without those that take a few microseconds."""
    for row in [row for row in saved("profile") if row["seconds"] > SHORT]:
        waits = ", ".join(f"{name} {value:.1f}" for name, value in row["waits"].items())
        yield table_row(f"{row['kernel']}, {row['call']}", ms(row["seconds"]), f"{row['memory']:.0f}%",
                        f"{row['issued']:.2f}", f"{row['shared']:.0f}%", waits)


TABLES = {FORWARD: forward, STEP: step, PROFILE: profile}


def texts() -> dict[Path, str]:
    text = PAGE.read_text()
    for header, rows in TABLES.items():
        text = with_rows(text, header, rows())
    return {PAGE: text}
