"""Launches of single kernels of Triton, which are made ready once for all calls that differ in tensors alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxkit.compile.fetching import fetch
from ptxkit.compile.launch_list import LaunchList
from ptxkit.compile.triton import Recipe

from .routine import Draft, described_once


def launch(recipe: Recipe, programs: int, tensors: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
    """Launch a kernel, if there are programs, with its arguments by name; others are passed over."""
    ready(recipe, programs, tuple(tensors), tuple(numbers.items()))([*tensors.values()])


@described_once
def ready(
    recipe: Recipe, programs: int, tensors: tuple[str, ...], numbers: tuple[tuple[str, float], ...]
) -> LaunchList:
    """Return the launch of a kernel, to be called with the tensors in order."""
    draft = Draft(None, tensors)
    if programs:
        draft.launch_triton(fetch(recipe), programs, {**draft.only(*tensors), **dict(numbers)})
    return draft.list()
