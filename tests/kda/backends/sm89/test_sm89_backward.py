"""The float32 backward on the CPU, from its PTX: gradients against the definition, clean in several schedules."""

import dataclasses
import functools

import pytest
import torch
from cute_calls import RAGGED, TOKENS, assert_right, changed, rows_of, seen_trained
from kernel_faults import plant
from sm89_calls import D128, OF_SM89, case_of, lacking, proven_trained, trained
from sm89_faults import BACKWARD as FAULTS

import kda
from kda.backends.sm89 import launch, plan
from kda.model.bundles import Save
from kda.model.stages import find
from kda.tools.verify.definition import definition
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import Oracle, alone
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "libnvrtc")]


# every option

OPTIONS = {
    "one chunk and a part of one, GVA": dict(T=70, H=2, HV=4),
    "chunks of 32": dict(T=70, C=32),
    "packed, many tokens of none, GVA": dict(HV=2, padding=70, **RAGGED),
    "a batch, beta up to 2": dict(B=2, T=33, beta="2*sigmoid"),
    "no initial state": dict(T=70, initial_state=False),
    "softplus gate that forgets": dict(T=100, gate="softplus", regime="fast"),
    "softplus gate, packed, chunks of 32": dict(C=32, gate="softplus", **RAGGED),
    "given decays and beta, no l2norm": dict(T=70, gate="given", beta="given", l2norm=False),
    "one gate per head, packed, GVA": dict(HV=2, padding=70, gate_per_head=True, **RAGGED),
    "one decay per head, a batch": dict(B=2, T=33, gate="given", gate_per_head=True),
    "one softplus gate per head, chunks of 32": dict(T=70, C=32, gate="softplus", gate_per_head=True),
}
LARGE = {
    "K=V=128, GVA": dict(T=130, HV=2, **D128),
    "K=V=128, chunks of 32, packed": dict(C=32, gate="softplus", padding=9, **D128, **RAGGED),
}


@rows_of(OPTIONS, "packed, many tokens of none, GVA", commit=["one gate per head, packed, GVA", "chunks of 32"])
def test_gradients_are_those_of_the_definition(name):
    proven_trained(case_of(**OPTIONS[name]))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_gradients_of_large_heads_are_those_of_the_definition(name):
    proven_trained(case_of(**LARGE[name]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("without", ["A_log", "dt_bias"])
def test_a_bounded_gate_may_lack_its_parameters(without):
    proven_trained(lacking(case_of(T=40), without))


@pytest.mark.exhaustive
def test_states_may_be_v_first():
    case = case_of(T=70, HV=2)
    found, expected = trained(case, state_v_first=True), trained(case)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_final_state_may_have_no_gradient():
    case = case_of(T=40)
    zero = dataclasses.replace(case, dht=torch.zeros_like(case.dht))
    with capture(arch="sm89") as session:
        found = kda.chunk_kda_bwd(do=case.do, dht=None, backend="sm89", **case.keywords)._asdict()
    assert not session.findings
    expected = trained(zero)
    assert all(torch.equal(found[name], expected[name]) for name in found)


NOTHING = [dict(B=2, T=0), dict(lengths=(0, 0), padding=10), dict(lengths=(), padding=9)]


@pytest.mark.parametrize("shape", NOTHING, ids=str)
def test_sequences_of_no_tokens_hand_their_gradients_through(shape):
    case = case_of(HV=2, **shape)
    found = trained(case)
    assert torch.equal(found.pop("ht"), case.keywords["initial_state"]) and torch.equal(found.pop("dh0"), case.dht)
    assert not any(x.any() for x in found.values())


def test_memory_may_lie_in_any_order():
    case = case_of(T=40, H=2)
    apart = case.map(lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2] if x.is_floating_point() else x)
    found, expected = trained(apart), trained(case)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# what a recorded forward keeps


def trained_from_products(case):
    """Return what a recorded forward saves, and the gradients made from it."""
    p = case.problem()
    with capture(arch="sm89") as session:
        kept = launch.forward(p, case.inputs, Save.PRODUCTS).saved
        grads = launch.backward(dataclasses.replace(p, direction="backward"), case.inputs, case.do, case.dht, kept)
    assert not session.findings
    return kept, grads


@pytest.mark.parametrize("gate", ["softplus", pytest.param("bounded", marks=pytest.mark.exhaustive)])
def test_a_recorded_forward_keeps_the_two_products(gate):
    case, C = case_of(T=70, HV=2, gate=gate), 64
    kept, _ = trained_from_products(case)
    oracle = Oracle(case, Door("sm89", "cpu").rounding(case))
    for stage in ("fwd/gate", "fwd/intra", "fwd/wy"):
        oracle.advance(find(stage))
    for name, x in kept._asdict().items():
        exact = oracle.exact[name]
        for chunk, rows in enumerate((64, 6)):
            found = x[64 * chunk : 64 * chunk + rows].transpose(0, 1).double()
            assert (found - exact[chunk, :, :rows, :C]).norm() < 1e-6 * exact[chunk].norm()


KEPT = {"a part of a chunk, GVA": dict(T=70, HV=2), "packed, chunks of 32": dict(C=32, padding=9, **RAGGED),
        "large heads": dict(T=70, **D128)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KEPT)
def test_what_was_kept_changes_no_bit_of_a_gradient(name):
    case = case_of(gate="softplus", **KEPT[name])
    grads, expected = trained_from_products(case)[1], trained(case)
    assert all(torch.equal(x.view(expected[n].shape), expected[n]) for n, x in grads._asdict().items() if x is not None)


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("stage", Door("sm89", "cpu").stages)
def test_a_run_of_stages_is_what_is_written_out(stage):
    case = case_of(lengths=(70, 0, 1), HV=2, gate="softplus")
    door = SimulatedDoor("sm89", plan.TARGET)
    rows = alone(door, case, find(stage), Oracle(case, door.rounding(case)))
    assert_right(rows)
    assert not door.findings


def test_autograd_takes_a_call_through_seven_kernels_after_two():
    door = SimulatedDoor("sm89", plan.TARGET)
    found = door.call(case_of(T=33), True)
    assert door.launches == 9 and not door.findings and {"o", "dq", "dA_log", "dh0"} <= found.keys()


# the same bits

SHAPES = {"one": dict(T=130), "packed, chunks of 32": RAGGED | dict(C=32, padding=9)}


@pytest.mark.spread(every=8)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", [1, 2])
def test_any_order_of_warps_gives_the_same_bits(schedule, shape):
    case = case_of(**SHAPES[shape])
    found, expected = trained(case, dict(schedule=schedule, early=schedule == 1)), trained(case)
    assert all(torch.equal(found[x], expected[x]) for x in expected)


def test_a_sequence_has_the_bits_that_it_has_alone():
    case = case_of(lengths=(33, 70, 21))
    found, x = trained(case), case.keywords
    tokens = slice(33, 103)
    rows = {n: x[n][:, tokens] for n in TOKENS} | {"initial_state": x["initial_state"][1:2]}
    keywords = {n: y for n, y in x.items() if n != "cu_seqlens"} | rows
    alone = trained(dataclasses.replace(case, keywords=keywords, do=case.do[:, tokens], dht=case.dht[1:2]))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(found[name][:, tokens], alone[name]), name
    assert torch.equal(found["dh0"][1:2], alone["dh0"])


# hard inputs

HARD = {
    "identical keys": dict(k=lambda x: x[:, :1].expand_as(x).contiguous()),
    "saturated gates": dict(g=lambda x: torch.where(x > 0, 1e4, -1e4).to(x.dtype)),
    "keys of zero": dict(k=torch.zeros_like),
    "rates of e^50": dict(A_log=lambda x: x + 50),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs_are_within_budget(name):
    proven_trained(changed(case_of(T=70), **HARD[name]))


@pytest.mark.exhaustive
@pytest.mark.commit
@pytest.mark.parametrize("size", [-1000.0, -torch.inf])
def test_decays_whose_products_vanish_have_gradients(size):
    case = changed(case_of(T=70, gate="given"), g=lambda x: (0.01 * x).index_fill(1, torch.arange(3, 70, 9), size))
    found = trained(case)
    assert all(x.isfinite().all() for x in found.values())
    if size > -torch.inf:
        proven_trained(case)


@pytest.mark.parametrize("regime", ["slow", pytest.param("fast", marks=pytest.mark.exhaustive)])
def test_ordinary_inputs_have_errors_below_3e_6(regime):
    case = case_of(T=130, gate="softplus", regime=regime)
    found, exact = trained(case), definition(case, torch.float64)
    errors = {n: float((found[n].double() - x).norm() / x.norm()) for n, x in exact.items()}
    assert max(errors.values()) < 3e-6, errors


# faults

FAULTY = {
    "long": dict(lengths=(130, 0, 30), HV=2, gate="softplus", seed=3), "128": dict(T=40, **D128),
    "bounded": dict(lengths=(130, 0, 30), HV=2, seed=3),
    "per head": dict(lengths=(70, 0, 30), HV=2, gate="softplus", gate_per_head=True, seed=3),
}


@functools.cache
def faulty(name):
    """Return a case, and its gradients by the definition."""
    case = case_of(**FAULTY[name])
    return case, definition(case, torch.float64)


def ways_of_noticing(name, schedule=0):
    """Return the kinds of the simulator's findings in a call with its gradients, and "wrong answer"."""
    case, exact = faulty(name)
    found, findings = seen_trained(case, "sm89", OF_SM89 | dict(schedule=schedule, early=schedule == 1))
    wrong = any(not (found[name].double() - x).norm() < 3e-6 * x.norm() for name, x in exact.items())
    return {finding.kind for finding in findings} | ({"wrong answer"} if wrong else set())


@pytest.mark.spread(every=40)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch):
    plant(fault, tmp_path, monkeypatch, "sm89")
    assert fault.noticed in ways_of_noticing(fault.case, fault.schedule)


def test_gradients_have_the_shapes_and_dtypes_of_parameters_and_are_no_views():
    case = changed(case_of(T=40), A_log=lambda x: x.view(1, 1, -1, 1).bfloat16(), dt_bias=lambda x: x.view(2, -1))
    x = {n: case.keywords[n].clone().requires_grad_() for n in ("A_log", "dt_bias")}
    with capture(arch="sm89"):
        o, _ = kda.chunk_kda(**case.keywords | x, backend="sm89")
        o.mul_(1)
        (o * case.do).sum().backward()
        grads = kda.chunk_kda_bwd(do=case.do, **case.keywords, backend="sm89")
    for n, ours in (("A_log", grads.dA_log), ("dt_bias", grads.ddt_bias)):
        assert x[n].grad.shape == ours.shape == x[n].shape and ours.dtype == x[n].dtype
    assert not [grad for grad in grads if grad is not None and grad._is_view()]
