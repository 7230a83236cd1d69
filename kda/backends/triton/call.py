"""One call: its tensors and numbers by the names that kernels give them, and the kernels that its plan names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from kda.model.bundles import Save
from kda.model.host import Host, detect
from kda.model.problem import Inputs, Problem
from kda.model.stages import RESULTS, SHAPES
from ptxkit.compile.fetching import fetch_all
from ptxkit.compile.triton import TritonKernel

from ..common.tensors import laid_out, offsets_on
from ..common.triton_recipes import launch
from .plan import Plan, plan
from .plan import dtype_of as dtype_name

Tensor = torch.Tensor


@functools.lru_cache(maxsize=1024)
def prepared(p: Problem, host: Host, saved: Save, cut: bool) -> tuple[Plan, dict[str, TritonKernel]]:
    """Return the plan and its kernels; those that are missing are built side by side."""
    chosen = plan(p, host, saved, cut)
    return chosen, dict(zip(chosen.kernels, fetch_all(chosen.kernels.values())))


def dtype_of(p: Problem, name: str) -> torch.dtype:
    """Return the dtype in which kernels have a tensor."""
    return getattr(torch, dtype_name(p, name))


class TritonCall:
    """The tensors and numbers of one call, and the launches of its kernels.

    A tensor of rows is read as (tokens, heads, ..), one of chunks as (chunks, HV, ..), whatever its shape is: kernels
    get addresses.
    """

    def __init__(self, p: Problem, saved: Save, device: torch.device, tensors: Mapping[str, Tensor | None],
                 cut: bool = False):
        self.p, self.device = p, device
        self.plan, self.kernels = prepared(p, detect(p.device), saved, cut)
        pl = self.plan
        self.env: dict[str, Any] = {
            **tensors,
            "T": p.T, "tokens": p.B * p.T, "N": p.N, "H": p.H, "HV": p.HV, "C": p.C, "one": 1, "scale": p.scale,
            "lower_bound": p.lower_bound or 0.0, "chunks": pl.chunks, "pieces": pl.segments,
            "segment": pl.segment, "chunk_bound": pl.chunk_bound,
        }
        # Packed, there may be fewer; programs without a chunk clear tokens outside every sequence.
        self.chunks, self.segments = pl.chunk_bound + p.packed, pl.all_segments
        if p.packed:
            self._tables(tensors["cu_seqlens"])

    @classmethod
    def of(cls, p: Problem, saved: Save, x: Inputs, cut: bool = False, **others: Tensor | None) -> TritonCall:
        """Return the Call with these inputs; `saved` says what it saves, or what was saved for it."""
        return cls(p, saved, x.q.device, laid_out(x) | {"cu_seqlens": x.cu_seqlens} | others, cut)

    def _tables(self, cu_seqlens: Tensor) -> None:
        """Launch the kernel that writes where chunks and segments lie."""
        cu_seqlens = offsets_on(self.device, cu_seqlens)
        table = self.empty(2 * self.chunks + 5 * self.segments + 1, dtype=torch.int64)
        names = ("chunk_table", "segment_table", "taken")
        self.env |= dict(zip(names, table.split((2 * self.chunks, 5 * self.segments, 1))))
        self.env["first_segment"] = self.empty(self.p.N + 1, dtype=torch.int32)
        name = "tables " + str(cu_seqlens.dtype).removeprefix("torch.")
        run: Any = self.plan.kernels[name].constants["RUN"]
        programs = max(1, -(-self.plan.chunks // run))
        self.run(name, programs, cu_seqlens=cu_seqlens, chunk_entries=self.chunks, segment_entries=self.segments)

    # memory

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def per_chunk(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.empty(self.plan.chunk_bound, self.p.HV, *shape, dtype=dtype)

    def per_segment(self, *shape: int) -> Tensor:
        return self.empty(self.segments, self.p.HV, *shape, dtype=torch.float32)

    def make(self, names: str) -> None:
        """Allocate tensors of `kda.model.stages`, of rows or of chunks."""
        p = self.p
        for name in names.split():
            first, *others = SHAPES[name].strip("()").split(", ")
            shape = [getattr(p, letter) for letter in others]
            if first == "C":
                tokens = (p.B, p.T) if name in RESULTS else (p.B * p.T,)
                shape = [*tokens, p.H if name in ("dq", "dk") else p.HV, *shape]
            else:
                shape = [self.plan.chunk_bound, p.HV, getattr(p, first), *shape]
            self.env[name] = self.empty(*shape, dtype=dtype_of(p, name))

    def drop(self, names: str) -> None:
        """Give memory back for what is made next."""
        for name in names.split():
            self.env.pop(name, None)

    # launches

    def run(self, name: str, grid: int, **given: Any) -> None:
        """Launch a kernel; its arguments are looked up by name."""
        launch(self.kernels[name], grid, {**self.env, **given})

    def over_chunks(self, name: str, parts: int = 1, **given: Any) -> None:
        self.run(name, self.chunks * self.p.HV * parts, **given)

    def over_segments(self, name: str, **given: Any) -> None:
        self.run(name, self.segments * self.p.HV * self.plan.tiles(name, "V"), **given)

    def over_sequences(self, name: str, **given: Any) -> None:
        self.run(name, self.p.N * self.p.HV * self.plan.tiles(name, "V"), **given)
