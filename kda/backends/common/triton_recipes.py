"""Recipes of Triton's kernels from dtypes by name.  No torch, no Triton."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ptxkit.compile.recipes import Constant
from ptxkit.compile.target import Target
from ptxkit.compile.triton import Recipe

from .triton_types import TYPES


def recipe(
    function: str, tensors: Mapping[str, str | None], numbers: Mapping[str, str], constants: Mapping[str, Constant],
    divisible: Iterable[str], target: Target, num_warps: int = 4, num_stages: int = 1, **options: Constant,
) -> Recipe:
    """Return the recipe of a kernel of kda.backends.  `tensors` are names -> dtypes, None for an absent one; `numbers`
    are names -> Triton's types; `constants` go before both.  Of `divisible`, the names of other kernels are left out.
    """
    types = {name: TYPES[dtype] for name, dtype in tensors.items() if dtype is not None} | dict(numbers)
    constants = {name: None for name, dtype in tensors.items() if dtype is None} | dict(constants)
    types = {name: kind for name, kind in types.items() if name not in constants}
    return Recipe(
        f"kda.backends.{function}", types, constants, target=target, divisible=set(divisible) & types.keys(),
        options={"num_warps": num_warps, "num_stages": num_stages, **options},
    )
