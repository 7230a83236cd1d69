"""What the clock's predictions say: the page of its errors, which docs/written.py writes, and figures in sentences.

The sentences stand in docs/results/clock.md; `python -m benchmarks write --only predicted` writes their figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import common
from .pages import table_row, with_figures

PAGE, DATA = common.ROOT / "docs/results/clock.md", common.ROOT / "docs/data/clock.json"
OF_ROWS = (
    "| backend, shape | kernel | measured, us | predicted | error | busiest unit | largest stall per issue | "
    "shaped the clock | source, timer |"
)
OF_ERRORS = "| errors | rows | median | worst | mean, with its sign |"
OF_SUMS = "| kernels together | measured, us | predicted | error |"
OF_H100 = "| H100, B1 T8192 | predicted, ms | measured | error |"
OF_PAIRS = "| kernel | configuration | measured, us | predicted |"
OF_STALLS = (
    "| kernel | issue slots used | long | barriers, mbarriers | fixed latency | short, MIO | math, dispatch | "
    "not selected |"
)
OF_BLACKWELL = "| H | counted, ms | clock, ms |"
TEXT = """# The clock's errors, kernel by kernel

Every kernel that was timed on an H200 and that the simulator can run, beside [the clock's](clock.md) prediction.
Constants come from microbenchmarks, never from these kernels.

- *fitted*: the window of 48 clocks was fitted to it, before loads could move. That loads move was decided on `prepare`
  and `fused` (H32, 1,024 tokens).
- *seen*: the structure was built and debugged with it, so it is not a clean test either. Triton's and float32's rows
  played no part in that, but were looked at before.
- *held out*: looked at only when everything was done.

The profiler and `ncu` give times of a kernel; events include some 2 us of its launch. `ncu` runs each kernel by itself,
with empty caches and its own clock rate.

{rows}

{errors}

The median of the families' medians is {median:.0f}%.

{sums}

## An H100

Nothing was fitted to these times (`benchmarks/results/h100-sm90.json` and `h100-sm90-step.json`).

{h100}

## Pairs

These configurations of Triton's kernels were timed beside each other at B1 T8192 H64, those of wy_bwd in an older form.

{pairs}

## Stalls beside ncu's

Clocks that warps wait per issued instruction: first ncu's, of the same kernels on an H200, then the simulator's. The
simulator's "long" includes waits for copies; its "math" includes the register file, which ncu calls dispatch.

{stalls}

## The Blackwell forward

B = 1, T = 8192, on a B200: predictions for a kernel that was never timed. The model's Blackwell constants are published
or assumed.

{blackwell}
"""
Row = Mapping[str, Any]
BACKWARD = ("prepare, backward", "chain, backward", "walk, backward", "grads, backward")
TOGETHER = {                                 # kernels whose times add up: backend, shape, kernels
    "Hopper's backward, 64 heads": ("sm90", "h64-8k", BACKWARD),
    "Hopper's backward, 32 heads": ("sm90", "h32-8k", BACKWARD),
    "Hopper's forward in one kernel, 64 heads": ("sm90", "h64-8k", ("fused",)),
    "Hopper's forward in two kernels, 64 heads": ("sm90", "h64-8k", ("prepare, alone", "chain, alone")),
    "Triton's backward, 64 heads": (
        "triton", "h64-8k", ("state_bwd, backward", "wy_bwd, backward", "intra_bwd, backward", "norms_bwd, backward")
    ),
}


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    signed = statistics.mean(row["error"] for row in rows)
    return {"rows": len(rows), "median": round(statistics.median(errors), 1), "worst": max(errors),
            "mean": round(signed, 1)}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors in percent: of all rows, of those that shaped the clock and of the others, and by family of kernels."""

    def by(key: str) -> dict[str, Any]:
        return {name: figures([r for r in rows if r[key] == name]) for name in dict.fromkeys(r[key] for r in rows)}

    families = by("family")
    medians = statistics.median(family["median"] for family in families.values())
    whole = figures(rows) | {"median of families": round(medians, 1)}
    return {"all": whole, "seen": by("seen"), "backends": by("backend"), "families": families}


def rows_of(rows: Iterable[Row], backend: str, shape: str, kernels: Iterable[str]) -> list[Row]:
    known = {r["kernel"]: r for r in rows if (r["backend"], r["shape"]) == (backend, shape)}
    return [known[kernel] for kernel in kernels]


def together(rows: Sequence[Row], name: str) -> tuple[float, float, float]:
    """Return what kernels take together, measured and predicted, and the error in percent."""
    some = rows_of(rows, *TOGETHER[name])
    measured, predicted = (sum(row[key] for row in some) for key in ("measured", "predicted"))
    return measured, predicted, round(100 * (predicted / measured - 1), 1)


def of_rows(rows: Iterable[Row]) -> Iterator[str]:
    for r in rows:
        source = " ".join(filter(None, (r["where"], r["commit"]))) + f", {r['timer']}"
        yield table_row(
            f"{r['backend']}, {r['shape']}", r["kernel"], f"{r['measured']:g}", f"{r['predicted']:g}",
            f"{r['error']:+.0f}%", r["binds"] or "", r["stall"] or "", r["seen"], source,
        )


def of_errors(rows: Sequence[Row]) -> Iterator[str]:
    medians = summary(rows)
    named = {"all": medians["all"], **medians["seen"], **medians["backends"], **medians["families"]}
    for name, e in named.items():
        yield table_row(name, e["rows"], f"{e['median']:.0f}%", f"{e['worst']:.0f}%", f"{e['mean']:+.0f}%")


def of_sums(rows: Sequence[Row]) -> Iterator[str]:
    for name in TOGETHER:
        measured, predicted, error = together(rows, name)
        yield table_row(name, f"{measured:,.0f}", f"{predicted:,.0f}", f"{error:+.0f}%")


def page(rows: Sequence[Row], tables: Mapping[str, Sequence[str]]) -> str:
    """Return the page of the rows and of what docs/data/clock.json holds."""

    def table(header: str, rows: Iterable[str]) -> str:
        return "\n".join([header, "|" + "---|" * header.count(" |"), *rows])

    others = {"h100": OF_H100, "pairs": OF_PAIRS, "stalls": OF_STALLS, "blackwell": OF_BLACKWELL}
    return TEXT.format(
        rows=table(OF_ROWS, of_rows(rows)), errors=table(OF_ERRORS, of_errors(rows)),
        sums=table(OF_SUMS, of_sums(rows)), median=summary(rows)["all"]["median of families"],
        **{name: table(header, tables[header]) for name, header in others.items()},
    )


def sentences(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return what docs/results/clock.md says of the rows, with # for a figure, and the figures."""

    def hopper(shape: str, *kernels: str) -> list[Row]:
        return rows_of(rows, "sm90", shape, kernels)

    def off(some: Iterable[Row], places: int = 0) -> list[str]:
        return [f"{abs(r['error']):.{places}f}" for r in some]

    def span(some: Sequence[Row]) -> list[str]:
        return [f"{limit([abs(r['error']) for r in some]):.0f}" for limit in (min, max)]

    errors = summary(rows)
    chains = [*hopper("h64-8k", "chain, alone"), *hopper("h8-32k", "chain 2"), *hopper("h16-8k", "chain 2")]
    chains += [r for shape in ("h32-8k", "h96-8k", "h64-64x128") for r in hopper(shape, "chain")]
    makers = [r for r in rows if r["family"] == "sm90 prepare" and r["shape"] != "h64-64x128"]
    medians = [errors["all"]["median of families"], errors["all"]["median"], errors["backends"]["sm90"]["median"]]
    backward = [-together(rows, name)[2] for name, (*_, kernels) in TOGETHER.items() if kernels is BACKWARD]
    return {
        "The worst is #%, `stream` at T4096 H12, then #%, `walk`":
            off([*hopper("h12-4k", "stream"), *hopper("h32-8k", "walk, backward")], 1),
        "median over the families is #%, over rows #%, over Hopper's rows #%":
            [f"{median:.0f}" for median in medians],
        "`stream` is predicted #% and #% too short": off([*hopper("h16-8k", "stream"), *hopper("h12-4k", "stream")]),
        "Its eight rows are # to #% off": span([*hopper("h64-8k", *BACKWARD), *hopper("h32-8k", *BACKWARD)]),
        "together #% at 64 heads and #% at 32": [f"{error:.0f}" for error in backward],
        "(`chain`) are # to #% too short in the forward": span(chains),
        "and # and #% too long where they carry a state": off([*hopper("h16-8k", "chain"), *hopper("h8-32k", "chain")]),
        "`prepare` of Hopper is # to #% too long**, in one shape #%.":
            [*span(makers), *off(hopper("h64-64x128", "prepare"))],
    }


def with_sentences(page: str, rows: Sequence[Row]) -> str:
    for words, figures in sentences(rows).items():
        page = with_figures(page, words, figures)
    return page
