"""The Hopper backward on a GPU that it is made for: every option in both gate regimes against float64, the same bits
run to run, CUDA graphs, gradients of any size."""

import dataclasses

import pytest
import torch
from hopper import ON_HOPPER
from on_a_gpu import DEVICE, assert_right, captured

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import kda
from kda.backends.sm90 import plan
from kda.model.host import detect
from kda.tools.verify.cases import REGIMES, make_inputs
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import whole_call

pytestmark = ON_HOPPER

OPTIONS = {
    "eight heads of one token": dict(T=1, H=8),
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "packed, many tokens of none": dict(lengths=(65, 0, 1, 300), HV=2, padding=140),
    "no initial state, beta up to 2": dict(T=300, initial_state=False, beta="2*sigmoid"),
    "a long sequence": dict(T=500),
    "more items than SMs": dict(B=9, T=70, H=4, HV=8),
    "softplus gate, cut into segments": dict(T=2100, gate="softplus"),
    "decays and beta as they are, no norms": dict(T=300, gate="given", beta="given", l2norm=False),
    "one gate per head, more items than SMs": dict(B=9, T=70, H=4, HV=8, gate_per_head=True),
    "one softplus gate per head, packed": dict(
        lengths=(65, 0, 1, 300), HV=2, padding=140, gate="softplus", gate_per_head=True
    ),
    "64 channels, more items than CTAs": dict(B=9, T=70, H=4, HV=8, K=64, V=64),
    "64 channels, softplus gate, packed": dict(lengths=(65, 0, 1, 300), HV=2, padding=140, gate="softplus", K=64, V=64),
    "64 channels, cut into segments": dict(T=2100, K=64, V=64),
}
SHAPES = {
    "a batch, GVA": dict(B=2, T=1000, H=4, HV=8),
    "cut into segments": dict(T=4100),
    "packed, cut into segments, tokens of none": dict(lengths=(3000, 0, 1, 1300), padding=100, HV=2),
}


def drawn(**words):
    return make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | words)


def gradients(case, kept=False):
    x = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in case.keywords.items()}
    saved = kda.chunk_kda_fwd(**x, disable_recompute=True, backend="sm90").saved if kept else None
    found = kda.chunk_kda_bwd(do=case.do.to(DEVICE), dht=case.dht.to(DEVICE), **x, saved=saved, backend="sm90")
    return {name: y for name, y in found._asdict().items() if y is not None}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_definition(name, regime):
    assert_right(whole_call(Door("sm90", DEVICE), drawn(regime=regime, **OPTIONS[name]), backward=True)[0])


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_every_time_made_again_or_kept(name):
    case = drawn(**SHAPES[name])
    expected = gradients(case)
    for n in range(20):
        assert all(torch.equal(y, expected[name]) for name, y in gradients(case, kept=n % 2 == 0).items())


@pytest.mark.parametrize("shape", [
    dict(T=1000, H=3), dict(lengths=(600, 0, 1, 700), padding=100, H=1, HV=2)
], ids=str)
@pytest.mark.parametrize("ctas, words", [
    (2, {}), (4, {}), (4, dict(gate="softplus")), (1, dict(K=64, V=64)), (2, dict(K=64, V=64))
], ids=str)
def test_one_kernel_that_keeps_has_the_bits_of_two(shape, ctas, words, force):
    case, found = drawn(**shape, **words), {}
    for one in (False, True):
        force(form="one kernel" if one else "two kernels", ctas=ctas)
        backward = dataclasses.replace(case.problem(), direction="backward")
        making = plan.training_plan(backward, detect("cuda").sms).making
        assert (making.clusters.ctas if one else making.record.walk) == (ctas if one else "sequences")
        found[one] = [gradients(case, kept) for kept in (False, True)]
    expected, *_ = found[False]
    for each in (*found[False], *found[True]):
        assert all(torch.equal(y, expected[name]) for name, y in each.items())


@pytest.mark.parametrize("size", [2.0**60, 2.0**-60], ids=str)
def test_gradients_are_as_large_as_those_that_come_in(size):
    case = drawn(T=300, H=4)
    logits = case.keywords["g"].clone()
    logits[:, 20:40], logits[:, 50] = 1000.0, float("-inf")
    case = dataclasses.replace(case, keywords=case.keywords | {"g": logits})
    found = gradients(dataclasses.replace(case, do=size * case.do, dht=size * case.dht))
    for name, x in gradients(case).items():
        assert x.isfinite().all() and torch.equal(found[name], size * x), name


def test_a_training_step_is_captured_in_a_graph():
    case = drawn(T=700, H=4)
    x = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in case.keywords.items()}
    leaves = {n: t.requires_grad_() for n, t in x.items() if isinstance(t, torch.Tensor)}
    do = case.do.to(DEVICE)

    def step():
        o, _ = kda.chunk_kda(**x | leaves)
        return torch.autograd.grad(o, list(leaves.values()), do)

    expected = step()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph, found = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
