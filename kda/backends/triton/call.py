"""One direction of a call while it is described: its tensors and numbers by the names that kernels give them, and the
kernels that its plan names."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kda.model.bundles import Save
from kda.model.host import Host
from kda.model.problem import Problem
from kda.model.stages import RESULTS, SHAPES
from ptxkit.compile.fetching import fetch_all
from ptxkit.compile.triton import TritonKernel

from ..common.routine import Draft, Routine
from .plan import Plan, dtype_of, plan

Tensor = torch.Tensor


@functools.lru_cache(maxsize=1024)
def prepared(p: Problem, host: Host, saved: Save, cut: bool) -> tuple[Plan, dict[str, TritonKernel]]:
    """Return the plan and its kernels; those that are missing are built side by side."""
    chosen = plan(p, host, saved, cut)
    return chosen, dict(zip(chosen.kernels, fetch_all(chosen.kernels.values())))


class TritonCall:
    """The tensors and numbers of one direction of a call, and the launches of its kernels.

    A tensor of rows is read as (tokens, heads, ..), one of chunks as (chunks, HV, ..), whatever its shape is: kernels
    get addresses.  `saved` says what it saves, or what was saved for it; `inputs` are those that a call passes, some of
    which may be None; `offsets` is the dtype of cu_seqlens.
    """

    def __init__(
        self, p: Problem, host: Host, saved: Save, offsets: str | None, inputs: Sequence[str], cut: bool = False
    ):
        self.p, (self.plan, self.kernels) = p, prepared(p, host, saved, cut)
        self.draft, pl = Draft(None, inputs), self.plan
        self.env: dict[str, Any] = {
            **self.draft.only(*inputs), "T": p.T, "tokens": p.B * p.T, "N": p.N, "H": p.H, "HV": p.HV, "C": p.C,
            "one": 1, "scale": p.scale, "lower_bound": p.lower_bound or 0.0, "chunks": pl.chunks,
            "pieces": pl.segments, "segment": pl.segment, "chunk_bound": pl.chunk_bound,
        }
        # Packed, there may be fewer; programs without a chunk clear tokens outside every sequence.
        self.chunks, self.segments = pl.chunk_bound + p.packed, pl.all_segments
        if p.packed:
            self._tables(f"tables {offsets}")

    def _tables(self, name: str) -> None:
        """Launch the kernel that writes where chunks and segments lie."""
        tables = self.draft.memory()
        sizes = dict(chunk_table=16 * self.chunks, segment_table=40 * self.segments, taken=8,
                     first_segment=4 * (self.p.N + 1))
        self.env |= {table: tables.part(size) for table, size in sizes.items()}
        run: Any = self.plan.kernels[name].constants["RUN"]
        programs = max(1, -(-self.plan.chunks // run))
        self.run(name, programs, chunk_entries=self.chunks, segment_entries=self.segments)

    # memory

    def allocate(self, names: str, *shape: int) -> None:
        """Allocate tensors in the dtypes in which kernels have them; None for those that they have not."""
        for name in names.split():
            dtype = dtype_of(self.p, name)
            self.env[name] = self.draft.tensor(shape, dtype) if dtype else None

    def per_chunk(self, names: str, *shape: int) -> None:
        self.allocate(names, self.plan.chunk_bound, self.p.HV, *shape)

    def per_segment(self, names: str, *shape: int) -> None:
        self.allocate(names, self.segments, self.p.HV, *shape)

    def make(self, names: str) -> None:
        """Allocate tensors of `kda.model.stages`, of rows or of chunks."""
        p = self.p
        for name in names.split():
            first, *others = SHAPES[name].strip("()").split(", ")
            if name == "dg" and p.gate_per_head:
                others = []
            shape = [getattr(p, letter) for letter in others]
            if first == "C":
                tokens = (p.B, p.T) if name in RESULTS else (p.B * p.T,)
                shape = [*tokens, p.H if name in ("dq", "dk") else p.HV, *shape]
            else:
                shape = [self.plan.chunk_bound, p.HV, getattr(p, first), *shape]
            self.allocate(name, *shape)

    def drop(self, names: str) -> None:
        """Give memory back for what is made next; no later launch reads these."""
        if any([self.env.pop(name, None) for name in names.split()]):
            self.draft.free_here()

    def done(self, names: Iterable[str]) -> Routine:
        """Return the routine, whose results are those tensors; None for one that there is not."""
        return self.draft.done(*map(self.env.get, names))

    # launches

    def run(self, name: str, grid: int, **given: Any) -> None:
        """Launch a kernel; its arguments are looked up by name."""
        self.draft.launch_triton(self.kernels[name], grid, {**self.env, **given})

    def over_chunks(self, name: str, parts: int = 1, **given: Any) -> None:
        self.run(name, self.chunks * self.p.HV * parts, **given)

    def over_segments(self, name: str, **given: Any) -> None:
        self.run(name, self.segments * self.p.HV * self.plan.tiles(name, "V"), **given)

    def over_sequences(self, name: str, **given: Any) -> None:
        self.run(name, self.p.N * self.p.HV * self.plan.tiles(name, "V"), **given)
