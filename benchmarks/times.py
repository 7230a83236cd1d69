"""Times on record of Hopper's backend, whatever program wrote them: `kda bench --save`, or the older files of steps.

Each has the gate that its file says.  Those that `benchmarks/everything.sh tables` writes come first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from kda.tools.measure.shapes import SHAPES, gate_in

from . import common

KINDS = ("forward", "forward-softplus", "kept", "kept-softplus", "step", "step-softplus", "eager", "kept-eager")
OTHERS = {"fla": "FLA", "cudnn": "cuDNN"}    # what `kda bench --against` calls them


class Timed(NamedTuple):
    """One time, in milliseconds."""

    code: str                                # the commit, or the file where it says none
    side: str                                # "kda", or who else was timed beside it
    shape: str                               # a label without its gate
    gate: str
    regime: str
    direction: str                           # "forward" or "step"
    keeps: bool                              # disable_recompute
    graph: bool
    ms: float
    GiB: float | None = None                 # the peak of memory, inputs included


class Pair(NamedTuple):
    """A time from a graph, and the same code's outside of one, as far as they are on record."""

    graph: float | None
    eager: float | None
    GiB: float | None

    @property
    def time(self) -> float:
        """Return the time outside of a graph where it is known: others are timed so."""
        time = self.graph if self.eager is None else self.eager
        assert time is not None
        return time


@functools.cache
def document(name: str) -> Any:
    file = common.RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


@functools.cache
def on_record(card: str) -> tuple[Timed, ...]:
    names = [f"{card}-sm90-{kind}" for kind in KINDS] + [f"{card}-sm90"]
    found = [(name, document(name)) for name in names]
    return tuple(timed for name, each in found if each for timed in (
        of_bench(each) if isinstance(each, dict) and each.get("command") == "bench" else of_steps(name, each)
    ))


def of_bench(saved: dict[str, Any]) -> Iterator[Timed]:
    keeps, graph = bool(saved["settings"]["disable_recompute"]), saved["settings"]["graph"]
    code = saved["host"]["commit"] or ""
    for row in saved["rows"]:
        if row["direction"] == "step" or (row["direction"] == "forward" and not keeps):
            gate = gate_in(row["problem"])
            about = (row["problem"].removesuffix(f", {gate} gate"), gate, row["regime"], row["direction"], keeps, graph)
            size = row["memory_with_inputs"] and row["memory_with_inputs"] / 2**30
            yield Timed(code, "kda", *about, 1e3 * row["median"], size)
            if row["baseline"] and row["baseline"]["backend"] in OTHERS:
                yield Timed(code, OTHERS[row["baseline"]["backend"]], *about, 1e3 * row["baseline"]["median"])


def of_steps(name: str, saved: Any) -> Iterator[Timed]:
    for row in saved["rows"] if isinstance(saved, dict) else ():
        shape, *words = row["shape"].split()
        if shape in SHAPES and words in ([], ["softplus"]):
            gate = (*words, "bounded")[0]
            for mode, keeps in (("again", False), ("kept", True)):
                about = ("kda", SHAPES[shape].label, gate, row["regime"], "step", keeps)
                size = row[f"{mode} MiB"] / 2**10
                yield Timed(name, *about, True, row[f"{mode} graph"], size)
                yield Timed(name, *about, False, row[mode], size)


def gates_of(card: str) -> list[str]:
    """Return the gates that were timed, the bounded one first."""
    return sorted({timed.gate for timed in on_record(card)})


def pair(
    card: str, shape: str, gate: str, regime: str, direction: str, keeps: bool = False, side: str = "kda"
) -> Pair | None:
    """Return the times of the first file that has such a call; of eager calls only those of the same code."""
    asked = side, SHAPES[shape].label.removesuffix(f", {SHAPES[shape].gate} gate"), gate, regime, direction, keeps
    found = [timed for timed in on_record(card) if timed[1:7] == asked]
    if not found:
        return None
    first = {timed.graph: timed for timed in reversed(found) if timed.code == found[0].code}
    graph, eager = (first.get(way) for way in (True, False))
    return Pair(graph and graph.ms, eager and eager.ms, found[0].GiB)
