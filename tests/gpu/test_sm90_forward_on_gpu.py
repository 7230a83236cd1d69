"""The Hopper forward on a GPU that it is made for: every option in both gate regimes against float64, the same bits
where they are promised, CUDA graphs, nothing that waits, lengths of models.
"""

import dataclasses

import pytest
import torch
from hopper import ON_HOPPER
from on_a_gpu import DEVICE, assert_causal, assert_right, captured, nothing_waits, write_others

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import kda
from kda.backends.sm90 import plan
from kda.model.force import forced
from kda.model.host import detect
from kda.tools.verify.cases import REGIMES, make_inputs
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import packed_vs_alone, run_vs_run, whole_call

pytestmark = ON_HOPPER

OPTIONS = {
    "one token": dict(T=1),
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "K = V = 64": dict(T=300, K=64, V=64),
    "K = 64, V = 128": dict(T=40, K=64),
    "packed, many tokens of none": dict(lengths=(65, 0, 1, 300), HV=2, padding=140),
    "no initial state, beta up to 2": dict(T=300, initial_state=False, beta="2*sigmoid"),
    "softplus gate": dict(T=300, gate="softplus"),
    "given decays, no l2norm": dict(T=300, gate="given", l2norm=False),
    "a long sequence": dict(T=4100, H=2),
}
SERVED = dict(lengths=(1300, 547, 0, 1, 963), padding=3, H=2, HV=4, K=128, V=128)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_definition(name, regime):
    case = make_inputs(**dict(H=1, K=128, V=128, gate="bounded", regime=regime) | OPTIONS[name])
    assert_right(whole_call(Door("sm90", DEVICE), case, backward=False)[0])


@pytest.mark.parametrize("name", ["a batch, GVA", "K = V = 64", "packed, many tokens of none", "softplus gate"])
def test_gradients_are_the_definition_made_by_triton_of_what_is_kept(name):
    case = make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | OPTIONS[name])
    assert_right(whole_call(Door("sm90", DEVICE), case, backward=True)[0])


@pytest.mark.parametrize("T, H", [(300, 2), (4100, 1)])
def test_states_that_enter_chunks_are_those_of_the_portable_backend(T, H):
    x = make_inputs(T=T, H=H, K=128, V=128, gate="bounded", device=DEVICE).keywords
    h, expected = (
        kda.chunk_kda_fwd(**x | {"backend": name, "return_intermediate_states": True}).h.float()
        for name in ("sm90", "triton")
    )
    assert h.shape == expected.shape and (h - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("shape", [dict(T=33), dict(T=2100, H=40), dict(B=3, T=700, H=70), SERVED], ids=str)
def test_one_kernel_has_the_bits_of_two(shape, force):
    case = make_inputs(**dict(H=1, K=128, V=128, gate="bounded", device=DEVICE) | shape)

    def found(fused):
        force(form="one kernel" if fused else "two kernels")
        assert plan.plan(case.problem(), detect(DEVICE).sms).name == forced().form
        out = kda.chunk_kda_fwd(**case.keywords, backend="sm90")
        return out.o, out.final_state

    runs, expected = [found(True) for _ in range(5)], found(False)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, expected))


@pytest.mark.parametrize("shape", [dict(T=33), dict(T=2100, H=70), dict(B=3, T=700, H=70), SERVED], ids=str)
@pytest.mark.parametrize("ctas, dims", [
    (1, dict(V=64)), (1, dict(V=64, gate="softplus")), (2, dict(V=64)), (2, dict(V=64, gate="softplus")),
    (1, dict(K=64, V=64)), (2, dict(K=64, V=64)), (2, dict(K=64)), (4, dict(K=64)),
], ids=str)
def test_one_kernel_of_other_dims_has_the_bits_of_two(ctas, dims, shape, force):
    case, found = make_inputs(**dict(H=1, K=128, V=128, gate="bounded", device=DEVICE) | shape | dims), {}
    for fused in (False, True):
        force(form="one kernel" if fused else "two kernels", ctas=ctas)
        planned = plan.plan(case.problem(), detect(DEVICE).sms)
        assert planned.name == forced().form and (not fused or planned.clusters.ctas == ctas)
        found[fused] = [kda.chunk_kda_fwd(**case.keywords, backend="sm90") for _ in range(3)]
    expected, *_ = found[False]
    for out in (*found[False], *found[True]):
        assert torch.equal(out.o, expected.o) and torch.equal(out.final_state, expected.final_state)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("shape", [dict(T=8192, H=16), dict(T=2100, H=12, V=64), SERVED | dict(HV=2)], ids=str)
def test_makers_and_walkers_are_within_the_budget_and_repeat_their_bits(shape, gate, force):
    case = make_inputs(**dict(H=1, K=128, V=128, gate=gate, device=DEVICE) | shape)
    force(form="stream")
    assert plan.plan(case.problem(), detect(DEVICE).sms).name == "stream"
    runs = [kda.chunk_kda_fwd(**case.keywords, backend="sm90") for _ in range(5)]
    assert all(torch.equal(run.o, runs[0].o) and torch.equal(run.final_state, runs[0].final_state) for run in runs)
    force(form="two kernels")
    two = kda.chunk_kda_fwd(**case.keywords, backend="sm90")
    for found, expected in ((runs[0].o, two.o), (runs[0].final_state, two.final_state)):
        assert (found.float() - expected.float()).norm() < 1e-2 * expected.float().norm()


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_two_runs_give_the_same_bits(gate):
    assert_right(run_vs_run(Door("sm90", DEVICE), make_inputs(**SERVED, gate=gate), backward=False))


def test_alone_and_packed_have_the_same_bits():
    assert_right(packed_vs_alone(Door("sm90", DEVICE), make_inputs(**SERVED, gate="bounded"), backward=False))


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_no_output_depends_on_later_tokens(gate):
    x = make_inputs(T=300, H=2, K=128, V=128, gate=gate).map(lambda x: x.to(DEVICE)).keywords | {"backend": "sm90"}
    assert_causal(x, (1, 16, 31, 32, 33, 64, 255, 299))


def test_a_graph_replays_with_other_numbers_and_lengths():
    x = make_inputs(**SERVED, gate="bounded").map(lambda x: x.to(DEVICE)).keywords | {"backend": "sm90"}
    kda.chunk_kda_fwd(**x)
    with nothing_waits():
        graph, found = captured(lambda: kda.chunk_kda_fwd(**x))
    random = torch.Generator(DEVICE).manual_seed(1)
    for step in range(3):
        write_others(x, random, step)
        graph.replay()
        expected = kda.chunk_kda_fwd(**x)
        assert torch.equal(found.o, expected.o) and torch.equal(found.final_state, expected.final_state)


def test_it_agrees_with_the_portable_backend_at_the_size_of_a_model():
    x = make_inputs(T=8192, H=16, K=128, V=128, gate="bounded", initial_state=False, device=DEVICE).keywords
    o, expected = (kda.chunk_kda_fwd(**x | {"backend": name}).o.double() for name in ("sm90", "triton"))
    assert (o - expected).norm() < 1e-2 * expected.norm()


def test_it_takes_the_gpu_that_the_tensors_are_on():
    case = make_inputs(T=33, H=1, K=64, V=64, gate="bounded")
    last = f"cuda:{torch.cuda.device_count() - 1}"
    on_last = dataclasses.replace(case, keywords=case.map(lambda x: x.to(last)).keywords | {"backend": "sm90"})
    assert kda.chunk_kda_fwd(**on_last.keywords).o.device == torch.device(last)
