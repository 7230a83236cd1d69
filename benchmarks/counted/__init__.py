"""Figures on pages that the simulator counts and ptxas gives, which `python -m benchmarks write` writes; no GPU.

A module for each backend counts; `figures.py` says which page has which, and what counts them.  Most counts are those
of a longer sequence less those of a shorter one, for each chunk or token between them.
"""

from __future__ import annotations

from typing import NamedTuple

import kda
from kda.backends.common.cute.training import TOKENS
from kda.tools.verify.cases import make_inputs
from ptxkit import capture
from ptxkit.capturing.session import Session
from ptxkit.report import Run

SHORT, LONG = 256, 512                       # tokens of the sequences that are compared
GATES = {
    "bounded by -5": "bounded dt_bias=true", "bounded by -8": "bounded lower_bound=-8 dt_bias=true",
    "softplus": "softplus dt_bias=true", "given decays": "gate=given",
}
GATES |= {f"{name}, g in float32": f"{words} g_dtype=float32" for name, words in GATES.items()}


class Counts(NamedTuple):
    """What a kernel takes for 64 tokens and one value head."""

    warp_instructions: float
    moves: float                             # those of them that have no instruction in SASS
    mufu: float
    tensor_flops: float
    shared_wavefronts: float
    shared_bytes: float                      # that products and copies read and write, past the warps
    bytes: float                             # per token

    def __add__(self, other):
        return Counts(*(a + b for a, b in zip(self, other)))


def mufu(run: Run) -> int:
    """Return the instructions of a launch that the unit of special functions computes."""
    return sum(run.instructions.get(name, 0) for name in ("ex2", "rcp", "rsqrt", "lg2"))


def moved(run: Run) -> int:
    """Return the bytes that a launch reads from global memory and writes to it."""
    return run.counters["global_bytes_read"] + run.counters["global_bytes_written"]


def between(short: Run, long: Run, tokens: int) -> Counts:
    """Return what so many more tokens take, for each block of them."""
    names = "tensor_flops", "shared_wavefronts", "shared_bytes_past_warps"
    a, b = (
        (run.counters["warp_instructions"], run.instructions.get("mov", 0), mufu(run),
         *(run.counters[name] for name in names), moved(run) / TOKENS)
        for run in (short, long)
    )
    return Counts(*((y - x) * TOKENS / tokens for x, y in zip(a, b)))


def forward(T: int, gate: str, backend: str, K: int = 128, checks: bool = True) -> Session:
    """A forward that keeps nothing, in one segment."""
    case = make_inputs(T=T, H=1, K=K, V=K, gate=gate, initial_state=False)
    words = {"output_final_state": False, "backend": backend, "batch_invariant": backend == "sm100"}
    with capture(arch=backend, checks=checks) as session:
        kda.chunk_kda_fwd(**case.keywords | words)
    return session


def step(T: int, saves: bool, backend: str, K: int = 128) -> Session:
    """A forward that keeps, and its backward; or a backward alone, that nothing was kept for."""
    case = make_inputs(T=T, H=1, K=K, V=K, gate="bounded", initial_state=False)
    keywords = case.keywords | {"backend": backend, "output_final_state": False}
    with capture(arch=backend) as session:
        saved = kda.chunk_kda_fwd(**keywords, disable_recompute=True).saved if saves else None
        kda.chunk_kda_bwd(do=case.do, saved=saved, **keywords)
    return session
