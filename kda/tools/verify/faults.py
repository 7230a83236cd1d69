"""Planted faults that a budget has to notice.  `kda verify --fault NAME` must exit with 1 for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from kda.model.problem import Problem
from kda.model.stages import BACKWARD, FORWARD, STAGES, find

from .budget import Rounding
from .cases import Case, Spec
from .definition import from_stages, stored_as
from .doors import Door
from .layout import ChunkLayout
from .literal import run_stage

Tensor = torch.Tensor
Tensors = dict[str, Any]                     # a fault is planted where its tensors are


class Fault(NamedTuple):
    says: str
    place: str                                  # "inputs", "results" or the stage that is to be wrong
    plant: Callable[..., None]               # (tensors, spec), or (written, read, layout, spec) in a stage; in place
    wants: Mapping[str, Callable[[Spec], Any]] = {}  # fields of the Spec without which it is no fault

    def suited(self, spec: Spec) -> Spec:
        return dataclasses.replace(spec, **{name: value(spec) for name, value in self.wants.items()})


FAULTS: dict[str, Fault] = {}


def fault(name: str, says: str, place: str, **wants: Callable[[Spec], Any]):
    def register(plant: Callable[..., None]) -> Callable[..., None]:
        FAULTS[name] = Fault(says, place, plant, wants)
        return plant

    return register


def _groups(spec: Spec) -> int:
    return spec.heads if spec.heads > spec.H > 1 else 2 * max(spec.H, 2)


def _gate(spec: Spec) -> str:
    return spec.gate if spec.gate != "given" else "softplus"


def _two_chunks(spec: Spec) -> tuple[int, ...] | None:
    if spec.lengths is None or max(spec.lengths, default=0) > spec.C:
        return spec.lengths
    return *spec.lengths, spec.C + 1


def _middle(spec: Spec) -> int:
    """Return a token in the middle of the longest sequence."""
    lengths = spec.lengths or (spec.T,)
    n = lengths.index(max(lengths))
    return sum(lengths[:n]) + lengths[n] // 2


def _longest(layout: ChunkLayout) -> list[int]:
    """Return the chunks of the sequence with the most."""
    return max(layout.chunks_of, key=len)


def _loudest(x: Tensor) -> tuple[Tensor, ...]:
    return torch.unravel_index(x.abs().argmax(), x.shape)


@fault("beta-zeroed", "the step size of one token is zero", "inputs")
def _(x: Tensors, spec: Spec) -> None:
    x["beta"][:, _middle(spec)] = 0 if spec.beta == "given" else -30


@fault("gate-shifted", "every token decays by the gate of the one before", "inputs")
def _(x: Tensors, spec: Spec) -> None:
    x["g"] = x["g"].roll(1, 1)


@fault("dt-bias-missing", "the gate's bias is left out", "inputs", gate=_gate)
def _(x: Tensors, spec: Spec) -> None:
    x["dt_bias"].zero_()


@fault("scale-missing", "q is not scaled", "inputs")
def _(x: Tensors, spec: Spec) -> None:
    x["scale"] = 1.0


@fault("heads-swapped", "value heads read q/k head i % H instead of i // (HV / H)", "fwd/gate",
       H=lambda spec: max(spec.H, 2), HV=_groups)
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    by_value_head = torch.arange(spec.heads) // (spec.heads // spec.H)
    first = [int((by_value_head == i).nonzero()[0]) for i in range(spec.H)]
    for name in ("qn", "kn"):
        x[name] = x[name][:, [first[i % spec.H] for i in range(spec.heads)]]


@fault("diagonal-missing", "a token does not read what it wrote", "fwd/intra")
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    x["A_qk"].diagonal(dim1=-2, dim2=-1).zero_()


@fault("row-not-inverted", "one row of A_inv is that of I - A_kk", "fwd/wy")
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    row = min(20, layout.pieces[0].rows - 1)
    x["A_inv"][:, :, row] = torch.eye(spec.C)[row].to(x["A_inv"]) - read["A_kk"][:, :, row]


@fault("state-stale", "the second chunk of a sequence starts from the state of the first", "fwd/state",
       lengths=_two_chunks, T=lambda spec: max(spec.T, spec.C + 1))
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    first, second, *_ = _longest(layout)
    x["h"][second] = x["h"][first]


@fault("h-one-percent", "one element of h is off by 1%", "fwd/state")
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    x["h"][_loudest(x["h"])] *= 1.01


@fault("nan-planted", "one element of v_new is nan", "fwd/state")
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    x["v_new"][_loudest(x["v_new"])] = torch.nan


@fault("tail-dropped", "the last token of every sequence has no output", "fwd/output")
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    for chunks in filter(None, layout.chunks_of):
        x["o"][chunks[-1], :, layout.pieces[chunks[-1]].rows - 1] = 0


@fault("diagonal-unlearned", "what a token reads of its own write has no gradient", "bwd/output")
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    x["dv_local"] -= read["A_qk"].diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * read["do"]


@fault("dh0-transposed", "the gradient of the initial state is (V, K)", "bwd/state", V=lambda spec: spec.K)
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    x["dh0"] = x["dh0"].mT.contiguous()


@fault("dA-unscaled", "dA_qk lacks the scale", "bwd/wy")
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    x["dA_qk"] /= spec.K**-0.5


@fault("decay-gradient-local", "dg2 lacks what comes through the next chunk's state", "bwd/wy")
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    x["dg2_local"] -= read["g2"].sum(-2, keepdim=True).exp2() * (read["h"] * read["dh"]).sum(-1).unsqueeze(-2)


@fault("half-tile-dropped", "rows from the half of every chunk have no dk from inside the chunk", "bwd/intra")
def _(x: Tensors, read: Tensors, layout: ChunkLayout, spec: Spec) -> None:
    half = slice(spec.C // 2, None)
    x["dkn"][:, :, half] = read["dkn_local"][:, :, half]


@fault("states-exchanged", "two sequences got each other's final state", "results",
       lengths=lambda spec: spec.lengths if spec.lengths is None or len(spec.lengths) > 1 else (*spec.lengths, 5),
       B=lambda spec: spec.B if spec.lengths is not None else max(spec.B, 2))
def _(x: Tensors, spec: Spec) -> None:
    x["ht"] = x["ht"].roll(1, 0)


@fault("o-late", "the last head's outputs are one token late", "results")
def _(x: Tensors, spec: Spec) -> None:
    x["o"][:, :, -1] = x["o"][:, :, -1].roll(1, 1)


@fault("dbeta-of-one-token", "one token has no dbeta", "results")
def _(x: Tensors, spec: Spec) -> None:
    if "dbeta" in x:
        x["dbeta"][:, _middle(spec)] = 0


class Planted(Door):
    """A door with a fault behind it; if a stage is at fault, calls consist of the stages.

    A run of stages cannot be opened: with a fault in one of its parts, it is computed stage by stage with the backend's
    roundings.
    """

    def __init__(self, door: Door, fault: Fault):
        self.__dict__.update(door.__dict__)
        self.door, self.fault = door, fault

    def against_problem(self, problem: Problem) -> tuple[str, ...]:
        return self.door.against_problem(problem)

    def rounding(self, case: Case) -> Rounding:
        return self.door.rounding(case)

    def sees(self, case: Case) -> Case:
        if self.fault.place != "inputs":
            return case
        keywords = {name: x.clone() if isinstance(x, Tensor) else x for name, x in case.keywords.items()}
        self.fault.plant(keywords, case.spec)
        return dataclasses.replace(case, keywords=keywords)

    def stage(self, name: str, case: Case, tensors: Mapping[str, Tensor | None]) -> Tensors:
        if self.fault.place in [part.name for part in find(name).run]:
            return self._written_out(name, case, tensors)
        return self._planted(name, self.door.stage(name, case, tensors), tensors, case)

    def _planted(self, name: str, written: Tensors, read: Mapping[str, Tensor | None], case: Case) -> Tensors:
        if name == self.fault.place:
            written = {n: None if x is None else x.clone() for n, x in written.items()}
            self.fault.plant(written, read, case.layout, case.spec)
        return written

    def _written_out(self, name: str, case: Case, tensors: Mapping[str, Tensor | None]) -> Tensors:
        env, rounding = dict(tensors), self.rounding(case)
        rounding = rounding.of_gradients if find(name).backward else rounding
        for part in find(name).members:
            written = run_stage(part.name, case.problem(), case.layout, env, rounding.compute, rounding)
            env |= self._planted(part.name, written, env, case)
        return {n: env[n] for n in find(name).writes}

    def call(self, case: Case, backward: bool, **keywords) -> dict[str, Tensor]:
        if self.fault.place in STAGES:
            return self._call_of_stages(case, backward)
        results = self.door.call(self.sees(case), backward, **keywords)
        if self.fault.place == "results":
            self.fault.plant(results, case.spec)
        return results

    def _call_of_stages(self, case: Case, backward: bool) -> dict[str, Tensor]:
        env = case.stage_tensors(self.rounding(case).compute)
        for stage in FORWARD + (BACKWARD if backward else ()):
            run = self.stage if stage.name in self.stages else self._written_out
            env |= run(stage.name, case, {name: env[name] for name in stage.reads})
        return {name: x.to(stored_as(case, name)) for name, x in from_stages(case, env).items()}
