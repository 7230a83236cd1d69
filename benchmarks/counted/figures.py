"""Which page has which figures of this package, and what counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from .. import common
from ..clock_page import OF_BLACKWELL
from ..pages import with_data, with_figures, with_rows
from . import blackwell, blackwell_step, float32, hopper, triton

DOCS = common.ROOT / "docs"


class Table(NamedTuple):
    page: str
    header: str
    count: Callable[[], Iterable[str]]       # its rows

    def renewed(self, text: str, rows: Iterable[str]) -> str:
        return with_rows(text, self.header, rows)


class Counted(NamedTuple):
    """A table of a page that docs/written.py writes from data, which is the file named here."""

    page: str
    header: str
    count: Callable[[], Iterable[str]]       # its rows

    def renewed(self, text: str, rows: Iterable[str]) -> str:
        return with_data(text, self.header, rows)


class Sentence(NamedTuple):
    page: str
    words: str                               # with # for a figure
    count: Callable[[], Iterable[str]]       # its figures

    def renewed(self, text: str, figures: Iterable[str]) -> str:
        return with_figures(text, self.words, figures)


SM89, SM90, SM100 = (f"data/counted/{name}.json" for name in ("sm89", "sm90_backward", "sm100_backward"))
TRITON, CLOCK, FORWARD = "triton.md", "results/clock.md", "stages/sm100_forward.md"
FIGURES = (
    Counted(SM89, float32.HEADER, float32.rows),
    Counted(SM90, hopper.HEADER, hopper.rows),
    Counted(SM90, hopper.SPILLS, hopper.spills),
    Counted("data/counted/sm90_forward.json", hopper.OF_FORWARD, hopper.of_forward),
    Counted(SM100, blackwell_step.OF_KERNELS, lambda: blackwell_step.of_kernels(blackwell_step.counts())),
    Counted(SM100, blackwell_step.OF_HEADS, lambda: blackwell_step.of_heads(blackwell_step.counts())),
    Counted(SM100, blackwell_step.OF_CODE, blackwell_step.of_code),
    Counted(SM100, blackwell_step.OF_SPILLS, blackwell_step.of_spills),
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
    Counted("data/clock.json", OF_BLACKWELL, blackwell.of_clock),
    Sentence(
        CLOCK, "which is # clocks for a chunk of 32 tokens and a head. In the clock a chunk takes #,",
        blackwell.clocks_of_a_chunk,
    ),
    Sentence(CLOCK, "`compose` and `join`: `fused` alone takes # and # ms", blackwell.fused_alone),
    Table(TRITON, triton.HEADER, triton.rows),
    Sentence(
        TRITON, "the forward writes # more, and of its first two launches the backward needs only the cumulative "
        "decays: # less", triton.saved_instead,
    ),
)


def renewed(page: str) -> str:
    """Return a page with all its figures counted anew."""
    text = (DOCS / page).read_text()
    for figures in FIGURES:
        if figures.page == page:
            text = figures.renewed(text, figures.count())
    return text
