"""The Blackwell backward, run on the CPU from its PTX: what it alone promises, and planted faults."""

import dataclasses
from pathlib import Path

import pytest
import torch
from cute_calls import changed, drawn, gradients, judged_gradients, rows_of
from kernel_faults import assert_noticed, plant
from sm100_faults import BACKWARD as FAULTS

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from benchmarks.counted import blackwell_step as counted
from kda.backends.common import training_plan
from kda.backends.common.cute.training import LOAD_WARPS
from kda.backends.sm100 import launch, plan
from kda.backends.sm100.capability import ARCHS
from kda.backends.sm100.configs import TMEM, GradsConfig, KeepingConfig
from kda.backends.sm100.reverse_config import ReverseConfig
from kda.model.host import host_of
from kda.model.problem import Problem
from kda.routing.dispatch import weigh
from kda.tools.verify.parity import prove
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_apart")]


@pytest.mark.exhaustive
def test_grouped_heads_that_are_none_have_the_bits_of_plain_ones():
    """HV == H, with q and k of every value head written out."""
    case = drawn(T=70, HV=2)
    plain = changed(case, q=lambda q: q.repeat_interleave(2, 2), k=lambda k: k.repeat_interleave(2, 2))
    plain = dataclasses.replace(plain, spec=dataclasses.replace(case.spec, H=2))
    (found, _), (expected, _) = gradients(case, "sm100"), gradients(plain, "sm100")
    assert all(torch.equal(found[name], expected[name]) for name in ("dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"))
    for name in ("dq", "dk"):
        summed = expected[name].float().sum(2, keepdim=True).bfloat16()
        assert torch.equal(found[name], summed)


@pytest.mark.parametrize("sizes, backend", [("K=64 V=64", "sm100"), ("K=64 V=128", "triton"), ("K=32 V=32", "triton")])
def test_other_head_dims_go_to_triton(sizes, backend):
    p = Problem.parse(f"bfloat16 backward beta=sigmoid bounded l2norm {sizes}")
    assert weigh(p, host_of("sm100")).backend == backend


def test_tensor_memory_of_grads_is_shared_by_as_many_ctas_as_an_sm_has():
    for K in (64, 128):
        config = plan.TRAINING.grads(Problem.parse(f"bfloat16 backward bounded l2norm K={K} V={K}"))
        assert config.tmem.end <= config.allocated and config.ctas * config.allocated <= TMEM
        assert config.ctas * (config.shared + 1024) <= 228 * 1024
        threads = 32 * config.math_warps, 32 * LOAD_WARPS
        assert config.ctas * sum(n * each for n, each in zip(threads, config.registers)) <= 65536


WITHOUT_SPILLS = "bounded dt_bias=true l2norm beta=sigmoid", "bounded dt_bias=true l2norm beta=sigmoid packed"


@pytest.mark.exhaustive
@pytest.mark.parametrize("K", [128, 64])
def test_no_kernel_of_a_bounded_gate_spills_but_those_with_grads_64_bytes_and_the_one_that_keeps_40(K):
    for words in WITHOUT_SPILLS:
        for arch in ARCHS:
            p = Problem.parse(f"bfloat16 {words} K={K} V={K} state_dtype=float32 final_state=true")
            for config in dict.fromkeys(training_plan.all_configs(plan.TRAINING, p)):
                bytes_ = launch.kernel(config, parse(arch)).spills if config else 0
                most = {GradsConfig: 64, ReverseConfig: 64, KeepingConfig: 40}.get(type(config), 0)
                assert bytes_ <= most, (config, arch)


SIZES = {"long": {}, "64": dict(K=64, V=64)}


@rows_of(FAULTS, commit=["G is read before it is there"])
def test_a_planted_fault_is_noticed(name, tmp_path, monkeypatch, force):
    fault = FAULTS[name]
    plant(fault, tmp_path, monkeypatch, "sm100")
    force(sms=1)                                                                # one or two items after another
    case = drawn(T=150, **SIZES[fault.case])
    found, session = gradients(case, "sm100", strict=True)
    assert_noticed(fault, session, lambda: judged_gradients(case, found, "sm100"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["a gate gains what a key loses", "dh r^T comes from h"])
def test_a_fault_of_grads_is_one_of_that_stage(name, tmp_path, monkeypatch):
    plant(FAULTS[name], tmp_path, monkeypatch, "sm100")
    found = prove(SimulatedDoor("sm100", parse("sm100")), "bwd/grads")
    assert not found.passed and any("dg: " in line for line in found.details)


@pytest.mark.exhaustive
@pytest.mark.commit
def test_its_page_says_what_is_counted():
    """At most what was asked for: 60,000 instructions, 5,600 bytes and 22 MFLOP back, 26,000 instructions up."""
    root = Path(__file__).parents[4]
    found, page = counted.counts(), (root / "docs" / "data" / "counted" / "sm100_backward.json").read_text()
    assert [row for row in counted.of_kernels(found) + counted.of_heads(found) if row not in page] == []
    up, back = (counted.total(found, names) for names in (counted.FORWARD, counted.BACKWARD))
    assert up.warp_instructions <= 26_000 and back.warp_instructions <= 60_000
    assert back.bytes <= 5_600 and back.tensor_flops <= 22e6
