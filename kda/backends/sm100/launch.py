"""Tensors in, tensors out: one kernel per call; for few heads, three; others where a backward follows."""

from __future__ import annotations

import torch

from kda.model.bundles import Outputs, Save
from kda.model.host import detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from ptxkit.compile.errors import BuildError

from ..common import training
from ..common.cute.tile import C
from ..common.directions import Direction, run_forward
from ..common.launcher import kernels, states_between_chunks
from ..common.pool.launch import STATES, Checkpoints
from ..common.pool.launch import prefill as of_pool
from ..common.routine import Draft, Routine, described_once
from ..common.tensors import INPUTS, on_its_device
from .plan import call_of_stage, plan, recipe, target, training_plan

Tensor = torch.Tensor


kernel = kernels(recipe)


@described_once
def routine(p: Problem, cc: tuple[int, int], sms: int, offsets: str | None) -> Routine:
    """Return a forward, for `cu_seqlens` of dtype `offsets`.  Its results are o and the final states."""
    form, draft = plan(p, sms, offsets), Draft(lambda config: kernel(config, target(cc)), (*INPUTS, *STATES))
    o = draft.tensor((p.B, p.T, p.HV, p.V), p.dtype, zeroed=not form.ctas)     # then no token is of a sequence
    ht = draft.tensor((p.N, *p.state_shape), "float32") if p.final_state else None
    every = p.C // C if p.intermediate_states else 0                           # chunks from one kept state to the next
    states = ("pool", "place") if p.checkpoints else ("h",) if p.intermediate_states else ()
    arguments = dict(**draft.only(*INPUTS, *states), T=p.T, N=p.N, H=p.H, HV=p.HV, every=1 if p.checkpoints else every,
                     scale=p.scale, lower_bound=p.lower_bound or 0.0)
    form.launches(draft, p, o, ht, **arguments)
    return draft.done(o, ht)


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING, checkpoints: Checkpoints | None = None) -> Outputs:
    if save in training.NOT_KEPT:
        return TRAINING.forward(p, x, save)
    direction, h = forward_direction(p, save, offsets_dtype(x)), states_between_chunks(p, x)
    o, ht = run_forward(direction, x, h, *(checkpoints or (None, None)))
    return Outputs(o, ht, h, None)


def forward_direction(p: Problem, save: Save, offsets: str | None) -> Direction:
    if save in training.NOT_KEPT:
        return TRAINING.forward_direction(p, save, offsets)
    if save is not Save.NOTHING:
        raise BuildError(
            "chunk_kda: backend='sm100' keeps what its own backward reads, not what others do. Leave out "
            "disable_recompute or backend."
        )
    host = detect(p.device)
    assert host.cc
    return Direction(routine(p, host.cc, host.sms, offsets))


prefill = of_pool(forward, lambda p: C)


TRAINING = training.TrainingBackend(
    training_plan, lambda config, cc: kernel(config, target(cc)), forward, call_of_stage, v_first=False
)
rounded_to, saved_bytes, stage = TRAINING.rounded_to, TRAINING.saved_bytes, TRAINING.stage
backward, segment_map_bwd = TRAINING.backward, TRAINING.segment_map_bwd
begin_backward, finish_backward = TRAINING.begin_backward, TRAINING.finish_backward
backward_direction = TRAINING.backward_direction
