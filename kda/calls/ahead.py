"""Kernels of calls that are about to come: built together, which takes less time than each when it is launched."""

from __future__ import annotations

from collections.abc import Iterable

from kda.model.bundles import Save
from kda.model.host import detect
from kda.model.problem import Problem
from kda.routing.dispatch import planner
from ptxkit.compile.fetching import build_together
from ptxkit.compile.recipes import AnyRecipe


def build(calls: Iterable[tuple[str | None, Problem]], save: Save, offsets: str | None) -> None:
    """Build the kernels of calls, each with its backend. `save`: what forwards keep; `offsets`: dtype of cu_seqlens."""
    build_together(recipe for backend, p in calls for recipe in recipes_of(backend, p, save, offsets))


def recipes_of(backend: str | None, p: Problem, save: Save, offsets: str | None) -> Iterable[AnyRecipe]:
    """Return the recipes of a call; there are none where no backend accepts it or the backend has no kernels."""
    plan = planner(backend) if backend else None
    return plan.recipes_of_call(p, detect(p.device), offsets, save) if plan else ()
