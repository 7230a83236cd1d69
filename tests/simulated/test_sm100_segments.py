"""The Blackwell forward of few heads: sequences cut into segments, on the CPU from PTX."""

import pytest
import torch
from cute_calls import (
    called,
    changed,
    check,
    kept_nowhere,
    looks_at_no_later_token,
    plant,
    reads_nothing_before_the_kernel_ahead_is_done,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm100 import launch, plan
from kda.problem import Problem
from kda.simulator.chips import host_of
from kda.verify.cases import make_inputs

pytestmark = pytest.mark.usefixtures("one_thread", "three_segments")


@pytest.fixture
def three_segments(monkeypatch):
    monkeypatch.setattr(plan, "PIECES", 3)
    kept_nowhere(monkeypatch, launch)


def case_of(**options):
    return make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | options)


CASES = {
    "GVA, the last segment of six tokens": dict(T=390, HV=2),
    "a batch, a segment without tokens": dict(B=2, T=60),
    "packed, GVA": dict(lengths=(300, 0, 1, 130), padding=9, HV=2),
    "no initial state, heads that remember": dict(T=200, initial_state=False, regime="slow"),
    "softplus gate that forgets": dict(T=200, gate="softplus", regime="fast"),
    "one block of rows and a part of one": dict(T=900),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_is_cut_is_the_definition(name):
    case = case_of(**CASES[name])
    assert plan.plan(case.problem(), 148, None).compose
    check(case, backend="sm100")


def test_states_may_be_v_first_and_bfloat16():
    case = changed(case_of(T=140), initial_state=lambda x: x.bfloat16())
    found, expected = [check(case, backend="sm100", state_v_first=v_first) for v_first in (True, False)]
    assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.parametrize("schedule", range(1, 6))
def test_any_order_of_warps_gives_the_same_bits(schedule):
    case = case_of(lengths=(200, 0, 65), HV=2)
    expected, _ = called(case, backend="sm100")
    found, session = called(case, backend="sm100", schedule=schedule, early=True)
    assert len(session.launches) == 3 and not session.findings
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_nothing_depends_on_later_tokens():
    looks_at_no_later_token(case_of(T=200), 100, "sm100")


@pytest.mark.parametrize("options", ["batch_invariant=true", "intermediate_states=true", "N=0 packed"])
def test_who_asks_for_the_bits_or_states_of_whole_sequences_has_them(options, monkeypatch):
    monkeypatch.setattr(plan, "PIECES", None)
    assert plan.segments(Problem.parse(f"bounded l2norm T=32768 H=4 {options}"), 148) == 1


@pytest.mark.parametrize("words, pieces", {
    "T=8192 H=8": 5, "T=8192 H=16": 2, "T=8192 H=32": 1, "T=8192 H=96": 1, "T=1024 H=8": 1, "T=32768 H=8": 5,
    "T=32768 H=1": 21, "T=8192 H=8 N=4 packed": 1, "T=65536 H=8 N=2 packed": 2,
}.items())  # fmt: skip
def test_shapes_alone_say_how_many_segments_there_are(words, pieces, monkeypatch):
    monkeypatch.setattr(plan, "PIECES", None)
    assert plan.segments(Problem.parse(f"bounded l2norm {words}"), 148) == pieces


def test_kernels_that_follow_read_nothing_before_the_kernel_ahead_is_done():
    case = case_of(T=100)
    configs = plan.plan(case.problem(), 148, None)
    for config in (configs.compose, configs.join):
        kernel = launch.kernel(config, plan.target((10, 0)))
        assert config.early and not kernel.spills
        reads_nothing_before_the_kernel_ahead_is_done(kernel)


def test_all_kernels_of_a_class_are_known_ahead():
    for words in ("", "packed", "batch_invariant=true"):
        p = Problem.parse(f"bounded l2norm K=128 V=128 final_state=true {words}")
        names = sorted(recipe.name for recipe in plan.recipes(p, host_of("sm100")))
        once = ["compose", "fused", "fused", "join"]
        assert names == {"": once, "packed": sorted(once + once[1:]), "batch_invariant=true": ["fused"]}[words]


FUSED, JOIN = "sm100/fwd/fused", "sm100/fwd/join"
FAULTS = {
    "a first segment begins with nothing": (FUSED, "if piece == 0:", "if piece < 0:"),
    "all segments begin with the state that enters the sequence": (FUSED, "if piece == 0:", "if piece >= 0:"),
    "M is not transposed": (FUSED, "rank, thread, True)", "rank, thread, False)"),
    "the second walk has v": (
        FUSED, "    if answers:\n                    store", "    if False:\n                    store"
    ),
    "second walks write o": (FUSED, "response.toint() if answers", "o.toint() if answers"),
    "the last rows of o are left": (JOIN, "if own[r] < rows:", "if own[r] < rows - 1:"),
    "the state is read before all of it is there": (JOIN, "            cute.arch.sync_threads()\n", ""),
    "the segment before is left out": ("common/cute/compose", "begin + 1, end + 1", "begin + 1, end"),
    "a segment's tokens are another's": ("sm100/parts/segments", "begin + first,", "begin,"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch):
    plant(*FAULTS[fault], tmp_path, monkeypatch, "sm100")
    with pytest.raises(AssertionError):
        for schedule in (0, 1):
            check(case_of(T=200), backend="sm100", schedule=schedule, early=bool(schedule))
