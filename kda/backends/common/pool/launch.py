"""A forward from and to slots of a pool: two launches around that of a backend, three with checkpoints.

Nothing is read back from the GPU, and no size depends on a number there: such a call may be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda.model.bundles import Outputs, Save
from kda.model.host import Host, detect
from kda.model.problem import Inputs, Problem, name_of_dtype
from ptxkit.compile.fetching import fetch_all
from ptxkit.compile.triton import Recipe

from ..routine import described_once
from ..tensors import aligned, offsets_on, on_its_device
from ..triton_launch import launch
from ..triton_types import target_of
from .plan import Dtypes, inner, recipes_of

Tensor = torch.Tensor


STATES = ("h", "pool", "place")              # where a call wants the states that enter chunks


class Checkpoints(NamedTuple):
    """The places where a walk over chunks stores states."""

    pool: Tensor
    place: Tensor                            # for every chunk, the element of the pool where its state begins; -1: none


def prefill(forward: Callable[..., Outputs], rows: Callable[[Problem], int]) -> Callable[[Problem, Inputs], Tensor]:
    """Return the prefill of a backend whose `forward` accepts `Checkpoints`; its chunks have `rows(p)` rows."""

    @on_its_device
    def run(p: Problem, x: Inputs) -> Tensor:
        pool, slots, device = x.initial_state, aligned(x.ssm_state_indices), x.q.device
        starts = slots if x.initial_state_indices is None else x.initial_state_indices.contiguous()
        cu_seqlens = None if x.cu_seqlens is None else offsets_on(device, x.cu_seqlens)
        tensors = {"pool": pool, "slots": slots, "starts": starts, "cu_seqlens": cu_seqlens}
        for name, given in (("offsets", x.checkpoint_offsets), ("checkpoints", x.checkpoint_indices)):
            tensors[name] = None if given is None else given.contiguous()
        dtypes = Dtypes(*(_name(tensors[n]) for n in Dtypes._fields))
        recipes = _built(p, dtypes, rows(p), detect(p.device))
        h0 = torch.empty(p.N, *p.state_shape, dtype=torch.float32, device=device)
        E = 0 if x.checkpoint_offsets is None else x.checkpoint_offsets.shape[1]
        numbers = {"stride": pool.stride(0), "count": p.slots, "T": p.T, "HV": p.HV, "E": E}
        block: Any = recipes["gather"].constants["BLOCK"]
        blocks = -(-p.K * p.V // block) * p.HV * p.N

        launch(recipes["gather"], blocks, tensors | {"h0": h0}, numbers)
        checkpoints = None
        if p.checkpoints:
            entries = -(-p.T // rows(p)) * p.B + p.N * p.packed
            place = torch.empty(entries, dtype=torch.int64, device=device)
            launch(recipes["places"], p.N, tensors | {"place": place}, numbers)
            checkpoints = Checkpoints(pool, place)
        out = forward(inner(p), x._replace(initial_state=h0), Save.NOTHING, checkpoints)
        launch(recipes["scatter"], blocks, tensors | {"ht": out.final_state}, numbers)
        return out.o

    return run


@described_once
def _built(p: Problem, x: Dtypes, rows: int, host: Host) -> dict[str, Recipe]:
    """Return the recipes of the kernels, which are built side by side where they are missing."""
    recipes = recipes_of(p, x, rows, target_of(host))
    fetch_all(recipes.values())
    return recipes


def _name(x: Tensor | None) -> Any:
    return None if x is None else name_of_dtype(x.dtype)
