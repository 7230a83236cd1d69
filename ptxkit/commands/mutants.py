"""Mutants, as a terminal shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .render import Screen

if TYPE_CHECKING:
    from ptxkit.mutation import Mutants

HEAD = ("line", "mutants", "instruction", "what was changed", "noticed by")


def write(screen: Screen, found: Mutants) -> None:
    """Write a sentence and a table for each kernel, as wide as the terminal."""
    for says, rows in found.sections():
        screen.line(says)
        for line in screen.table(rows, HEAD, "lrlll", indent=2):
            screen.line(line)
