"""Walk and grads of the Hopper backward in one grid, run on the CPU from its PTX: it has the bits of both kernels apart
in any order of warps and CTAs, and runs where it is faster."""

import dataclasses

import pytest
from cute_calls import (
    check_gradients,
    has_products_that_wait_for_no_other,
    repeats_waits_where_they_are,
    rows_of,
)
from one_grid import CALLS as ONE_GRID
from one_grid import CALLS_OF_64_CHANNELS, FAST, MIXED, TWO, assert_what_was_saved_gives_the_same_bits, both_ways
from sm90_forms import REVERSE, SMALL, Call, assert_nothing_found, assert_the_same

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.common.cute.configs import ComposeConfig
from kda.backends.sm90 import launch, plan
from kda.backends.sm90.configs import GradsConfig, WalkConfig
from kda.backends.sm90.reverse_config import ReverseConfig
from kda.model.bundles import Save
from kda.model.force import Force
from kda.model.problem import Problem
from ptxkit.compile.errors import BuildError

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]

CALLS = ONE_GRID | CALLS_OF_64_CHANNELS


@rows_of(CALLS, "three heads", "64 channels, packed", commit=["packed", "64 channels", "one gate per head"])
def test_gradients_have_the_bits_of_both_kernels_apart(name, force):
    found, expected, session = both_ways(CALLS[name], "sm90", force)
    assert_nothing_found(session)
    assert_the_same(found, expected)


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("order", MIXED, ids=str)
@pytest.mark.parametrize("name", [
    "three heads", "packed", "64 channels", "64 channels, packed", "segments", "segments, 64 channels, packed"
])
def test_any_order_of_warps_and_CTAs_gives_the_same_bits(name, order, force):
    found, expected, session = both_ways(CALLS[name], "sm90", force, **order)
    assert_nothing_found(session)
    assert_the_same(found, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [dict(T=200, HV=2), dict(lengths=(65, 0, 1, 130), HV=2, **FAST)], ids=str)
def test_gradients_are_those_of_the_definition(words, force):
    force(**REVERSE.forced | TWO)
    check_gradients(Call(REVERSE, words).case(), "sm90")


@pytest.mark.parametrize("words", [
    dict(lengths=(65, 0, 1, 130), padding=140, HV=2),
    pytest.param(dict(T=150, HV=2, **SMALL), marks=pytest.mark.exhaustive),
], ids=str)
def test_what_was_saved_gives_the_same_bits(words, force):
    """dh has memory of its own if the tiles were saved; dq comes where r was unless r was saved."""
    assert_what_was_saved_gives_the_same_bits(words, "sm90", force)


def planned(words="T=8192 H=64", **force):
    p = Problem.parse(f"bfloat16 bounded l2norm beta=sigmoid backward {words}")
    return plan.training_plan(dataclasses.replace(p, force=Force(**force)), 132)


@pytest.mark.parametrize(("words", "one_grid"), [
    ("T=8192 H=64", True), ("T=8192 H=24", True), ("T=1024 H=32", True), ("T=8192 N=8 packed H=64 K=64 V=64", True),
    ("T=8192 H=16", True), ("T=32768 H=8", True), ("T=4096 H=12", True), ("T=256 H=64", False), ("T=512 H=8", False),
])
def test_it_runs_where_it_was_faster(words, one_grid):
    """There are items enough for all SMs."""
    assert (Save.OWN in planned(words).reverse) == one_grid
    assert not planned(words, reverse=False).reverse


def test_where_tiles_are_made_again_dh_lies_over_them():
    for save in (Save.NOTHING, Save.OWN):
        (one,) = filter(None, planned().back(save))
        assert one.remade == one.grads.shares_over_h == (save is Save.NOTHING)
    assert [type(x) for x in planned().back(Save.STATES) if x] == [WalkConfig, GradsConfig]    # dg needs more memory
    assert [x.remade for x in planned(reverse=True).back(Save.STATES) if x] == [True]
    assert not planned("T=0 H=16", reverse=True).reverse


@pytest.mark.parametrize(("words", "chunks", "walks", "walkers"), [
    ("T=8192 H=16", None, 4 * 16, 32), ("T=8192 H=16", 128, 2 * 16, 32), ("T=8192 H=16", 0, 16, 16),
    ("T=32768 H=8", None, 8 * 8, 32), ("T=4096 H=12", None, 4 * 12, 48),
])
def test_where_sequences_are_cut_it_walks_over_segments(words, chunks, walks, walkers):
    """Their last states have gradients that were found before."""
    found = planned(words, segment_chunks=chunks)
    cut = chunks != 0
    assert [type(x) for x in found.back(Save.OWN) if x] == [*(WalkConfig, ComposeConfig)[: 2 * cut], ReverseConfig]
    one = found.reverse[Save.OWN]
    assert one.config.walk.cut == cut
    assert (one.walks, one.walkers) == (walks, walkers)


@pytest.mark.parametrize("words", ["gate_per_head=true", "g_dtype=float32", "gate_per_head=true K=64 V=64"])
def test_without_rows_of_g_a_walk_has_a_stage_less(words):
    one, usual = (planned(f"T=8192 H=64 {x}").reverse[Save.OWN].config for x in (words, ""))
    assert one.why_invalid() is None and one.walk.stages == usual.walk.stages - 1
    stages = dataclasses.replace(one.walk, stages=usual.walk.stages)
    assert "below the mbarriers" in dataclasses.replace(one, walk=stages).why_invalid()


@pytest.mark.parametrize(("words", "halves"), [
    ("T=8192", 0), ("T=8161", 0), ("T=8160 B=2", 128), ("T=8192 N=5 packed", 320), ("T=8160 K=64 V=64", 0),
])
def test_the_second_half_of_dh_of_a_last_tile_lies_behind_all_tiles(words, halves):
    assert planned(f"H=64 {words}").reverse[Save.OWN].spare == halves * 64 * 128 * 2


@pytest.mark.parametrize(("words", "walkers"), [
    ("T=8192 H=64", 32), ("T=8192 H=96", 32), ("T=8192 H=32", 32), ("T=8192 H=128", 32), ("T=8192 N=8 packed H=64", 32),
    ("T=8192 H=80", 40), ("T=8192 H=54", 54),
])
def test_so_many_CTAs_walk_that_the_others_do_not_wait(words, walkers):
    found = planned(words, reverse=True, segment_chunks=0).reverse[Save.OWN]
    assert (found.grid, found.walkers) == (132, walkers)


@pytest.mark.parametrize("K", [64, 128])
def test_an_SM_has_room_for_as_many_CTAs_as_are_launched(K):
    found = planned(f"T=8192 H=64 K={K} V={K}", reverse=True).reverse[Save.OWN]
    config = found.config
    registers = 32 * sum(count * warps for count, warps in zip(config.registers, (4 * K // 64, 4)))
    assert found.grid == 132 * config.grads.ctas == 132 * 128 // K
    assert config.grads.ctas * registers <= 65536 and config.grads.ctas * (config.shared + 1024) <= 228 << 10


def test_a_walk_has_its_stages_where_values_and_rows_are_later():
    config = planned(reverse=True).reverse[Save.OWN].config
    more = dataclasses.replace(config, walk=dataclasses.replace(config.walk, stages=5))
    with pytest.raises(BuildError, match=r"a CTA that walks has 231,808 bytes below the mbarriers; found 245,760"):
        more.require_valid()


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [
    "", "K=64 V=64", "packed H=1 HV=2", "packed softplus state_dtype=float32 final_state=true",
])
@pytest.mark.parametrize("save", [Save.OWN, Save.NOTHING])
def test_no_product_waits_for_another(words, save, tmp_path):
    found = planned(f"T=8192 H=64 {words}", reverse=True, segment_chunks=0).reverse
    has_products_that_wait_for_no_other(launch.kernel(found[save].config), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("save", [Save.OWN, Save.NOTHING, None])
@pytest.mark.parametrize("words", ["", "K=64 V=64", "packed", "packed K=64 V=64"])
def test_waits_repeat_where_they_are(words, save, tmp_path):
    """Also in grads alone, where there is no one grid."""
    found = planned(f"T=8192 H=64 {words}", reverse=True, segment_chunks=0)
    config = found.reverse[save].config if save else found.grads
    repeats_waits_where_they_are(launch.kernel(config), tmp_path)
