"""The Hopper forward of few heads: sequences cut into segments, whose states are composed, on the CPU from PTX."""

import pytest
import torch
from cute_calls import called, check

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.common import training_plan
from kda.backends.sm90 import plan
from kda.backends.sm90.launch import forget_plans
from kda.problem import Problem
from kda.verify.cases import make_inputs

pytestmark = pytest.mark.usefixtures("one_thread", "kernels_apart", "short_segments")


@pytest.fixture
def short_segments(monkeypatch):
    """Make segments of two chunks, so that little is simulated."""
    monkeypatch.setattr(training_plan, "SHORTEST", 2)
    forget_plans()
    yield
    forget_plans()


CASES = {
    "five segments, the last of one token": dict(T=257),
    "a batch, GVA, K = 64": dict(B=2, T=150, HV=2, K=64),
    "packed": dict(lengths=(300, 0, 200), padding=40, HV=2),
    "no initial state": dict(T=200, initial_state=False),
    "softplus gate that forgets": dict(T=200, gate="softplus", regime="fast", K=64, V=64),
}


@pytest.mark.spread(every=6)
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_is_cut_is_the_definition(name):
    case = make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | CASES[name])
    assert plan.plan(case.problem(), 132).carry
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_states_may_be_v_first_and_in_another_dtype(state):
    case = make_inputs(T=200, H=1, K=64, V=128, gate="bounded")
    case.keywords["initial_state"] = case.keywords["initial_state"].to(state)
    check(case, state_v_first=True)


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("schedule", [1, 2])
def test_any_order_of_warps_gives_the_same_bits(schedule):
    case = make_inputs((200, 0, 65), H=1, K=64, V=64, gate="bounded")
    (expected, _), (found, session) = called(case), called(case, schedule=schedule, early=True)
    assert not session.findings
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_states_of_heads_that_remember_are_whole_or_cut_the_same_but_for_roundings(monkeypatch):
    case = make_inputs(T=256, H=1, K=64, V=64, gate="bounded", regime="slow")
    case.keywords["return_intermediate_states"] = True
    cut = called(case)[0]
    monkeypatch.setattr(plan, "segment_length", lambda p, sms: 0)
    forget_plans()
    whole = called(case)[0]
    assert whole["h"].shape == (1, 4, 1, 64, 64)
    for name in ("ht", "h"):
        assert not torch.equal(cut[name], whole[name])
        assert (cut[name] - whole[name]).norm() < 5e-3 * whole[name].norm()


@pytest.mark.parametrize("words, length", {
    "T=32768 H=8": 128, "T=8192 H=16": 64, "T=8192 H=64": 0, "T=1024 H=8": 0, "T=8192 H=8 V=64": 32,
    "T=8192 H=8 N=8 packed": 0, "T=65536 H=8 N=2 packed": 256, "T=65536 H=8 batch_invariant=true": 0,
}.items())
def test_shapes_alone_say_where_sequences_are_cut(words, length, monkeypatch):
    monkeypatch.setattr(training_plan, "SHORTEST", 32)
    assert training_plan.segment_length(Problem.parse(f"bounded lower_bound=-5 l2norm {words}"), 132) == length
