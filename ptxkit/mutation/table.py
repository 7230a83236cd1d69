"""The results of all mutants: by source line, as a table for people and as JSON."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

from ..findings import FREED, KINDS
from ..ptx import Loc, parse
from .sites import Mutant
from .sources import reason, shown

SHORT = 40                                   # characters of a kernel's name, or of an instruction
ENDLESS = {"deadlock", "livelock", "too-many-instructions"}
WAYS = ("race", "deadlock", "rule", "result")  # how a mutant is noticed: the first of these; rule: any other finding
NOT_REACHED = "the calls never execute it"


@dataclass(frozen=True)
class Outcome:
    """A mutant, and what noticed it: kinds of findings, "wrong result" or an exception's name; () if it survived."""

    mutant: Mutant
    noticed: tuple[str, ...]
    schedule: int | None = None              # the first that noticed, from 0
    reached: bool = True

    @property
    def reason(self) -> str | None:
        """Return why the mutant's survival is accepted."""
        return next((why for frame in frames(self.mutant.loc) if (why := reason(frame.file, frame.line))), None)

    @property
    def way(self) -> str | None:
        """Return one of WAYS."""
        if any(kind.startswith("race") for kind in self.noticed):
            return "race"
        if ENDLESS & set(self.noticed):
            return "deadlock"
        rules = {kind.id for kind in (*KINDS.values(), FREED)}
        return None if not self.noticed else "rule" if set(self.noticed) <= rules else "result"

    @property
    def status(self) -> str:
        return "noticed" if self.noticed else "redundant" if self.reason else "survived"


class OutcomeRow(NamedTuple):
    """Mutants of one kernel at one line of its source."""

    kernel: str
    source: str                              # "file:line", and who called it; or the line of the PTX
    instruction: str                         # its opcode
    mutation: str
    outcomes: tuple[Outcome, ...]

    @property
    def noticed(self) -> dict[str, int]:
        """Return what noticed the mutants, and how many of them."""
        return dict(collections.Counter(how for outcome in self.outcomes for how in outcome.noticed).most_common())

    def with_status(self, status: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == status]

    @property
    def survivors(self) -> list[Outcome]:
        return self.with_status("survived") + self.with_status("redundant")

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel, "symbol": self.outcomes[0].mutant.kernel, "source": self.source,
            "instruction": self.instruction, "mutation": self.mutation, "noticed": self.noticed,
            "mutants": [
                {"line": o.mutant.line, "status": o.status, "noticed": list(o.noticed), "schedule": o.schedule,
                 "reached": o.reached, "reason": o.reason if o.status == "redundant" else None}
                for o in self.outcomes
            ],
        }

    @property
    def says(self) -> str:
        noticed = ", ".join(self.noticed)
        if not self.survivors:
            return noticed
        lines = ", ".join(str(outcome.mutant.line) for outcome in self.survivors)
        not_reached = "" if any(o.reached for o in self.survivors) else NOT_REACHED
        why = next((o.reason for o in self.survivors if o.reason), not_reached)
        word = "SURVIVED" if self.with_status("survived") else "redundant"
        survived = f"{word} (PTX line {lines})" + (f": {why}" if why else "")
        return f"{noticed}; {survived}" if noticed else survived


class Mutants:
    """The result of `ptxkit.mutants`."""

    def __init__(self, arch: str, outcomes: Sequence[Outcome], sample: int):
        self.arch, self.outcomes, self.sample = arch, list(outcomes), sample
        self._labels = _labels(self.outcomes)

    def _label(self, mutant: Mutant) -> str:
        return self._labels[mutant.ptx, mutant.kernel]

    @property
    def rows(self) -> list[OutcomeRow]:
        by_place = collections.defaultdict(list)
        for outcome in self.outcomes:
            m = outcome.mutant
            by_place[self._label(m), where(m), opcode_of(m), m.mutation].append(outcome)
        return [OutcomeRow(*key, tuple(outcomes)) for key, outcomes in by_place.items()]

    @property
    def survivors(self) -> list[Outcome]:
        """Return the outcomes of mutants that nothing noticed and no comment accepts."""
        return [outcome for outcome in self.outcomes if outcome.status == "survived"]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Return the numbers of mutants by kernel: all, noticed, redundant, survived, and noticed in each way."""
        columns = ("mutants", "noticed", "redundant", "survived", *WAYS)
        by_label: dict[str, dict[str, int]] = {label: dict.fromkeys(columns, 0) for label in self._labels.values()}
        for outcome in self.outcomes:
            for column in filter(None, ("mutants", outcome.status, outcome.way)):
                by_label[self._label(outcome.mutant)][column] += 1
        return by_label

    @property
    def share(self) -> float:
        """Return the share of the mutants that were noticed, among those that no comment accepts."""
        judged = [outcome for outcome in self.outcomes if outcome.status != "redundant"]
        return sum(outcome.status == "noticed" for outcome in judged) / len(judged) if judged else 1.0

    def as_json(self) -> dict[str, Any]:
        return {
            "arch": self.arch,
            "sample": self.sample,
            "share": self.share,
            "kernels": self.counts,
            "rows": [row.as_json() for row in self.rows],
        }

    def sections(self) -> Iterator[tuple[str, list[tuple[str, str, str, str, str]]]]:
        """Yield a sentence per kernel, and cells: source, number of mutants, instruction, mutation, what noticed."""
        rows = self.rows
        for kernel, c in self.counts.items():
            ways = ", ".join(f"{c[way]} by {way}" for way in WAYS)
            numbers = f"{c['mutants']} mutant{'s' * (c['mutants'] != 1)}, {c['noticed']} noticed ({ways}), "
            numbers += f"{c['redundant']} redundant, {c['survived']} survived"
            cells = [(row.source, str(len(row.outcomes)), row.instruction[:SHORT], row.mutation, row.says)
                     for row in rows if row.kernel == kernel]
            yield f"{kernel}: {numbers}", cells

    def lines(self) -> Iterator[str]:
        sections = list(self.sections())
        width = max((len(cells[0]) for _, rows in sections for cells in rows), default=0)
        for says, rows in sections:
            yield says
            for source, count, instruction, mutation, noticed in rows:
                yield f"  {source:<{width}} {count:>3}  {instruction:<{SHORT}}  {mutation:<24}  {noticed}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def frames(loc: Loc | None) -> Iterator[Loc]:
    """Yield a line and the calls that it was inlined at, innermost first."""
    while loc:
        yield loc
        loc = loc.inlined_at


def where(mutant: Mutant) -> str:
    """Return a mutant's source line and those that it was inlined at; the PTX line if there is none."""
    places = list(dict.fromkeys(f"{shown(frame.file)}:{frame.line}" for frame in frames(mutant.loc)))
    if not places:
        return f"PTX line {mutant.line}"
    return " < ".join([places[0], *(PurePath(each).name for each in places[1:])])


def opcode_of(mutant: Mutant) -> str:
    words = mutant.instruction.rstrip(";").split()
    return words[words[0].startswith("@")]


def _labels(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], str]:
    """Return kernels' names for people: a mangled one is named after the file of its first source line."""
    labels: dict[tuple[str, str], str] = {}
    for key in dict.fromkeys((outcome.mutant.ptx, outcome.mutant.kernel) for outcome in outcomes):
        name = key[1]
        first = next((ins.loc for ins in parse(key[0]).kernels[name].body if ins.loc), None)
        if len(name) > SHORT and first:
            name = PurePath(first.file).stem
        same = sum(label.split(" ")[0] == name for label in labels.values())
        labels[key] = f"{name} {same + 1}" if same else name
    return labels
