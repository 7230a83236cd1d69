"""The kernels of what `kda selftest` executes, which are built together before the first of them is launched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kda.calls import ahead
from kda.model.offsets import offsets_dtype
from kda.routing.dispatch import planner, route
from ptxkit.compile.recipes import AnyRecipe

from .cases import make
from .doors import Door
from .parity import proof_specs
from .trials import OperatorTrial, against


def recipes_of(door: Door, stages: Iterable[str], trials: Iterable[OperatorTrial]) -> Iterator[AnyRecipe]:
    """Yield the recipes of a backend with kernels.  A decoding trial needs one kernel, which is built when it comes."""
    if (plan := planner(door.name)) is None:
        return
    for stage in stages:
        for spec in proof_specs(door):
            case = make(spec)
            whole = case.problem("forward", door.device)
            p, save = plan.call_of_stage(stage, whole, spec.lengths is not None)
            if not door.against(case, p.direction):
                yield from ahead.recipes_of(door.name, p, save, "int64" if p.packed else None)
    for trial in trials:
        if not trial.decode and not against(door, trial):
            yield from _of_call(door, trial)


def _of_call(door: Door, trial: OperatorTrial) -> Iterator[AnyRecipe]:
    case = make(trial.spec)
    forward, backward = (case.problem(way, door.device) for way in ("forward", "backward"))
    training = not door.against(case, "backward")
    save = route(forward, door.name, training).save
    for p in (forward, backward)[: 1 + training]:
        yield from ahead.recipes_of(door.name, p, save, offsets_dtype(case.inputs))
