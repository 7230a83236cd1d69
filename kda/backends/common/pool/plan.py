"""What the kernels of a pool are built for, and the call that they stand around.  No torch, no Triton."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from kda.model.problem import Problem
from ptxkit.compile.target import Target
from ptxkit.compile.triton import Recipe

from ..triton_types import TYPES

ELEMENTS = 4096                              # elements that a program of gather or scatter has: 32 for each thread
INDICES = ("int32", "int64")
UNALIGNED = ("pool", "starts", "slots", "cu_seqlens", "offsets", "checkpoints")    # as they come from the caller


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

    def recipe(function: str, names: str, numbers: str, constants: Mapping[str, int]) -> Recipe:
        given = {name: TYPES[tensors[name]] for name in names.split() if tensors[name] is not None}
        absent = dict.fromkeys(name for name in names.split() if tensors[name] is None)
        wide = dict.fromkeys(("stride", "count", "T"), "i64")
        signature = given | {name: wide.get(name, "i32") for name in numbers.split()}
        return Recipe(
            f"kda.backends.common.pool.kernels:{function}", signature, absent | dict(constants), target=target,
            divisible=[name for name in given if name not in UNALIGNED], options={"num_warps": 4, "num_stages": 1},
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
