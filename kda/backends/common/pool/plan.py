"""What the kernels of a pool are built for, and the call that they stand around.  No torch, no Triton."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import NamedTuple

from kda.model.problem import Problem
from ptxkit.compile.target import Target
from ptxkit.compile.triton import Recipe

from .. import triton_recipes
from ..arguments import Arguments, number, tensor
from ..triton_types import width

ELEMENTS = 4096                              # elements that a program of gather or scatter has: 32 for each thread
INDICES = ("int32", "int64")


class PoolArguments(Arguments):
    pool = slots = starts = cu_seqlens = offsets = checkpoints = tensor(None, divisible=False)  # as the caller has them
    h0 = ht = tensor("float32")              # (N, HV, K, V), or (N, HV, V, K)
    place = tensor("int64")                  # (chunks)
    stride = count = T = number("int64")
    HV = E = number("int32")


class Dtypes(NamedTuple):
    """The dtypes of tensors that a Problem does not describe; None if there is no such tensor."""

    slots: str
    starts: str
    cu_seqlens: str | None = None
    offsets: str | None = None
    checkpoints: str | None = None


@functools.lru_cache(maxsize=4096)
def inner(p: Problem) -> Problem:
    """Return the call whose states are float32, one for each sequence, instead of slots."""
    return dataclasses.replace(
        p, slots=0, start_slots=False, inplace=False, state_dtype="float32", final_state=True
    )


@functools.lru_cache(maxsize=1024)
def recipes_of(p: Problem, x: Dtypes, rows: int, target: Target) -> dict[str, Recipe]:
    """Return the recipes of the kernels; `rows` is the number of rows of a chunk in the walk over the states."""
    size = p.K * p.V
    dtypes = SimpleNamespace(pool=p.state_dtype, **x._asdict())
    blocks = dict.fromkeys(("gather", "scatter"), min(ELEMENTS, width(size))) | {"places": 256}
    return {
        name: triton_recipes.recipe(
            f"common.pool.kernels:{name}", PoolArguments, dtypes, {"SIZE": size, "ROWS": rows, "BLOCK": BLOCK}, target
        )
        for name, BLOCK in blocks.items() if name != "places" or x.checkpoints is not None
    }


def recipes(p: Problem, rows: int, target: Target) -> list[Recipe]:
    """Return all recipes that calls like this one need, if their indices have one dtype."""
    needed: list[Recipe] = []
    for offsets, slots in itertools.product(INDICES if p.packed else (None,), INDICES):
        of_checkpoints = (slots, slots) if p.checkpoints else (None, None)
        needed += recipes_of(p, Dtypes(slots, slots, offsets, *of_checkpoints), rows, target).values()
    return list(dict.fromkeys(needed))
