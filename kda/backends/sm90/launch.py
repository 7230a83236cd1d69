"""Tensors in, tensors out: tables of packed sequences, tiles of all chunks, chains over them; what is kept."""

from __future__ import annotations

import torch

from kda.model.bundles import Outputs, Products, Save, SegmentSummary
from kda.model.host import detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from ptxkit.compile.errors import BuildError

from ..common import training, training_halves
from ..common.cute.tile import C
from ..common.directions import Direction, run_forward
from ..common.launcher import kernels, states_between_chunks
from ..common.pool.launch import STATES, Checkpoints
from ..common.pool.launch import prefill as of_pool
from ..common.routine import Routine, described_once
from ..common.tensors import INPUTS, on_its_device
from ..common.training import Description
from .plan import call_of_stage, halves_plan, length_in_halves, plan, recipe, training_plan

Tensor = torch.Tensor
kernel = kernels(recipe)


@described_once
def routine(p: Problem, sms: int, saves: bool, offsets: str | None) -> Routine:
    """Return a forward, for `cu_seqlens` of dtype `offsets`.  Its results are o, the final states, A_qk and A_inv."""
    form = plan(p, sms, saves)
    d = Description(p, form.sizes, kernel, (*INPUTS, *STATES), offsets)
    o = d.result(p.V, p.dtype)
    ht = d.draft.tensor((p.N, *p.state_shape), "float32") if p.final_state else None
    return d.draft.done(o, ht, *form.launches(d, o, ht))


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
        return HALVES.segment_map(p, x)
    return SegmentSummary(x.q.new_zeros(1, p.HV, p.K, p.K, dtype=torch.float32), forward(p, x).final_state)


TRAINING = training.TrainingBackend(
    training_plan, lambda config, cc: kernel(config), forward, call_of_stage, v_first=True
)
HALVES = training_halves.Halves(TRAINING, halves_plan, length_in_halves)
begin_forward, finish_forward = HALVES.begin_forward, HALVES.finish_forward
rounded_to, saved_bytes, stage = TRAINING.rounded_to, TRAINING.saved_bytes, TRAINING.stage
backward, segment_map_bwd = TRAINING.backward, TRAINING.segment_map_bwd
begin_backward, finish_backward = TRAINING.begin_backward, TRAINING.finish_backward
backward_direction = TRAINING.backward_direction
