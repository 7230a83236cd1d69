"""The float32 forward on the CPU, from its PTX: whole calls against the definition, clean in several schedules."""

import dataclasses

import pytest
import torch
from cute_calls import (
    COMMIT,
    RAGGED,
    changed,
    rows_of,
)
from kernel_faults import assert_a_call_notices, plant
from sm89_calls import D128, case_of, lacking, proven, seen
from sm89_faults import FORWARD as FAULTS

from kda.backends.common.routine import forget_routines
from kda.backends.sm89 import launch, plan
from kda.backends.sm89.configs import SMALLEST
from kda.model.bundles import Save
from kda.model.host import host_of, standing_in
from kda.model.problem import Problem
from kda.routing.dispatch import capabilities, route, weigh
from kda.tools.commands.selftest import is_here
from kda.tools.verify.definition import definition
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture
from ptxkit.compile.errors import BuildError
from ptxkit.compile.fetching import fetch_here

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "libnvrtc")]


# every option


@pytest.mark.parametrize("without", ["A_log", pytest.param("dt_bias", marks=COMMIT)])
def test_a_bounded_gate_may_lack_its_parameters(without):
    proven(lacking(case_of(T=70), without))


def test_a_scale_of_its_own():
    case = case_of(T=70)
    proven(dataclasses.replace(case, keywords=case.keywords | {"scale": -0.3}))


@pytest.mark.spread(every=16)
@pytest.mark.parametrize("columns", plan.COLUMNS)
@pytest.mark.parametrize("shape", [dict(T=140, C=32), dict(T=140, **D128), dict(HV=2, **RAGGED)], ids=str)
def test_columns_of_a_cta_change_no_bit(shape, columns, force):
    case = case_of(**shape)
    expected, _ = seen(case)
    force(columns=columns)
    found = proven(case)
    assert all(torch.equal(found[x], expected[x]) for x in expected)


def test_idle_chips_share_a_state_out_further():
    few, many = (case_of(T=1, H=H).problem() for H in (1, 64))
    assert [plan.columns(p, 132) for p in (few, many)] == [8, 32]
    assert plan.columns(dataclasses.replace(few, K=128, V=128, H=16, HV=16), 132) == 16


def test_inputs_are_left_alone():
    case = case_of(HV=2, padding=9, **RAGGED)
    copy = case.map(torch.clone)
    seen(copy)
    for name, x in case.keywords.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x.nan_to_num(7.0), copy.keywords[name].nan_to_num(7.0)), name


def test_more_sequences_than_threads_count_them():
    lengths = [int(n) for n in torch.randint(0, 90, (600,), generator=torch.Generator().manual_seed(1))]
    for C, dtype in ((32, torch.int32), (64, torch.int64)):
        p = Problem(K=64, V=64, C=C, N=600, T=sum(lengths), packed=True, dtype="float32")
        d = launch.Description(p, host_of("sm89"), str(dtype).removeprefix("torch."), Save.NOTHING, ["cu_seqlens"])
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
        with capture(arch="sm89") as session:
            (found,) = d.draft.done(d.where["first_chunk"])(offsets, [offsets])
        assert not session.findings
        assert found.tolist() == torch.tensor([0, *(-(-n // C) for n in lengths)]).cumsum(0).tolist()


# the same bits


# hard inputs, and how large the error is


def relative_errors(case):
    found, session = seen(case)
    assert not session.findings
    exact = definition(case, torch.float64, backward=False)
    return {n: float((found[n].double() - exact[n]).norm() / exact[n].norm()) for n in exact}


@pytest.mark.spread(every=6)
@pytest.mark.parametrize("gate, regime", [("bounded", "slow"), ("softplus", "slow"), ("softplus", "fast")])
@pytest.mark.parametrize("C", [32, 64])
def test_ordinary_inputs_have_errors_below_1e_6(gate, regime, C):
    errors = relative_errors(case_of(T=150, C=C, gate=gate, regime=regime, **D128))
    assert max(errors.values()) < 1e-6, errors


def test_keys_that_replace_each_other_have_errors_below_1e_6():
    """Identical ones, beta near 1, gates open: all of a value is taken back by the next token."""
    case = changed(case_of(T=100), k=lambda x: x[:, :1].expand_as(x).contiguous(),
                   beta=lambda x: torch.full_like(x, 8), g=lambda x: torch.full_like(x, -30))
    errors = relative_errors(case)
    assert max(errors.values()) < 1e-6, errors


LONG = dict(T=1600, initial_state=False)


@pytest.mark.slow
def test_a_memory_of_all_tokens_has_errors_below_3e_6():
    """Nothing is forgotten, keys and values have a mean: what a chunk cuts off would add up."""
    case = changed(case_of(**LONG), g=lambda x: torch.full_like(x, -1e9), v=lambda x: x + 2, k=lambda x: x + 0.3)
    errors = relative_errors(case)
    assert max(errors.values()) < 3e-6, errors


# faults

FAULTY = {"long": dict(T=150), "packed": dict(padding=9, lengths=(130, 0, 1, 30)), "128": dict(T=70, **D128),
          "per head": dict(T=70, HV=2, gate_per_head=True)}


@rows_of(FAULTS, "a token does not read what it wrote", "v is read before it is there",
         "the state is read before it is there")
def test_a_planted_fault_is_noticed(name, tmp_path, monkeypatch):
    fault = FAULTS[name]
    plant(fault, tmp_path, monkeypatch, "sm89")
    if fault.noticed == "drift":
        assert max(relative_errors(case_of(**LONG | dict(T=600))).values()) > 4e-7
    else:
        assert_a_call_notices(fault, case_of(**FAULTY[fault.case]), "sm89")


# the plan


OFFERED = [dict(K=D, V=D, C=C, gate=gate) for D in (64, 128) for C in (32, 64) for gate in ("softplus", "bounded")]


def offered(p):
    return plan.recipes(p, host_of("sm89"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("direction, packed", [("forward", False), ("forward", True), ("backward", True)])
@pytest.mark.parametrize("words", OFFERED, ids=str)
def test_no_kernel_spills_or_needs_more_than_every_gpu_has(words, packed, direction):
    p = Problem(direction=direction, dtype="float32", A_log=True, dt_bias=True, beta="sigmoid", qk_l2norm=True,
                packed=packed, **words)
    for recipe in offered(p):
        kernel = fetch_here(recipe)
        assert kernel.spills == 0 and kernel.registers <= 255, recipe
        assert kernel.shared + recipe.config.shared <= SMALLEST, recipe
        assert kernel.target.spelling == "sm_89"
        assert ".target sm_89" in kernel.ptx


@pytest.mark.exhaustive
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sizes_are_64_bits_wide(direction):
    for recipe in offered(Problem(K=64, V=64, dtype="float32", packed=True, direction=direction)):
        assert {param.type for param in fetch_here(recipe).params} <= {"u64", "f32"}


@pytest.mark.parametrize("config", ["prepare", "chain"])
def test_shared_memory_is_what_the_configuration_says(config, monkeypatch):
    """With 16 bytes less a kernel reaches beyond it."""
    kind = type(plan.plan(case_of(T=1).problem(), 1, None).steps[config][0])
    enough = kind.shared.fget
    monkeypatch.setattr(kind, "shared", property(lambda c: enough(c) - 16))
    forget_routines()
    _, session = seen(case_of(T=100))
    forget_routines()
    assert any(finding.kind == "out-of-bounds" for finding in session.findings)


def test_a_gpu_with_too_little_shared_memory_gets_an_error_with_the_bytes():
    host = dataclasses.replace(host_of("sm89"), smem=48 << 10)
    case = case_of(T=10)
    with pytest.raises(BuildError, match=r"prepare of K=64 V=64 C=64 needs [\d,]+ bytes .* allows 49,152.*triton"):
        launch.forward_routine(case.problem(), host, None, Save.NOTHING)


def test_kernels_built_ahead_are_those_of_calls_of_any_size():
    for packed, offsets in ((False, (None,)), (True, ("int32", "int64"))):
        for words in (dict(), dict(T=65536, H=1, HV=1), dict(B=4, N=4, H=64, HV=64), dict(T=0)):
            p = Problem(**dict(K=64, V=64, dtype="float32", packed=packed) | words)
            for dtype in offsets:
                found = plan.plan(p, 132, dtype)
                assert {plan.recipe(config) for config, _ in found.steps.values()} <= set(offered(p))


# dispatch


@pytest.mark.parametrize("arch", ["sm89", "sm90", "sm100", "sm110", "sm120", "sm121"])
def test_every_gpu_from_sm89_up_takes_float32_by_itself(arch):
    p = dataclasses.replace(case_of(T=33).problem(), device="cuda:0")
    assert weigh(p, host_of(arch)).backend == "sm89"
    assert weigh(dataclasses.replace(p, direction="backward"), host_of(arch)).backend == "sm89"
    with standing_in(host_of(arch)):
        assert route(p, "sm89", training=True, save=Save.PRODUCTS).backend == "sm89"


@pytest.mark.parametrize("arch, executed", [("sm86", False), ("sm89", True), ("sm90", True), ("sm120", True)])
def test_what_is_built_for_sm89_is_executed_on_later_gpus(arch, executed):
    (c,) = (c for c in capabilities() if c.backend == "sm89")
    with standing_in(host_of(arch)):
        assert is_here(c, plan.TARGET) is executed


def test_a_call_launches_two_kernels_and_a_packed_one_three():
    for shape, launches in ((dict(T=33), 2), (RAGGED, 3)):
        door = SimulatedDoor("sm89", plan.TARGET)
        assert door.call(case_of(**shape), False).keys() == {"o", "ht"}
        assert door.launches == launches and not door.findings


def test_an_older_gpu_is_refused():
    reasons = dict(weigh(case_of(T=1).problem(), host_of("sm86"), "sm89").tried)["sm89"]
    assert [r.split(":")[0] for r in reasons] == ["sm89.gpu"]


