"""Which page has which figures of this package, and what counts them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .. import common
from ..clock_page import OF_BLACKWELL
from ..pages import with_data, with_figures, with_rows
from . import blackwell, blackwell_step, blackwell_times, float32, hopper, triton

DOCS = common.ROOT / "docs"


class Figures(NamedTuple):
    page: str
    where: str                               # a table's header, or a sentence with # for a figure
    count: Callable[[], Iterable[str]]       # rows of the table, or figures of the sentence
    put: Callable[[str, str, Iterable[str]], str]    # puts them into the page, or into data that a page is made of

    def renewed(self, text: str, figures: Iterable[str]) -> str:
        return self.put(text, self.where, figures)


in_data, in_table, in_sentence = (
    functools.partial(Figures, put=put) for put in (with_data, with_rows, with_figures)
)
SM89, SM90, SM100 = (f"data/counted/{name}.json" for name in ("sm89", "sm90_backward", "sm100_backward"))
BLACKWELL = "results/sm100.md"
TRITON, CLOCK, FORWARD = "triton.md", "results/clock.md", "stages/sm100_forward.md"
BACKWARD = "stages/sm100_backward.md"
FIGURES = (
    in_data(SM89, float32.HEADER, float32.rows),
    in_data(SM90, hopper.HEADER, hopper.rows),
    in_data(SM90, hopper.SPILLS, hopper.spills),
    in_data("data/counted/sm90_forward.json", hopper.OF_FORWARD, hopper.of_forward),
    in_data(SM100, blackwell_step.OF_KERNELS, lambda: blackwell_step.of_kernels(blackwell_step.counts())),
    in_data(SM100, blackwell_step.OF_HEADS, lambda: blackwell_step.of_heads(blackwell_step.counts())),
    in_data(SM100, blackwell_step.OF_CODE, blackwell_step.of_code),
    in_data(SM100, blackwell_step.OF_SPILLS, blackwell_step.of_spills),
    in_sentence(
        FORWARD, "columns of tensor memory in use | # bytes; # | # bytes; # (all are allocated)",
        blackwell.memory_of_dims,
    ),
    in_sentence(
        FORWARD, "MUFU, wavefronts per chunk, bounded gate | #, #, # | #, #, # |", lambda: blackwell.of_dims("bounded")
    ),
    in_sentence(FORWARD, "| the same, given decays | #, #, # | #, #, # |", lambda: blackwell.of_dims("given")),
    in_sentence(FORWARD, "| bytes of HBM per token | # | # |", blackwell.bytes_of_dims),
    in_sentence(FORWARD, "at B1 T8192 H64: bounded gate, given decays | #, # | #, # |", blackwell.clocks_of_dims),
    in_sentence(
        BACKWARD, "| instructions per 64 tokens | #, #, #, # | #, #, #, # |",
        lambda: blackwell_step.of_dims("warp_instructions"),
    ),
    in_sentence(BACKWARD, "| bytes per token | #, #, #, # | #, #, #, # |", lambda: blackwell_step.of_dims("bytes")),
    in_data("data/clock.json", OF_BLACKWELL, blackwell.of_clock),
    in_table(BLACKWELL, blackwell_times.OF_FORWARDS, blackwell_times.of_forwards),
    in_table(BLACKWELL, blackwell_times.OF_STEPS, blackwell_times.of_steps),
    in_table(BLACKWELL, blackwell_times.OF_BOTH, blackwell_times.of_both),
    in_table(BLACKWELL, blackwell_step.OF_BYTES, blackwell_step.of_bytes),
    in_table(TRITON, triton.HEADER, triton.rows),
    in_sentence(
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
