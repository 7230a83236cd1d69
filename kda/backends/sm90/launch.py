"""Tensors in, tensors out: tables of packed sequences, tiles of all chunks, chains over them; what is kept."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kda.bundles import Grads, Outputs, Products, Save, Saved
from kda.compile.errors import BuildError
from kda.compile.fetching import fetch_here
from kda.compile.kernel import Kernel
from kda.host import detect
from kda.problem import Inputs, Problem

from ..common.arguments import Launch
from ..common.cute.configs import ROUNDED_TO
from ..common.cute.tile import C
from ..common.launcher import forward_as_stage, launch_of, offsets_dtype, outputs, segment_summary
from ..common.tensors import aligned, laid_out, offsets_on, on_its_device
from .configs import RUN, TOKENS, ChunkTable, SegmentTable, TablesConfig
from .plan import BackwardPlan, Config, Plan, backward_plan, plan, recipe, states_table

Tensor = torch.Tensor


# The same of the backward, by the names that the stages have for what is as large: kE, qg, b kg, A_qk b, T', states, r,
# z and dv; G, Qu, Ku and Kd; results.
BACKWARD_ROUNDED_TO = dict.fromkeys(
    ("A_qk", "A_inv", "w", "u", "qg", "kb", "kg", "h", "v_new", "dh", "dv_new", "P", "kD", "qD", "dA_k", "dA_q",
     "dq", "dk", "dv", "dg", "dbeta"), "bfloat16",
)  # fmt: skip


def rounded_to(p: Problem) -> dict[str, str]:
    return BACKWARD_ROUNDED_TO if p.direction == "backward" else ROUNDED_TO


@functools.cache
def kernel(config: Config) -> Kernel:
    return fetch_here(recipe(config))


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
    step = functools.partial(launch_of, lambda config: kernel(config))
    runs, walks = max(1, -(-p.T // (C * RUN))), pl.all_segments if p.N else 0
    gate = dict(T=p.T, H=p.H, HV=p.HV, scale=p.scale, lower_bound=p.lower_bound or 0.0)
    walk = dict(T=p.T, chunks=pl.chunks, segments=pl.segments, segment=pl.segment, HV=p.HV)
    tables = step(
        TablesConfig(offsets) if offsets else None, (runs, 1, 1), T=p.T, N=p.N, segment=pl.segment, every=p.C // C,
        chunk_entries=pl.entries, segment_entries=pl.all_segments,
    )  # fmt: skip
    if pl.fused:
        return Steps(pl, tables, *[None] * 5, step(pl.fused, (2, p.HV, p.N), **gate))
    return Steps(
        pl, tables,
        step(pl.prepare, (p.HV, *pl.entries_grid), chunks=pl.entries, **gate),
        step(pl.pairs, (p.HV, *pl.halves_grid), T=p.T, chunks=pl.entries, HV=p.HV),
        step(pl.chain, (pl.chain.strips, p.HV, walks), **walk),
        pl.carry and step(pl.carry, (pl.carry.strips, p.HV, walks), **walk),
        pl.compose and step(pl.compose, (pl.compose.strips, p.HV, p.N), segments=pl.segments, HV=p.HV),
        None,
    )  # fmt: skip


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING) -> Outputs:
    if save is Save.ALL:
        raise BuildError(
            "chunk_kda: backend='sm90' keeps A_qk and A_inv for a backward, and has no kernels for more. Leave out "
            "disable_recompute, or backend."
        )
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


class BackwardSteps(NamedTuple):
    plan: BackwardPlan
    tables: Launch | None                    # of chunks, and of sequences
    states: Launch | None                    # of pairs of chunks
    prepare: Launch | None
    again: Launch | None
    walk: Launch | None
    grads: Launch | None


@functools.lru_cache(maxsize=1024)
def backward_steps(p: Problem, sms: int, dht: bool, offsets: str | None) -> BackwardSteps:
    """`dht`: whether final states have gradients; for `cu_seqlens` of dtype `offsets`."""
    pl = backward_plan(dataclasses.replace(p, final_state=dht), sms)
    step = functools.partial(launch_of, lambda config: kernel(config))
    gate = dict(T=p.T, H=p.H, HV=p.HV, scale=p.scale, lower_bound=p.lower_bound or 0.0)
    strips, whole, rows = pl.again.strips, max(pl.chunks, 1), (p.N, p.T)
    return BackwardSteps(
        pl,
        step(TablesConfig(offsets) if offsets else None, (runs(C, *rows), 1, 1), T=p.T, N=p.N, segment=whole,
             every=pl.again.every, chunk_entries=pl.entries, segment_entries=p.N),
        step(states_table(offsets) if offsets else None, (runs(TOKENS, *rows), 1, 1), T=p.T, N=p.N, segment=whole,
             every=1, chunk_entries=pl.states, segment_entries=0),
        step(pl.prepare, (p.HV, *pl.entries_grid), chunks=pl.entries, **gate),
        step(pl.again, (strips, p.HV, p.N), T=p.T, chunks=pl.chunks, segments=1, segment=whole, HV=p.HV),
        step(pl.walk, (strips, p.HV, p.N), T=p.T, chunks=pl.chunks, HV=p.HV),
        step(pl.grads, (pl.grads_grid, 1, 1), chunks=pl.states, items=pl.all_states * p.HV, zero=0.0, one=1.0, **gate),
    )  # fmt: skip


def runs(rows: int, N: int, T: int) -> int:
    """CTAs that write tables."""
    return max(1, -(-T // (rows * RUN))) if N else 0


@on_its_device
def backward(
    p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | None = None
) -> Grads:
    """Makes operands, states and residuals of the forward again: what was kept for another backend is not looked at."""
    at = backward_steps(p, detect(p.device).sms, dht is not None, offsets_dtype(x))
    pl, inputs, like = at.plan, laid_out(x), x.q
    v, h0 = inputs.pop("v"), inputs.pop("h0")
    do, dht = aligned(do, like.dtype), aligned(dht, torch.float32)
    chunk_table = segment_table = state_table = None
    if p.packed:
        chunk_table, segment_table, state_table = backward_tables(p, at, x.cu_seqlens, like.device)
    dv = like.new_empty(p.B, p.T, p.HV, p.V)
    dh0 = None if h0 is None else torch.empty_like(h0)
    r = torch.empty_like(dv)
    h, dh = (like.new_empty(pl.all_states, p.HV, p.V, p.K) for _ in range(2))
    tiles = like.new_empty(pl.scratch, dtype=torch.uint8)
    if at.prepare:
        at.prepare(**inputs, tiles=tiles, o=dv, chunk_table=chunk_table)
    if at.again:
        at.again(tiles=tiles, v=v, h0=h0, o=r, h=h, segment_table=segment_table)
        at.walk(tiles=tiles, do=do, dht=dht, dv=dv, dh=dh, dh0=dh0, segment_table=segment_table)
    del tiles
    dq, dk = (like.new_empty(p.B, p.T, p.HV, p.K) for _ in range(2))
    dg, dbeta = torch.empty_like(inputs["g"]), torch.empty_like(inputs["beta"])
    of_A_log, of_dt_bias = (like.new_empty(pl.all_states, p.HV, p.K, dtype=torch.float32) for _ in range(2))
    if at.grads:
        at.grads(
            **inputs, do=do, dv=dv, r=r, h=h, dh=dh, dq=dq, dk=dk, dg=dg, dbeta=dbeta, of_A_log=of_A_log,
            of_dt_bias=of_dt_bias, chunk_table=state_table,
        )  # fmt: skip
    else:
        of_A_log, of_dt_bias = of_A_log[:0], of_dt_bias[:0]
    dq, dk = (of_heads(y, p) for y in (dq, dk))
    dA_log, ddt_bias = summed(of_A_log, (0, 2), x.A_log), summed(of_dt_bias, (0,), x.dt_bias)
    return Grads(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0)


def backward_tables(
    p: Problem, at: BackwardSteps, cu_seqlens: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Where chunks, sequences and pairs of chunks lie, on the GPU."""
    sizes = (ChunkTable.WIDTH * at.plan.entries, SegmentTable.WIDTH * p.N, ChunkTable.WIDTH * at.plan.states)
    found = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    cu_seqlens = offsets_on(device, cu_seqlens)
    if at.tables:
        first_segment = torch.empty(p.N + 1, dtype=torch.int32, device=device)
        at.tables(cu_seqlens=cu_seqlens, chunk_table=found[0], segment_table=found[1], first_segment=first_segment)
        at.states(cu_seqlens=cu_seqlens, chunk_table=found[2])
    return found


def of_heads(y: Tensor, p: Problem) -> Tensor:
    """The gradient of q or k of each value head, those that share a head summed in order."""
    if p.HV == p.H:
        return y
    return y.view(p.B, p.T, p.H, p.HV // p.H, p.K).sum(3, dtype=torch.float32).to(y.dtype)


def summed(shares: Tensor, dims: tuple[int, ...], like: Tensor | None) -> Tensor | None:
    """The gradient of a gate's parameter, of what chunks give to it."""
    if like is None:
        return None
    found = torch.empty(like.shape, dtype=shares.dtype, device=shares.device)
    left = [n for d, n in enumerate(shares.shape) if d not in dims]
    torch.sum(shares, dims, out=found.view(left))
    return found.to(like.dtype)


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
    """The only one: the forward in one piece, with what it keeps."""
    return forward_as_stage(forward, Save.PRODUCTS, p, offsets, tensors)
