"""The Blackwell forward of more walks than clusters, which have equal shares of them: on the CPU from PTX."""

import dataclasses

import pytest
import torch
from cute_calls import called, changed, check, rows_of
from kernel_faults import assert_a_call_notices, plant
from sm100_faults import SHARES as FAULTS

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm100 import plan
from kda.model.problem import Problem
from kda.tools.verify.cases import make_inputs

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]

SIZES = 128, pytest.param(64, marks=pytest.mark.exhaustive)
CASES = {
    "shares": dict(T=260, HV=4), "whole": dict(T=260, HV=3), "batch": dict(B=3, T=70, HV=2),
    "packed": dict(lengths=(130, 1, 0, 70, 200), HV=2), "few tokens": dict(lengths=(0, 0, 300, 0, 33, 0), padding=9),
    "many sequences": dict(lengths=(40, 0, 7) * 15), "short": dict(T=20, HV=7),
    "fewer chunks than clusters": dict(lengths=(0, 70) + (0,) * 9),
}


def case_of(K=128, **options):
    return make_inputs(**dict(H=1, K=K, V=K, gate="bounded") | options)


def with_states(case):
    return dataclasses.replace(case, keywords=case.keywords | dict(return_intermediate_states=True))


def seen(case, **options):
    found, session = called(case, backend="sm100", **options)
    assert not session.findings
    return found


def assert_the_same(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[x], expected[x]) for x in expected)


NUMBERS = {f"{name}, {n} clusters": (name, n) for name in CASES for n in (1, 2, 3, 5, 7)}


@pytest.mark.parametrize("K", SIZES)
@rows_of(NUMBERS, "shares, 3 clusters", "packed, 3 clusters", commit=["many sequences, 7 clusters"])
def test_no_bit_depends_on_the_number_of_clusters(name, K, force):
    name, clusters = NUMBERS[name]
    case = case_of(K, **CASES[name])
    expected = seen(case)
    force(sms=2 * clusters)
    assert_the_same(seen(case), expected)
    assert_the_same(seen(case, schedule=2, early=True), expected)


@pytest.mark.parametrize("K", SIZES)
@rows_of(CASES, "shares", commit=["few tokens"])
def test_a_call_in_shares_is_the_definition(name, K, force):
    force(sms=6)
    check(case_of(K, **CASES[name]), backend="sm100")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["shares", "packed", "few tokens"])
@pytest.mark.parametrize("gate", ["softplus", "given"])
def test_no_bit_of_any_gate_depends_on_the_number_of_clusters(name, gate, force):
    case = changed(case_of(gate=gate, **CASES[name]), initial_state=lambda x: x.bfloat16())
    expected = seen(case, state_v_first=True)
    force(sms=6)
    assert_the_same(seen(case, state_v_first=True), expected)


@pytest.mark.parametrize("K", SIZES)
@rows_of(CASES, "packed", commit=["shares"])
def test_states_that_enter_chunks_lie_where_they_do_in_whole_walks(name, K, force):
    case = with_states(case_of(K, **CASES[name]))
    expected = seen(case)
    assert expected.keys() == {"o", "ht", "h"}
    force(sms=6)
    assert_the_same(seen(case), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("segments", [2, 3])
@pytest.mark.parametrize("name", ["shares", "packed", "few tokens"])
def test_walks_over_segments_may_be_shared(name, segments, force):
    case = case_of(**CASES[name])
    force(segments=segments)
    expected = seen(case)
    for sms in (2, 6, 10):
        force(segments=segments, sms=sms)
        assert_the_same(seen(case), expected)


@pytest.mark.parametrize("words, crosses", {
    "T=8192 H=96": True, "T=8192 H=64": False, "T=8192 H=148": False, "T=1024 H=64 B=8 N=8": True,
    "T=8192 H=64 N=1 packed": False, "T=8192 H=32 N=2 packed": True, "T=8192 H=96 batch_invariant=true": True,
}.items())
def test_shapes_alone_say_whether_states_cross(words, crosses, force):
    force()
    p = Problem.parse(f"bounded l2norm {words}")
    assert plan.shares_end_in_walks(p, plan.plan(p, 148, None).ctas) == crosses


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch, force):
    force(sms={"whole": 4, "fewer chunks than clusters": 14}.get(fault.case, 6))
    if fault.case != "states":
        plant(fault, tmp_path, monkeypatch, "sm100")
        assert_a_call_notices(fault, case_of(64, **CASES[fault.case]), "sm100")
        return
    case = with_states(case_of(64, **CASES["shares"]))
    expected = seen(case)
    plant(fault, tmp_path, monkeypatch, "sm100")
    found, _ = called(case, backend="sm100")
    assert not torch.equal(found.pop("h"), expected.pop("h"))
    assert_the_same(found, expected)                                           # the states alone are wrong
