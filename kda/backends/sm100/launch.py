"""Tensors in, tensors out: one kernel a call."""

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
from ..common.tensors import chunks_of_a_row, laid_out, on_its_device
from .configs import FusedConfig
from .plan import plan, recipe, target

Tensor = torch.Tensor

# Operands of products, and results; decays, norms, the inverse and the state stay float32.
ROUNDED_TO = dict.fromkeys(("A_qk", "A_inv", "qg", "kb", "kg", "h", "v_new", "o"), "bfloat16")


@functools.cache
def kernel(config: FusedConfig, arch: Target) -> Kernel:
    return fetch_here(recipe(config, arch))


class Step(NamedTuple):
    """What launches the kernel: called with tensors; None where there is no sequence."""

    fused: Bound | None


@functools.lru_cache(maxsize=1024)
def step(p: Problem, cc: tuple[int, int], sms: int, offsets: torch.dtype | None) -> Step:
    """For `cu_seqlens` of dtype `offsets`."""
    pl = plan(p, sms, str(offsets).removeprefix("torch.") if p.packed else None)
    if not pl.ctas:
        return Step(None)
    numbers = (p.T, p.N, p.H, p.HV, p.scale, p.lower_bound or 0.0)
    config = pl.fused
    return Step(
        kernel(config, target(cc)).bound(
            (pl.ctas, 1, 1), *numbers, block=config.threads, cluster=config.cluster, dynamic_shared=config.shared
        )
    )


@on_its_device
def forward(p: Problem, x: Inputs, save: str = "nothing") -> Outputs:
    if save != "nothing":
        raise BuildError(
            "chunk_kda: backend='sm100' has no kernels that keep intermediates. Leave out disable_recompute or backend."
        )
    host = detect(p.device)
    at = step(p, host.cc, host.sms, x.cu_seqlens.dtype if p.packed else None)
    q, k, v, g, beta, A_log, dt_bias, h0 = laid_out(x)
    o, ht, h = q.new_empty(p.B, p.T, p.HV, p.V), None, None
    states = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    if p.final_state:
        ht = q.new_empty(states, dtype=torch.float32)
    if p.intermediate_states:
        h = q.new_empty(p.B, chunks_of_a_row(p, x), *states[1:])
    offsets = x.cu_seqlens.to(q.device, non_blocking=True).contiguous() if p.packed else None
    if at.fused:
        at.fused(q, k, v, g, beta, A_log, dt_bias, h0, o, ht, h, offsets)
    else:
        o.zero_()                                                              # tokens of no sequence
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
