"""The clock against every H200 time on record that the simulator can run.  No GPU:

    python -m benchmarks write --only predicted   # writes docs/results/clock.md, and the errors that kda quotes
    python -m benchmarks.predicted --only h96-8k  # prints rows; --json FILE keeps them,
    python -m benchmarks.predicted --merge FILE   # and this puts them in instead of the old ones

Each row is a kernel of a call, predicted with the plan of the call as it was timed.  What the prediction and the record
say of it stands in kda/tools/measure/errors.json; `table` makes the page's table of that.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kda.tools.measure.predicted import ERRORS, PredictedLaunch, Prediction, forget, predict
from kda.tools.measure.shapes import SHAPES, BenchShape

from . import common
from .forms import planned
from .pages import with_figures, with_rows

PAGE = common.ROOT / "docs/results/clock.md"
MARKERS = ("<!-- errors: begin, by benchmarks/predicted.py -->", "<!-- errors: end -->")
ARCH, CHIP = "sm_90a", "h200"


class Source(NamedTuple):
    where: str
    commit: str                              # that recorded it; empty where the page names none
    timer: str


class Call(NamedTuple):
    """A call that was timed: `times` holds microseconds by kernel, "name", "name, backward", or "name 2" of several."""

    backend: str
    shape: str
    times: dict[str, float]
    source: Source
    seen: str                                # "fitted": a constant was set on it; "seen": the structure was
    two: bool = False                        # sm90 in two kernels where one would be sooner
    K: int = 0                               # channels of a float32 call

    def label(self, name: str) -> str:
        return name + ", alone" * (self.source is ALONE)

    @property
    def step(self) -> bool:
        return any("backward" in name for name in self.times)

    @property
    def problem(self) -> BenchShape:
        if self.K:
            return BenchShape(T=8192, H=16, K=self.K, V=self.K, dtype="float32")
        return SHAPES.get(self.shape) or BenchShape(H=64, lengths=(128,) * 64)


HOPPER = Source("results/h200-sm90-kernels.json", "f0dd4ec", "profiler")
EVENTS = Source("results/h200-sm90-kernels.json", "f0dd4ec", "events")
STREAM = Source("results/h200-sm90-stream.json", "", "a graph of it alone")
BACKWARD = Source("results/h200-sm90-backward.json", "", "profiler")
ALONE = Source("docs/results/sm90.md: chain is 416 less prepare", "", "timer not recorded")
TRITON = Source("docs/results/triton.md", "", "timer not recorded")
FLOAT32 = Source("docs/decisions/sm89_chains.md", "", "ncu")
CALLS = (
    Call("sm90", "h64-8k", {"fused": 318.2}, HOPPER, "fitted"),
    Call("sm90", "h64-1k", {"fused": 47.4}, HOPPER, "fitted"),
    Call("sm90", "h64-8x1k", {"fused": 360.8}, HOPPER, "held out"),
    Call("sm90", "h64-mixed", {"fused": 351.0}, HOPPER, "held out"),
    Call("sm90", "h64-8k", {"prepare": 229, "chain": 187}, ALONE, "seen", two=True),
    Call("sm90", "kimi-8k", {"prepare": 114.6, "chain": 182.5}, HOPPER, "seen", two=True),
    Call("sm90", "h96-8k", {"prepare": 339.5, "chain": 298.9}, HOPPER, "seen", two=True),
    Call("sm90", "h64-64x128", {"prepare": 245.8, "chain": 257.7}, HOPPER, "held out", two=True),
    Call("sm90", "h8-32k", {"prepare": 115.3}, HOPPER, "seen", two=True),
    Call("sm90", "h8-32k", {"compose": 17.0}, HOPPER, "held out", two=True),
    Call("sm90", "h8-32k", {"chain": 104.0, "chain 2": 97.1}, EVENTS, "held out", two=True),
    Call("sm90", "h16-8k", {"prepare": 59.6, "compose": 13.9}, HOPPER, "held out", two=True),
    Call("sm90", "h16-8k", {"chain": 55.0, "chain 2": 51.2}, EVENTS, "held out", two=True),
    Call("sm90", "h16-8k", {"stream": 150.1}, STREAM, "held out"),
    Call("sm90", "h12-4k", {"stream": 86.4}, STREAM, "held out"),
    Call("sm90", "h64-8k", {"prepare, backward": 229, "chain, backward": 251, "walk, backward": 251,
         "grads, backward": 700}, BACKWARD, "held out"),
    Call("sm90", "kimi-8k", {"prepare, backward": 115, "chain, backward": 182, "walk, backward": 242,
         "grads, backward": 352}, BACKWARD, "held out"),
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
def prediction(backend: str, shape: BenchShape, step: bool, two: bool) -> Prediction:
    as_timed = {"FUSED": False, "STREAM": False} if two or step else {}
    with planned(**as_timed):
        forget()                             # so that a row is the same alone and behind others
        return predict(ARCH, CHIP, backend, shape, step, "softplus" if backend == "sm89" else "bounded")


def launched(call: Call, name: str, recorded_step: bool) -> PredictedLaunch:
    words, _, direction = name.partition(", ")
    kernel, _, nth = words.partition(" ")
    return prediction(call.backend, call.problem, recorded_step, call.two).kernel(
        kernel, bool(direction), int(nth or 1) - 1
    )


def row_of(call: Call, name: str, recorded_step: bool | None = None) -> dict[str, Any]:
    """A forward's kernels are those of a forward, where the record does not have a step."""
    one = launched(call, name, call.step if recorded_step is None else recorded_step)
    measured, found = call.times[name], 1e3 * one.milliseconds
    unit, share = one.clock.binds()[0]
    why, clocks = one.stalls[0]
    return {
        "backend": call.backend, "family": f"{call.backend} {name.partition(',')[0].split(' ')[0]}",
        "shape": call.shape, "kernel": call.label(name), "measured": measured, "predicted": round(found, 1),
        "error": round(100 * (found / measured - 1), 1), "binds": f"{unit} {share:.0%}", "stall": f"{why} {clocks:.1f}",
        "seen": call.seen, **call.source._asdict(),
    }


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    signed = statistics.mean(row["error"] for row in rows)
    return {"rows": len(rows), "median": round(statistics.median(errors), 1), "worst": max(errors),
            "mean": round(signed, 1)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors in percent: of all rows, of those that shaped the clock and of the others, and by family of kernels."""

    def by(key: str) -> dict[str, Any]:
        return {name: figures([r for r in rows if r[key] == name]) for name in dict.fromkeys(r[key] for r in rows)}

    families = by("family")
    medians = statistics.median(family["median"] for family in families.values())
    whole = figures(rows) | {"median of families": round(medians, 1)}
    return {"all": whole, "seen": by("seen"), "backends": by("backend"), "families": families}


def table(rows: list[dict[str, Any]]) -> str:
    found = summary(rows)
    lines = ["| backend, shape | kernel | measured, us | predicted | error | busiest unit | largest stall per issue | "
             "shaped the clock | source, timer |", "|" + "---|" * 9]
    for r in rows:
        source = " ".join(filter(None, (r["where"], r["commit"]))) + f", {r['timer']}"
        lines.append(f"| {r['backend']}, {r['shape']} | {r['kernel']} | {r['measured']:g} | {r['predicted']:g} | "
                     f"{r['error']:+.0f}% | {r['binds'] or ''} | {r['stall'] or ''} | {r['seen']} | {source} |")
    lines += ["", "| errors | rows | median | worst | mean, with its sign |", "|---|---|---|---|---|"]
    named = {"all": found["all"], **found["seen"], **found["backends"], **found["families"]}
    lines += [f"| {name} | {e['rows']} | {e['median']:.0f}% | {e['worst']:.0f}% | {e['mean']:+.0f}% |"
              for name, e in named.items()]
    lines += ["", f"The median of the families' medians is {found['all']['median of families']:.0f}%."]
    return "\n".join(lines)


def sentences(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """What the page says of the rows, with # for a figure, and the figures."""
    errors = summary(rows)

    def rows_of(shape: str, *kernels: str, backend: str = "sm90") -> list[dict[str, Any]]:
        known = {r["kernel"]: r for r in rows if (r["backend"], r["shape"]) == (backend, shape)}
        return [known[kernel] for kernel in kernels]

    def off(some: list[dict[str, Any]], places: int = 0) -> list[str]:
        return [f"{abs(r['error']):.{places}f}" for r in some]

    def span(some: list[dict[str, Any]]) -> list[str]:
        return [f"{limit([abs(r['error']) for r in some]):.0f}" for limit in (min, max)]

    def both(some: list[dict[str, Any]]) -> list[float]:
        return [sum(r[key] for r in some) for key in ("predicted", "measured")]

    def sums(some: list[dict[str, Any]]) -> list[str]:
        predicted, measured = both(some)
        return [f"{predicted / 1e3:.2f}", f"{measured / 1e3:.2f}", f"{100 * (1 - predicted / measured):.0f}"]

    def busy(some: list[dict[str, Any]]) -> list[str]:
        return [r["binds"].split()[1].rstrip("%") for r in some]

    back = ("prepare, backward", "chain, backward", "walk, backward", "grads, backward")
    many, few = rows_of("h64-8k", *back), rows_of("kimi-8k", *back)
    chains = [*rows_of("h64-8k", "chain, alone"), *rows_of("h8-32k", "chain 2"), *rows_of("h16-8k", "chain 2")]
    chains += [r for shape in ("kimi-8k", "h96-8k", "h64-64x128") for r in rows_of(shape, "chain")]
    makers = [r for r in rows if r["family"] == "sm90 prepare" and r["shape"] != "h64-64x128"]
    names = [f"{name}_bwd, backward" for name in ("state", "wy", "intra", "norms")]
    triton = rows_of("h64-8k", *names, backend="triton")
    of_triton = [f"{r[key]:,.0f}" for r in triton for key in ("predicted", "measured")]
    forms = [rows_of("h64-8k", "fused"), rows_of("h64-8k", "prepare, alone", "chain, alone")]
    medians = [errors["all"]["median of families"], errors["all"]["median"], errors["backends"]["sm90"]["median"]]
    return {
        "The worst is #%, `stream` at T4096 H12, then #%, `walk`":
            off([*rows_of("h12-4k", "stream"), *rows_of("kimi-8k", "walk, backward")], 1),
        "median over the families is #%; the median over rows is #%, over Hopper's rows #%":
            [f"{median:.0f}" for median in medians],
        "`stream` is predicted #% and #% too short": off([*rows_of("h16-8k", "stream"), *rows_of("h12-4k", "stream")]),
        "Its eight rows are # to #% off: `prepare` is # and #% too long":
            [*span(many + few), *off([many[0], few[0]])],
        "at 64 heads `chain` and `walk` are # and #% too short, at 32 heads # and #%; `grads` is # "
        "and #% too short": off([*many[1:3], *few[1:3], many[3], few[3]]),
        "The sum of the four is # ms instead of # at 64 heads (#% short), and # instead of # at 32 (#%)":
            [*sums(many), *sums(few)],
        "At 64 heads HBM limits both walks (# and #% busy); at 32 it does not (# and #%)":
            busy([*many[1:3], *few[1:3]]),
        "as in the forward's `chain` (#% short at 32 heads)": off(rows_of("kimi-8k", "chain")),
        "(`chain`) are # to #% too short in the forward": span(chains),
        "and # and #% too long where they carry a state":
            off([*rows_of("h16-8k", "chain"), *rows_of("h8-32k", "chain")]),
        "`prepare` of Hopper is # to #% too long**, in one shape #%.":
            [*span(makers), *off(rows_of("h64-64x128", "prepare"))],
        "one kernel is correctly faster than two: # and # us measured, # and # predicted":
            [f"{both(form)[n]:.0f}" for n in (1, 0) for form in forms],
        "`fused` #% too long at this length": off(forms[0]),
        "state_bwd # us (# measured), wy_bwd # (#), intra_bwd # (#), norms_bwd # (#).": of_triton,
        "The sum is # ms instead of #, #% short": sums(triton),
    }


def written(page: str, rows: list[dict[str, Any]]) -> str:
    before, rest = page.split(MARKERS[0])
    page = f"{before}{MARKERS[0]}\n\n{table(rows)}\n\n{MARKERS[1]}{rest.split(MARKERS[1])[1]}"
    for words, figures in sentences(rows).items():
        page = with_figures(page, words, figures)
    return page


H100 = {                                     # at B1 T8192: heads, a step or a forward, milliseconds measured
    "H64, forward": (64, False, 0.323), "H64, step, nothing kept": (64, True, 1.987), "H96, step": (96, True, 2.996),
    "H32, step": (32, True, 1.137),
}


def of_h100() -> Iterator[str]:
    for name, (heads, step, measured) in H100.items():
        found = predict(ARCH, "h100", "sm90", BenchShape(T=8192, H=heads), step).milliseconds()
        yield f"| {name} | {found:.3f} | {measured} | {100 * (found / measured - 1):+.0f}% |"


WAITS = (                                    # the clock's reasons, as the columns of ncu's have them together
    ("long", "copies"), ("barrier", "mbarrier", "cluster"), ("wait",), ("short", "mio"), ("math",), ("not selected",),
)
NCU = {                                      # kernel: its call's shape and name; percent of issue slots, then WAITS
    "sm90 fused": ("h64-8k", "fused", 57, 1.70, 1.98, 1.13, 1.04, 0.68, 1.02),
    "sm90 prepare, H32": ("kimi-8k", "prepare", 60, 1.66, 0.93, 1.06, 1.04, 0.75, 1.23),
    "sm90 chain, H32": ("kimi-8k", "chain", 28, 1.04, 0.48, 0.79, 0.66, 0.14, 0.02),
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
        found, issue = dict(one.stalls), dict(one.clock.binds())["issue"]
        cells = [f"{ncu:.2f}; {sum(found[why] for why in whys):.1f}" for ncu, whys in zip(waits, WAITS)]
        yield f"| {kernel} | {slots}%; {issue:.0%} | {' | '.join(cells)} |"


TABLES = {                                   # beside that of the rows, by header
    "| H100, B1 T8192 | predicted, ms | measured | error |": of_h100,
    "| kernel | issue slots used | long | barriers, mbarriers | fixed latency | short, MIO | math, dispatch | not "
    "selected |": of_stalls,
}


def with_tables(page: str) -> str:
    for header, count in TABLES.items():
        page = with_rows(page, header, count())
    return page


def calls() -> list[dict[str, Any]]:
    """Whole calls that `kda bench` timed."""
    found = []
    for file in sorted(common.RESULTS.glob("h200-*.json")):
        data = json.loads(file.read_text())
        if isinstance(data, dict) and "settings" in data and not data["settings"]["disable_recompute"]:
            source = f"{file.name} {data['host']['commit'].partition(',')[0]}"
            found += [{"problem": row["problem"], "direction": row["direction"], "backend": row["backend"],
                       "seconds": row["median"], "source": source}
                      for row in data["rows"] if row["regime"] == "slow"]
    return found


def merged(rows: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows instead of those of the same name, in the order of CALLS."""
    def named(row: dict[str, Any]) -> tuple[str, ...]:
        return row["backend"], row["shape"], row["kernel"]

    order = [(call.backend, call.shape, call.label(name)) for call in CALLS for name in call.times]
    found = {named(row): row for row in (*rows, *new)}
    return [found[name] for name in order if name in found]


def texts(rows: list[dict[str, Any]]) -> dict[Path, str]:
    """Return the files that say what the rows say."""
    data = {"chip": CHIP, "errors": summary(rows), "calls": calls(), "rows": rows}
    return {ERRORS: json.dumps(data, indent=1) + "\n", PAGE: written(PAGE.read_text(), rows)}


def all_texts() -> dict[Path, str]:
    found = texts([row_of(call, name) for call in CALLS for name in call.times])
    return found | {PAGE: with_tables(found[PAGE])}


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
