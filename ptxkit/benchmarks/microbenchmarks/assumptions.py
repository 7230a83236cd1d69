"""What the clock assumes of a chip, and which figure of the microbenchmarks measures it.

    python -m ptxkit.benchmarks.microbenchmarks --json figures.json
    python -m ptxkit.benchmarks.microbenchmarks.assumptions b200 figures.json     # what differs, the worst first
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ptxkit.timing.chips import CHIPS, ChipClock, Constant

from .figures import under_headings

INTRODUCTION = """# What the clock assumes of a B200

Each constant of the clock, how it is known, and the figure of the [microbenchmarks](microbenchmarks.md) that measures
it; x and y are figures. [SemiAnalysis's microbenchmarks](https://github.com/SemiAnalysisAI/microbench-blackwell) are
public. No Blackwell GPU has run those of this page yet. On one,
`python -m ptxkit.benchmarks.microbenchmarks.assumptions b200 figures.json` prints what differs.

| constant | clocks, or bytes or products per clock | known | source | measured by | constant from figures |
|---|---|---|---|---|---|
"""
NOT_MEASURED = "-"
NONE = "there is none"                       # what chips.txt says of a unit that a chip has not


class Assumption(NamedTuple):
    """A constant of the clock, and how it follows from figures of a group."""

    constant: str
    group: str
    formula: str
    figures: tuple[str, ...]

    def names(self, chip: ChipClock) -> tuple[str, ...]:
        return tuple(name.replace("{sms}", str(int(chip.sms))) for name in self.figures)

    def measured(self, chip: ChipClock, values: Mapping[tuple[str, str], float]) -> float | None:
        """Return the constant that these figures give; None if one of them is missing."""
        found = [values.get((self.group, name)) for name in self.names(chip)]
        if None in found:
            return None
        known = {name: constant.value for name, constant in chip.constants.items()}
        return float(eval(self.formula, known | dict(zip("xy", found))))


def _assumptions() -> Iterator[Assumption]:
    for group, _, line in under_headings("assumptions.txt"):
        rule, *figures = line.split(" | ")
        constant, _, formula = rule.partition(" = ")
        yield Assumption(constant, group, formula, tuple(figures))


ASSUMPTIONS = tuple(_assumptions())


class Difference(NamedTuple):
    assumption: Assumption
    constant: Constant
    measured: float | None

    @property
    def off(self) -> float:
        """The share of the measured constant by which the clock's differs from it; 0 if it is not measured."""
        return abs(self.constant.value / self.measured - 1) if self.measured else 0.0

    def __str__(self) -> str:
        unknown, known = self.measured is None, f"{self.constant.how}: {self.constant.source}"
        measured, share = (NOT_MEASURED, "") if unknown else (f"{self.measured:.4g}", f"{self.off:.0%}")
        return f"{self.assumption.constant:18} {self.constant.value:>9.4g} {measured:>9} {share:>6}  {known}"


def differences(chip: ChipClock, figures: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return each constant beside what the figures give for it, the largest difference first.  A figure with a fault
    counts as missing."""
    values = {(figure["group"], figure["name"]): figure["value"] for figure in figures if not figure["fault"]}
    known = [(one, chip.constants[one.constant]) for one in ASSUMPTIONS]
    known = [(one, constant) for one, constant in known if constant.source != NONE]
    found = [Difference(one, constant, one.measured(chip, values)) for one, constant in known]
    return sorted(found, key=lambda one: -one.off)


def page() -> str:
    """Return the page of a B200's assumptions, as Markdown."""
    chip, lines = CHIPS["b200"], []
    for one in ASSUMPTIONS:
        known = chip.constants[one.constant]
        cells = one.constant, f"{known.value:.4g}", known.how, known.source, "; ".join(one.names(chip)), one.formula
        lines.append(f"| {' | '.join(cells)} |\n")
    return INTRODUCTION + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}", description="What a GPU says of the clock.")
    parser.add_argument("chip", choices=sorted(CHIPS), help="whose constants")
    parser.add_argument("figures", type=Path, help="what the microbenchmarks wrote on that GPU (--json)")
    args = parser.parse_args()
    print(f"{'constant':18} {'the clock':>9} {'this GPU':>9}    off  known")
    for one in differences(CHIPS[args.chip], json.loads(args.figures.read_text())["figures"]):
        print(one)


if __name__ == "__main__":
    main()
