"""The synchronising instructions of a PTX text, and the text with one of them changed."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ptx import Instruction, Loc, parse
from ..ptx.lexer import Statement, split_list, statements, without_comments

if TYPE_CHECKING:
    from .rules import Rule

_PARTS = re.compile(r"(?P<guard>@\s*!?\s*\S+\s+)?(?P<opcode>[^\s\[{(;]+)\s*(?P<operands>.*);", re.DOTALL)


class Site:
    """One instruction of a text, split as a rule wants it."""

    def __init__(self, text: Sequence[Statement], index: int):
        self.statements, self.index = text, index
        found = _PARTS.fullmatch(self.text)
        self.guard, self.opcode = found["guard"] or "", found["opcode"]
        self.operands = split_list(found["operands"]) or []

    @property
    def text(self) -> str:
        return self.statements[self.index].text

    def written(self, opcode: str, operands: Iterable[str] | None = None) -> str:
        """An instruction under the same guard."""
        return f"{self.guard}{opcode} {', '.join(self.operands if operands is None else operands)};"

    def earlier(self, opcode: str) -> int | None:
        """Index of the nearest instruction of this kind before it, if whoever runs one of them runs both.

        None also where a register that the instruction reads is written in between.
        """
        depth, between = 0, ""
        for at in range(self.index - 1, -1, -1):
            kind, text = self.statements[at][:2]
            depth += (kind == "close") - (kind == "open")
            if depth < 0 or kind in ("label", "function"):
                return None
            if kind != "instruction":
                continue
            found = _PARTS.fullmatch(text)
            if found["opcode"].startswith(("bra", "brx", "ret", "exit", "call")):
                return None
            if re.match(opcode, found["opcode"]):
                apart = set(re.findall(r"%\w+", self.text)).isdisjoint(re.findall(r"%\w+", between))
                same_guard = (found["guard"] or "").split() == self.guard.split()
                return at if apart and same_guard else None
            between += text
        return None


@dataclass(frozen=True)
class Mutant:
    """One instruction of one kernel, changed by one rule."""

    ptx: str = field(repr=False)             # unchanged
    kernel: str
    mutation: str                            # the rule's name
    line: int                                # in the PTX
    instruction: str
    loc: Loc | None
    edits: tuple[tuple[int, int, str], ...]  # first, end, text instead; places in the text without comments

    @property
    def changed(self) -> str:
        """The PTX with the instruction changed; every line keeps its number, comments go."""
        text = without_comments(self.ptx)
        for first, end, instead in sorted(self.edits, reverse=True):
            lines = text.count("\n", first, end) - instead.count("\n")
            text = text[:first] + instead + "\n" * lines + text[end:]
        return text


def mutants_of(ptx: str, kernel: str, rules: Sequence[Rule] | None = None) -> list[Mutant]:
    """Every mutant of a kernel, in the order of its text."""
    if rules is None:
        from .rules import RULES as rules

    text, places = _read(ptx)
    found = []
    for instruction, index in _located(parse(ptx).kernels[kernel].body, places):
        matching = [rule for rule in rules if re.match(rule.pattern, instruction.opcode)]
        if not matching:
            continue
        site = Site(text, index)
        for rule in matching:
            if edits := _edits(site, rule.change(site)):
                found.append(Mutant(ptx, kernel, rule.name, instruction.line, instruction.text, instruction.loc, edits))
    return found


@functools.lru_cache(maxsize=8)
def _read(ptx: str) -> tuple[list[Statement], dict[tuple[int, str], list[int]]]:
    """Statements, and where each instruction stands among them: by line and text, as the parser knows them."""
    text, places = list(statements(without_comments(ptx))), defaultdict(list)
    for index, statement in enumerate(text):
        if statement.kind == "instruction":
            places[statement.line, " ".join(statement.text.split())].append(index)
    return text, places


def _located(body: Iterable[Instruction], places: dict[tuple[int, str], list[int]]):
    """(instruction, index of its statement): those of one line and text follow each other in both."""
    seen = defaultdict(int)
    for instruction in body:
        key = instruction.line, instruction.text
        yield instruction, places[key][seen[key]]
        seen[key] += 1


def _edits(site: Site, change: str | tuple[str, int] | None) -> tuple[tuple[int, int, str], ...]:
    if change is None:
        return ()
    own = site.statements[site.index]
    first, end = own.start, own.start + len(own.text)
    if isinstance(change, str):
        return ((first, end, change),)
    moved, before = change
    at = site.statements[before].start
    return (at, at, f"{moved} "), (first, end, "")
