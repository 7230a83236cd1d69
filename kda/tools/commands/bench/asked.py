"""What `kda bench` was asked for, measured or predicted: shapes, directions, problems, an arch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kda.model.bundles import Save
from kda.routing.dispatch import route
from kda.tools.measure.shapes import CUSTOM, DIRECTIONS, SHAPES, BenchShape

if TYPE_CHECKING:
    from kda.model.problem import Problem
    from kda.tools.verify.cases import Spec


REGIMES = ("fast", "slow")
SETTINGS = ("graph", "disable_recompute")                       # timings that differ in these are not compared


def names_a_shape(options: dict[str, Any]) -> bool:
    return bool(options["names"] or options["tokens"] or options["lengths"] is not None)


def shapes_asked(
    options: dict[str, Any], on: str, default: dict[str, BenchShape] | None = None
) -> dict[str, BenchShape]:
    shapes = default or {name: shape for name, shape in SHAPES.items() if shape.on == on}
    if options["names"]:
        shapes = {name: SHAPES[name] for name in options["names"]}
    elif names_a_shape(options):
        shapes = {CUSTOM: explicit_shape(options)}
    gate = options["gate"]
    return {name: shape._replace(gate=gate) for name, shape in shapes.items()} if gate else shapes


def explicit_shape(options: dict[str, Any]) -> BenchShape:
    names = {"B": "batch", "T": "tokens", "H": "heads", "HV": "value_heads", "K": "k", "V": "v", "dtype": "dtype"}
    fields = {field: options[name] for field, name in names.items() if options[name] is not None}
    return BenchShape(**fields, lengths=options["lengths"] or ())


def spec_of(shape: BenchShape, regime: str) -> Spec:
    from kda.tools.verify.cases import Spec

    return Spec(lengths=shape.lengths or None, B=shape.B, T=shape.T, H=shape.H, HV=shape.HV, K=shape.K, V=shape.V,
                dtype=shape.dtype, gate=shape.gate, regime=regime, initial_state=False)


def both(choice: str, choices: Sequence[str]) -> tuple[str, ...]:
    return tuple(choices) if choice == "both" else (choice,)


def ways(choices: Sequence[str]) -> tuple[str, ...]:
    """Return the directions that are timed, each once."""
    return tuple(dict.fromkeys(way for choice in choices for way in both(choice, DIRECTIONS)))


def problem_of(spec: Spec, direction: str, device: str) -> Problem:
    """Return the problem of a spec whose tensors are not drawn yet."""
    from kda.tools.verify.cases import make

    one_token = dataclasses.replace(spec, lengths=None if spec.lengths is None else (1,), B=1, T=1)
    (B, T), N = spec.shape, spec.B if spec.lengths is None else len(spec.lengths)
    return dataclasses.replace(make(one_token).problem(direction), device=device, B=B, T=T, N=N)


def problems_of(
    spec: Spec, directions: Sequence[str], device: str, saved: bool | str | None, requested: str
) -> list[Problem]:
    """Return the problems of some directions; if all is kept in the form that backends share, they say so."""
    problems = [problem_of(spec, way, device) for way in directions]
    if setting(saved) is not True:
        return problems
    step = dataclasses.replace(problem_of(spec, "forward", device), disable_recompute=True)
    shared = route(step, requested, training=True).save is Save.ALL            # else each backend keeps its own
    return [dataclasses.replace(problem, disable_recompute=shared) for problem in problems]


def backend_for(problem: Problem, requested: str) -> str:
    """Return the backend that handles a call, as `kda.routing.dispatch.choose` has it."""
    from kda.routing.dispatch import choose

    backend = choose(problem, requested).backend
    assert backend is not None
    return backend


def ms(seconds: float) -> str:
    digits = 4 if seconds < 1e-5 else 3 if seconds < 0.1 else 1
    return f"{seconds * 1e3:.{digits}f}"


def setting(x: Any) -> bool | str:
    """Return an option as files have it and calls are given it: without a value it is True."""
    return x if x == "states" else bool(x)
