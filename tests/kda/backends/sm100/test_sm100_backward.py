"""The Blackwell backward, run on the CPU from its PTX: gradients against the definition, clean in several schedules."""

import dataclasses
from pathlib import Path

import pytest
import torch
from cute_backward import KEPT, OPTIONS, Backward
from cute_calls import changed, drawn, saturated
from kernel_faults import assert_noticed, plant
from sm100_faults import BACKWARD as FAULTS

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from benchmarks.counted import blackwell_step as counted
from kda.backends.common import training_plan
from kda.backends.sm100 import launch, plan
from kda.model.host import host_of
from kda.model.problem import Problem
from kda.routing.dispatch import weigh
from kda.tools.verify.parity import prove
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_apart")]

BACKWARD = Backward("sm100", 148)
gradients, check = BACKWARD.gradients, BACKWARD.check


@pytest.mark.spread(every=14)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_the_definition(name):
    check(drawn(**OPTIONS[name]))


@pytest.mark.exhaustive
def test_so_they_are_on_sm_103a():
    check(drawn(lengths=(65, 0, 1, 30), padding=20, HV=2), arch="sm103")


@pytest.mark.exhaustive
def test_grouped_heads_that_are_none_have_the_bits_of_plain_ones():
    """HV == H, with q and k of every value head written out."""
    case = drawn(T=70, HV=2)
    plain = changed(case, q=lambda q: q.repeat_interleave(2, 2), k=lambda k: k.repeat_interleave(2, 2))
    plain = dataclasses.replace(plain, spec=dataclasses.replace(case.spec, H=2))
    (found, _), (expected, _) = gradients(case), gradients(plain)
    assert all(torch.equal(found[name], expected[name]) for name in ("dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"))
    for name in ("dq", "dk"):
        summed = expected[name].float().sum(2, keepdim=True).bfloat16()
        assert torch.equal(found[name], summed)


@pytest.mark.exhaustive
def test_states_may_be_v_first():
    BACKWARD.takes_states_v_first(drawn(T=70))


def test_no_tokens_hand_the_gradient_of_their_state_through():
    BACKWARD.hands_gradients_through_sequences_of_no_tokens()


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", [1, 2, 3, 4, 5])
def test_any_order_of_warps_gives_the_same_bits(schedule):
    BACKWARD.has_the_same_gradients_in_any_order_of_warps(drawn(T=200, HV=2), schedule)


@pytest.mark.spread(every=5)
@pytest.mark.parametrize(("gate", "size"), [
    ("bounded", 2.0**60), ("softplus", 2.0**50), ("given", 2.0**50), ("bounded", 2.0**-60), ("softplus", 2.0**-50),
], ids=str)
def test_gradients_are_as_large_as_those_that_come_in(gate, size):
    BACKWARD.has_gradients_as_large_as_those_that_come_in(drawn(T=70, gate=gate), size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", ["softplus", "given"])
def test_gates_that_hide_all_that_was_before(gate):
    BACKWARD.has_no_gradients_of_gates_that_hide_all_that_was_before(saturated(drawn(T=70, gate=gate)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [
    dict(T=140, gate="softplus", B=2), dict(lengths=(65, 0, 1, 30), padding=140, HV=2), dict(T=70, gate="given"),
], ids=str)
def test_g_may_be_float32(words):
    BACKWARD.takes_float32_gates(drawn(**words))


@pytest.mark.exhaustive
def test_beta_may_be_0():
    case = drawn(T=70, beta="given")
    found = check(changed(case, beta=lambda b: b * (torch.arange(70) % 3 > 0).view(1, 70, 1)))
    assert found["dbeta"][:, ::3].abs().min() > 0


@pytest.mark.exhaustive
def test_keys_may_be_all_alike():
    BACKWARD.takes_keys_that_are_all_alike()


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [True, "states"])
@pytest.mark.parametrize("name", KEPT)
def test_what_a_forward_keeps_gives_the_bits_of_what_is_made_again(name, keep, monkeypatch):
    BACKWARD.has_the_bits_of_what_is_made_again(name, KEPT[name], keep, monkeypatch)


@pytest.mark.parametrize("kept", [False, True, "states"])
def test_autograd_gives_the_same_gradients(kept):
    BACKWARD.has_the_same_gradients_by_autograd(kept)


@pytest.mark.parametrize(("kept", "said"), [
    (False, "between forward and backward nothing is kept but the inputs"),
    (True, "between forward and backward sm100 keeps 1.7 MiB beside the inputs"),
    ("states", "between forward and backward sm100 keeps 0.8 MiB beside the inputs"),
])
def test_explain_says_that_both_directions_are_here_and_what_is_kept_between_them(kept, said):
    BACKWARD.explains_what_is_kept(kept, said)


def test_other_head_dims_go_to_triton():
    p = Problem.parse("bfloat16 backward beta=sigmoid bounded l2norm K=64 V=64")
    assert weigh(p, host_of("sm100")).backend == "triton"


WITHOUT_SPILLS = "bounded dt_bias=true l2norm beta=sigmoid", "bounded dt_bias=true l2norm beta=sigmoid packed"


@pytest.mark.exhaustive
def test_no_kernel_of_a_bounded_gate_spills_but_grads_8_bytes_and_64_of_packed_calls():
    spilt = {}
    for words in WITHOUT_SPILLS:
        for arch in ("sm100", "sm103"):
            p = Problem.parse(f"bfloat16 {words} state_dtype=float32 final_state=true")
            for config in dict.fromkeys(training_plan.all_configs(plan.TRAINING, p)):
                bytes_ = launch.kernel(config, parse(arch)).spills if config else 0
                if bytes_:
                    spilt[type(config).__name__, config.packed] = bytes_
    most = {("GradsConfig", False): 8, ("GradsConfig", True): 64}
    assert all(bytes_ <= most.get(kind, 0) for kind, bytes_ in spilt.items())


@pytest.mark.spread(every=18)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch):
    plant(fault, tmp_path, monkeypatch, "sm100")
    monkeypatch.setattr(launch.TRAINING, "plan", lambda p, sms: plan.training_plan(p, 1))       # one item after another
    case = drawn(T=150)
    found, session = gradients(case, strict=True)
    assert_noticed(fault, session, lambda: BACKWARD.judged(case, found))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["a gate gains what a key loses", "dh r^T comes from h"])
def test_a_fault_of_grads_is_one_of_that_stage(name, tmp_path, monkeypatch):
    plant(FAULTS[name], tmp_path, monkeypatch, "sm100")
    found = prove(SimulatedDoor("sm100", parse("sm100")), "bwd/grads")
    assert not found.passed and any("dg: " in line for line in found.details)


def test_its_page_says_what_is_counted():
    """At most what was asked for: 60,000 instructions, 5,600 bytes and 22 MFLOP back, 26,000 instructions up."""
    root = Path(__file__).parents[4]
    found, page = counted.counts(), (root / "docs" / "data" / "counted" / "sm100_backward.json").read_text()
    assert [row for row in counted.of_kernels(found) + counted.of_heads(found) if row not in page] == []
    up, back = (counted.total(found, names) for names in (counted.FORWARD, counted.BACKWARD))
    assert up.warp_instructions <= 26_000 and back.warp_instructions <= 60_000
    assert back.bytes <= 5_600 and back.tensor_flops <= 22e6
