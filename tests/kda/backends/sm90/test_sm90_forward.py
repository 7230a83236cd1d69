"""The Hopper forward, run on the CPU from its PTX: whole calls against the definition, clean in several schedules."""

import dataclasses

import pytest
import torch
from cute_calls import (
    RAGGED,
    called,
    changed,
    check,
    enters_chunks_with_the_final_states_of_what_comes_before,
    hands_states_through_sequences_of_no_tokens,
    has_products_that_wait_for_no_other,
    has_the_same_bits_in_any_order_of_warps,
    kept_nowhere,
    reads_nothing_before_the_kernel_ahead_is_done,
    refusals,
    rows_of,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import kda
from kda.backends.sm90 import launch
from kda.backends.sm90.configs import ChainConfig, PrepareConfig
from kda.model.bundles import Save
from kda.model.host import host_of
from kda.routing.dispatch import weigh
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture
from ptxkit.compile.errors import BuildError
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_apart")]

OPTIONS = {
    "one chunk and a part of one": dict(T=33),
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "K = V = 64": dict(T=100, K=64, V=64),
    "K = 64, V = 128": dict(T=40, K=64),
    "packed, GVA": dict(HV=2, **RAGGED),
    "packed, many tokens of none": dict(HV=2, padding=140, **RAGGED),
    "no initial state, beta up to 2": dict(T=40, initial_state=False, beta="2*sigmoid"),
    "given beta": dict(T=40, beta="given"),
    "gates that forget": dict(T=100, regime="fast"),
    "one token": dict(T=1),
    "softplus gate": dict(T=100, gate="softplus"),
    "softplus gate that forgets, packed": dict(gate="softplus", regime="fast", HV=2, **RAGGED),
    "given decays, no l2norm": dict(T=70, gate="given", l2norm=False),
    "bounded gate, no l2norm, K = V = 64": dict(T=40, K=64, V=64, l2norm=False),
}


@rows_of(OPTIONS, "K = V = 64",
         commit=["a batch, GVA", "K = 64, V = 128", "bounded gate, no l2norm, K = V = 64"])
def test_a_call_is_the_definition(name):
    check(make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | OPTIONS[name]))


def test_states_may_be_v_first():
    check(make_inputs(T=40, H=1, K=64, V=64, gate="bounded"), state_v_first=True)


@pytest.mark.spread(every=8, first=1)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("C", [32, 64])
def test_states_that_enter_chunks_are_final_states_of_what_comes_before(C, v_first):
    lengths = (130, 0, 1, 64)
    case = make_inputs(lengths, padding=9, H=1, HV=2, K=64, V=64, gate="bounded", initial_state=False)
    found = enters_chunks_with_the_final_states_of_what_comes_before(
        case, "sm90", chunk_size=C, state_v_first=v_first
    )
    assert found.shape == (1, sum(-(-n // C) for n in lengths), 2, 64, 64) and found.dtype == torch.bfloat16


def test_g_and_beta_may_be_float32_and_states_bfloat16():
    case = make_inputs(T=40, H=1, K=64, V=64, gate="bounded")
    wide = dict.fromkeys(("g", "beta"), lambda x: x.float())
    check(changed(case, initial_state=lambda x: x.bfloat16(), **wide))


def test_memory_may_lie_in_any_order():
    case = make_inputs(T=40, H=2, K=64, V=64, gate="bounded")
    strided = {n: (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)) for n in ("q", "k", "v", "g", "beta")}
    (found, _), (expected, _) = called(changed(case, **strided)), called(case)
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("shape", [dict(B=2, T=0), dict(lengths=(0, 0), padding=40)], ids=str)
def test_sequences_of_no_tokens_hand_their_states_through(shape):
    case = make_inputs(H=1, HV=2, K=64, V=64, gate="bounded", **shape)
    hands_states_through_sequences_of_no_tokens(case)


def test_a_hopper_gpu_picks_it_and_its_backward_if_both_head_dims_are_equal():
    door = SimulatedDoor("sm90", parse("sm90"))
    case = make_inputs(T=33, H=1, K=64, V=64, gate="bounded")
    assert door.call(case, False).keys() == {"o", "ht"} and door.launches == 2 and not door.findings
    mixed = make_inputs(T=33, H=1, K=128, V=64, gate="bounded")
    taken = [weigh(each.problem("backward"), host_of("sm90")).backend for each in (case, mixed)]
    assert taken == ["sm90", "triton"]


REFUSED = {
    "dtype=float16": "sm90.dtype", "K=96": "sm90.head_dim", "V=256": "sm90.head_dim",
    "backward K=64": "sm90.backward_shape",
    "recurrent": "sm90.chunks", "disable_recompute=true": "sm90.keeps", "N=70000 packed": "sm90.size",
    "beta_per_value=true": "sm90.beta",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_do_is_refused_with_a_way_out(words):
    assert refusals(f"bounded lower_bound=-5 l2norm {words}", "sm90") == [REFUSED[words]]


def test_no_kernel_keeps_all_that_a_backward_reads():
    case = make_inputs(T=33, H=1, K=64, V=64, gate="bounded")
    with pytest.raises(BuildError, match=r"keeps what its own backward reads, or A_qk and A_inv, not all"):
        launch.forward(case.problem(), case.inputs, Save.ALL)


@pytest.mark.spread(every=6)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("schedule", [1, 2, 3])
def test_any_order_of_warps_gives_the_same_bits(schedule, gate):
    case = make_inputs(H=1, HV=2, K=64, V=64, gate=gate, **RAGGED)
    has_the_same_bits_in_any_order_of_warps(case, schedule=schedule, early=True)


@pytest.mark.parametrize("name, change", {
    "every token at the lower bound": dict(g=lambda x: torch.full_like(x, 1e9)),
    "gates saturated on and off in turn": dict(
        g=lambda x: torch.full_like(x, -20.0).index_fill(1, torch.arange(0, x.shape[1], 2), 20.0)
    ),
    "no decay at all": dict(g=lambda x: torch.full_like(x, -1e9)),
    "identical keys": dict(k=lambda x: x[:, :1].expand(x.shape).contiguous(), g=lambda x: torch.full_like(x, -30.0)),
    "keys and values of 2^12": dict(k=lambda x: 4096 * x, v=lambda x: 4096 * x),
}.items())
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_gates_and_keys_at_their_limits_are_the_definition(gate, name, change):
    found = check(changed(make_inputs(T=70, H=1, K=64, V=64, gate=gate), **change))
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_no_output_depends_on_later_tokens(gate):
    case = make_inputs(T=70, H=1, K=64, V=64, gate=gate)
    found = called(case)[0]["o"]
    for t in (1, 9, 31, 32, 50):
        def later(x, t=t):
            return torch.cat((x[:, :t], torch.randn(x[:, t:].shape).to(x.dtype)), 1)

        other = changed(case, **dict.fromkeys(("q", "k", "v", "g", "beta"), later))
        assert torch.equal(called(other)[0]["o"][:, :t], found[:, :t]), t


def test_alone_and_packed_have_the_same_bits():
    lengths = (65, 0, 1, 30)
    case = make_inputs(lengths, H=1, K=128, V=128, gate="bounded")
    packed, start = called(case)[0]["o"], 0
    for n, length in enumerate(lengths):
        if length:
            rows = {name: case.keywords[name][:, start : start + length] for name in ("q", "k", "v", "g", "beta")}
            state = case.keywords["initial_state"][n : n + 1]
            spec = dataclasses.replace(case.spec, lengths=None, B=1, T=length)
            alone = dataclasses.replace(case, spec=spec, keywords=case.keywords | rows | {
                "initial_state": state, "cu_seqlens": None})
            assert torch.equal(called(alone)[0]["o"], packed[:, start : start + length])
        start += length


@pytest.mark.parametrize("kind", [PrepareConfig, ChainConfig], ids=lambda kind: kind.__name__)
def test_kernels_take_the_shared_memory_that_their_configurations_say(kind, monkeypatch):
    """With 16 bytes less they reach beyond it."""
    enough = kind.shared.fget
    monkeypatch.setattr(kind, "shared", property(lambda config: enough(config) - 16))
    kept_nowhere(monkeypatch)
    _, session = called(make_inputs(T=200, H=1, K=64, V=64, gate="bounded"))
    assert any(finding.kind == "out-of-bounds" for finding in session.findings)


def test_a_kernel_reads_nothing_before_the_kernel_ahead_of_it_is_done():
    case = make_inputs(**RAGGED, H=1, K=64, V=64, gate="bounded")
    with capture(arch="sm90") as session:
        launch.forward(case.problem(), case.inputs, Save.PRODUCTS)
    assert [launched.pdl for launched in session.launches] == [False, True, False, False]
    for launched in session.launches:
        if launched.pdl:
            reads_nothing_before_the_kernel_ahead_is_done(launched.kernel)
        else:
            assert "griddepcontrol.wait" not in launched.kernel.ptx


def test_no_product_waits_for_another(tmp_path):
    with capture(arch="sm90") as session:
        kda.chunk_kda_fwd(**make_inputs(T=33, H=1, K=128, V=128, gate="bounded").keywords, backend="sm90")
    for launched in session.launches:
        has_products_that_wait_for_no_other(launched.kernel, tmp_path)

