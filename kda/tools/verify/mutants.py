"""Small, packed and grouped calls that launch the shipped kernels, for `kda verify --mutants`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import kda
from kda.model.bundles import Save
from kda.model.force import Force, forcing
from kda.routing.dispatch import launcher

from .cases import Case, Spec, make

Tensor = torch.Tensor


class MutantsCall(NamedTuple):
    """A problem, and settings that make it follow the path of a large one."""

    spec: Spec
    forced: Mapping[str, Any] = {}           # fields of Force
    backward: bool = False                   # whether it is a backward, not a forward
    tables: bool = False                     # whether only the tables of a training call are made
    save: Save = Save.NOTHING                # what a forward saves
    states: bool = False                     # whether the states that enter chunks are requested


def packed(*lengths: int, **words: Any) -> MutantsCall:
    """Return a call on packed sequences, with two value heads for a q/k head; words are fields of its Spec, of
    MutantsCall, or of Force."""
    known: dict[str, dict[str, Any]] = {"spec": {"H": 1, "HV": 2}, "call": {}, "force": {}}
    for name, value in words.items():
        place = "force" if name in Force._fields else "call" if name in MutantsCall._fields else "spec"
        known[place][name] = value
    return MutantsCall(Spec(lengths, **known["spec"]), known["force"], **known["call"])


MANY = (0,) * 256 + (300,)                   # sequences, more than a CTA has threads
CALLS = {
    "sm100": {
        "clusters of two, one walk after the other": packed(430, 0, 70, sms=2, states=True),
        "the same of any gate": packed(430, 0, 70, gate="softplus", sms=2, states=True),
        "sequences cut into segments": packed(400, 40, segments=3, sms=2),
        "clusters of two, heads of 64 channels": packed(230, 0, 70, K=64, V=64, sms=2, states=True),
        "walks that cross from cluster to cluster": packed(430, 0, 70, sms=6, states=True),
        "such walks, any gate": packed(230, 0, 70, gate="softplus", sms=6, states=True),
        "such walks, sequences cut into segments": packed(400, 40, segments=3, sms=6),
        "such walks, heads of 64 channels": packed(230, 0, 70, K=64, V=64, sms=6, states=True),
        "such walks in one kernel that keeps": packed(230, 0, 70, save=Save.OWN, form="one kernel", sms=6),
        "a forward that keeps its own": packed(230, 0, 70, save=Save.OWN),
        "a forward of any gate that keeps its own": packed(70, 0, 33, gate="softplus", save=Save.OWN),
        "a forward that keeps its own, heads of 64 channels": packed(230, 0, 70, K=64, V=64, save=Save.OWN),
        "backward, one item after the other": packed(230, 0, 40, 20, sms=2, backward=True),
        "backward of any gate": packed(230, 0, 40, 20, gate="softplus", sms=2, backward=True),
        "the same, a CTA for each item": packed(70, gate="softplus", backward=True),
        "backward of walks that cross": packed(230, 0, 40, 20, sms=6, backward=True),
        "backward of such walks, any gate": packed(230, 0, 40, 20, gate="softplus", sms=6, backward=True),
        "backward of segments": packed(390, segment_chunks=6, backward=True),
        "backward of segments, one without tokens": packed(290, 0, segment_chunks=2, backward=True),
        "tables of more sequences than threads": packed(*MANY, HV=None, tables=True),
        "backward of one gate per head": packed(130, 65, gate_per_head=True, sms=3, backward=True),
        "backward of walks that cross, one gate per head":
            packed(230, 0, 70, HV=4, gate_per_head=True, sms=6, backward=True),
        "backward of heads of 64 channels": packed(230, 0, 40, 20, K=64, V=64, sms=2, backward=True),
        "the same of any gate, of segments":
            packed(390, K=64, V=64, gate="softplus", segment_chunks=6, sms=2, backward=True),
        "one grid walks back and computes gradients":
            packed(200, 0, 65, padding=70, segment_chunks=0, reverse=True, walkers=2, sms=3, backward=True),
        "walks of four heads that cross, in one kernel that keeps":
            packed(230, 0, 70, HV=4, save=Save.OWN, form="one kernel", sms=6),
    },
    "sm90": {
        "one kernel, clusters of two": packed(600, 0, 65, form="one kernel"),
        "one kernel, walks shared out": packed(300, 0, 65, form="one kernel", sms=6),
        "one kernel, clusters of four": packed(1000, 0, 65, form="one kernel", ctas=4),
        "clusters of four, walks shared out": packed(900, 0, 65, form="one kernel", ctas=4, sms=14),
        "one kernel of any gate, clusters of two": packed(600, 0, 65, gate="softplus", form="one kernel"),
        "the same of four": packed(900, 0, 65, gate="softplus", form="one kernel", ctas=4),
        "some CTAs make tiles and others walk": packed(600, 0, 65, form="stream", segments=1, sms=16),
        "the same with any gate": packed(600, 0, 65, gate="softplus", form="stream", segments=1, sms=16),
        "the same over segments": packed(900, 0, form="stream", segments=2, sms=28),
        "kernels one by one, with what is kept": packed(600, 0, 65, form="two kernels", save=Save.PRODUCTS),
        "sequences cut into segments, any gate": packed(930, gate="softplus", form="two kernels", segment_chunks=14),
        "more sequences than threads": packed(*MANY, HV=None, form="two kernels"),
        "backward, one item after the other": packed(300, 0, 65, sms=2, backward=True),
        "backward of any gate": packed(600, 0, 65, gate="softplus", sms=2, backward=True),
        "backward of any gate, a CTA for each item": packed(600, 0, 65, gate="softplus", backward=True),
        "backward of heads of 64 channels": packed(400, 0, 65, K=64, V=64, sms=2, backward=True),
        "heads of 64 channels, a CTA for each item": packed(600, 0, 65, K=64, V=64, backward=True),
        "backward of segments": packed(930, segment_chunks=14, backward=True),
        "tables of more sequences than threads": packed(*MANY, HV=None, tables=True),
        "a forward that keeps its own": packed(300, 0, 65, form="two kernels", save=Save.OWN),
        "a forward of any gate that keeps its own":
            packed(300, 0, 65, gate="softplus", form="two kernels", save=Save.OWN),
        "one kernel that keeps, clusters of two": packed(600, 0, 65, form="one kernel", save=Save.OWN),
        "the same, walks shared out": packed(300, 0, 65, form="one kernel", sms=6, save=Save.OWN),
        "one kernel that keeps, of four": packed(1000, 0, 65, form="one kernel", ctas=4, save=Save.OWN),
        "the same that keeps, of any gate":
            packed(900, 0, 65, gate="softplus", form="one kernel", ctas=4, save=Save.OWN),
        "CTAs alone, walks shared out": packed(400, 0, 65, V=64, form="one kernel", ctas=1, sms=3),
        "clusters of two, of which one walks": packed(600, 0, 65, V=64, form="one kernel", ctas=2),
        "one kernel that keeps, 64 channels, CTAs alone":
            packed(300, 0, 65, K=64, V=64, form="one kernel", ctas=1, sms=3, save=Save.OWN),
        "the same, clusters of two, of which one walks":
            packed(400, 0, 65, K=64, V=64, form="one kernel", ctas=2, save=Save.OWN),
        "backward of one gate per head": packed(130, 65, K=64, V=64, gate_per_head=True, sms=2, backward=True),
        "one grid walks back and computes gradients":
            packed(200, 0, 65, padding=70, segment_chunks=0, reverse=True, walkers=2, sms=3, backward=True),
    },
    "sm89": {
        "forward": packed(150, 0, 30, dtype="float32"),
        "backward": packed(150, 0, 30, dtype="float32", backward=True),
        "more sequences than threads": packed(*MANY, HV=None, K=64, V=64, dtype="float32"),
    },
}


def calls(backend: str) -> list[Callable[[], Mapping[str, Tensor | None]]]:
    """Return the functions that are to be called inside a capture."""
    return [functools.partial(results, backend, call, make(call.spec)) for call in CALLS[backend].values()]


def results(backend: str, call: MutantsCall, case: Case) -> dict[str, Tensor | None]:
    """Make the call and return its results, by name."""
    with forcing(**call.forced):
        if call.tables:
            return launcher(backend).TRAINING.tables_alone(case.problem(), case.inputs)  # type: ignore[attr-defined]
        if call.backward:
            return kda.chunk_kda_bwd(do=case.do, dht=case.dht, **case.keywords, backend=backend)._asdict()
        if call.save is Save.NOTHING:
            more: dict[str, Any] = dict(return_intermediate_states=True) if call.states else {}
            return kda.chunk_kda_fwd(**case.keywords, **more, backend=backend)._asdict()
        out = launcher(backend).forward(case.problem(), case.inputs, call.save)
        return out._replace(saved=None)._asdict() | (out.saved._asdict() if out.saved else {})
