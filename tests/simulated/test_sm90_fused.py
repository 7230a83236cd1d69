"""The Hopper forward in one kernel, clusters of two: calls against the definition, and the bits of the two kernels."""

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch
from cute_calls import (
    RAGGED,
    Fault,
    assert_a_call_notices,
    assert_less_shared_memory_is_too_little,
    assert_the_bits_of_two_kernels,
    called,
    changed,
    check,
    has_products_that_wait_for_no_other,
    kept_nowhere,
    plant,
    reads_nothing_before_the_kernel_ahead_is_done,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm90 import launch, plan
from kda.verify.cases import make_inputs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def fused(plan_says):
    """One kernel where it can be; what it gives turns that off again."""

    def ask(on=True):
        plan_says(FUSED=on)

    ask()
    return ask


OPTIONS = {
    "one chunk and a part of one": dict(T=33),
    "a chunk of each group": dict(T=100),
    "stages used several times, GVA": dict(T=390, HV=2),
    "one token": dict(T=1),
    "a batch": dict(B=2, T=40),
    "packed, GVA": dict(HV=2, **RAGGED),
    "packed, many tokens of none": dict(padding=140, **RAGGED),
    "no initial state": dict(T=70, initial_state=False),
}


@pytest.mark.parametrize(
    "T, H, lengths, ctas, wrapped",
    [
        (8192, 64, (), 2, False), (8192, 128, (), 2, True), (1024, 64, (), 2, False), (64, 8, (), 2, False),
        (8192, 96, (), 2, True), (32768, 8, (), 0, None),
        (8192, 64, (1024,) * 8, 2, True), (8192, 64, (128,) * 64, 2, True), (8192, 32, (256,) * 32, 2, True),
        (2048, 96, (64,) * 32, 2, True),
        (8192, 28, (), 4, False), (8192, 32, (), 4, True), (8192, 40, (), 4, True), (4096, 24, (), 4, False),
        (1024, 32, (), 4, True), (8192, 4, (1024,) * 8, 4, True), (8192, 44, (), 2, False), (8192, 48, (), 2, False),
        (1024, 8, (), 0, None), (2048, 16, (), 0, None), (8192, 1, (256,) * 32, 2, False),
    ],
)
def test_one_kernel_is_taken_where_its_clusters_fill_an_h200(T, H, lengths, ctas, wrapped):
    """These are measured."""
    p = case_of(**(dict(lengths=(1,) * len(lengths)) if lengths else dict(T=1)), initial_state=False).problem()
    p = dataclasses.replace(p, T=T, H=H, HV=H)
    found = plan.plan(p, 132).fused
    assert (found.ctas if found else 0) == ctas and not plan.plan(p, 132, products=True).fused
    assert not ctas or found.wrapped == wrapped


def case_of(**options):
    return make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | options)


@pytest.mark.spread(every=8)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_is_the_definition_and_has_the_bits_of_two_kernels(name, fused):
    case = case_of(**OPTIONS[name])
    assert_the_bits_of_two_kernels(case, lambda: fused(False))


def test_it_is_one_kernel(fused):
    _, session = called(case_of(T=33))
    assert len(session.launches) == 1
    _, session = called(case_of(**RAGGED))
    assert len(session.launches) == 2                                          # and the tables


def test_states_may_be_v_first_and_bfloat16(fused):
    case = changed(case_of(T=70), initial_state=lambda x: x.bfloat16())
    found, session = called(case, state_v_first=True)
    fused(False)
    expected, _ = called(case)
    assert not session.findings and all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.parametrize("HV", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("shape", [dict(B=2, T=0), dict(lengths=(0, 0), padding=40)], ids=str)
def test_sequences_of_no_tokens_hand_their_states_through(shape, HV, fused):
    case = case_of(HV=HV, **shape)
    found, session = called(case)
    assert not session.findings and not found["o"].any()
    assert torch.equal(found["ht"], case.keywords["initial_state"])


@pytest.mark.spread(every=6)
@pytest.mark.parametrize("shape", [dict(T=390), RAGGED | dict(padding=9)], ids=["one", "packed"])
@pytest.mark.parametrize("schedule", [1, 2, 3])
def test_any_order_of_warps_gives_the_same_bits(schedule, shape, fused):
    case = case_of(**shape)
    (expected, _), (found, session) = called(case), called(case, schedule=schedule, early=True)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(found[x], expected[x]) for x in expected)


OTHERS = [dict(K=64, gate="softplus"), dict(K=64, V=64, gate="softplus"), dict(K=64, l2norm=False)]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_what_it_cannot_do_stays_with_two_kernels(change, fused):
    p = case_of(T=33, **change).problem()
    assert plan.plan(p, 132).fused is None


def test_with_few_heads_or_more_results_two_kernels_run(fused):
    p = case_of(T=8192).problem()
    assert plan.plan(p, 132).carry and plan.plan(p, 132).fused is None          # cut into segments
    p = case_of(T=33).problem()
    assert plan.plan(p, 132).fused and plan.plan(p, 132, products=True).fused is None
    fused(False)
    assert plan.plan(p, 132).fused is None


FUSED, HANDOVER, VALUES = "sm90/fwd/fused", "sm90/parts/handover", "sm90/parts/values"
FAULTS = {
    "a stage is handed back before both CTAs have read it": Fault(
        HANDOVER, "(ring.empty + stage, 4 * self.c.walking +", "(ring.empty + stage, 4 +",
        "race-write-read"
    ),
    "the neighbour's group does not hear that a stage is free": Fault(
        HANDOVER, ", peer_cta_rank_in_cluster=stage & 1", "", "deadlock"
    ),
    "TB leaves before it is there": Fault(
        FUSED, f'cute.arch.fence_proxy("async.shared", space="cta"){21 * " "}# TB is in the tile', "pass", "proxy"
    ),
    "groups meet at one barrier": Fault(
        "sm90/parts/teams", "GROUP = NamedBarrier(2, 32 * WARPS, ids_per_group=2)",
        "GROUP = NamedBarrier(2, 32 * WARPS)", "race-write-read"
    ),
    "a CTA is gone before the neighbour is done": Fault(
        FUSED, "        if cutlass.const_expr(self.c.ctas > 1):\n            self.meet()\n", "", "peer-exited"
    ),
    "rows of v are overwritten before they are read": Fault(
        VALUES, f"i + RING - 1, tokens, walked){5 * ' '}# where all", "i + RING, tokens, walked)  #", "race-read-write"
    ),
    "rows of v are read before they are there": Fault(
        VALUES, "cp_async_wait_group(behind)", "cp_async_wait_group(RING)", "race-write-read"
    ),
    "rows of o are stored before they are there": Fault(
        VALUES, f"CHAIN.sync(){55 * ' '}# o of the last", "pass  #", "race-write-read", schedule=2
    ),
    "the neighbour's barrier is not there yet": Fault(
        FUSED, "self.meet()\n        warp =", "cute.arch.sync_threads()\n        warp =", "race-write-read"
    ),
    "a lane hands a stage back before the others have read it": Fault(
        HANDOVER, "cute.arch.sync_warp()\n        with cute.arch.elect_one():\n"
        "            if cutlass.const_expr(self.c.ctas == 1)", "with cute.arch.elect_one():\n"
        "            if cutlass.const_expr(self.c.ctas == 1)", "race-lanes"
    ),
    "copies are not told of the mbarriers": Fault(FUSED, "cute.arch.mbarrier_init_fence()", "pass", "mbarrier-fence"),
    "the kernel ahead is not waited for": Fault(
        "common/cute/order", "cute.arch.griddepcontrol_wait()", "pass", "race-grids", case="packed"
    ),
    "a token of none is left as it is": Fault(
        "common/cute/clear", "first, x.T,", "first, x.T - 1,", "wrong answer", case="packed"
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("ctas, V", [(1, 64), (2, 64), (2, 128), (4, 128)])
def test_the_form_that_racecheck_follows_is_this_kernel(ctas, V, tmp_path, monkeypatch, fused):
    monkeypatch.setattr(plan, "CTAS", ctas)
    for x, name in ((launch, "kernel"), (sys, "path")):                         # `follow` changes both
        monkeypatch.setattr(x, name, getattr(x, name))
    monkeypatch.syspath_prepend(BENCHMARKS)
    kept_nowhere(monkeypatch)
    case = case_of(T=390, V=V)
    expected, _ = called(case)
    importlib.import_module("sanitized").follow(tmp_path)
    assert all(torch.equal(x, expected[name]) for name, x in check(case).items())


FAULTY = {"long": dict(T=390), "packed": dict(padding=9, **RAGGED)}


@pytest.mark.spread(every=16)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch, fused):
    plant(fault, tmp_path, monkeypatch)
    assert_a_call_notices(fault, case_of(**FAULTY[fault.case]))


def test_it_takes_the_shared_memory_that_its_configuration_says(monkeypatch, fused):
    assert_less_shared_memory_is_too_little(case_of(T=100), monkeypatch)


def test_roles_share_out_the_registers_of_the_launch(fused):
    kernel = launch.kernel(plan.plan(case_of(T=33).problem(), 132).fused)
    assert not kernel.spills and 128 * 192 + 512 * 72 <= 640 * kernel.registers <= 65536


def test_no_product_waits_for_another(tmp_path, fused):
    kernel = launch.kernel(plan.plan(case_of(T=33).problem(), 132).fused)
    has_products_that_wait_for_no_other(kernel, tmp_path)


def test_it_reads_nothing_before_the_tables_are_there(fused):
    _, session = called(case_of(**RAGGED))
    assert [launched.pdl for launched in session.launches] == [False, True]
    reads_nothing_before_the_kernel_ahead_is_done(session.launches[1].kernel)
