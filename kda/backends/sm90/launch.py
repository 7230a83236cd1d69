"""Tensors in, tensors out: tables of packed sequences, tiles of all chunks, chains over them; what is kept."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kda.model.bundles import Outputs, Products, Save, SegmentSummary
from kda.model.host import detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from ptxkit.compile.errors import BuildError

from ..common import training
from ..common.arguments import NamedLaunch
from ..common.cute.configs import JOIN_ROWS, RUN, TablesConfig
from ..common.cute.tile import C
from ..common.cute.training import TOKENS
from ..common.launcher import (
    gate_numbers,
    kernels,
    launch_of,
    outputs,
    run_segments,
    segment_summary,
    walk_numbers,
)
from ..common.pool.launch import Checkpoints
from ..common.pool.launch import prefill as of_pool
from ..common.tensors import laid_out, offsets_on, on_its_device
from .configs import tile
from .plan import Plan, call_of_stage, join_config, map_plan, plan, recipe, training_plan

Tensor = torch.Tensor
kernel = kernels(recipe)


class Launches(NamedTuple):
    """A plan, and what launches its kernels: called with tensors; None where there is nothing to do."""

    plan: Plan
    tables: NamedLaunch | None
    prepare: NamedLaunch | None = None
    pairs: NamedLaunch | None = None
    chain: NamedLaunch | None = None
    carry: NamedLaunch | None = None
    compose: NamedLaunch | None = None
    fused: NamedLaunch | None = None         # then there are tables alone beside it
    stream: NamedLaunch | None = None        # the same; of segments: then compose and join
    join: NamedLaunch | None = None
    states: None = None                      # tables of pairs of chunks are for training


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, sms: int, saves: bool, offsets: str | None) -> Launches:
    """For `cu_seqlens` of dtype `offsets`."""
    pl = plan(p, sms, saves)
    step = functools.partial(launch_of, kernel)
    runs, walks = max(1, -(-p.T // (C * RUN))), pl.all_segments if p.N else 0
    gate, walk = gate_numbers(p), walk_numbers(p, pl)
    tables = step(
        TablesConfig(offsets) if offsets else None, (runs, 1, 1), T=p.T, N=p.N, segment=pl.segment, every=p.C // C,
        chunk_entries=pl.entries, segment_entries=pl.all_segments,
    )
    if pl.fused:
        return Launches(pl, tables, fused=step(pl.fused, pl.clusters.grid(p), chunks=pl.chunks, N=p.N, **gate))
    if pl.stream:
        cut = pl.stream_segments > 1
        grid = (pl.makers + pl.stream.walks(pl.stream_segments) * p.HV * p.N, 1, 1)
        segments = dict(segments=pl.stream_segments) if cut else {}
        stream = step(pl.stream, grid, chunks=pl.chunks, N=p.N, makers=pl.makers, **gate, **segments)
        if not cut:
            return Launches(pl, tables, stream=stream)
        blocks = -(-(-(-p.T // (TOKENS * pl.stream_segments)) * TOKENS) // JOIN_ROWS)
        join = (blocks, p.HV, p.N * (pl.stream_segments - 1))
        return Launches(
            pl, tables, stream=stream,
            compose=step(pl.compose, (pl.compose.strips, p.HV, p.N), HV=p.HV, **segments),
            join=step(join_config(p, offsets), join, T=p.T, HV=p.HV, **segments),
        )
    return Launches(
        pl, tables,
        step(pl.prepare, (p.HV, *pl.entries_grid), chunks=pl.entries, **gate),
        step(pl.pairs, (p.HV, *pl.halves_grid), T=p.T, chunks=pl.entries, HV=p.HV),
        step(pl.chain, (pl.chain.strips, p.HV, walks), **walk),
        step(pl.carry, (pl.carry.strips, p.HV, walks), **walk) if pl.carry else None,
        step(pl.compose, (pl.compose.strips, p.HV, p.N), segments=pl.segments, HV=p.HV) if pl.compose else None,
    )


def forget_plans() -> None:
    """Forget plans made with other constants of plan.py; functions without a cache are passed over."""
    for planned in (plan, training_plan, steps, training.steps):
        getattr(planned, "cache_clear", lambda: None)()


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING, checkpoints: Checkpoints | None = None) -> Outputs:
    if save is Save.ALL:
        raise BuildError(
            "chunk_kda: backend='sm90' keeps what its own backward reads, or A_qk and A_inv, not all that "
            "disable_recompute keeps for others. Leave it out, or backend."
        )
    if save in training.NOT_KEPT:
        return TRAINING.forward(p, x, save)
    saves = save is Save.PRODUCTS
    launches = steps(p, detect(p.device).sms, saves, offsets_dtype(x))
    inputs, out = laid_out(x), outputs(p, x)
    o = out.o
    crossing = training.edges_of(p, o, launches)
    if launches.stream:                                                        # ahead of the tables, too
        places = launches.plan.all_steps * p.HV
        tiles = o.new_empty(2 * places * tile(p.K).bytes, dtype=torch.uint8)
        ready = o.new_zeros(places, dtype=torch.int32)
    tables = training.tables(p, launches, x)
    if launches.fused:
        states = checkpoints._asdict() if checkpoints else {}
        if p.intermediate_states:
            states = {"h": out.h}
        launches.fused(**inputs, **crossing._asdict(), **states, o=o, ht=out.final_state, segment_table=tables.segment)
        return out
    if launches.stream:
        arguments = dict(inputs, segment_table=tables.segment, tiles=tiles, ready=ready)
        if not launches.join:
            launches.stream(**arguments, o=o, ht=out.final_state)
            return out
        offsets, segments = offsets_on(o.device, x.cu_seqlens) if p.packed else None, launches.plan.stream_segments
        run_segments(p, launches.stream, launches.compose, launches.join, segments, out, offsets, **arguments)
        return out
    v, h0 = inputs.pop("v"), inputs.pop("h0")
    tiles = o.new_empty(launches.plan.scratch, dtype=torch.uint8)
    A_qk = A_inv = None
    if saves:
        A_qk, A_inv = (o.new_empty(p.B * p.T, p.HV, p.C) for _ in range(2))
    if launches.prepare:
        launches.prepare(**inputs, tiles=tiles, A_qk=A_qk, A_inv=A_inv, o=o, chunk_table=tables.chunk)
    if launches.pairs:
        launches.pairs(tiles=tiles, beta=inputs["beta"], A_qk=A_qk, A_inv=A_inv, chunk_table=tables.chunk)
    if launches.carry:                                                         # states that enter segments come first
        summary = segment_summary(p, o, launches.plan.all_segments)
        h0 = training.entering_segments(launches, tiles, v, h0, summary.M, summary.added, tables)
    if launches.chain:
        kept_states = checkpoints._asdict() if checkpoints else {"h": out.h}
        launches.chain(
            tiles=tiles, v=v, h0=h0, o=o, ht=out.final_state, segment_table=tables.segment, **kept_states
        )
    return out._replace(saved=Products(A_qk, A_inv) if saves else None)


prefill = of_pool(forward, lambda p: C)


@on_its_device
def segment_map(p: Problem, x: Inputs, transition: bool) -> SegmentSummary:
    if transition:
        return TRAINING.segment_map(p, x)
    return SegmentSummary(x.q.new_zeros(1, p.HV, p.K, p.K, dtype=torch.float32), forward(p, x).final_state)


TRAINING = training.TrainingBackend(
    training_plan, lambda config, cc: kernel(config), forward, call_of_stage, v_first=True, map_plan=map_plan
)
rounded_to, saved_bytes, stage = TRAINING.rounded_to, TRAINING.saved_bytes, TRAINING.stage
backward, segment_map_bwd = TRAINING.backward, TRAINING.segment_map_bwd
