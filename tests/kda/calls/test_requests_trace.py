"""Serving equals one call: a trace of requests through a pool of states against each sequence alone, bit for bit; and
what decoding by recurrence may differ by.
"""

import pytest
import torch
from requests_trace import CHUNK, Engine, run

import kda
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import describe, judge


def test_requests_have_the_bits_that_they_have_alone_and_no_slot_is_lost():
    found = run(60)
    assert found.hits > 10 and found.reused > 30


@pytest.mark.exhaustive
def test_ten_thousand_requests_have_the_bits_that_they_have_alone():
    found = run(10_000, seed=1)
    assert found.hits > 1000 and found.reused > 5000


class ForgetsTheCancelled(Engine):
    def leave(self):
        left = super().leave()
        self.free = [slot for slot in self.free if slot not in [r.slot for r in left if r.cancelled]]
        return left


class StartsFromWhatLiesThere(Engine):
    def start_of(self, r):
        return r.slot if (slot := super().start_of(r)) < 0 else slot


class MixesUpTemplates(Engine):
    """An engine that takes the prefix of another request, of as many tokens."""

    def start_of(self, r):
        slot = super().start_of(r)
        return next((s for (_, n), s in self.prefixes.items() if n == r.hit), slot) if r.done == r.hit > 0 else slot


class TakesAPrefixForALongerOne(Engine):
    def start_of(self, r):
        slot = super().start_of(r)
        if r.done == r.hit > 0 and r.done + CHUNK < r.prompt:
            r.done = r.hit = r.done + CHUNK
        return slot


class LeavesSlotsToTwo(Engine):
    """An engine that gives one slot to two requests that wait for their first tokens."""

    def admit(self, r):
        if super().admit(r):
            r.slot = self.running[0].slot
            return True
        return False


FAULTS = [ForgetsTheCancelled, StartsFromWhatLiesThere, MixesUpTemplates, TakesAPrefixForALongerOne, LeavesSlotsToTwo]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_engine_is_noticed(fault):
    with pytest.raises((AssertionError, kda.InputError), match=r"request|a slot is lost|different for every sequence"):
        run(60, fault)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_is_within_the_budget_of_one_call_over_all_tokens(dtype):
    """A prompt in chunks and 100 tokens by recurrence; twice the errors of independent roundings of the maths."""
    case = make_inputs((192, 165), H=1, HV=2, K=16, V=16, dtype=dtype)
    keywords, prompts = dict(case.keywords), (100, 64)
    rows = {n: keywords.pop(n) for n in ("q", "k", "v", "g", "beta")}
    ends = keywords.pop("cu_seqlens").tolist()
    states, C = keywords.pop("initial_state"), keywords.pop("chunk_size")
    keywords.pop("output_final_state")
    o, finals = [], []
    for n, (start, end) in enumerate(zip(ends, ends[1:])):
        cut = start + prompts[n]
        head, S = kda.chunk_kda(**{k: x[:, start:cut] for k, x in rows.items()}, **keywords, chunk_size=C,
                                initial_state=states[n : n + 1], output_final_state=True)
        tail, S = kda.fused_recurrent_kda(**{k: x[:, cut:end] for k, x in rows.items()}, **keywords, initial_state=S,
                                          output_final_state=True)
        o += [head, tail]
        finals.append(S)
    found = {"o": torch.cat(o, 1), "ht": torch.cat(finals)}
    limits = budgets(case, Door("reference", "cpu").rounding(case), backward=False)
    wrong = [row for n in found if (row := judge("call", n, limits[n], found[n], case, whole=True)).wrong]
    assert not wrong, "\n".join(map(describe, wrong))
