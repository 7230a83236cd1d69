"""What the kernels of a pool are built for, and the call that they stand around.  No torch, no Triton."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

from kda.model.problem import Problem
from ptxkit.compile.target import Target
from ptxkit.compile.triton import Recipe

from .. import triton_recipes

ELEMENTS = 4096                              # elements that a program of gather or scatter has: 32 for each thread
INDICES = ("int32", "int64")
ALIGNED = ("h0", "ht", "place")              # others are as they come from the caller
WIDE = ("stride", "count", "T")              # numbers of 64 bits


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
    tensors: dict[str, Any] = {
        "pool": p.state_dtype, "h0": "float32", "ht": "float32", "place": "int64", **x._asdict(),
    }
    of_states = {"SIZE": size, "BLOCK": min(ELEMENTS, 1 << (size - 1).bit_length())}

    def recipe(function: str, names: str, numbers: str, constants: dict[str, Any]) -> Recipe:
        return triton_recipes.recipe(
            f"common.pool.kernels:{function}", {name: tensors[name] for name in names.split()},
            {name: "i64" if name in WIDE else "i32" for name in numbers.split()}, constants, ALIGNED, target,
        )

    result = {
        "gather": recipe("gather", "pool starts h0", "stride count HV", of_states),
        "scatter": recipe("scatter", "ht pool slots starts cu_seqlens offsets checkpoints", "stride count T HV E",
                          of_states),
    }
    if x.checkpoints is not None:
        result["places"] = recipe("places", "offsets checkpoints cu_seqlens place", "stride count T E",
                                 {"ROWS": rows, "BLOCK": 256})
    return result


def recipes(p: Problem, rows: int, target: Target) -> list[Recipe]:
    """Return all recipes that calls like this one need, if their indices have one dtype."""
    needed: list[Recipe] = []
    for offsets, slots in itertools.product(INDICES if p.packed else (None,), INDICES):
        of_checkpoints = (slots, slots) if p.checkpoints else (None, None)
        needed += recipes_of(p, Dtypes(slots, slots, offsets, *of_checkpoints), rows, target).values()
    return list(dict.fromkeys(needed))
