"""One instruction of a PTX text, for rules that change it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..ptx.lexer import Statement, split_list

_PARTS = re.compile(r"(?P<guard>@\s*!?\s*\S+\s+)?(?P<opcode>[^\s\[{(;]+)\s*(?P<operands>.*);", re.DOTALL)


class Site:
    """One instruction of a text, split for rules."""

    def __init__(self, text: Sequence[Statement], index: int):
        self.statements, self.index = text, index
        parts = _PARTS.fullmatch(self.text)
        self.guard, self.opcode = parts["guard"] or "", parts["opcode"]
        self.operands = split_list(parts["operands"]) or []

    @property
    def text(self) -> str:
        return self.statements[self.index].text

    def written(self, opcode: str, operands: Iterable[str] | None = None) -> str:
        """Return an instruction under the same guard."""
        return f"{self.guard}{opcode} {', '.join(self.operands if operands is None else operands)};"

    def earlier(self, opcode: str) -> int | None:
        """Return the index of the nearest earlier instruction of this kind; None unless the same threads run both, and
        if a register that the instruction reads is written in between."""
        depth, between = 0, ""
        for index in range(self.index - 1, -1, -1):
            kind, text = self.statements[index][:2]
            depth += (kind == "close") - (kind == "open")
            if depth < 0 or kind in ("label", "function"):
                return None
            if kind != "instruction":
                continue
            parts = _PARTS.fullmatch(text)
            if parts["opcode"].startswith(("bra", "brx", "ret", "exit", "call")):
                return None
            if re.match(opcode, parts["opcode"]):
                apart = set(re.findall(r"%\w+", self.text)).isdisjoint(re.findall(r"%\w+", between))
                same_guard = (parts["guard"] or "").split() == self.guard.split()
                return index if apart and same_guard else None
            between += text
        return None
