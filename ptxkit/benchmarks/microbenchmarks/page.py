"""The page of constants, from results on record; ptxkit/docs/from_data.py writes it.

A figure that is missing or has a fault is shown as not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .figures import EXPECTED, Expected, under_headings

RESULTS = Path(__file__).resolve().parents[1] / "results" / "h200-microbenchmarks.json"
NOT_YET, NOTHING = "not measured", "-"
LETTERS = {"measured": "S", "published": "L", "assumed": "?", "predicted": "P"}
CLOSE, FAR = 0.25, 1.5                       # a share of the figure; a factor
INTRODUCTION = """# The constants of an H200

Medians of what the [microbenchmarks](microbenchmarks.md) measured. Before: L published, S this project's H200,
? assumed by the prototype, P predicted for the first run; all were written down before that.

"""


class Row(NamedTuple):
    constant: str
    figures: list[str]                       # names of figures in the section's group
    how: str = ""


class Section(NamedTuple):
    title: str
    group: str
    rows: list[Row]


def expanded(pattern: str) -> list[str]:
    """Return the names that a pattern stands for: "L2, {1; 132} SMs" are "L2, 1 SMs" and "L2, 132 SMs"."""
    before, _, rest = pattern.partition("{")
    several, _, behind = rest.partition("}")
    return [f"{before}{one}{behind}" for one in several.split("; ")]


def sections() -> list[Section]:
    """Return what constants.txt says: a section's group and title, then rows of constant | figures | how."""
    found: dict[tuple[str, str], Section] = {}
    for group, title, line in under_headings("constants.txt"):
        constant, pattern, *how = line.split(" | ")
        found.setdefault((group, title), Section(title, group, [])).rows.append(Row(constant, expanded(pattern), *how))
    return list(found.values())


SECTIONS = sections()


def shown(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure["fault"]:
        return NOT_YET
    value = figure["value"]
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def before(expected: Expected | None) -> str:
    return f"{expected.value:g} {LETTERS[expected.source]}" if expected else NOTHING


def joined(cells: Sequence[str]) -> str:
    """Join the cells; if all of them say nothing, one is enough."""
    return cells[0] if set(cells) in ({NOT_YET}, {NOTHING}) else "; ".join(cells)


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return all sections, as Markdown."""
    known, lines = {(figure["group"], figure["name"]): figure for figure in figures}, []
    for title, group, rows in SECTIONS:
        lines += [f"## {title}", "", "| constant | measured | before | how |", "|---|---|---|---|"]
        for row in rows:
            measured = joined([shown(known.get((group, name))) for name in row.figures])
            said = joined([before(EXPECTED.get((group, name))) for name in row.figures])
            lines.append(f"| {row.constant} | {measured} | {said} | {row.how} |")
        lines.append("")
    return "\n".join(lines)


def surprises(figures: Sequence[Mapping[str, Any]]) -> str:
    """Say how many expectations were met, and list those that were far off, the worst first."""
    known = {(figure["group"], figure["name"]): figure for figure in figures if not figure["fault"]}
    pairs = [(known[name], expected) for name, expected in EXPECTED.items() if name in known]
    close = sum(abs(figure["value"] - expected.value) <= CLOSE * figure["value"] for figure, expected in pairs)
    far = sorted((max(figure["value"] / expected.value, expected.value / figure["value"]), figure["group"],
                  figure["name"], shown(figure), before(expected)) for figure, expected in pairs)
    lines = [
        "## Surprises", "", f"Of {len(pairs)} expectations {close} are within a quarter of the measured figure. These "
        f"are off by a factor of {FAR} or more:", "", "| group | figure | measured | before |", "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(cells)} |" for factor, *cells in reversed(far) if factor >= FAR]
    return "\n".join([*lines, ""])


def page(results: Mapping[str, Any]) -> str:
    figures = results["figures"]
    steady = sum(figure["high"] <= 1.02 * figure["low"] for figure in figures)
    faults = sum(bool(figure["fault"]) for figure in figures)
    run = f"{results['device']}, {results['date']}, driver {results['driver']}, torch {results['versions']['torch']}"
    seconds = sum(results["seconds"].values())
    summary = (
        f"One {run}:\n{len(figures)} figures in {seconds:.0f} seconds, {faults} of them with a fault. For {steady} the "
        "smallest and the largest are\nwithin 2%; the others are mostly of launches, memory and copies."
    )
    return "\n".join([INTRODUCTION + summary, "", table(figures), surprises(figures)])
