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
OF_PAIRS = "| kernel | configuration | measured, us | predicted |"
OF_STALLS = (
    "| kernel | issue slots used | long | barriers, mbarriers | fixed latency | short, MIO | math, dispatch | "
    "not selected |"
)
OF_BLACKWELL = "| H | counted, ms | clock, ms |"
TEXT = """# The clock's errors, kernel by kernel

Every kernel that was timed on an H200 and that the simulator can run, beside [the clock's](clock.md) prediction.
Constants come from microbenchmarks, never from these kernels, but for the window of 48 clocks.

- *fitted*: the window of 48 clocks was fitted to an older form of this kernel.
- *seen*: looked at before everything was done; no constant was set on it.
- *held out*: looked at only when everything was done.

`ncu` times each kernel by itself, with the clock rate and the caches of a call; float32's rows with empty caches and
its own clock rate.

{rows}

{errors}

The median of the families' medians is {median:.0f}%.

{sums}

## Pairs

These configurations of Triton's kernels were timed beside each other at B1 T8192 H64, those of wy_bwd in an older form.

{pairs}

## Stalls beside ncu's

Clocks that warps wait per issued instruction: first ncu's, of the same kernels on an H200, then the simulator's. The
simulator's "long" includes waits for copies; its "math" includes the register file, which ncu calls dispatch.

{stalls}

## The Blackwell forward

B = 1, T = 8192, on a B200: predictions for a kernel that was never timed, and times counted from its instructions and
bytes. The model's Blackwell constants are published or assumed.

{blackwell}
"""
Row = Mapping[str, Any]
KEPT_STEP = ("fused, kept", "reverse, backward, kept", "shares, backward, kept")
TOGETHER = {                                 # kernels whose times add up: backend, shape, kernels
    "Hopper's kept step, 64 heads": ("sm90", "h64-8k", KEPT_STEP),
    "Hopper's kept step, 32 heads": ("sm90", "h32-8k", KEPT_STEP),
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
        source = f"{r['where']}, {r['timer']}"
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

    others = {"pairs": OF_PAIRS, "stalls": OF_STALLS, "blackwell": OF_BLACKWELL}
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
    medians = [errors["all"]["median of families"], errors["all"]["median"], errors["backends"]["sm90"]["median"]]
    forwards = [*hopper("h64-8k", "fused"), *hopper("h32-8k", "fused"), *hopper("h64-8k", "fused, softplus")]
    streams = [row for row in rows if row["family"] == "sm90 stream"]
    return {
        "The worst is #%": off([max(rows, key=lambda row: abs(row["error"]))], 1),
        "median over the families is #%, over rows #%, over Hopper's rows #%":
            [f"{median:.0f}" for median in medians],
        "`fused` is # to #% off": span(forwards),
        "`stream` # to #%": span(streams),
        "together #% at 64 heads and #% at 32":
            [f"{abs(together(rows, name)[2]):.0f}" for name, of_step in TOGETHER.items() if of_step[2] is KEPT_STEP],
    }


def with_sentences(page: str, rows: Sequence[Row]) -> str:
    for words, figures in sentences(rows).items():
        page = with_figures(page, words, figures)
    return page
