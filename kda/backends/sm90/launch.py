"""Tensors in, tensors out: tables of packed sequences, tiles of all chunks, chains over them; what is kept."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kda.bundles import Outputs, Products
from kda.compile.errors import BuildError
from kda.compile.fetching import fetch_here
from kda.compile.kernel import Bound, Kernel
from kda.host import detect
from kda.problem import Inputs, Problem

from ..common.chunks import whole_call
from ..common.cute.tile import C
from ..common.tensors import chunks_of_a_row, laid_out, on_its_device
from .configs import RUN, TablesConfig
from .plan import Config, Plan, plan, recipe

Tensor = torch.Tensor


@functools.cache
def kernel(config: Config) -> Kernel:
    return fetch_here(recipe(config))


def step(config: Config | None, grid: tuple[int, int, int], *numbers: float) -> Bound | None:
    """What launches a kernel, where there is one and something to do."""
    if config is None or 0 in grid:
        return None
    return config.bound(kernel(config), grid, *numbers)


class Steps(NamedTuple):
    """A plan, and what launches its kernels: called with tensors."""

    plan: Plan
    tables: Bound | None
    prepare: Bound | None
    pairs: Bound | None
    chain: Bound | None
    carry: Bound | None
    compose: Bound | None
    fused: Bound | None                      # then there are tables alone beside it


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, sms: int, kept: bool, offsets: torch.dtype | None) -> Steps:
    """For `cu_seqlens` of dtype `offsets`."""
    pl = plan(p, sms, kept)
    runs, walks = max(1, -(-p.T // (C * RUN))), pl.all_segments if p.N else 0
    gate = (p.H, p.HV, p.scale, p.lower_bound or 0.0)
    place = (p.T, pl.chunks, pl.pieces, pl.segment, p.HV)
    tables = TablesConfig(str(offsets).removeprefix("torch.")) if p.packed else None
    tables = step(tables, (runs, 1, 1), p.T, p.N, pl.segment, p.C // C, pl.entries, pl.all_segments)
    if pl.fused:
        return Steps(pl, tables, *[None] * 5, step(pl.fused, (2, p.HV, p.N), p.T, *gate))
    return Steps(
        pl, tables,
        step(pl.prepare, (p.HV, *pl.entries_grid), p.T, pl.entries, *gate),
        step(pl.pairs, (p.HV, *pl.halves_grid), p.T, pl.entries, p.HV),
        step(pl.chain, (pl.chain.parts, p.HV, walks), *place),
        pl.carry and step(pl.carry, (pl.carry.parts, p.HV, walks), *place),
        pl.compose and step(pl.compose, (pl.compose.parts, p.HV, p.N), pl.pieces, p.HV),
        None,
    )  # fmt: skip


# Operands of products, and results; decays, norms, the inverse and the state stay float32.
ROUNDED_TO = dict.fromkeys(("A_qk", "A_inv", "qg", "kb", "kg", "h", "v_new", "o"), "bfloat16")


@on_its_device
def forward(p: Problem, x: Inputs, save: str = "nothing") -> Outputs:
    if save == "all":
        raise BuildError(
            "chunk_kda: backend='sm90' keeps A_qk and A_inv for a backward, and has no kernels for more. Leave out "
            "disable_recompute, or backend."
        )
    kept = save == "products"
    at = steps(p, detect(p.device).sms, kept, x.cu_seqlens.dtype if p.packed else None)
    q, k, v, g, beta, A_log, dt_bias, h0 = laid_out(x)
    o, ht, h = q.new_empty(p.B, p.T, p.HV, p.V), None, None
    states = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    if p.final_state:
        ht = q.new_empty(states, dtype=torch.float32)
    if p.intermediate_states:
        h = q.new_empty(p.B, chunks_of_a_row(p, x), *states[1:])
    chunk_table, segment_table, first_segment = tables(p, at, x.cu_seqlens, q.device) if p.packed else (None,) * 3
    if at.fused:
        at.fused(q, k, v, g, beta, A_log, dt_bias, h0, o, ht, segment_table)
        return Outputs(o, ht, None, None)
    tiles = q.new_empty(at.plan.scratch, dtype=torch.uint8)
    A_qk = A_inv = None
    if kept:
        A_qk, A_inv = (q.new_empty(p.B * p.T, p.HV, p.C) for _ in range(2))
    if at.prepare:
        at.prepare(q, k, g, beta, A_log, dt_bias, tiles, A_qk, A_inv, o, chunk_table)
    if at.pairs:
        at.pairs(tiles, beta, A_qk, A_inv, chunk_table)
    if at.carry:                                                               # states that enter segments come first
        M, added = (q.new_empty(at.plan.all_segments, p.HV, p.K, n, dtype=torch.float32) for n in (p.K, p.V))
        edge = torch.empty_like(added)
        at.carry(tiles, v, None, None, added, M, None, segment_table)
        at.compose(M, added, h0, edge, None, first_segment)
        h0 = edge
    if at.chain:
        at.chain(tiles, v, h0, o, ht, None, h, segment_table)
    return Outputs(o, ht, h, Products(A_qk, A_inv) if kept else None)


def tables(p: Problem, at: Steps, cu_seqlens: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where chunks and segments lie, on the GPU."""
    sizes = (3 * at.plan.entries, 6 * at.plan.all_segments)
    chunk_table, segment_table = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    first_segment = torch.empty(p.N + 1, dtype=torch.int32, device=device)
    at.tables(cu_seqlens.to(device, non_blocking=True).contiguous(), chunk_table, segment_table, first_segment)
    return chunk_table, segment_table, first_segment


WHOLE = "fwd/gate+intra+wy+state+output"


def stage(
    name: str, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """The forward in one piece, on tensors as they lie in chunks."""
    assert name == WHOLE
    p, x, table = whole_call(p, offsets, tensors)
    out = forward(p, x, "products")
    kept = {n: table.chunks(x) for n, x in out.saved._asdict().items()}
    return {"o": table.chunks(out.o.flatten(0, 1)), "ht": out.final_state, "h": out.h.flatten(0, 1), **kept}
