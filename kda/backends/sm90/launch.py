"""Tensors in, tensors out: tables of packed sequences, tiles of all chunks, chains over them; what is kept."""

from __future__ import annotations

import dataclasses
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

from ..common.chunks import Chunks
from ..common.tensors import aligned, chunks_of_a_row, on_its_device
from .configs import RUN, TablesConfig
from .parts.tile import C, Tile
from .plan import Config, Plan, plan, recipe

Tensor = torch.Tensor


@functools.cache
def kernel(config: Config) -> Kernel:
    return fetch_here(recipe(config))


@functools.cache
def step(config: Config) -> Bound:
    return kernel(config).bound(config.threads, config.cluster, config.shared, pdl=config.early)


class Steps(NamedTuple):
    """A plan and what launches its kernels."""

    plan: Plan
    prepare: Bound | None
    pairs: Bound | None
    chain: Bound | None
    carry: Bound | None
    compose: Bound | None
    fused: Bound | None                      # then no other is there


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, sms: int, kept: bool) -> Steps:
    pl = plan(p, sms, kept)
    configs = (None,) * 5 if pl.fused else (pl.prepare, pl.pairs, pl.chain, pl.carry, pl.compose)
    return Steps(pl, *(config and step(config) for config in (*configs, pl.fused)))


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
    at = steps(p, detect(p.device).sms, kept)
    device, pl = x.q.device, at.plan
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=x.q.dtype, device=device)
    states = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    ht = torch.empty(states, dtype=torch.float32, device=device) if p.final_state else None
    h = None
    if p.intermediate_states:
        h = torch.empty(p.B, chunks_of_a_row(p, x), *states[1:], dtype=x.q.dtype, device=device)
    chunk_table, *segments = tables(p, pl, x.cu_seqlens, device) if p.packed else (None, None, None)
    if at.fused:
        at.fused(
            (2, p.HV, p.N), aligned(x.q), aligned(x.k), aligned(x.v), aligned(x.g), aligned(x.beta),
            aligned(x.A_log, torch.float32), aligned(x.dt_bias, torch.float32), aligned(x.initial_state), o, ht,
            segments[0], p.T, p.H, p.HV, p.scale, p.lower_bound,
        )  # fmt: skip
        return Outputs(o, ht, None, None)
    tiles = torch.empty(pl.all_chunks * p.HV * Tile(p.K).bytes, dtype=torch.uint8, device=device)
    A_qk = A_inv = None
    if kept:
        A_qk, A_inv = (torch.empty(p.B * p.T, p.HV, p.C, dtype=x.q.dtype, device=device) for _ in range(2))
    if pl.entries * p.HV:
        beta = aligned(x.beta)
        at.prepare(
            (p.HV, *pl.entries_grid), aligned(x.q), aligned(x.k), aligned(x.g), beta, aligned(x.A_log, torch.float32),
            aligned(x.dt_bias, torch.float32), tiles, A_qk, A_inv, o, chunk_table, p.T, pl.entries, p.H, p.HV, p.scale,
            p.lower_bound or 0.0,
        )  # fmt: skip
        if at.pairs:
            at.pairs((p.HV, *pl.halves_grid), tiles, beta, A_qk, A_inv, chunk_table, p.T, pl.entries, p.HV)
    if p.N * p.HV:
        chains(p, at, tiles, aligned(x.v), aligned(x.initial_state), o, ht, h, *segments)
    return Outputs(o, ht, h, Products(A_qk, A_inv) if kept else None)


def chains(
    p: Problem, at: Steps, tiles: Tensor, v: Tensor, h0: Tensor | None, o: Tensor, ht: Tensor | None,
    h: Tensor | None, segment_table: Tensor | None, first_segment: Tensor | None,
) -> None:  # fmt: skip
    """o, ht and h of tiles; where sequences are cut, first the states that enter their segments."""
    pl = at.plan
    place = (segment_table, p.T, pl.chunks, pl.pieces, pl.segment, p.HV)
    if at.carry and at.compose:
        of_segments = functools.partial(torch.empty, dtype=torch.float32, device=v.device)
        M, added = (of_segments(pl.all_segments, p.HV, p.K, columns) for columns in (p.K, p.V))
        edge = torch.empty_like(added)
        at.carry((pl.carry.parts, p.HV, pl.all_segments), tiles, v, None, None, added, M, None, *place)
        at.compose((pl.compose.parts, p.HV, p.N), M, added, h0, edge, first_segment, pl.pieces, p.HV)
        h0 = edge
    at.chain((pl.chain.parts, p.HV, pl.all_segments), tiles, v, h0, o, ht, None, h, *place)


def tables(p: Problem, pl: Plan, cu_seqlens: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Where chunks and segments lie, on the GPU."""
    sizes = (3 * pl.entries, 6 * pl.all_segments)
    chunk_table, segment_table = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    first_segment = torch.empty(p.N + 1, dtype=torch.int32, device=device)
    cu_seqlens = cu_seqlens.to(device, non_blocking=True).contiguous()
    launch = step(TablesConfig(str(cu_seqlens.dtype).removeprefix("torch.")))
    launch((max(1, -(-p.T // (C * RUN))), 1, 1), cu_seqlens, chunk_table, segment_table, first_segment, p.T, p.N,
           pl.segment, p.C // C, pl.entries, pl.all_segments)  # fmt: skip
    return chunk_table, segment_table, first_segment


WHOLE = "fwd/gate+intra+wy+state+output"


def stage(
    name: str, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """The forward in one piece, on tensors as they lie in chunks: rows (NC, heads, C, D), states (N, HV, K, V)."""
    assert name == WHOLE
    p = dataclasses.replace(
        p, final_state=True, intermediate_states=True, state_v_first=False, state_dtype=p.state_dtype or "float32",
        packed=offsets is not None,
    )  # fmt: skip
    device = next(x.device for x in tensors.values() if x is not None)
    table = Chunks(p, offsets, device)
    types = dict.fromkeys(("q", "k", "v"), p.dtype) | {"g": p.g_dtype, "beta": p.beta_dtype}
    rows = {n: table.rows(tensors[n]).to(getattr(torch, dtype)) for n, dtype in types.items()}
    rows = {n: x.view(p.B, p.T, *(x.shape[1:] if n != "beta" else x.shape[1:2])) for n, x in rows.items()}
    flat = {n: None if tensors[n] is None else tensors[n].flatten() for n in ("A_log", "dt_bias")}
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
    h0 = tensors["h0"].to(getattr(torch, p.state_dtype))
    out = forward(p, Inputs(**rows, **flat, initial_state=h0, cu_seqlens=cu_seqlens), "products")
    kept = {n: table.chunks(x) for n, x in out.saved._asdict().items()}
    return {"o": table.chunks(out.o.flatten(0, 1)), "ht": out.final_state, "h": out.h.flatten(0, 1), **kept}
