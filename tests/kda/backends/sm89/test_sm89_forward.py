"""The float32 forward on the CPU, from its PTX: whole calls against the definition, clean in several schedules."""

import dataclasses

import pytest
import torch
from cute_calls import (
    COMMIT,
    LAYOUTS,
    RAGGED,
    changed,
    enters_chunks_with_the_final_states_of_what_comes_before,
    hands_states_through_sequences_of_no_tokens,
    has_the_bits_of_value_heads_with_q_and_k_of_their_own,
    has_the_bits_that_it_has_alone,
    has_the_same_bits_in_any_order_of_warps,
    looks_at_no_later_token,
    refusals,
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
from kda.routing.dispatch import capabilities, training_backend, weigh
from kda.tools.commands.selftest import is_here
from kda.tools.verify.definition import definition
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture
from ptxkit.compile.errors import BuildError
from ptxkit.compile.fetching import fetch_here

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "libnvrtc")]


def forget_steps():
    forget_routines()
    launch.kernel.cache_clear()


@pytest.fixture
def in_columns(monkeypatch):
    """Let a test say how many columns of the state a CTA has, whatever the chip."""

    def set_columns(columns):
        monkeypatch.setattr(plan, "columns", lambda p, sms: columns)
        forget_steps()

    yield set_columns
    monkeypatch.undo()
    forget_steps()


# every option

OPTIONS = {
    "one chunk and a part of one": dict(T=70),
    "the same, K=V=128": dict(T=70, **D128),
    "chunks of 32": dict(T=70, C=32),
    "chunks of 32, K=V=128, GVA": dict(T=70, C=32, HV=2, **D128),
    "one token": dict(T=1),
    "a batch, GVA": dict(B=2, T=70, H=2, HV=4),
    "packed, GVA": dict(HV=2, **RAGGED),
    "packed, chunks of 32, K=V=128": dict(C=32, **D128, **RAGGED),
    "packed, many tokens of none": dict(HV=2, padding=140, **RAGGED),
    "no initial state, beta up to 2": dict(T=70, initial_state=False, beta="2*sigmoid"),
    "given beta": dict(T=70, beta="given"),
    "gates that forget": dict(T=100, regime="fast"),
    "softplus gate": dict(T=100, gate="softplus"),
    "softplus gate that forgets, packed": dict(gate="softplus", regime="fast", HV=2, **RAGGED),
    "given decays, no l2norm": dict(T=70, gate="given", l2norm=False),
    "given decays that forget": dict(T=70, gate="given", regime="fast"),
}


@pytest.mark.spread(every=6)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_is_the_definition(name):
    proven(case_of(**OPTIONS[name]))


@pytest.mark.parametrize("without", ["A_log", pytest.param("dt_bias", marks=COMMIT)])
def test_a_bounded_gate_may_lack_its_parameters(without):
    proven(lacking(case_of(T=70), without))


def test_a_scale_of_its_own():
    case = case_of(T=70)
    proven(dataclasses.replace(case, keywords=case.keywords | {"scale": -0.3}))


@pytest.mark.spread(every=16)
@pytest.mark.parametrize("columns", plan.COLUMNS)
@pytest.mark.parametrize("shape", [dict(T=140, C=32), dict(T=140, **D128), dict(HV=2, **RAGGED)], ids=str)
def test_columns_of_a_cta_change_no_bit(shape, columns, in_columns):
    case = case_of(**shape)
    expected, _ = seen(case)
    in_columns(columns)
    found = proven(case)
    assert all(torch.equal(found[x], expected[x]) for x in expected)


def test_idle_chips_share_a_state_out_further():
    few, many = (case_of(T=1, H=H).problem() for H in (1, 64))
    assert [plan.columns(p, 132) for p in (few, many)] == [8, 32]
    assert plan.columns(dataclasses.replace(few, K=128, V=128, H=16, HV=16), 132) == 16


def test_states_may_be_v_first():
    case = case_of(T=70, HV=2)
    found, expected = proven(case, state_v_first=True), proven(case)
    assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.exhaustive
def test_offsets_may_be_int32():
    case = case_of(**RAGGED)
    narrow = changed(case, cu_seqlens=lambda x: x.int())
    assert torch.equal(seen(narrow)[0]["o"], seen(case)[0]["o"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_may_lie_in_any_order(layout):
    """Nothing is read at an address that is not a multiple of its size, either."""
    case = case_of(T=40, H=2)
    apart = case.map(lambda x: LAYOUTS[layout](x) if x.is_floating_point() else x)
    (found, session), (expected, _) = seen(apart), seen(case)
    assert not session.findings and all(torch.equal(found[name], expected[name]) for name in found)


def test_inputs_are_left_alone():
    case = case_of(HV=2, padding=9, **RAGGED)
    copy = case.map(torch.clone)
    seen(copy)
    for name, x in case.keywords.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x.nan_to_num(7.0), copy.keywords[name].nan_to_num(7.0)), name


@pytest.mark.spread(every=8, first=2)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("C", [32, 64])
def test_states_that_enter_chunks_are_final_states_of_what_comes_before(C, v_first):
    lengths = (70, 0, 1, 64)
    case = case_of(lengths=lengths, padding=9, HV=2, initial_state=False)
    found = enters_chunks_with_the_final_states_of_what_comes_before(
        case, "sm89", chunk_size=C, state_v_first=v_first
    )
    assert found.shape == (1, sum(-(-n // C) for n in lengths), 2, 64, 64)


NOTHING = [dict(B=2, T=0), dict(lengths=(0, 0), padding=40), dict(lengths=(), padding=9)]


@pytest.mark.parametrize("shape", NOTHING, ids=str)
def test_sequences_of_no_tokens_hand_their_states_through(shape):
    case = case_of(HV=2, **shape)
    hands_states_through_sequences_of_no_tokens(case, "sm89")


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


def test_a_value_head_of_its_own_has_the_bits_of_one_that_shares_q_and_k():
    has_the_bits_of_value_heads_with_q_and_k_of_their_own(case_of(T=70, HV=2), "sm89")


SHAPES = {"one": dict(T=140), "packed": RAGGED | dict(padding=9), "32, K=V=128": dict(T=70, C=32, **D128)}


@pytest.mark.spread(every=8, first=1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", [1, 2, 3])
def test_any_order_of_warps_gives_the_same_bits(schedule, shape):
    case = case_of(**SHAPES[shape])
    has_the_same_bits_in_any_order_of_warps(case, "sm89", schedule=schedule, early=schedule % 2 == 1)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("token", [1, 9, 33, 75])
def test_no_output_depends_on_later_tokens(gate, token):
    case = case_of(T=100, gate=gate)
    looks_at_no_later_token(case, token, "sm89")


def test_a_sequence_has_the_bits_that_it_has_alone_whatever_its_neighbours_hold():
    lengths = (33, 70, 21)
    case = case_of(lengths=lengths, initial_state=False)
    assert has_the_bits_that_it_has_alone(case, 33, 103, "sm89")[:, :33].isnan().all()


# hard inputs, and how large the error is


HARD = {
    "identical keys": dict(k=lambda x: x[:, :1].expand_as(x).contiguous()),
    "saturated gates": dict(g=lambda x: torch.where(x > 0, 1e4, -1e4).to(x.dtype)),
    "keys of zero": dict(k=torch.zeros_like),
    "q, k and v of 2^12": dict.fromkeys(("q", "k", "v"), lambda x: 4096 * x),
    "nothing forgotten": dict(g=lambda x: torch.full_like(x, -1e9)),
    "all of it forgotten at once": dict(g=lambda x: x.index_fill(1, torch.arange(3, 96, 9), 1e9)),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs_are_within_budget(name):
    proven(changed(case_of(T=100), **HARD[name]))


@pytest.mark.parametrize("size", [-1000.0, -1e6, -torch.inf])
def test_decays_whose_products_vanish_are_finite_and_correct(size):
    """A ratio of prefix products is 0 / 0 here, and a difference of float32 sums forgets what follows."""
    case = changed(case_of(T=70, gate="given"), g=lambda x: (0.01 * x).index_fill(1, torch.arange(3, 70, 9), size))
    assert proven(case)["o"].isfinite().all()


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

FAULTY = {"long": dict(T=150), "packed": dict(padding=9, lengths=(130, 0, 1, 30)), "128": dict(T=70, **D128)}


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


@pytest.mark.parametrize("arch", ["sm89", "sm90", "sm100", "sm120"])
def test_every_gpu_from_sm89_up_takes_float32_by_itself(arch):
    p = dataclasses.replace(case_of(T=33).problem(), device="cuda:0")
    assert weigh(p, host_of(arch)).backend == "sm89"
    assert weigh(dataclasses.replace(p, direction="backward"), host_of(arch)).backend == "sm89"
    with standing_in(host_of(arch)):
        assert training_backend(p, "sm89") == "sm89"


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


REFUSED = {
    "bfloat16": "sm89.dtype", "g_dtype=bfloat16": "sm89.dtype", "state_dtype=bfloat16": "sm89.dtype",
    "K=128": "sm89.head_dim", "V=32": "sm89.head_dim", "recurrent": "sm89.chunks",
    "backward T=1000000000 HV=80": "sm89.size",
    "disable_recompute=true": "sm89.keeps", "N=70000 HV=40000 packed": "sm89.size", "T=1000000000 HV=200": "sm89.size",
    "beta_per_value=true": "sm89.beta",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_do_is_refused_with_a_way_out(words):
    assert refusals(f"float32 K=64 V=64 bounded lower_bound=-5 l2norm {words}", "sm89") == [REFUSED[words]]


def test_an_older_gpu_is_refused():
    reasons = dict(weigh(case_of(T=1).problem(), host_of("sm86"), "sm89").tried)["sm89"]
    assert [r.split(":")[0] for r in reasons] == ["sm89.gpu"]


def test_no_kernel_keeps_all_that_a_backward_reads():
    case = case_of(T=33)
    with capture(arch="sm89"), pytest.raises(BuildError, match="Leave out disable_recompute"):
        launch.forward(case.problem(), case.inputs, Save.ALL)
