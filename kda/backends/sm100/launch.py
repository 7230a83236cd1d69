"""Tensors in, tensors out: one kernel per call; for few heads, three; others where a backward follows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kda.model.bundles import Outputs, Save
from kda.model.host import detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from ptxkit.compile.errors import BuildError

from ..common import training
from ..common.arguments import NamedLaunch
from ..common.cute.tile import C
from ..common.launcher import kernels, launch_of, outputs, run_segments
from ..common.pool.launch import Checkpoints
from ..common.pool.launch import prefill as of_pool
from ..common.tensors import laid_out, offsets_on, on_its_device
from .plan import Plan, call_of_stage, plan, recipe, target, training_plan

Tensor = torch.Tensor


kernel = kernels(recipe)


class Launches(NamedTuple):
    """A plan, and what launches its kernels: called with tensors; None where there is no sequence, or none is cut."""

    plan: Plan
    fused: NamedLaunch | None
    compose: NamedLaunch | None
    join: NamedLaunch | None


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, cc: tuple[int, int], sms: int, offsets: str | None) -> Launches:
    """Return the launches of a call; `offsets` is the dtype of `cu_seqlens`."""
    pl = plan(p, sms, offsets)
    step = functools.partial(launch_of, lambda config: kernel(config, target(cc)))
    every = p.C // C if p.intermediate_states else 0                           # chunks from one kept state to the next
    if p.checkpoints:
        every = 1
    shape = dict(T=p.T, HV=p.HV, segments=pl.segments)
    gate = dict(scale=p.scale, lower_bound=p.lower_bound or 0.0)
    return Launches(
        pl,
        step(pl.fused, (pl.ctas, 1, 1), N=p.N, H=p.H, every=every, **shape, **gate),
        step(pl.compose, (pl.compose.strips, p.HV, p.N), segments=pl.segments, HV=p.HV) if pl.compose else None,
        step(pl.join, (pl.blocks, p.HV, p.N * (pl.segments - 1)), **shape),
    )


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING, checkpoints: Checkpoints | None = None) -> Outputs:
    if save in training.NOT_KEPT:
        return TRAINING.forward(p, x, save)
    if save is not Save.NOTHING:
        raise BuildError(
            "chunk_kda: backend='sm100' keeps what its own backward reads, not what others do. Leave out "
            "disable_recompute or backend."
        )
    host = detect(p.device)
    launches = steps(p, host.cc, host.sms, offsets_dtype(x))
    out = outputs(p, x)
    o, ht, h, _ = out
    offsets = offsets_on(x.q.device, x.cu_seqlens) if p.packed else None
    inputs = dict(laid_out(x), cu_seqlens=offsets)
    if not launches.fused:
        o.zero_()                                                              # tokens of no sequence
    elif not launches.compose:
        launches.fused(**inputs, o=o, ht=ht, **(checkpoints._asdict() if checkpoints else {"h": h}))
    else:
        segments = launches.plan.segments
        run_segments(p, launches.fused, launches.compose, launches.join, segments, out, offsets, **inputs)
    return out


prefill = of_pool(forward, lambda p: C)


TRAINING = training.TrainingBackend(
    training_plan, lambda config, cc: kernel(config, target(cc)), forward, call_of_stage, v_first=False
)
rounded_to, saved_bytes, stage = TRAINING.rounded_to, TRAINING.saved_bytes, TRAINING.stage
backward, segment_map_bwd = TRAINING.backward, TRAINING.segment_map_bwd
