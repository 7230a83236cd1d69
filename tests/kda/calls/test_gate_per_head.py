"""One gate per head, g (B, T, HV), is the gate g[..., None].expand(B, T, HV, K) of each channel."""

import dataclasses

import pytest
import torch
from naive import DIFFERENTIABLE, distance, make

import kda
from kda.model.host import host_of
from kda.model.problem import Problem
from kda.routing.dispatch import weigh

GATES = {"given": {}, "softplus": {"gate": "softplus"}, "bounded": {"gate": "bounded", "beta": "sigmoid"}}
every_gate = pytest.mark.parametrize("options", GATES.values(), ids=GATES)


def expanded(call):
    """Return the tensors of the call, with a gate and a bias for each channel."""
    x, K = dict(call.tensors), call.tensors["q"].shape[-1]
    x["g"] = x["g"][..., None].expand(*x["g"].shape, K)
    if "dt_bias" in x:
        x["dt_bias"] = x["dt_bias"][:, None].expand(-1, K).flatten()
    return x


def gradients(call, tensors):
    o, ht = kda.chunk_kda(**tensors, **call.options, output_final_state=True)
    names = [name for name in DIFFERENTIABLE if name in call.tensors]
    loss = (o * call.do).sum() + (ht * call.dht).sum()
    return (o, ht), dict(zip(names, torch.autograd.grad(loss, [call.tensors[name] for name in names])))


@every_gate
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_are_those_of_the_expanded_gate_and_its_gradients_are_sums_of_its(options, dtype):
    call = make([70, 0, 33], HV=4, K=16, per_head=True, dtype=dtype, tail=5, **options).requiring_grad()
    outputs, grads = gradients(call, call.tensors)
    wanted, sums = gradients(call, expanded(call))
    limits = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.02}   # sums of rounded terms
    assert all(map(torch.equal, outputs, wanted)) or options
    assert all(distance(x, y) < limits[dtype] for x, y in zip(outputs, wanted))
    for name, grad in grads.items():
        x = call.tensors[name]
        assert grad.shape == x.shape and grad.dtype == x.dtype
        assert distance(grad, sums[name]) < limits[dtype], name


@every_gate
def test_its_gradient_has_the_same_bits_each_time(options):
    call = make([70, 33], per_head=True, dtype=torch.float32, **options).requiring_grad()
    (_, first), (_, second) = (gradients(call, call.tensors) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_bias_of_one_gate_per_head_has_a_number_per_head():
    call = make(T=5, K=16, gate="softplus", per_head=True)
    with pytest.raises(kda.InputError, match="dt_bias must be a tensor of HV=2 elements; found 32 elements"):
        kda.chunk_kda(**call.arguments | {"dt_bias": torch.zeros(32)})


def test_what_a_forward_kept_for_the_one_gate_is_refused_with_the_other():
    call = make(T=5, K=16, per_head=True)
    saved = kda.chunk_kda_fwd(**call.arguments, disable_recompute=True).saved
    with pytest.raises(kda.InputError, match="for g="):
        kda.chunk_kda_bwd(**expanded(call) | call.options, do=call.do, saved=saved)


def test_a_call_says_that_it_has_one_gate_per_head():
    call = make(T=5, per_head=True)
    assert ", gate per head" in str(kda.explain(**call.arguments))
    assert Problem.parse("gate_per_head=true").gate_width == 1 and Problem.parse("K=64").gate_width == 64


def test_a_decay_of_each_head_comes_from_the_gate_alone_with_one_channel():
    call = make(T=5, gate="softplus", per_head=True)
    g, A_log, dt_bias = (call.tensors[name] for name in ("g", "A_log", "dt_bias"))
    decays = kda.fused_kda_gate(g[..., None], A_log, dt_bias, output_dtype=torch.float64).squeeze(-1)
    given = {name: x for name, x in call.tensors.items() if name not in ("A_log", "dt_bias")}
    options = call.options | {"use_gate_in_kernel": False}
    found, wanted = (kda.chunk_kda(**x)[0] for x in (given | {"g": decays} | options, call.arguments))
    assert distance(found, wanted) < 1e-14


@pytest.mark.parametrize("words", ["", "packed", "K=64 V=64", "g_dtype=float32"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_both_directions_are_of_the_backend_that_runs_a_gate_of_each_channel(arch, gate, words):
    for direction in ("forward", "backward"):
        p = Problem.parse(f"bfloat16 l2norm beta=sigmoid {gate.replace('given', '')} {words} {direction}")
        found, expected = (weigh(x, host_of(arch)).backend for x in (dataclasses.replace(p, gate_per_head=True), p))
        assert found == expected == arch
