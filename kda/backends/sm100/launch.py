"""Tensors in, tensors out: one kernel a call; of few heads, three."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kda.bundles import Outputs
from kda.compile.errors import BuildError
from kda.compile.fetching import fetch_here
from kda.compile.kernel import Bound, Kernel
from kda.compile.target import Target
from kda.host import detect
from kda.problem import Inputs, Problem

from ..common.chunks import whole_call
from ..common.cute.tile import C
from ..common.tensors import chunks_of_a_row, laid_out, on_its_device
from .plan import Config, Plan, plan, recipe, target

Tensor = torch.Tensor

# Operands of products, and results; decays, norms, the inverse and the state stay float32.
ROUNDED_TO = dict.fromkeys(("A_qk", "A_inv", "qg", "kb", "kg", "h", "v_new", "o"), "bfloat16")


@functools.cache
def kernel(config: Config, arch: Target) -> Kernel:
    return fetch_here(recipe(config, arch))


class Steps(NamedTuple):
    """A plan, and what launches its kernels: called with tensors; None where there is no sequence, or none is cut."""

    plan: Plan
    fused: Bound | None
    compose: Bound | None
    join: Bound | None


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, cc: tuple[int, int], sms: int, offsets: torch.dtype | None) -> Steps:
    """For `cu_seqlens` of dtype `offsets`."""
    pl = plan(p, sms, str(offsets).removeprefix("torch.") if p.packed else None)

    def step(config: Config | None, grid: tuple[int, int, int], *numbers: float) -> Bound | None:
        if config is None or 0 in grid:
            return None
        return config.bound(kernel(config, target(cc)), grid, *numbers)

    every = p.C // C if p.intermediate_states else 0                           # of so many chunks a state is kept
    gate = (p.scale, p.lower_bound or 0.0)
    return Steps(
        pl,
        step(pl.fused, (pl.ctas, 1, 1), p.T, p.N, p.H, p.HV, pl.pieces, every, *gate),
        pl.compose and step(pl.compose, (pl.compose.parts, p.HV, p.N), pl.pieces, p.HV),
        step(pl.join, (pl.blocks, p.HV, p.N * (pl.pieces - 1)), p.T, p.HV, pl.pieces),
    )


@on_its_device
def forward(p: Problem, x: Inputs, save: str = "nothing") -> Outputs:
    if save != "nothing":
        raise BuildError(
            "chunk_kda: backend='sm100' has no kernels that keep intermediates. Leave out disable_recompute or backend."
        )
    host = detect(p.device)
    at = steps(p, host.cc, host.sms, x.cu_seqlens.dtype if p.packed else None)
    inputs = laid_out(x)
    q = inputs[0]
    o, ht, h = q.new_empty(p.B, p.T, p.HV, p.V), None, None
    states = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    if p.final_state:
        ht = q.new_empty(states, dtype=torch.float32)
    if p.intermediate_states:
        h = q.new_empty(p.B, chunks_of_a_row(p, x), *states[1:])
    offsets = x.cu_seqlens.to(q.device, non_blocking=True).contiguous() if p.packed else None
    if not at.fused:
        o.zero_()                                                              # tokens of no sequence
    elif not at.compose:
        at.fused(*inputs, o, None, ht, None, h, offsets)
    else:
        response, pieces = torch.empty_like(o), p.N * at.plan.pieces
        added, M, edge = q.new_empty(3, pieces, p.HV, p.K, p.V, dtype=torch.float32)
        at.fused(*inputs, o, response, added, M, None, offsets)
        at.compose(M, added, None, edge, ht, None)
        if at.join:
            at.join(response, edge, o, offsets)
    return Outputs(o, ht, h, None)


WHOLE = "fwd/gate+intra+wy+state+output only"


def stage(
    name: str, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """The forward in one piece, on tensors as they lie in chunks."""
    assert name == WHOLE
    p, x, table = whole_call(p, offsets, tensors)
    out = forward(p, x)
    return {"o": table.chunks(out.o.flatten(0, 1)), "ht": out.final_state, "h": out.h.flatten(0, 1)}
