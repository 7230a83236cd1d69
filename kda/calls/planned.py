"""What a call launches on a GPU: the form of each direction in words, and its kernels.

A backend's plan decides it, without torch and without a compiler, so nobody needs the GPU to ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kda.backends.common.cute.tile import C
from kda.backends.common.training_plan import NOT_KEPT
from kda.model.bundles import Save
from kda.model.host import Host, detect
from kda.model.problem import Problem
from kda.routing.dispatch import Route, planner
from ptxkit.compile.recipes import AnyRecipe

from .ahead import recipes_of

COUNTED = {1: "one CTA", 2: "two CTAs", 4: "four CTAs"}
TWO_KERNELS = "two kernels: one makes the tiles of all chunks, one walks over them"


class Planned(NamedTuple):
    """What one direction of a call launches."""

    backend: str
    direction: str                           # "forward" or "backward"
    form: str                                # in words; "" where the backend has one form
    recipes: tuple[AnyRecipe, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(recipe.name for recipe in self.recipes))

    def __str__(self) -> str:
        form = f"{self.form}; " if self.form else ""
        return f"{self.direction} on {self.backend}: {form}kernels: {', '.join(self.kernels)}"


def planned_of(route: Route, training: bool, offsets: str | None) -> tuple[Planned, ...]:
    """Return what the directions of a call launch; `offsets` is the dtype of cu_seqlens.  A backend without kernels
    launches nothing of its own."""
    directions = ((route.backend, route.forward), (route.reader, route.backward))[: 1 + training]
    return tuple(_planned(backend, p, route.save, offsets) for backend, p in directions if backend and planner(backend))


def _planned(backend: str, p: Problem, save: Save, offsets: str | None) -> Planned:
    plan: Any = planner(backend)
    host = detect(p.device)
    if p.op != "chunk" or p.slots:
        form = "all that calls with a pool can launch" if p.op == "chunk" else ""
        return Planned(backend, p.direction, form, tuple(plan.recipes(p, host, training=False)))
    form = _FORMS[backend](plan, p, host, save, offsets) if backend in _FORMS else ""
    return Planned(backend, p.direction, form, tuple(recipes_of(backend, p, save, offsets)))


# ---- forms in words


def _segments(p: Problem, number: int, tokens: int) -> str:
    """Say how sequences are cut; how many segments packed ones have depends on their lengths."""
    many = "" if p.packed else f"{number} "
    return f"in {many}segments of up to {tokens:,} tokens"


def _clusters(p: Problem, ctas: int, sharing: int) -> str:
    each = "single CTAs" if ctas == 1 else f"clusters of {COUNTED[ctas]}"
    return f"one kernel makes tiles and walks over them: {sharing or p.N * p.HV} {each}" + (
        ", which share all walks" if sharing else ", each with a walk"
    )


def _stream(p: Problem, form: Any) -> str:
    walkers = form.stream.walks(form.segments) * p.HV * p.N
    words = f"one grid of makers and walkers: {form.makers} CTAs make tiles, {walkers} walk over them"
    return words if form.segments == 1 else f"{words}, in {form.segments} segments that are joined at the end"


def _two_kernels(p: Problem, form: Any) -> str:
    sizes = form.sizes
    return f"{TWO_KERNELS}, {_segments(p, sizes.segments, sizes.segment * C)}" if form.length else TWO_KERNELS


_FORWARDS: dict[str, Callable[[Problem, Any], str]] = {                        # by the name of a form's class
    "OneKernel": lambda p, form: _clusters(p, *form.clusters),
    "Stream": _stream,
    "TwoKernels": _two_kernels,
    "Whole": lambda p, form: _clusters(p, 2, form.ctas // 2),
    "InSegments": lambda p, form: (
        f"{_clusters(p, 2, form.ctas // 2)}, in {form.segments} segments that are joined at the end"
    ),
}


def _making(p: Problem, found: Any) -> str:
    """Say how what a backward reads is made."""
    if hasattr(found.making, "clusters"):
        return _clusters(p, *found.making.clusters)
    return f"{TWO_KERNELS}, {_segments(p, found.segments, found.segment * C)}" if found.carry_back else TWO_KERNELS


def _of_cute(plan: Any, p: Problem, host: Host, save: Save, forward: Any) -> str:
    if p.direction == "forward" and save not in NOT_KEPT:
        return _FORWARDS[type(forward()).__name__](p, forward())
    found = plan.training_plan(p, host.sms)
    if p.direction == "forward":
        return f"{_making(p, found)}, and saves"
    again = {Save.OWN: "", Save.STATES: "tiles are made again; "}.get(save, f"again {_making(p, found)}; ")
    one = "a walk back and the gradients in one grid" if save in found.reverse else "a walk back, then the gradients"
    return again + one + (f", {_segments(p, found.segments, found.segment * C)}" if found.carry_back else "")


def _of_sm90(plan: Any, p: Problem, host: Host, save: Save, offsets: str | None) -> str:
    return _of_cute(plan, p, host, save, lambda: plan.plan(p, host.sms, save is Save.PRODUCTS))


def _of_sm100(plan: Any, p: Problem, host: Host, save: Save, offsets: str | None) -> str:
    return _of_cute(plan, p, host, save, lambda: plan.plan(p, host.sms, offsets))


def _of_triton(plan: Any, p: Problem, host: Host, save: Save, offsets: str | None) -> str:
    found = plan.plan(p, host, save)
    cut = _segments(p, found.segments, found.segment * p.C) if found.cut else "over whole sequences"
    return f"one kernel makes the tiles of all chunks, one walks {cut}" if p.direction == "forward" else f"walks {cut}"


def _of_sm89(plan: Any, p: Problem, host: Host, save: Save, offsets: str | None) -> str:
    walks = f"walks over whole sequences, {plan.columns(p, host.sms)} columns of a state in each CTA"
    return f"one kernel makes the tiles of all chunks, one {walks}" if p.direction == "forward" else walks


_FORMS: dict[str, Callable[..., str]] = {
    "sm90": _of_sm90, "sm100": _of_sm100, "triton": _of_triton, "sm89": _of_sm89,
}
