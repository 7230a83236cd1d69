"""Times on record of Hopper's backend, from CUDA graphs, whatever wrote them: `kda bench --save` or older programs.

Each has the gate that its file says.  Those that `benchmarks/everything.sh tables` writes come first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from kda.tools.measure.shapes import SHAPES, gate_in

from . import common

KINDS = ("forward", "forward-softplus", "kept", "kept-softplus", "step", "step-softplus")
OTHERS = {"fla": "FLA", "cudnn": "cuDNN"}    # what `kda bench --against` calls them


class Timed(NamedTuple):
    """One time, in milliseconds."""

    side: str                                # "kda", or who else was timed beside it
    shape: str                               # a label without its gate
    gate: str
    regime: str
    direction: str                           # "forward" or "step"
    keeps: bool                              # disable_recompute
    ms: float
    GiB: float | None = None                 # the peak of memory, inputs included


@functools.cache
def document(name: str) -> Any:
    """Return what a file of benchmarks/results holds; None if there is no such file."""
    file = common.RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


@functools.cache
def on_record(card: str) -> tuple[Timed, ...]:
    names = [*(f"{card}-sm90-{kind}" for kind in KINDS), f"{card}-sm90", f"{card}-gates"]
    return tuple(timed for name in names if isinstance(saved := document(name), dict) for timed in read(saved))


def read(saved: dict[str, Any]) -> Iterator[Timed]:
    for row in saved["rows"]:
        if saved.get("command") == "bench":
            yield from of_bench(saved["settings"], row)
        elif "again graph" in row:
            yield from of_steps(row)
        elif "forward" in row and row["shape"] in SHAPES:
            yield Timed("kda", name_of(row["shape"]), row["gate"], "slow", "forward", False, row["forward"])


def of_bench(settings: dict[str, Any], row: dict[str, Any]) -> Iterator[Timed]:
    keeps = bool(settings["disable_recompute"])
    if settings["graph"] and (row["direction"] == "step" or (row["direction"] == "forward" and not keeps)):
        gate = gate_in(row["problem"])
        about = row["problem"].removesuffix(f", {gate} gate"), gate, row["regime"], row["direction"], keeps
        size = row["memory_with_inputs"] and row["memory_with_inputs"] / 2**30
        yield Timed("kda", *about, 1e3 * row["median"], size)
        if row["baseline"] and row["baseline"]["backend"] in OTHERS:
            yield Timed(OTHERS[row["baseline"]["backend"]], *about, 1e3 * row["baseline"]["median"])


def of_steps(row: dict[str, Any]) -> Iterator[Timed]:
    """Yield the steps of a row that names its shape and, unless it is bounded, its gate."""
    shape, *words = row["shape"].split()
    if shape in SHAPES and words in ([], ["softplus"]):
        gate = (*words, "bounded")[0]
        for mode, keeps in (("again", False), ("kept", True)):
            about = name_of(shape), gate, row["regime"], "step", keeps
            yield Timed("kda", *about, row[f"{mode} graph"], row[f"{mode} MiB"] / 2**10)


def name_of(shape: str) -> str:
    """Return the label of a named shape without its gate."""
    return SHAPES[shape]._replace(gate="bounded").label


def gates_of(card: str) -> list[str]:
    """Return the gates that were timed, the bounded one first."""
    return sorted({timed.gate for timed in on_record(card)})


def found(
    card: str, shape: str, gate: str, regime: str, direction: str, keeps: bool = False, side: str = "kda"
) -> Timed | None:
    """Return the time of the first file that has such a call."""
    asked = side, name_of(shape), gate, regime, direction, keeps
    return next((timed for timed in on_record(card) if timed[:6] == asked), None)
