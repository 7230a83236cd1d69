"""What a figure is, how it is printed, and how figures are kept in a file."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


def under_headings(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield each indented line of a file beside this one, behind both parts of its heading, "group: words"."""
    group, words = "", ""
    for line in (HERE / name).read_text().splitlines():
        if line.startswith(" "):
            yield group, words, line.strip()
        else:
            group, _, words = line.partition(": ")


class Expected(NamedTuple):
    """What stood there before a figure was measured: written down before the run, not changed after it.

    `measured` is a figure of this project's H200 (2026-11-21 or 23), `published` was read somewhere, `assumed` was
    fitted or supposed by the prototype of the clock, `predicted` is a guess made for the first run. A Blackwell has no
    expectations of its own: its figures stand beside Hopper's, but for tcgen05.
    """

    value: float
    source: str


EXPECTED = {(group, name): Expected(float(value), source)
            for group, source, line in under_headings("expected.txt") for name, _, value in [line.rpartition(" ")]}


class Figure(NamedTuple):
    """One measured number: the median of its runs."""

    group: str
    name: str
    value: float
    low: float                               # the least of the runs
    high: float
    unit: str
    runs: int
    fault: str = ""                          # why it cannot be trusted; "" where its checks hold

    @classmethod
    def from_values(cls, group: str, name: str, values: Sequence[float], unit: str, fault: str = "") -> Figure:
        median = statistics.median(values)
        return cls(group, name, *map(rounded, (median, min(values), max(values))), unit, len(values), fault)

    def record(self) -> dict[str, Any]:
        """Return the figure in the form that files have: with what was expected, if something was."""
        fields = self._asdict()
        if expected := EXPECTED.get((self.group, self.name)):
            fields |= {"expected": expected.value, "source": expected.source}
        return fields

    def __str__(self) -> str:
        expected = EXPECTED.get((self.group, self.name))
        beside = f"  expected {expected.value:g}" if expected else ""
        ends = f"  FAULT: {self.fault}" if self.fault else ""
        measured = f"{self.value:>10g} [{self.low:g} .. {self.high:g}] {self.unit}"
        return f"{self.group:8} {self.name:52} {measured}{beside}{ends}"


def rounded(value: float) -> float:
    """Round to five digits, which are more than any clock here gives."""
    return float(f"{value:.5g}")


class Results:
    """One document, written anew after every figure: what was measured stays, whatever comes next."""

    def __init__(self, path: Path | None, head: dict[str, Any]):
        self.path, self.head = path, head
        self.figures: list[dict[str, Any]] = []
        self.skipped: dict[str, str] = {}    # group -> why
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def write(self) -> None:
        if self.path is None:
            return
        parts = {"skipped": self.skipped, "failed": self.failed, "seconds": self.seconds}
        lines = ",\n".join(f"  {json.dumps(each)}" for each in self.figures)
        head = json.dumps(self.head | parts, indent=1)[:-2]
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(f'{head},\n "figures": [\n{lines}\n ]\n}}\n')
        os.replace(beside, self.path)
