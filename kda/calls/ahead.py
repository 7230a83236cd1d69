"""Kernels of calls that are about to come: built together, which takes less time than each when it is launched."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from kda.model.bundles import Save
from kda.model.host import detect
from kda.model.problem import Problem
from kda.routing.dispatch import Route, planner
from ptxkit.compile import launch_list
from ptxkit.compile.fetching import build_together
from ptxkit.compile.recipes import AnyRecipe


def build(route: Route, offsets: str | None) -> None:
    """Build the kernels of a training call and of its backward, and beside them what runs lists of launches; `offsets`
    is the dtype of cu_seqlens."""
    if recipes := [*recipes_of_step(route, offsets)]:
        threading.Thread(target=launch_list.in_c, daemon=True).start()
        build_together(recipes)


def recipes_of_step(route: Route, offsets: str | None) -> Iterator[AnyRecipe]:
    """Yield the recipes of both directions of a training call."""
    yield from recipes_of(route.backend, route.forward, route.save, offsets)
    yield from recipes_of(route.reader, route.backward, route.save, offsets)


def recipes_of(backend: str, p: Problem, save: Save, offsets: str | None) -> Iterable[AnyRecipe]:
    """Return the recipes of one direction, whose forward saves `save`; a backend without kernels has none."""
    plan = planner(backend)
    return plan.recipes_of_call(p, detect(p.device), offsets, save) if plan else ()
