"""Tensors in, tensors out: tables of packed sequences, tiles of all chunks, chains over them; what is kept."""

from __future__ import annotations

import torch

from kda.model.bundles import Outputs, Products, Save, SegmentSummary
from kda.model.host import detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from ptxkit.compile.errors import BuildError
from ptxkit.compile.launch_list import Location

from ..common import training
from ..common.cute.configs import JOIN_ROWS
from ..common.cute.tile import C
from ..common.cute.training import TOKENS
from ..common.directions import Direction, run_forward
from ..common.launcher import kernels, launch_segments, states_between_chunks
from ..common.pool.launch import STATES, Checkpoints
from ..common.pool.launch import prefill as of_pool
from ..common.routine import Routine, described_once
from ..common.tensors import INPUTS, ROWS, on_its_device
from ..common.training import Description
from .configs import tile
from .plan import call_of_stage, join_config, map_plan, plan, recipe, training_plan

Tensor = torch.Tensor
kernel = kernels(recipe)


@described_once
def routine(p: Problem, sms: int, saves: bool, offsets: str | None) -> Routine:
    """Return a forward, for `cu_seqlens` of dtype `offsets`.  Its results are o, the final states, A_qk and A_inv."""
    pl = plan(p, sms, saves)
    d = Description(p, pl, kernel, (*INPUTS, *STATES), offsets)
    o = d.result(p.V, p.dtype)
    ht = d.draft.tensor((p.N, *p.state_shape), "float32") if p.final_state else None
    products: list[Location | None] = [None, None]
    if pl.fused:
        _fused(d, o, ht)
    elif pl.stream:
        _stream(d, o, ht)
    else:
        products = _chain(d, o, ht, saves)
    return d.draft.done(o, ht, *products)


def _states(d: Description, always: bool) -> dict[str, Location]:
    """Return where the states that enter chunks are stored."""
    if d.p.checkpoints:
        return d.draft.only("pool", "place")
    return d.draft.only("h") if always or d.p.intermediate_states else {}


def _fused(d: Description, o: Location, ht: Location | None) -> None:
    edges = d.edges()
    d.make_tables()
    d.launch("fused", d.plan.clusters.grid(d.p), **d.draft.only(*ROWS, "v", "h0"), **edges, **_states(d, always=False),
             **d.gate, chunks=d.plan.chunks, N=d.p.N, o=o, ht=ht, segment_table=d.tables.segment)


def _stream(d: Description, o: Location, ht: Location | None) -> None:
    p, pl = d.p, d.plan
    places, segments = pl.all_steps * p.HV, pl.stream_segments
    ready = d.draft.tensor((places,), "int32", zeroed=True)
    tiles = d.scratch.part(2 * places * tile(p.K).bytes)
    d.make_tables()
    grid = (pl.makers + pl.stream.walks(segments) * p.HV * p.N, 1, 1)
    arguments = dict(**d.draft.only(*ROWS, "v", "h0"), **d.gate, chunks=pl.chunks, N=p.N, makers=pl.makers,
                     segment_table=d.tables.segment, tiles=tiles, ready=ready)
    if segments == 1:
        d.launch("stream", grid, **arguments, o=o, ht=ht)
        return
    blocks = -(-(-(-p.T // (TOKENS * segments)) * TOKENS) // JOIN_ROWS)
    join = join_config(p, d.offsets), blocks
    launch_segments(d.draft, p, (pl.stream, grid), pl.compose, join, segments, o, ht, **arguments)


def _chain(d: Description, o: Location, ht: Location | None, saves: bool) -> list[Location | None]:
    """Describe two kernels and more; return A_qk and A_inv if they are saved."""
    p, pl = d.p, d.plan
    tiles = d.scratch.part(pl.scratch)
    A_qk, A_inv = products = [d.draft.tensor((p.B * p.T, p.HV, p.C), p.dtype) if saves else None for _ in range(2)]
    d.make_tables()
    d.make_tiles(tiles, cleared=o, A_qk=A_qk, A_inv=A_inv)
    d.launch("pairs", (p.HV, *pl.halves_grid), T=p.T, chunks=pl.entries, HV=p.HV, tiles=tiles, beta=d.draft["beta"],
             A_qk=A_qk, A_inv=A_inv, chunk_table=d.tables.chunk)
    M = d.states(pl.all_segments, p.K) if pl.carry else None
    h0 = d.entering_segments(tiles, M)                                         # they come first
    d.launch_walk("chain", tiles=tiles, v=d.draft["v"], h0=h0, o=o, ht=ht, segment_table=d.tables.segment,
                  **_states(d, always=True))
    return products


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING, checkpoints: Checkpoints | None = None) -> Outputs:
    if save in training.NOT_KEPT:
        return TRAINING.forward(p, x, save)
    direction, h = forward_direction(p, save, offsets_dtype(x)), states_between_chunks(p, x)
    o, final_state, *products = run_forward(direction, x, h, *(checkpoints or (None, None)))
    return Outputs(o, final_state, h, Products(*products) if direction.saved else None)


def forward_direction(p: Problem, save: Save, offsets: str | None) -> Direction:
    if save is Save.ALL:
        raise BuildError(
            "chunk_kda: backend='sm90' keeps what its own backward reads, or A_qk and A_inv, not all that "
            "disable_recompute keeps for others. Leave it out, or backend."
        )
    if save in training.NOT_KEPT:
        return TRAINING.forward_direction(p, save, offsets)
    saves = save is Save.PRODUCTS
    return Direction(routine(p, detect(p.device).sms, saves, offsets), (2, 3) if saves else ())


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
backward_direction = TRAINING.backward_direction
