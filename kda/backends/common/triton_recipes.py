"""Recipes of Triton's kernels from arguments that are declared (arguments.py).  No torch, no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ptxkit.compile.errors import BuildError
from ptxkit.compile.recipes import Constant
from ptxkit.compile.sources import parameters
from ptxkit.compile.target import Target
from ptxkit.compile.triton import Recipe

from .arguments import Arguments
from .triton_types import TYPES

NONE: Mapping[str, Any] = MappingProxyType({})


def recipe(
    function: str, arguments: type[Arguments], config: Any, constants: Mapping[str, Constant], target: Target, *,
    dtypes: Mapping[str, str | None] = NONE, fixed: Mapping[str, Constant] = NONE, num_warps: int = 4,
    num_stages: int = 1, **options: Constant,
) -> Recipe:
    """Return the recipe of a kernel of kda.backends, whose signature says which arguments and constants it reads.

    `config` is what declarations name fields of.  `dtypes` are those of tensors that this kernel has otherwise than
    declared, None for one that it has not; `fixed` are arguments with one value whatever the call.
    """
    function = f"kda.backends.{function}"
    needed, declared = parameters(function), arguments.declared
    if lacking := [n for n, is_constant in needed.items() if n not in (constants if is_constant else declared)]:
        raise BuildError(f"{function}: {arguments.__name__} and the constants lack {', '.join(lacking)}.")
    values = {n: constants[n] for n, is_constant in needed.items() if is_constant} | dict(fixed)
    kinds = {n: dtypes[n] if n in dtypes else declared[n].dtype_in(config) for n in needed if n not in values}
    values |= {n: None for n, dtype in kinds.items() if dtype is None}
    types = {n: "*" * declared[n].is_tensor + TYPES[dtype] for n, dtype in kinds.items() if dtype is not None}
    return Recipe(
        function, types, values, target=target, divisible=[n for n in types if declared[n].read("divisible", config)],
        options={"num_warps": num_warps, "num_stages": num_stages, **options},
    )
