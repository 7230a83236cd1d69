"""The Blackwell forward of few heads: sequences cut into segments, on the CPU from PTX."""

import pytest
import torch
from cute_calls import (
    COMMIT,
    called,
    changed,
    check,
    looks_at_no_later_token,
    reads_nothing_before_the_kernel_ahead_is_done,
)
from kernel_faults import assert_a_call_notices, plant
from sm100_faults import SEGMENTS as FAULTS

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.common.cute.configs import JoinConfig
from kda.backends.sm100 import launch, plan
from kda.model.host import host_of
from kda.model.problem import Problem
from kda.tools.verify.cases import make_inputs

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "three_segments")]


@pytest.fixture
def three_segments(force):
    force(segments=3)


def case_of(K=128, **options):
    return make_inputs(**dict(H=1, K=K, V=K, gate="bounded") | options)


CASES = {
    "GVA, the last segment of six tokens": dict(T=390, HV=2),
    "a batch, a segment without tokens": dict(B=2, T=60),
    "packed, GVA": dict(lengths=(300, 0, 1, 130), padding=9, HV=2),
    "no initial state, heads that remember": dict(T=200, initial_state=False, regime="slow"),
    "softplus gate that forgets": dict(T=200, gate="softplus", regime="fast"),
    "one block of rows and a part of one": dict(T=900),
}


@pytest.mark.spread(every=12, first=6)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("K", [128, 64])
def test_a_call_that_is_cut_is_the_definition(name, K):
    case = case_of(K, **CASES[name])
    assert plan.plan(case.problem(), 148, None).compose
    check(case, backend="sm100")


@pytest.mark.exhaustive
@pytest.mark.parametrize("K", [128, 64])
def test_states_may_be_v_first_and_bfloat16(K):
    case = changed(case_of(K, T=140), initial_state=lambda x: x.bfloat16())
    found, expected = [check(case, backend="sm100", state_v_first=v_first) for v_first in (True, False)]
    assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", range(1, 6))
@pytest.mark.parametrize("K", [128, 64])
def test_any_order_of_warps_gives_the_same_bits(schedule, K):
    case = case_of(K, lengths=(200, 0, 65), HV=2)
    expected, _ = called(case, backend="sm100")
    found, session = called(case, backend="sm100", schedule=schedule, early=True)
    assert len(session.launches) == 3 and not session.findings
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.exhaustive
def test_nothing_depends_on_later_tokens():
    looks_at_no_later_token(case_of(T=200), "sm100", 100)


@pytest.mark.parametrize("options", ["batch_invariant=true", "intermediate_states=true", "N=0 packed"])
def test_requested_bits_and_states_of_whole_sequences_are_kept(options, force):
    force()
    assert plan.segments_of(Problem.parse(f"bounded l2norm T=32768 H=4 {options}"), 148) == 1


@pytest.mark.parametrize("words, pieces", {
    "T=8192 H=8": 5, "T=8192 H=16": 3, "T=8192 H=32": 2, "T=8192 H=40": 1, "T=8192 H=96": 1, "T=1024 H=8": 1,
    "T=32768 H=8": 5, "T=32768 H=1": 21, "T=8192 H=8 N=4 packed": 1, "T=65536 H=8 N=2 packed": 3,
}.items())
def test_shapes_alone_say_how_many_segments_there_are(words, pieces, force):
    force()
    assert plan.segments_of(Problem.parse(f"bounded l2norm {words}"), 148) == pieces


@pytest.mark.parametrize("K", [64, pytest.param(128, marks=COMMIT)])
def test_kernels_that_follow_read_nothing_before_the_kernel_ahead_is_done(K):
    case = case_of(K, T=100)
    configs = plan.plan(case.problem(), 148, None)
    for config in (configs.compose, configs.join):
        kernel = launch.kernel(config, plan.target((10, 0)))
        assert config.pdl and kernel.spills <= 16 * isinstance(config, JoinConfig)
        reads_nothing_before_the_kernel_ahead_is_done(kernel)


def test_all_kernels_of_a_class_are_known_ahead():
    for words in ("", "packed", "batch_invariant=true"):
        p = Problem.parse(f"bounded l2norm K=128 V=128 final_state=true {words}")
        names = sorted({recipe.name for recipe in plan.recipes(p, host_of("sm100"))})
        recorded = ["fused", "grads", "operands", "record", "reverse", "shares", "walk"]
        more = {"": ["compose", "join"], "packed": ["compose", "join", "tables"], "batch_invariant=true": []}[words]
        assert names == sorted(recorded + more)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch):
    plant(fault, tmp_path, monkeypatch, "sm100")
    assert_a_call_notices(fault, case_of(T=200), "sm100")
