"""Which page has which figures of this package, and what counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from .. import common
from ..pages import with_figures, with_rows
from . import blackwell, blackwell_step, float32, hopper, triton

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
    Table(SM89, float32.HEADER, float32.rows),
    Table(SM90, hopper.HEADER, hopper.rows),
    Table(SM90, hopper.SPILLS, hopper.spills),
    Table("stages/sm90_forward.md", hopper.OF_FORWARD, hopper.of_forward),
    Table(SM100, blackwell_step.OF_KERNELS, lambda: blackwell_step.of_kernels(blackwell_step.counts())),
    Table(SM100, blackwell_step.OF_HEADS, lambda: blackwell_step.of_heads(blackwell_step.counts())),
    Table(SM100, blackwell_step.OF_CODE, blackwell_step.of_code),
    Table(SM100, blackwell_step.OF_SPILLS, blackwell_step.of_spills),
    Sentence(
        FORWARD, "columns of tensor memory in use | # bytes; # | # bytes; # (all are allocated)",
        blackwell.memory_of_dims,
    ),
    Sentence(
        FORWARD, "MUFU, wavefronts per chunk, bounded gate | #, #, # | #, #, # |", lambda: blackwell.of_dims("bounded")
    ),
    Sentence(FORWARD, "| the same, given decays | #, #, # | #, #, # |", lambda: blackwell.of_dims("given")),
    Sentence(FORWARD, "| bytes of HBM per token | # | # |", blackwell.bytes_of_dims),
    Sentence(FORWARD, "at B1 T8192 H64: bounded gate, given decays | #, # | #, # |", blackwell.clocks_of_dims),
    Table(CLOCK, blackwell.HEADER, blackwell.of_clock),
    Sentence(
        CLOCK, "which is # clocks for a chunk of 32 tokens and a head. In the clock a chunk takes #,",
        blackwell.clocks_of_a_chunk,
    ),
    Sentence(CLOCK, "`compose` and `join`: `fused` alone takes # and # ms", blackwell.fused_alone),
    Table(TRITON, triton.HEADER, triton.rows),
    Sentence(
        TRITON, "the forward writes # more, and of its first two launches the backward needs only the cumulative "
        "decays: # less", triton.kept,
    ),
)


def renewed(page: str) -> str:
    """Return a page with all its figures counted anew."""
    text = (DOCS / page).read_text()
    for figures in FIGURES:
        if figures.page == page:
            text = figures.renewed(text, figures.count())
    return text
