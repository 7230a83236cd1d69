"""The clock against every H200 time on record that the simulator can run.  No GPU:

    python -m benchmarks write --only predicted   # writes the errors that kda quotes, and what pages say of them
    python -m benchmarks.predicted --only h96-8k  # prints rows; --json FILE keeps them,
    python -m benchmarks.predicted --merge FILE   # and this puts them in instead of the old ones

Each row is a kernel of a call, predicted with the plan of the call as it was timed.  What the prediction and the record
say of it stands in kda/tools/measure/errors.json, of other predictions in docs/data/clock.json; `clock_page` makes
pages of both.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kda.tools.measure.predicted import ERRORS, PredictedLaunch, Prediction, forget, predict
from kda.tools.measure.shapes import SHAPES, BenchShape

from . import clock_page, common
from .pages import with_data

ARCH, CHIP = "sm_90a", "h200"


class Source(NamedTuple):
    where: str
    timer: str


class Call(NamedTuple):
    """A call that was timed: `times` holds microseconds by kernel, "name" or "name, backward"."""

    backend: str
    shape: str
    times: dict[str, float]
    source: Source
    seen: str                                # "fitted": a constant was set on it; "seen": the structure was
    K: int = 0                               # channels of a float32 call, of which nothing was saved for the backward
    keeps: bool = False                      # a step with disable_recompute
    gate: str = "bounded"

    def label(self, name: str) -> str:
        return name + ", kept" * self.keeps + f", {self.gate}" * (self.gate != "bounded")

    @property
    def step(self) -> bool:
        return any("backward" in name for name in self.times)

    @property
    def problem(self) -> BenchShape:
        if self.K:
            return BenchShape(T=8192, H=16, K=self.K, V=self.K, dtype="float32", gate="softplus")
        return SHAPES[self.shape]._replace(gate=self.gate)


OF_BACKWARDS = ("reverse", "shares")
PROFILE = "h200-sm90-profile.json"           # benchmarks/profiled.py
HOPPER = Source(f"results/{PROFILE}", "ncu")
TRITON = Source("docs/results/triton.md", "timer not recorded")
FLOAT32 = Source("docs/decisions/sm89_chains.md", "ncu")


def profiled() -> Iterator[Call]:
    """Calls of Hopper's kernels.  The clock's window was fitted to `fused`, in an older form; `stream` and the kernels
    of a step came later."""
    for call, rows in itertools.groupby(json.loads((common.RESULTS / PROFILE).read_text())["rows"], itemgetter("call")):
        way, shape, gate = [*call.split(), "bounded"][:3]
        times = {row["kernel"] + ", backward" * (row["kernel"] in OF_BACKWARDS): round(1e6 * row["seconds"], 1)
                 for row in rows}
        seen = "fitted" if (way, shape, gate) == ("forward", "h64-8k", "bounded") else "held out"
        yield Call("sm90", shape, times, HOPPER, seen, keeps=way == "kept", gate=gate)


CALLS = (
    *profiled(),
    Call("triton", "h64-8k", {"prepare": 747, "state": 220, "state_bwd, backward": 370, "wy_bwd, backward": 320,
         "intra_bwd, backward": 1980, "norms_bwd, backward": 240}, TRITON, "seen"),
    Call("sm89", "K64", {"prepare": 185, "chain": 212, "prepare, backward": 204, "chain, backward": 174,
         "chain_bwd, backward": 209, "wy_bwd, backward": 121, "intra_bwd, backward": 377, "norms_bwd, backward": 76},
         FLOAT32, "seen", K=64),
    Call("sm89", "K128", {"prepare": 324, "chain": 429, "prepare, backward": 365, "chain, backward": 340,
         "chain_bwd, backward": 441, "wy_bwd, backward": 219, "intra_bwd, backward": 890, "norms_bwd, backward": 151},
         FLOAT32, "seen", K=128),
)


@functools.cache
def prediction(backend: str, shape: BenchShape, step: bool, apart: bool, keeps: bool) -> Prediction:
    forget()                                 # so that a row is the same alone and behind others
    return predict(ARCH, CHIP, backend, shape, step, apart, keeps)


def launched(call: Call, name: str, recorded_step: bool) -> PredictedLaunch:
    kernel, _, direction = name.partition(", ")
    found = prediction(call.backend, call.problem, recorded_step, bool(call.K), call.keeps)
    return found.kernel(kernel, bool(direction))


def row_of(call: Call, name: str, recorded_step: bool | None = None) -> dict[str, Any]:
    """A forward's kernels are those of a forward, where the record does not have a step."""
    one = launched(call, name, call.step if recorded_step is None else recorded_step)
    measured, predicted = call.times[name], 1e3 * one.milliseconds
    unit, share = one.clock.binds()[0]
    why, clocks = one.stalls[0]
    return {
        "backend": call.backend, "family": f"{call.backend} {name.partition(',')[0]}",
        "shape": call.shape, "kernel": call.label(name), "measured": measured, "predicted": round(predicted, 1),
        "error": round(100 * (predicted / measured - 1), 1), "binds": f"{unit} {share:.0%}",
        "stall": f"{why} {clocks:.1f}",
        "seen": call.seen, **call.source._asdict(),
    }


WAITS = (                                    # the clock's reasons, as the columns of ncu's have them together
    ("long", "copies"), ("barrier", "mbarrier", "cluster"), ("wait",), ("short", "mio"), ("math",), ("not selected",),
)
NCU = {                                      # kernel: its call's shape and name; percent of issue slots, then WAITS
    "Triton prepare": ("h64-8k", "prepare", 26, 3.25, 0.62, 1.45, 0.73, 0.14, 0.14),
    "Triton state_bwd": ("h64-8k", "state_bwd, backward", 19, 1.66, 1.35, 0.57, 0.39, 0.08, 0.00),
    "Triton wy_bwd": ("h64-8k", "wy_bwd, backward", 24, 3.78, 0.65, 0.77, 1.28, 0.23, 0.17),
    "Triton intra_bwd": ("h64-8k", "intra_bwd, backward", 33, 4.12, 1.02, 1.05, 1.08, 0.25, 0.33),
    "Triton norms_bwd": ("h64-8k", "norms_bwd, backward", 42, 7.60, 0.00, 0.91, 0.63, 0.43, 0.52),
}


def of_stalls() -> Iterator[str]:
    for kernel, (shape, name, slots, *waits) in NCU.items():
        backend = kernel.split()[0].lower()
        call = next(c for c in CALLS if (c.backend, c.shape) == (backend, shape) and name in c.times)
        one = launched(call, name, call.step)
        stalls, issue = dict(one.stalls), dict(one.clock.binds())["issue"]
        cells = [f"{ncu:.2f}; {sum(stalls[why] for why in whys):.1f}" for ncu, whys in zip(waits, WAITS)]
        yield f"| {kernel} | {slots}%; {issue:.0%} | {' | '.join(cells)} |"


TABLES = {clock_page.OF_STALLS: of_stalls}   # beside that of the rows


def with_tables(data: str) -> str:
    for header, count in TABLES.items():
        data = with_data(data, header, count())
    return data


def calls() -> list[dict[str, Any]]:
    """Whole calls that `kda bench` timed."""
    rows = []
    for file in sorted(common.RESULTS.glob("h200-*.json")):
        data = json.loads(file.read_text())
        if isinstance(data, dict) and data.get("command") == "bench" and not data["settings"]["disable_recompute"]:
            source = f"{file.name} {data['host']['commit'].partition(',')[0]}"
            rows += [{"problem": row["problem"], "direction": row["direction"], "backend": row["backend"],
                       "seconds": row["median"], "source": source}
                      for row in data["rows"] if row["regime"] == "slow"]
    return rows


def merged(rows: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows instead of those of the same name, in the order of CALLS."""
    def named(row: dict[str, Any]) -> tuple[str, ...]:
        return row["backend"], row["shape"], row["kernel"]

    order = [(call.backend, call.shape, call.label(name)) for call in CALLS for name in call.times]
    by_name = {named(row): row for row in (*rows, *new)}
    return [by_name[name] for name in order if name in by_name]


def texts(rows: list[dict[str, Any]]) -> dict[Path, str]:
    """Return the files that say what the rows say."""
    data = {"chip": CHIP, "errors": clock_page.summary(rows), "calls": calls(), "rows": rows}
    page = clock_page.with_sentences(clock_page.PAGE.read_text(), rows)
    return {ERRORS: json.dumps(data, indent=1) + "\n", clock_page.PAGE: page}


def all_texts() -> dict[Path, str]:
    written = texts([row_of(call, name) for call in CALLS for name in call.times])
    return written | {clock_page.DATA: with_tables(clock_page.DATA.read_text())}


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--only", metavar="WORD", help="rows whose backend or shape this is")
    parser.add_argument("--merge", metavar="FILE", type=Path, nargs="+",
                        help="predict nothing: take new rows from these files")
    options = parser.parse_args()
    if options.merge:
        old = json.loads(ERRORS.read_text())["rows"]
        new = [row for file in options.merge for row in json.loads(file.read_text())]
        for file, text in texts(merged(old, new)).items():
            file.write_text(text)
        return
    only = options.only
    torch.set_num_threads(1)
    rows = []
    for call in CALLS:
        for name in call.times if only in (None, call.backend, call.shape) else ():
            rows.append(row_of(call, name))
            print(*(rows[-1][k] for k in ("backend", "shape", "kernel", "measured", "predicted", "error")), flush=True)
            common.write(options.json, rows)


if __name__ == "__main__":
    main()
