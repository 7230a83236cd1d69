"""The synchronising instructions of a PTX text, and the text with one of them changed."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..ptx import Instruction, Loc, parse
from ..ptx.lexer import Statement, statements, without_comments
from .rules import RULES, Site, Weakening


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
        """Return the PTX with the instruction changed; every line keeps its number, without comments."""
        text = without_comments(self.ptx)
        for first, end, instead in sorted(self.edits, reverse=True):
            lines = text.count("\n", first, end) - instead.count("\n")
            text = text[:first] + instead + "\n" * lines + text[end:]
        return text


def mutants_of(ptx: str, kernel: str, rules: Sequence[Weakening] = RULES) -> list[Mutant]:
    """Return every mutant of a kernel, in the order of its text."""
    text, places = _read(ptx)
    mutants = []
    for ins, index in _located(parse(ptx).kernels[kernel].body, places):
        if not (matching := [rule for rule in rules if re.match(rule.pattern, ins.opcode)]):
            continue
        site = Site(text, index)
        for rule in matching:
            if edits := _edits(site, rule.change(site)):
                mutants.append(Mutant(ptx, kernel, rule.name, ins.line, ins.text, ins.loc, edits))
    return mutants


@functools.lru_cache(maxsize=8)
def _read(ptx: str) -> tuple[list[Statement], dict[tuple[int, str], list[int]]]:
    """Return statements, and the index of each instruction among them: by line and text, as the parser has them."""
    text, places = list(statements(without_comments(ptx))), defaultdict(list)
    for index, statement in enumerate(text):
        if statement.kind == "instruction":
            places[statement.line, " ".join(statement.text.split())].append(index)
    return text, places


def _located(body: Iterable[Instruction], places: dict[tuple[int, str], list[int]]):
    """Yield (instruction, index of its statement): those of one line and text follow each other in both."""
    seen: defaultdict[tuple[int, str], int] = defaultdict(int)
    for instruction in body:
        key = instruction.line, instruction.text
        yield instruction, places[key][seen[key]]
        seen[key] += 1


def _edits(site: Site, change: str | tuple[str, int] | None) -> tuple[tuple[int, int, str], ...]:
    if change is None:
        return ()
    statement = site.statements[site.index]
    first, end = statement.start, statement.start + len(statement.text)
    if isinstance(change, str):
        return ((first, end, change),)
    moved, before = change
    position = site.statements[before].start
    return (position, position, f"{moved} "), (first, end, "")
