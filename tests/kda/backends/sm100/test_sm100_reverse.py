"""Walk and grads of the Blackwell backward in one grid, run on the CPU from its PTX: it has the bits of both kernels
apart in any order of warps and CTAs, and runs where it is faster."""

import dataclasses

import pytest
from cute_calls import check_gradients, gradients, judged_gradients, rows_of
from kernel_faults import assert_noticed, plant
from one_grid import CALLS, FAST, MIXED, TWO, assert_what_was_saved_gives_the_same_bits, both_ways
from sm90_forms import REVERSE, Call, assert_nothing_found, assert_the_same
from sm100_faults import REVERSE as FAULTS

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.common.cute.configs import ComposeConfig
from kda.backends.sm100 import launch, plan
from kda.backends.sm100.configs import TMEM, GradsConfig, WalkConfig
from kda.backends.sm100.reverse_config import ReverseConfig
from kda.model.bundles import Save
from kda.model.force import Force
from kda.model.problem import Problem
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]


@rows_of(CALLS, "three heads", "packed", commit=["one gate per head", "segments"])
def test_gradients_have_the_bits_of_both_kernels_apart(name, force):
    found, expected, session = both_ways(CALLS[name], "sm100", force)
    assert_nothing_found(session)
    assert_the_same(found, expected)


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("order", MIXED, ids=str)
@pytest.mark.parametrize("name", ["three heads", "packed", "one CTA walks, then computes gradients", "segments"])
def test_any_order_of_warps_and_CTAs_gives_the_same_bits(name, order, force):
    found, expected, session = both_ways(CALLS[name], "sm100", force, **order)
    assert_nothing_found(session)
    assert_the_same(found, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [dict(T=200, HV=2), dict(lengths=(65, 0, 1, 130), HV=2, **FAST)], ids=str)
def test_gradients_are_those_of_the_definition(words, force):
    force(**REVERSE.forced | TWO)
    check_gradients(Call(REVERSE, words).case(), "sm100")


@pytest.mark.exhaustive
def test_what_was_saved_gives_the_same_bits(force):
    """dh has memory of its own if the tiles were saved; dq comes where r was unless r was saved."""
    words = dict(lengths=(65, 0, 1, 130), padding=140, HV=2)
    assert_what_was_saved_gives_the_same_bits(words, "sm100", force, reverse=False)


def planned(words="T=8192 H=64", **force):
    p = Problem.parse(f"bfloat16 bounded l2norm beta=sigmoid backward {words}")
    return plan.training_plan(dataclasses.replace(p, force=Force(**force)), 148)


@pytest.mark.parametrize(("words", "one_grid"), [
    ("T=8192 H=64", True), ("T=8192 H=96", True), ("T=1024 H=64", True), ("T=8192 H=16", True), ("T=512 H=8", False),
])
def test_it_runs_where_items_are_enough_for_all_SMs(words, one_grid):
    assert (Save.OWN in planned(words).reverse) == one_grid
    assert not planned(words, reverse=False).reverse


def test_where_tiles_are_made_again_dh_lies_over_them():
    for save in (Save.NOTHING, Save.OWN):
        (one,) = filter(None, planned().back(save))
        assert one.remade == one.grads.shares_over_h == (save is Save.NOTHING)
    assert [type(x) for x in planned().back(Save.STATES) if x] == [WalkConfig, GradsConfig]    # dg needs more memory
    assert not planned("T=0 H=16", reverse=True).reverse


def test_where_sequences_are_cut_it_walks_over_segments():
    """Their last states have gradients that were found before."""
    found = planned("T=8192 H=16")
    assert [type(x) for x in found.back(Save.OWN) if x] == [WalkConfig, ComposeConfig, ReverseConfig]
    assert found.reverse[Save.OWN].config.walk.cut and not planned().reverse[Save.OWN].config.walk.cut


@pytest.mark.parametrize(("words", "walkers"), [
    ("T=8192 H=64", 32), ("T=8192 H=96", 32), ("T=8192 H=32", 32), ("T=8192 N=8 packed H=64", 31),
])
def test_about_a_fifth_of_the_SMs_walk(words, walkers):
    found = planned(words, reverse=True, segment_chunks=0).reverse[Save.OWN]
    assert (found.grid, found.walkers) == (148, walkers)


@pytest.mark.parametrize("words", ["gate_per_head=true", "g_dtype=float32"])
def test_without_rows_of_g_a_walk_has_a_stage_less(words):
    one, usual = (planned(f"T=8192 H=64 {x}").reverse[Save.OWN].config for x in (words, ""))
    assert one.why_invalid() is None and one.walk.stages == usual.walk.stages - 1
    stages = dataclasses.replace(one.walk, stages=usual.walk.stages)
    assert "below the mbarriers" in dataclasses.replace(one, walk=stages).why_invalid()


def test_a_walk_has_its_memory_where_values_and_rows_are_later():
    config = planned(reverse=True).reverse[Save.OWN].config
    fields = config.walk.memory.fields
    assert all(config.walk.struct.fields[name].offset == field.offset for name, field in fields.items())


def test_tensor_memory_is_allocated_once_for_both():
    config = planned(reverse=True).reverse[Save.OWN].config
    assert max(config.walk.tmem.end, config.grads.tmem.end) <= config.grads.allocated == TMEM


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", ["", "packed H=1 HV=2", "softplus state_dtype=float32 final_state=true"])
@pytest.mark.parametrize("save", [Save.OWN, Save.NOTHING])
def test_it_spills_no_more_than_grads_alone(words, save):
    found = planned(f"T=8192 H=64 {words}", reverse=True, segment_chunks=0)
    one, grads = (launch.kernel(x, parse("sm100")) for x in (found.reverse[save].config, found.grads))
    assert one.spills <= grads.spills and 384 * one.registers <= 65536


FAULTY = {
    "one grid": (dict(sms=2), dict(T=150, HV=2)), "two walks": (dict(sms=2, walkers=1), dict(T=150, HV=2)),
    "many items": (dict(sms=1), dict(T=1200)),
}


@rows_of(FAULTS, "the queue orders nothing", commit=["dh comes over a tile that is still to be read"])
def test_a_planted_fault_is_noticed(name, tmp_path, monkeypatch, force):
    fault = FAULTS[name]
    plant(fault, tmp_path, monkeypatch, "sm100")
    prescribed, words = FAULTY[fault.case]
    force(**REVERSE.forced | prescribed)
    case = Call(REVERSE, words).case()
    found, session = gradients(case, "sm100", schedule=fault.schedule, early=bool(fault.schedule))
    assert_noticed(fault, session, lambda: judged_gradients(case, found, "sm100"))
