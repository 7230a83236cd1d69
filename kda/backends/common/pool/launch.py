"""A forward from and to slots of a pool: two launches around that of a backend, three with checkpoints.

Nothing is read back from the GPU, and no size depends on a number there: such a call may be captured and replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda.model.bundles import Outputs, Save
from kda.model.host import Host, detect
from kda.model.problem import Inputs, Problem
from ptxkit.compile.fetching import fetch_all
from ptxkit.compile.triton import TritonKernel

from ..tensors import aligned, offsets_on, on_its_device
from ..triton_recipes import launch
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
        kernels = _kernels(p, dtypes, rows(p), detect(p.device))
        h0 = torch.empty(p.N, *p.state_shape, dtype=torch.float32, device=device)
        E = 0 if x.checkpoint_offsets is None else x.checkpoint_offsets.shape[1]
        values = tensors | {"h0": h0, "stride": pool.stride(0), "count": p.slots, "T": p.T, "HV": p.HV, "E": E}
        blocks = -(-p.K * p.V // kernels["gather"].block) * p.HV * p.N

        launch(kernels["gather"].kernel, blocks, values)
        checkpoints = None
        if p.checkpoints:
            entries = -(-p.T // rows(p)) * p.B + p.N * p.packed
            place = torch.empty(entries, dtype=torch.int64, device=device)
            launch(kernels["places"].kernel, p.N, values | {"place": place})
            checkpoints = Checkpoints(pool, place)
        out = forward(inner(p), x._replace(initial_state=h0), Save.NOTHING, checkpoints)
        launch(kernels["scatter"].kernel, blocks, values | {"ht": out.final_state})
        return out.o

    return run


class _Built(NamedTuple):
    kernel: TritonKernel
    block: int                               # the number of elements that a program of gather or scatter has


@functools.lru_cache(maxsize=1024)
def _kernels(p: Problem, x: Dtypes, rows: int, host: Host) -> dict[str, _Built]:
    recipes = recipes_of(p, x, rows, target_of(host))
    built = fetch_all(recipes.values())
    blocks: list[Any] = [recipe.constants["BLOCK"] for recipe in recipes.values()]
    return {name: _Built(kernel, block) for name, kernel, block in zip(recipes, built, blocks)}


def _name(x: Tensor | None) -> Any:
    return None if x is None else str(x.dtype).removeprefix("torch.")
