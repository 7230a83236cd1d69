"""Tensors in, tensors out: tables of packed sequences, tiles of all chunks, chains over them; what is kept."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kda.bundles import Grads, Outputs, Own, Products, Save, Saved
from kda.compile.errors import BuildError
from kda.host import detect
from kda.problem import Inputs, Problem

from ..common import recorded
from ..common.arguments import Launch
from ..common.cute.configs import ROUNDED_TO, RUN, ChunkTable, SegmentTable, TablesConfig
from ..common.cute.tile import C
from ..common.launcher import (
    backward_as_stage,
    forward_as_stage,
    launch_of,
    offsets_dtype,
    outputs,
    segment_summary,
)
from ..common.tensors import laid_out, offsets_on, on_its_device
from .kernels import kernel
from .plan import Plan, plan, recorded_plan

Tensor = torch.Tensor
RECORDED = recorded.Backend(recorded_plan, lambda config, cc: kernel(config), v_first=True)


def rounded_to(p: Problem) -> dict[str, str]:
    return recorded.ROUNDED_TO if p.direction == "backward" else ROUNDED_TO


class Steps(NamedTuple):
    """A plan, and what launches its kernels: called with tensors; None where there is nothing to do."""

    plan: Plan
    tables: Launch | None
    prepare: Launch | None
    pairs: Launch | None
    chain: Launch | None
    carry: Launch | None
    compose: Launch | None
    fused: Launch | None                     # then there are tables alone beside it


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, sms: int, kept: bool, offsets: str | None) -> Steps:
    """For `cu_seqlens` of dtype `offsets`."""
    pl = plan(p, sms, kept)
    step = functools.partial(launch_of, kernel)
    runs, walks = max(1, -(-p.T // (C * RUN))), pl.all_segments if p.N else 0
    gate = dict(T=p.T, H=p.H, HV=p.HV, scale=p.scale, lower_bound=p.lower_bound or 0.0)
    walk = dict(T=p.T, chunks=pl.chunks, segments=pl.segments, segment=pl.segment, HV=p.HV)
    tables = step(
        TablesConfig(offsets) if offsets else None, (runs, 1, 1), T=p.T, N=p.N, segment=pl.segment, every=p.C // C,
        chunk_entries=pl.entries, segment_entries=pl.all_segments,
    )  # fmt: skip
    if pl.fused:
        return Steps(pl, tables, None, None, None, None, None, step(pl.fused, (2, p.HV, p.N), **gate))
    return Steps(
        pl, tables,
        step(pl.prepare, (p.HV, *pl.entries_grid), chunks=pl.entries, **gate),
        step(pl.pairs, (p.HV, *pl.halves_grid), T=p.T, chunks=pl.entries, HV=p.HV),
        step(pl.chain, (pl.chain.strips, p.HV, walks), **walk),
        step(pl.carry, (pl.carry.strips, p.HV, walks), **walk) if pl.carry else None,
        step(pl.compose, (pl.compose.strips, p.HV, p.N), segments=pl.segments, HV=p.HV) if pl.compose else None,
        None,
    )  # fmt: skip


def kept_bytes(p: Problem) -> int:
    return recorded.kept_bytes(RECORDED, p)


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING) -> Outputs:
    if save is Save.ALL:
        raise BuildError(
            "chunk_kda: backend='sm90' keeps what its own backward reads, or A_qk and A_inv, not all that "
            "disable_recompute keeps for others. Leave it out, or backend."
        )
    if save is Save.OWN:
        return recorded.forward(RECORDED, p, x)
    kept = save is Save.PRODUCTS
    at = steps(p, detect(p.device).sms, kept, offsets_dtype(x))
    inputs, out = laid_out(x), outputs(p, x)
    o, ht, h, _ = out
    chunk_table, segment_table, first_segment = tables(p, at, x.cu_seqlens, x.q.device) if p.packed else (None,) * 3
    if at.fused:
        at.fused(**inputs, o=o, ht=ht, segment_table=segment_table)
        return out
    v, h0 = inputs.pop("v"), inputs.pop("h0")
    tiles = o.new_empty(at.plan.scratch, dtype=torch.uint8)
    A_qk = A_inv = None
    if kept:
        A_qk, A_inv = (o.new_empty(p.B * p.T, p.HV, p.C) for _ in range(2))
    if at.prepare:
        at.prepare(**inputs, tiles=tiles, A_qk=A_qk, A_inv=A_inv, o=o, chunk_table=chunk_table)
    if at.pairs:
        at.pairs(tiles=tiles, beta=inputs["beta"], A_qk=A_qk, A_inv=A_inv, chunk_table=chunk_table)
    if at.carry:                                                               # states that enter segments come first
        summary = segment_summary(p, o, at.plan.all_segments)
        edge = torch.empty_like(summary.added)
        at.carry(tiles=tiles, v=v, ht=summary.added, M=summary.M, segment_table=segment_table)
        at.compose(M=summary.M, added=summary.added, h0=h0, edge=edge, first_segment=first_segment)
        h0 = edge
    if at.chain:
        at.chain(tiles=tiles, v=v, h0=h0, o=o, ht=ht, h=h, segment_table=segment_table)
    return out._replace(saved=Products(A_qk, A_inv) if kept else None)


@on_its_device
def backward(
    p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | Own | None = None
) -> Grads:
    """What was kept for another backend is not looked at."""
    return recorded.backward(RECORDED, p, x, do, dht, saved if type(saved) is Own else None)


def tables(p: Problem, at: Steps, cu_seqlens: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where chunks and segments lie, on the GPU."""
    sizes = (ChunkTable.WIDTH * at.plan.entries, SegmentTable.WIDTH * at.plan.all_segments)
    chunk_table, segment_table = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    first_segment = torch.empty(p.N + 1, dtype=torch.int32, device=device)
    cu_seqlens = offsets_on(device, cu_seqlens)
    at.tables(
        cu_seqlens=cu_seqlens, chunk_table=chunk_table, segment_table=segment_table, first_segment=first_segment
    )
    return chunk_table, segment_table, first_segment


def stage(
    name: str, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """The forward in one piece, with what it keeps for others; the backward, with all that it makes again; its second
    kernel alone."""
    if name == "bwd/grads":
        return recorded.grads_as_stage(RECORDED, p, offsets, tensors)
    if name.startswith("bwd"):
        return backward_as_stage(backward, p, offsets, tensors)
    return forward_as_stage(forward, Save.PRODUCTS, p, offsets, tensors)
