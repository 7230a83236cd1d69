"""The states that enter chunks, returned by the Hopper forward in one kernel: the bits of two kernels."""

import dataclasses

import pytest
import torch
from cute_calls import Fault, called, drawn, plant

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm90 import plan

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = dict(lengths=(130, 0, 65, 1), padding=5)
SHARES = "packed, GVA, walks shared out"
CASES = {                                    # drawn inputs, what the plan says
    "a batch, GVA": (dict(B=2, T=150, HV=2), {}),
    "chunks of 32": (dict(T=100, C=32), {}),
    SHARES: (dict(HV=3, **ROWS), dict(CLUSTERS=2)),
    "any gate": (dict(T=100, gate="softplus"), {}),
    "clusters of four, packed": (ROWS, dict(CTAS=4)),
    "clusters of four, shares, any gate": (dict(HV=3, gate="softplus", **ROWS), dict(CTAS=4, CLUSTERS=2)),
}


def with_states(words):
    case = drawn(**words)
    case.keywords["return_intermediate_states"] = True
    return case


def of_two_kernels(case, plan_says, **options):
    plan_says(FUSED=False, CTAS=None, CLUSTERS=None)
    return called(case, **options)[0]


@pytest.mark.spread(every=12)
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("name", CASES)
def test_states_outputs_and_final_states_have_the_bits_of_two_kernels(name, v_first, plan_says):
    words, told = CASES[name]
    case = with_states(words)
    plan_says(FUSED=True, **told)
    found, session = called(case, state_v_first=v_first)
    assert not session.findings and len(session.launches) == 1 + ("lengths" in words)
    expected = of_two_kernels(case, plan_says, state_v_first=v_first)
    assert found.keys() == {"o", "ht", "h"} and all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", [1, 2, 3])
def test_any_order_of_warps_gives_the_same_bits(schedule, plan_says):
    words, told = CASES[SHARES]
    case = with_states(words)
    plan_says(FUSED=True, **told)
    (expected, _), (found, session) = called(case), called(case, schedule=schedule, early=True)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(found[x], expected[x]) for x in expected)


FAULTS = {
    "states of a walk that a share cut are counted from the cut": (
        "number = kept.state + (kept.skipped + i) // self.c.every", "number = kept.state + i // self.c.every"
    ),
    "every state is one chunk late": ("if kept.skipped + i & self.c.every - 1 == 0:", "if kept.skipped + i & 1 == 1:"),
    "heads lie the other way round": (
        "place = Int64(number) * x.HV + head", "place = Int64(number) * x.HV + x.HV - 1 - head"
    ),
}


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("old, new", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_changes_the_states_alone(old, new, tmp_path, monkeypatch, plan_says):
    words, told = CASES[SHARES]
    case = with_states(words)
    expected = of_two_kernels(case, plan_says)
    plan_says(FUSED=True, **told)
    plant(Fault("sm90/fwd/fused", old, new, ""), tmp_path, monkeypatch)
    found, _ = called(case)
    assert not torch.equal(found["h"], expected["h"])
    assert torch.equal(found["o"], expected["o"]) and torch.equal(found["ht"], expected["ht"])


def test_one_kernel_runs_where_it_runs_without_them():
    without = drawn(T=33, initial_state=False).problem()
    for T, H in ((8192, 64), (8192, 32), (1024, 64)):
        p = dataclasses.replace(without, T=T, H=H, HV=H)
        one, of_states = (plan.plan(x, 132).fused for x in (p, dataclasses.replace(p, intermediate_states=True)))
        assert one and of_states and (one.ctas, one.wrapped) == (of_states.ctas, of_states.wrapped)
        assert of_states.chain.h and of_states.chain.every == 2 and not of_states.saves
