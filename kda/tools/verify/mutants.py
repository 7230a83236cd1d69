"""Small, packed and grouped calls that launch the shipped kernels, for `kda verify --mutants`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

import kda
from kda.backends.common import training, training_plan
from kda.backends.common.routine import forget_routines
from kda.model.bundles import Save
from kda.model.host import stand_in, standing_in
from kda.routing.dispatch import launcher
from ptxkit.temporary import replaced

from .cases import Case, Spec, make

Tensor = torch.Tensor


class MutantsCall(NamedTuple):
    """A problem, and settings that make it follow the path of a large one."""

    spec: Spec
    constants: Mapping[str, Any] = {}             # constants of the backend's plan
    sms: int | None = None                   # number of SMs, if fewer than the GPU has
    backward: bool = False                   # whether it is a backward, not a forward
    tables: bool = False                     # whether only the tables of a training call are made
    save: Save = Save.NOTHING                # what a forward saves
    states: bool = False                     # whether the states that enter chunks are requested


def packed(*lengths: int, **words: Any) -> MutantsCall:
    """Return a call on packed sequences, with two value heads for a q/k head; words are fields of its Spec, of
    MutantsCall, or constants of the backend's plan."""
    known: dict[str, dict[str, Any]] = {"spec": {"H": 1, "HV": 2}, "call": {}, "plan": {}}
    for name, value in words.items():
        place = "spec" if name in Spec.__dataclass_fields__ else "call" if name in MutantsCall._fields else "plan"
        known[place][name] = value
    return MutantsCall(Spec(lengths, **known["spec"]), known["plan"], **known["call"])


MANY = (0,) * 256 + (300,)                   # sequences, more than a CTA has threads
CALLS = {
    "sm100": {
        "clusters of two, one walk after the other": packed(430, 0, 70, sms=2, states=True),
        "the same of any gate": packed(430, 0, 70, gate="softplus", sms=2, states=True),
        "sequences cut into segments": packed(400, 40, SEGMENTS=3, sms=2),
        "clusters of two, heads of 64 channels": packed(230, 0, 70, K=64, V=64, sms=2, states=True),
        "a forward that keeps its own": packed(230, 0, 70, save=Save.OWN),
        "a forward of any gate that keeps its own": packed(70, 0, 33, gate="softplus", save=Save.OWN),
        "backward, one item after the other": packed(230, 0, 40, 20, sms=2, backward=True),
        "backward of any gate": packed(230, 0, 40, 20, gate="softplus", sms=2, backward=True),
        "the same, a CTA for each item": packed(70, gate="softplus", backward=True),
        "backward of segments": packed(390, SHORTEST=6, backward=True),
        "backward of segments, one without tokens": packed(290, 0, SHORTEST=2, backward=True),
        "tables of more sequences than threads": packed(*MANY, HV=None, tables=True),
    },
    "sm90": {
        "one kernel, clusters of two": packed(600, 0, 65, FUSED=True),
        "one kernel, walks shared out": packed(300, 0, 65, FUSED=True, sms=6),
        "one kernel, clusters of four": packed(1000, 0, 65, FUSED=True, CTAS=4),
        "clusters of four, walks shared out": packed(900, 0, 65, FUSED=True, CTAS=4, sms=14),
        "one kernel of any gate, clusters of two": packed(600, 0, 65, gate="softplus", FUSED=True),
        "the same of four": packed(900, 0, 65, gate="softplus", FUSED=True, CTAS=4),
        "some CTAs make tiles and others walk": packed(600, 0, 65, STREAM=True, STREAM_SEGMENTS=1, sms=16),
        "the same with any gate": packed(600, 0, 65, gate="softplus", STREAM=True, STREAM_SEGMENTS=1, sms=16),
        "the same over segments": packed(900, 0, STREAM=True, STREAM_SEGMENTS=2, sms=28),
        "kernels one by one, with what is kept": packed(600, 0, 65, FUSED=False, save=Save.PRODUCTS),
        "sequences cut into segments, any gate": packed(930, gate="softplus", FUSED=False, SHORTEST=14),
        "more sequences than threads": packed(*MANY, HV=None, FUSED=False),
        "backward, one item after the other": packed(300, 0, 65, sms=2, backward=True),
        "backward of any gate": packed(600, 0, 65, gate="softplus", sms=2, backward=True),
        "backward of any gate, a CTA for each item": packed(600, 0, 65, gate="softplus", backward=True),
        "backward of heads of 64 channels": packed(400, 0, 65, K=64, V=64, sms=2, backward=True),
        "heads of 64 channels, a CTA for each item": packed(600, 0, 65, K=64, V=64, backward=True),
        "backward of segments": packed(930, SHORTEST=14, backward=True),
        "tables of more sequences than threads": packed(*MANY, HV=None, tables=True),
        "a forward that keeps its own": packed(300, 0, 65, FUSED=False, save=Save.OWN),
        "a forward of any gate that keeps its own": packed(300, 0, 65, gate="softplus", FUSED=False, save=Save.OWN),
        "one kernel that keeps, clusters of two": packed(600, 0, 65, FUSED=True, save=Save.OWN),
        "the same, walks shared out": packed(300, 0, 65, FUSED=True, sms=6, save=Save.OWN),
        "one kernel that keeps, of four": packed(1000, 0, 65, FUSED=True, CTAS=4, save=Save.OWN),
        "the same that keeps, of any gate": packed(900, 0, 65, gate="softplus", FUSED=True, CTAS=4, save=Save.OWN),
        "CTAs alone, walks shared out": packed(400, 0, 65, V=64, FUSED=True, CTAS=1, sms=3),
        "clusters of two, of which one walks": packed(600, 0, 65, V=64, FUSED=True, CTAS=2),
        "one kernel that keeps, 64 channels, CTAs alone":
            packed(300, 0, 65, K=64, V=64, FUSED=True, CTAS=1, sms=3, save=Save.OWN),
        "the same, clusters of two, of which one walks":
            packed(400, 0, 65, K=64, V=64, FUSED=True, CTAS=2, save=Save.OWN),
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
    with planned_with(backend, call):
        if call.tables:
            return launcher(backend).TRAINING.tables_alone(case.problem(), case.inputs)  # type: ignore[attr-defined]
        if call.backward:
            return kda.chunk_kda_bwd(do=case.do, dht=case.dht, **case.keywords, backend=backend)._asdict()
        if call.save is Save.NOTHING:
            more: dict[str, Any] = dict(return_intermediate_states=True) if call.states else {}
            return kda.chunk_kda_fwd(**case.keywords, **more, backend=backend)._asdict()
        out = launcher(backend).forward(case.problem(), case.inputs, call.save)
        return out._replace(saved=None)._asdict() | out.saved._asdict()


@contextlib.contextmanager
def planned_with(backend: str, call: MutantsCall) -> Iterator[None]:
    """Make the backend plan as the call requires, inside the block."""
    plan, host = importlib.import_module(f"kda.backends.{backend}.plan"), stand_in()
    modules = (plan, launcher(backend), training, training_plan)
    memos = [getattr(module, name, None) for module in modules for name in ("plan", "training_plan")]

    def forget() -> None:
        forget_routines()
        for cached in memos:
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()

    with contextlib.ExitStack() as changed:
        changed.callback(forget)             # comes last, when the constants are what they were
        for name, value in call.constants.items():
            owner = next(module for module in modules if hasattr(module, name))
            changed.enter_context(replaced(owner, **{name: value}))
        forget()
        with standing_in(dataclasses.replace(host, sms=call.sms or host.sms)):
            yield
