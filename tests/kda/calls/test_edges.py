"""Where such kernels break: no tokens, one token, saturated gates, identical keys, foreign memory, others' tokens."""

import broken_parallel
import pytest
import torch
from naive import DIFFERENTIABLE, assert_is_the_definition, definition, distance, gradients, make

import kda


def run(call, **options):
    return kda.chunk_kda(**call.arguments, output_final_state=True, **options)


def trained(call):
    call = call.requiring_grad()
    o, ht = run(call)
    ((o * call.do).sum() + (ht * call.dht).sum()).backward()
    return o, ht, {n: call.tensors[n].grad for n in DIFFERENTIABLE if n in call.tensors}


def assert_both_ways(call, tolerance=1e-11):
    """Check a forward and all its gradients."""
    o, ht, grads = trained(call)
    assert_is_the_definition(call, (o, ht), tolerance)
    for name, exact in gradients(call).items():
        assert distance(grads[name], exact) < tolerance, name


NOTHING = {
    "T=0": {"B": 2, "T": 0},
    "B=0": {"B": 0, "T": 5},
    "one empty sequence": {"lengths": [0]},
    "no sequence": {"lengths": []},
    "only a tail": {"lengths": [0, 0], "tail": 4},
}


def test_no_sequence_on_ranks_is_as_on_one():
    call = make(lengths=[], tail=4)
    alone = {name: x for name, x in call.arguments.items() if name != "cu_seqlens"}
    with broken_parallel.alone() as group:
        context = kda.parallel.build_cp_context(call.tensors["cu_seqlens"], group, lengths=[4])
        found = kda.chunk_kda(**alone, output_final_state=True, cp_context=context)
    assert all(map(torch.equal, found, run(call)))


@pytest.mark.parametrize("shape", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("gate", ["given", "bounded"])
def test_nothing_in_gives_nothing_out_and_the_states_back(shape, gate):
    call = make(gate=gate, **shape)
    o, ht, grads = trained(call)
    assert o.shape == call.tensors["v"].shape and not o.any()
    assert torch.equal(ht, call.tensors["initial_state"])
    for name, grad in grads.items():
        exact = call.dht if name == "initial_state" else torch.zeros_like(call.tensors[name])
        assert torch.equal(grad, exact), name
    with torch.no_grad():
        assert run(call, return_intermediate_states=True)[2].numel() == 0


@pytest.mark.parametrize("B", [1, 3])
def test_one_token(B):
    assert_both_ways(make(B=B, T=1, gate="softplus"))


@pytest.mark.parametrize("gate", ["given", "softplus", "bounded"])
def test_tokens_of_no_sequence_touch_nothing(gate):
    """Garbage, even nan, past the last offset: outputs and gradients there are zero and no parameter sees it."""
    clean = make([20, 30], gate=gate, tail=21)
    dirty = make([20, 30], gate=gate, tail=21)
    for name in ("q", "k", "v", "g", "beta"):
        dirty.tensors[name][:, 50:] = float("nan")
    dirty.do[:, 50:] = float("nan")
    clean_run, dirty_run = trained(clean), trained(dirty)
    for a, b in zip((*clean_run[:2], *clean_run[2].values()), (*dirty_run[:2], *dirty_run[2].values())):
        assert torch.equal(a, b)
    assert not dirty_run[0][:, 50:].any()
    assert not any(dirty_run[2][name][:, 50:].any() for name in ("q", "k", "v", "g", "beta"))


def test_outputs_never_depend_on_later_tokens():
    first = make([150], gate="softplus", dtype=torch.float32, K=16, V=16)
    o, _ = run(first)
    for t in (1, 31, 32, 50, 64, 149):
        other = make([150], gate="softplus", dtype=torch.float32, K=16, V=16)
        for name in ("q", "k", "v", "g", "beta"):
            other.tensors[name][:, t:] = 7 * torch.randn_like(other.tensors[name][:, t:])
        assert torch.equal(run(other)[0][:, :t], o[:, :t]), t


def test_two_runs_give_the_same_bits():
    call = make([100, 30, 1], dtype=torch.float32, gate="bounded", HV=4, K=16, V=16)
    a, b = trained(call), trained(call)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert all(torch.equal(a[2][name], b[2][name]) for name in a[2])


@pytest.mark.parametrize("K,V", [(16, 16), (5, 3), (8, 8), (64, 32)])
def test_batch_invariant_gives_the_same_bits_alone_and_packed(K, V):
    lengths = [70, 0, 1, 200, 33]
    packed = make(lengths, dtype=torch.float32, gate="softplus", K=K, V=V, batch_invariant=True)
    o, ht, grads = trained(packed)
    ends = packed.tensors["cu_seqlens"].tolist()
    for n, (start, end) in enumerate(zip(ends, ends[1:])):
        alone = make([end - start], dtype=torch.float32, gate="softplus", K=K, V=V, batch_invariant=True)
        for name in ("q", "k", "v", "g", "beta"):
            alone.tensors[name] = packed.tensors[name][:, start:end]
        alone.tensors |= {name: packed.tensors[name] for name in ("A_log", "dt_bias")}
        alone.tensors["initial_state"] = packed.tensors["initial_state"][n : n + 1]
        alone.do, alone.dht = packed.do[:, start:end], packed.dht[n : n + 1]
        o_alone, ht_alone, grads_alone = trained(alone)
        assert torch.equal(o_alone, o[:, start:end]) and torch.equal(ht_alone, ht[n : n + 1])
        for name in ("q", "k", "v", "g", "beta"):
            assert torch.equal(grads_alone[name], grads[name][:, start:end]), (n, name)
        assert torch.equal(grads_alone["initial_state"], grads["initial_state"][n : n + 1])


@pytest.mark.parametrize("decay", [0.0, -1e-6, -50.0, -1e3, -1e8, -float("inf")])
def test_any_decay(decay):
    call = make([70], l2norm=True)
    call.tensors["g"][:, ::7] = decay
    assert_both_ways(call) if decay > -float("inf") else None
    assert_is_the_definition(call, run(call))


def test_a_mask_of_minus_1000_does_not_blur_its_neighbours():
    """In float32 a difference of cumulative sums would lose the small decays after the large one."""
    call = make([64], dtype=torch.float32, K=8, V=8)
    call.tensors["g"] *= 0.01
    call.tensors["g"][:, 3] = -1e6
    o, _ = run(call)
    assert distance(o, definition(call)[0]) < 1e-6


@pytest.mark.parametrize("A_log", [-100.0, 0.0, 5.0, 90.0, 200.0])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saturated_gates_have_finite_gradients(A_log, gate, dtype):
    call = make([40], gate=gate, dtype=dtype)
    call.tensors["A_log"].fill_(A_log)
    call.tensors["g"][:, :10] = 0
    call.tensors["dt_bias"].zero_()
    o, ht, grads = trained(call)
    assert o.isfinite().all() and ht.isfinite().all()
    for name, grad in grads.items():
        assert grad.isfinite().all(), name


@pytest.mark.parametrize("beta", ["given", "2*sigmoid"])
def test_identical_keys(beta):
    """The matrix to be inverted is as far from the identity as it gets."""
    call = make([64, 64], gate="bounded", beta=beta, chunk_size=64, K=8)
    call.tensors["k"][:] = call.tensors["k"][:, :1]
    call.tensors["g"].fill_(-30.0)
    if beta == "given":
        call.tensors["beta"].fill_(1.0)
    assert_both_ways(call)


def test_zero_rows_pass_through_the_l2norm():
    call = make([40])
    for name in ("q", "k"):
        call.tensors[name][:, 3:5] = 0
    assert_both_ways(call)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_memory_may_lie_in_any_order(layout):
    call = make([40, 7], gate="softplus", HV=4)
    expected = trained(call)
    for name in DIFFERENTIABLE:
        call.tensors[name] = layout(call.tensors[name])
    call.do, call.dht = layout(call.do), layout(call.dht)
    got = trained(call)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert all(torch.equal(got[2][name], expected[2][name]) for name in expected[2])


def test_expanded_inputs():
    call = make([40], H=3)
    for name in ("q", "v", "g", "beta"):
        call.tensors[name] = call.tensors[name][:, :, :1].expand_as(call.tensors[name])
    call.tensors["initial_state"] = call.tensors["initial_state"][:, :1].expand(-1, 3, -1, -1)
    call.do = call.do[:, :1, :1, :1].expand_as(call.do)
    assert_both_ways(call)


def test_inputs_are_left_alone():
    call = make([40, 3], gate="softplus", beta="sigmoid")
    before = {n: x.clone() for n, x in call.tensors.items()}
    trained(call)
    assert all(torch.equal(call.tensors[n], x) for n, x in before.items())


def test_many_slabs_and_a_long_ragged_batch():
    """More chunks than a slab holds, sequences that cross slabs, in both directions."""
    from kda.backends.reference import launch

    lengths = [700, 1, 0, 450, 33]
    call = make(lengths, K=4, V=4, gate="softplus")
    whole = trained(call)
    old, launch.SLAB_ELEMENTS = launch.SLAB_ELEMENTS, 32 * 2 * 32 * 3
    try:
        slabs = trained(call)
    finally:
        launch.SLAB_ELEMENTS = old
    assert distance(slabs[0], whole[0]) < 1e-13 and distance(slabs[1], whole[1]) < 1e-13
    assert all(distance(slabs[2][name], whole[2][name]) < 1e-12 for name in whole[2])
    assert distance(whole[0], definition(call)[0]) < 1e-12
