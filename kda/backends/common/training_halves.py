"""A forward in two halves, of one sequence whose parts are on several GPUs, and the map of such a part.

  first half   prepare;  carry over segments, if another rank waits for the map or the second half is cut;  for the
               map, compose of what segments add and of their M
  second half  compose, if it is cut;  a chain from the state that has come: o, and what a backward reads

A part has no other sequence, so kernels run as in a call that is not packed.  Its backward may be packed: what is kept
lies where that looks for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from kda.model.bundles import OpaqueSaved, Outputs, Save, SegmentSummary
from kda.model.host import detect
from kda.model.problem import Inputs, Problem
from ptxkit.compile.launch_list import Location

from .routine import Memory, Routine, described_once
from .tensors import INPUTS, inputs_in_memory, on_its_device
from .training import Description, TrainingBackend, parts_of
from .training_plan import NOT_KEPT, HalvesPlan, SavedBytes, length_of_a_map

Tensor = torch.Tensor


class HalvesCall(NamedTuple):
    """A call that has both halves."""

    p: Problem
    save: Save
    length: int                              # chunks of a segment; 0: there is one segment
    of_map: bool                             # another rank waits for the map


class BegunForward(NamedTuple):
    """What a forward has after its first half."""

    call: HalvesCall
    scratch: Tensor                           # tiles, M and what segments add, but for what is kept
    saved: Tensor | None                     # memory for all that is kept


class HalvesParts(NamedTuple):
    """Where what both halves use lies."""

    tiles: Location
    M: Location
    h: Location | None                       # what a backward reads
    r: Location | None
    added: Location                          # what each segment adds to a state


def parts_in_halves(pl: HalvesPlan, save: Save, scratch: Memory, saved: Location | None) -> HalvesParts:
    again = [scratch.part(size) for size in pl.saved[:NOT_KEPT.get(save, 2)]]
    tiles, M, *others = [*again, *parts_of(saved, pl.saved[len(again):])] if saved else again
    h, r = others or (None, None)
    return HalvesParts(tiles, scratch.part(pl.M_apart) if pl.M_apart else M, h, r, scratch.part(pl.added))


class Halves:
    """The functions of an arch's `launch` that run halves.  `length` returns the chunks of a segment of a forward in
    two halves, 0 for one segment, or None if all at once is faster."""

    def __init__(
        self, backend: TrainingBackend, plan: Callable[[Problem, int, SavedBytes | None, int, bool], HalvesPlan],
        length: Callable[[Problem, int, Save, bool], int | None],
    ) -> None:
        self.backend, self.plan, self.length = backend, plan, length
        self.segment_map, self.begin_forward = on_its_device(self._segment_map), on_its_device(self._begin_forward)
        self.finish_forward = on_its_device(self._finish_forward)

    def description(self, call: HalvesCall, cc: tuple[int, int], sms: int, inputs: tuple[str, ...]) -> Description:
        """Return what the routine of a half begins with."""
        p, backend = call.p, self.backend
        kept = backend.plan(p, sms).saved if call.save in NOT_KEPT else None
        p = dataclasses.replace(p, packed=False)
        plan = self.plan(p, sms, kept, call.length, call.of_map)
        return Description(p, plan, lambda config: backend.kernel(config, cc), (*INPUTS, *inputs), None)

    def _segment_map(self, p: Problem, x: Inputs) -> SegmentSummary:
        """Return the map of one sequence alone."""
        length = length_of_a_map(p, detect(p.device).sms)
        return self.begun(HalvesCall(p, Save.NOTHING, length, True), x)[0]  # type: ignore[return-value]

    def _begin_forward(
        self, p: Problem, x: Inputs, save: Save, of_map: bool
    ) -> tuple[SegmentSummary | None, BegunForward] | None:
        """Return the map, if it is wanted, and what the second half reads; None if all at once is faster, or keeps what
        no half does."""
        if p.intermediate_states or save not in (Save.NOTHING, *NOT_KEPT):
            return None
        length = self.length(p, detect(p.device).sms, save, of_map)
        if length is None:
            return None
        return self.begun(HalvesCall(without_state(p), save, length, of_map), x._replace(initial_state=None))

    def begun(self, call: HalvesCall, x: Inputs) -> tuple[SegmentSummary | None, BegunForward]:
        p, host = call.p, detect(call.p.device)
        eye = torch.eye(p.K, device=x.q.device).repeat(1, p.HV, 1, 1) if call.of_map else None
        run = begin_routine(self, call, host.cc, host.sms)  # type: ignore[arg-type]
        M, added, scratch, saved = run(x.q, [*inputs_in_memory(x._replace(cu_seqlens=None)), eye])
        return SegmentSummary(M[-1:], added[-1:]) if call.of_map else None, BegunForward(call, scratch, saved)

    def _finish_forward(self, p: Problem, x: Inputs, begun: BegunForward) -> Outputs:
        """Return the results of the forward."""
        host, call = detect(p.device), begun.call._replace(p=p)
        run = finish_routine(self, call, host.cc, host.sms)  # type: ignore[arg-type]
        o, ht = run(x.q, [*inputs_in_memory(x._replace(cu_seqlens=None)), begun.scratch, begun.saved])
        return Outputs(o, ht, None, None if begun.saved is None else OpaqueSaved(begun.saved))


@functools.lru_cache(maxsize=1024)
def without_state(p: Problem) -> Problem:
    return dataclasses.replace(p, state_dtype=None)


@described_once
def begin_routine(halves: Halves, call: HalvesCall, cc: tuple[int, int], sms: int) -> Routine:
    """Return the first half; its results are M and the state that leaves, behind those between segments, or None, and
    what the second half reads."""
    d = halves.description(call, cc, sms, ("eye",))
    kept = sum(d.plan.saved[NOT_KEPT[call.save]:]) if call.save in NOT_KEPT else 0
    saved = d.draft.tensor((kept,), "uint8") if kept else None
    parts = parts_in_halves(d.plan, call.save, d.scratch, saved)
    d.make_tiles(d.plan.prepare, parts.tiles, cleared=d.draft["v"])            # nothing of a sequence is cleared
    d.launch_walk(d.plan.carry, tiles=parts.tiles, v=d.draft["v"], ht=parts.added, M=parts.M)
    map_of_all = composed(d, parts) if call.of_map else (None, None)
    return d.draft.done(*map_of_all, Location(d.scratch.slot), saved)


def composed(d: Description, parts: HalvesParts) -> tuple[Location, Location]:
    """Return M and the state that leaves, of a sequence that segments more have than there are: `compose` returns the
    states that enter segments, and that of one segment more leaves the sequence."""
    p, more = d.p, d.plan.segments + 1
    M, leaving, nothing = (d.draft.tensor((more, p.HV, p.K, n), "float32", zeroed)
                           for n, zeroed in ((p.K, False), (p.V, False), (p.K, True)))
    for config, added, h0, edge in (
        (d.plan.compose_added, parts.added, d.draft["h0"], leaving), (d.plan.compose_M, nothing, d.draft["eye"], M),
    ):
        d.draft.launch(config, (config.strips, p.HV, 1), segments=more, HV=p.HV, M=parts.M, added=added, h0=h0,
                       edge=edge)
    return M, leaving


@described_once
def finish_routine(halves: Halves, call: HalvesCall, cc: tuple[int, int], sms: int) -> Routine:
    """Return the second half; its results are o and the final state."""
    d = halves.description(call, cc, sms, ("scratch", "saved"))
    p, h0, saved = d.p, d.draft["h0"], d.draft["saved"] if call.save in NOT_KEPT else None
    o = d.result(p.V, p.dtype)
    ht = d.draft.tensor((p.N, *p.state_shape), "float32") if p.final_state else None
    parts = parts_in_halves(d.plan, call.save, Memory(d.draft["scratch"].slot), saved)
    if d.plan.compose:
        edge = d.states(d.plan.segments, p.V)
        d.launch_compose(d.plan.compose, M=parts.M, added=parts.added, h0=h0, edge=edge)
        h0 = edge
    d.launch_walk(d.plan.chain, tiles=parts.tiles, v=d.draft["v"], h0=h0, o=o, ht=ht, r=parts.r, h=parts.h)
    return d.draft.done(o, ht)
