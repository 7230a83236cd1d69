"""Figures on pages that the simulator counts and ptxas gives.  No GPU:

    python -m benchmarks.tables                   what differs from the pages
    python -m benchmarks.tables --write           write them anew
    python -m benchmarks.tables --only sm90       those of the pages whose name has this word

`FIGURES` says which page has which, and what counts them.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import common, counted, counted_sm89, counted_sm90, counted_step, counted_triton
from .pages import with_figures, with_rows

DOCS = common.ROOT / "docs"


class Table(NamedTuple):
    page: str
    header: str
    count: Callable[[], Iterable[str]]       # its rows

    def renewed(self, text: str, rows: Iterable[str]) -> str:
        return with_rows(text, self.header, rows)


class Sentence(NamedTuple):
    page: str
    words: str                               # with # for a figure
    count: Callable[[], Iterable[str]]       # its figures

    def renewed(self, text: str, figures: Iterable[str]) -> str:
        return with_figures(text, self.words, figures)


SM89, SM90, TRITON, CLOCK = "stages/sm89.md", "stages/sm90_backward.md", "triton.md", "results/clock.md"
FORWARD, SM100 = "stages/sm100_forward.md", "stages/sm100_backward.md"
FIGURES = (
    Table(SM89, counted_sm89.HEADER, counted_sm89.rows),
    Table(SM90, counted_sm90.HEADER, counted_sm90.rows),
    Table(SM90, counted_sm90.SPILLS, counted_sm90.spills),
    Table("stages/sm90_forward.md", counted_sm90.OF_FORWARD, counted_sm90.of_forward),
    Table(SM100, counted_step.OF_KERNELS, lambda: counted_step.of_kernels(counted_step.counts())),
    Table(SM100, counted_step.OF_HEADS, lambda: counted_step.of_heads(counted_step.counts())),
    Table(SM100, counted_step.OF_CODE, counted_step.of_code),
    Table(SM100, counted_step.OF_SPILLS, counted_step.of_spills),
    Sentence(
        FORWARD, "columns of tensor memory in use | # bytes; # | # bytes; # (all are allocated)", counted.memory_of_dims
    ),
    Sentence(
        FORWARD, "MUFU, wavefronts per chunk, bounded gate | #, #, # | #, #, # |", lambda: counted.of_dims("bounded")
    ),
    Sentence(FORWARD, "| the same, given decays | #, #, # | #, #, # |", lambda: counted.of_dims("given")),
    Sentence(FORWARD, "| bytes of HBM per token | # | # |", counted.bytes_of_dims),
    Sentence(FORWARD, "at B1 T8192 H64: bounded gate, given decays | #, # | #, # |", counted.clocks_of_dims),
    Table(CLOCK, counted.HEADER, counted.of_clock),
    Sentence(
        CLOCK, "which is # clocks for a chunk of 32 tokens and a head. In the clock a chunk takes #,",
        counted.clocks_of_a_chunk,
    ),
    Sentence(CLOCK, "`compose` and `join`: `fused` alone takes # and # ms", counted.fused_alone),
    Table(TRITON, counted_triton.HEADER, counted_triton.rows),
    Sentence(
        TRITON, "the forward writes # more, and of its first two launches the backward needs only the cumulative "
        "decays: # less", counted_triton.kept,
    ),
)


def main() -> None:
    parser = common.parser(__spec__, __doc__, json=False)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", metavar="WORD", default="")
    asked = parser.parse_args()
    differs = False
    for page in dict.fromkeys(figures.page for figures in FIGURES if asked.only in figures.page):
        before = now = (DOCS / page).read_text()
        for figures in FIGURES:
            if figures.page == page:
                now = figures.renewed(now, figures.count())
        print(*difflib.unified_diff(before.splitlines(), now.splitlines(), page, "now", "", "", 0, ""), sep="\n")
        differs |= now != before
        if asked.write:
            (DOCS / page).write_text(now)
    sys.exit(differs and not asked.write)


if __name__ == "__main__":
    main()
