"""The recurrent kernel of the Triton backend on a GPU: serving sizes, CUDA graphs, what a CPU cannot hold."""

import pytest
import torch
from memory import needs
from on_a_gpu import ROWS, captured, nothing_waits

pytest.importorskip("triton", reason="needs triton")

import kda
from kda.tools.verify.budget import Budget

pytestmark = pytest.mark.gpu

SWITCHES = dict(
    use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0
)


def call(B=1, T=1, N=None, H=8, HV=8, K=128, V=128, dtype=torch.bfloat16, states=torch.float32, v_first=False):
    """Keywords of fused_recurrent_kda, with a pool of N + 2 states that waits for slots."""
    random = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=random, device="cuda").to(dtype)

    return dict(
        q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, HV, V), g=normal(B, T, HV, K), beta=normal(B, T, HV),
        A_log=torch.rand(HV, generator=random, device="cuda"), dt_bias=normal(HV * K, dtype=torch.float32),
        initial_state=normal((B if N is None else N) + 2, HV, *((V, K) if v_first else (K, V)), dtype=states),
        state_v_first=v_first, **SWITCHES,
    )


def run(x, backend="triton"):
    """o and the pool; the caller's pool is left alone."""
    x = x | {"initial_state": x["initial_state"].clone()}
    return kda.fused_recurrent_kda(**x, backend=backend)


def exactly(x, dtype):
    floats = {name: t.to(dtype) for name, t in x.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return run(x | floats, "reference")


def check(x):
    found = run(x)
    for name, got, exact, rounded in zip(("o", "pool"), found, exactly(x, torch.float64), exactly(x, torch.float32)):
        rounded = rounded.to(got.dtype).cpu()
        budget = Budget.of(exact.cpu(), rounded, compute=torch.float32, stored=got.dtype, summed=x["q"].shape[-1])
        measure = budget.measure(got)
        assert measure.used <= 1, f"{name}: {measure}"
    return found


def slots_of(N, dtype=torch.int32):
    return (torch.randperm(N + 2, generator=torch.Generator().manual_seed(1))[:N]).to("cuda", dtype)


@pytest.mark.parametrize("v_first", [False, True], ids=["states (K, V)", "states (V, K)"])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("B,T", [(1, 1), (64, 1), (4, 33)], ids=["one", "many", "prompts"])
def test_it_is_the_definition(B, T, states, v_first):
    check(call(B, T, states=states, v_first=v_first) | {"ssm_state_indices": slots_of(B)})


def plain(x):
    """The call with normal keys and step sizes as they come, a softplus gate, and without a bias."""
    k, beta = torch.nn.functional.normalize(x["k"].float(), dim=-1).to(x["k"].dtype), x["beta"].sigmoid()
    switches = dict(use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, lower_bound=None)
    return x | switches | {"k": k, "beta": beta, "dt_bias": None}


@pytest.mark.parametrize("N", [3, 64], ids=["few", "many"])
@pytest.mark.parametrize("slots", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_every_dtype_of_offsets_and_slots_is_the_definition(offsets, slots, N):
    x = plain(call(1, 2 * N, N=N))
    check(x | {"cu_seqlens": torch.arange(0, 2 * N + 1, 2, dtype=offsets, device="cuda"),
               "ssm_state_indices": slots_of(N, slots)})


@pytest.mark.parametrize("B", [3, 64], ids=["few", "many"])
def test_decays_in_float32_and_no_state_are_the_definition(B):
    x = plain(call(B, 3, dtype=torch.float16)) | {"A_log": None, "initial_state": None, "use_gate_in_kernel": False}
    x["g"] = -x["g"].float().abs()
    doubled = {name: t.double() for name, t in x.items() if isinstance(t, torch.Tensor)}
    o, exact = (kda.fused_recurrent_kda(**x | other)[0].double() for other in
                (dict(backend="triton"), doubled | dict(backend="reference")))
    assert (o - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("K,V", [(60, 100), (256, 64), (16, 16)])
def test_any_head_dims(K, V):
    check(call(3, 9, H=2, HV=6, K=K, V=V) | {"ssm_state_indices": slots_of(3)})


@pytest.mark.parametrize("regime", ["slow", "fast"])
def test_the_error_does_not_add_up_over_many_tokens(regime):
    """A state that remembers hundreds of tokens would show an exp2 that errs to one side."""
    x = call(1, 2048, H=2, HV=2, dtype=torch.float32) | {"ssm_state_indices": slots_of(1), "lower_bound": None}
    if regime == "slow":
        x |= {"A_log": torch.zeros_like(x["A_log"]), "dt_bias": x["dt_bias"].abs() / 2 - 8}
    check(x)


def test_packed_prompts_with_offsets_on_the_gpu_and_no_synchronisation():
    lengths = [0, 5, 1, 0, 30, 2]
    x = call(1, sum(lengths) + 9, N=len(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x |= {"cu_seqlens": offsets.to("cuda", torch.int32), "ssm_state_indices": slots_of(len(lengths))}
    check(x)
    with nothing_waits():
        o, _ = run(x)
    assert not o[:, sum(lengths) :].any()


def test_a_graph_replays_with_other_slots_tokens_and_padding():
    x = call(16, 1) | {"ssm_state_indices": slots_of(16)}
    pool = x["initial_state"]
    kda.fused_recurrent_kda(**x | {"initial_state": pool.clone()}, backend="triton")
    graph, (o, _) = captured(lambda: kda.fused_recurrent_kda(**x, backend="triton"))
    for step in range(3):
        for name in ROWS:
            x[name].copy_(torch.randn_like(x[name]))
        slots = x["ssm_state_indices"].roll(1)
        slots[step] = -1
        x["ssm_state_indices"].copy_(slots)
        expected_o, expected_pool = run(x)
        graph.replay()
        assert torch.equal(o, expected_o) and torch.equal(pool, expected_pool)
        assert not o[step].any()


def test_two_runs_give_the_same_bits():
    x = call(64, 3) | {"ssm_state_indices": slots_of(64)}
    for a, b in zip(run(x), run(x)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("v_first", [False, True], ids=["states (K, V)", "states (V, K)"])
def test_batch_invariant_gives_the_same_bits_alone_and_packed(v_first):
    x = call(64, 3, v_first=v_first) | {"ssm_state_indices": slots_of(64), "batch_invariant": True}
    o, pool = run(x)
    for n in (0, 63):
        alone = {name: x[name][n : n + 1] for name in (*ROWS, "ssm_state_indices")}
        o_alone, pool_alone = run(x | alone)
        slot = int(x["ssm_state_indices"][n])
        assert torch.equal(o_alone, o[n : n + 1]) and torch.equal(pool_alone[slot], pool[slot])


def test_a_pool_of_more_elements_than_an_int32_counts():
    needs(14)
    HV, last = 32, 2**31 // (32 * 128 * 128) + 3
    x = call(2, 2, H=HV, HV=HV)
    small = x["initial_state"]
    pool = torch.full((last + 1, HV, 128, 128), torch.nan, device="cuda")
    pool[last], pool[0] = small[0], small[1]
    assert pool[:last].numel() > 2**31
    o, states = run(x | {"ssm_state_indices": torch.tensor([0, 1], dtype=torch.int32, device="cuda")})
    slots = torch.tensor([last, 0], dtype=torch.int32, device="cuda")
    o_large, _ = kda.fused_recurrent_kda(**x | {"initial_state": pool, "ssm_state_indices": slots}, backend="triton")
    assert torch.equal(o, o_large)
    assert torch.equal(pool[last], states[0]) and torch.equal(pool[0], states[1]) and pool[1:last].isnan().all()


def test_rows_further_apart_than_an_int32_counts():
    needs(6)
    x = call(2, 2) | {"ssm_state_indices": slots_of(2)}
    memory = torch.full((2**31 + 4096,), torch.nan, device="cuda", dtype=torch.bfloat16)
    q = memory.as_strided(x["q"].shape, (2**31, *x["q"].stride()[1:])).copy_(x["q"])
    for a, b in zip(run(x), run(x | {"q": q})):
        assert torch.equal(a, b)
