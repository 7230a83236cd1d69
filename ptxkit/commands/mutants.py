"""Mutants, as a terminal shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .progress import Progress
from .render import Screen

if TYPE_CHECKING:
    from ptxkit.mutation import Mutants

HEAD = ("line", "mutants", "instruction", "what was changed", "noticed by")


def lines(screen: Screen, judged: Mutants) -> Iterator[str]:
    """Yield a sentence and a table for each kernel, as wide as the terminal."""
    for says, rows in judged.sections():
        yield says
        yield from screen.table(rows, HEAD, "lrlll", indent=2)


def reporter(shown: Progress, name: str = "mutants") -> Callable[[int, int, int], None]:
    """Return the `tell` of `ptxkit.mutants` that shows how many were judged, and how many of them survived."""
    def tell(done: int, total: int, survived: int) -> None:
        if not shown.total:
            shown.expect(total)
        shown(f"{name}, {survived} survived")
        shown.count()

    return tell
