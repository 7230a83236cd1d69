"""The API on CUDA tensors, with the reference: what does not depend on any kernel."""

import pytest
import torch

import kda
from kda.model.host import detect

pytestmark = pytest.mark.gpu


def call(device="cuda", dtype=torch.float64, lengths=(0, 33, 1, 40), K=8, V=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    T, H, HV = sum(lengths) + 3, 2, 4

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return dict(
        q=rand(1, T, H, K), k=rand(1, T, H, K), v=rand(1, T, HV, V), g=rand(1, T, HV, K), beta=rand(1, T, HV),
        A_log=rand(HV), dt_bias=rand(HV * K), initial_state=rand(len(lengths), HV, K, V), cu_seqlens=offsets.to(device),
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True,
    )


def gradients(x, **options):
    tensors = {n: t.requires_grad_() for n, t in x.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    o, ht = kda.chunk_kda(**x, **options)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o)
    dht = torch.randn(ht.shape, generator=generator, dtype=torch.float64).to(ht)
    return [o, ht, *torch.autograd.grad((o * do).sum() + (ht * dht).sum(), list(tensors.values()))]


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize("offsets_on", ["cpu", "cuda"])
def test_the_reference_gives_on_a_gpu_what_it_gives_on_a_cpu(disable_recompute, offsets_on):
    on_gpu = call()
    on_gpu["cu_seqlens"] = on_gpu["cu_seqlens"].to(offsets_on)
    options = {"backend": "reference", "disable_recompute": disable_recompute}
    for a, b in zip(gradients(on_gpu, **options), gradients(call("cpu"), **options)):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-10, atol=1e-12)


def test_decoding_from_a_pool_on_a_gpu():
    results = []
    for device in ("cuda", "cpu"):
        x = call(device)
        x.pop("output_final_state")
        pool = torch.cat([x["initial_state"], x["initial_state"]])
        slots = torch.tensor([5, -1, 0, 2], device=device)
        o, state = kda.fused_recurrent_kda(**x | {"initial_state": pool}, ssm_state_indices=slots, backend="reference")
        assert state is pool
        results.append((o.cpu(), pool.cpu()))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_auto_refuses_what_only_the_reference_could_take():
    with pytest.raises(kda.NoBackendError, match=r"reference\.auto"):
        kda.chunk_kda(**call())


def test_wrong_offsets_on_a_gpu_are_named_when_the_reference_reads_them():
    x = call()
    x["cu_seqlens"][1:] += 50
    with pytest.raises(kda.InputError, match="cu_seqlens"):
        kda.chunk_kda(**x, backend="reference")


def test_offsets_on_a_gpu_are_checked_through_their_copy():
    x = call()
    with pytest.raises(kda.InputError, match="cu_seqlens_cpu"):
        kda.chunk_kda(**x, cu_seqlens_cpu=x["cu_seqlens"].cpu() + 1, backend="reference")


def test_tensors_on_two_devices_are_named():
    x = call()
    x["k"] = x["k"].cpu()
    with pytest.raises(kda.InputError, match="k must be on the device of q; found cpu beside q on cuda:0"):
        kda.chunk_kda(**x, backend="reference")


@pytest.mark.slow
def test_more_elements_than_an_int32_counts():
    """The last sequence begins beyond 2^31 elements of every tensor and is what it is alone."""
    H, D, T, last = 128, 128, 2**17 + 130, 130
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, g = (torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4))
    beta = torch.rand(1, T, H, device="cuda", dtype=torch.bfloat16, generator=generator)
    tensors = dict(q=q, k=k, v=v, g=g, beta=beta)
    options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0, batch_invariant=True)
    options |= dict(output_final_state=True, backend="reference")
    assert q[:, :-last].numel() == 2**31
    with torch.no_grad():
        offsets = torch.tensor([0, T - last, T])
        o, state = kda.chunk_kda(**tensors, cu_seqlens=offsets, **options)
        alone = {n: x[:, -last:].clone() for n, x in tensors.items()}
        expected, expected_state = kda.chunk_kda(**alone, cu_seqlens=torch.tensor([0, last]), **options)
    assert torch.equal(o[:, -last:], expected) and torch.equal(state[1:], expected_state)


def test_autocast_casts_q_k_v_alone():
    x = call(dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o, ht = kda.chunk_kda(**x, backend="reference")
    cast = x | {n: x[n].bfloat16() for n in ("q", "k", "v")}
    expected = kda.chunk_kda(**cast, backend="reference")
    assert o.dtype == torch.bfloat16 and torch.equal(o, expected[0]) and torch.equal(ht, expected[1])


def test_a_compiled_call_gives_the_same_numbers():
    torch._dynamo.reset()
    x = call(dtype=torch.float32)
    compiled = torch.compile(lambda **x: gradients(x, backend="reference"), fullgraph=False)
    for a, b in zip(compiled(**x), gradients(call(dtype=torch.float32), backend="reference")):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_host_says_what_the_device_is():
    host = detect("cuda:0")
    assert host.is_gpu and host.cc == torch.cuda.get_device_capability(0)
    assert host.sms > 0 and host.smem >= 48 * 1024 and host.memory > 2**30 and host.name in str(host)
