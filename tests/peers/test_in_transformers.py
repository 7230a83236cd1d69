"""A Kimi-Linear of transformers, small and random, whose calls of FLA come to kda."""

import inspect
import os
import subprocess
import sys
import warnings

import pytest
import torch
from naive import distance

import kda
from kda.notices import KdaNotice

pytest.importorskip("fla", reason="needs fla-core, see tests/peers/conftest.py")
pytest.importorskip("transformers", reason="needs transformers, see tests/peers/conftest.py")

from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

pytestmark = pytest.mark.peers

STEPS = 10
LIMIT = 100 * torch.finfo(torch.float32).eps             # for sums in another order
FUNCTIONS = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")


def model(dtype=torch.float32):
    """Two layers, one of KDA and one of attention."""
    config = KimiLinearConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        linear_head_dim=16, linear_num_heads=2, layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"], num_local_experts=2, num_experts_per_tok=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, max_position_embeddings=256,
    )
    torch.manual_seed(0)
    return KimiLinearForCausalLM(config).to(dtype)


def train(dtype=torch.float32):
    """The losses of ten steps."""
    trained, losses = model(dtype), []
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for step in range(STEPS):
        ids = torch.randint(3, 97, (2, 70), generator=torch.Generator().manual_seed(step % 2))
        loss = trained(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().double())
    return torch.stack(losses)


def by_token(q, k, v, g, beta, initial_state=None, use_qk_l2norm_in_kernel=True, **others):
    """KDA as its definition says, in the dtype of the model."""
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    S, outputs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        S = g[:, t].to(q.dtype).exp()[..., None] * S
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * q.shape[3] ** -0.5)
    return torch.stack(outputs, 1), S


@pytest.fixture
def counted(monkeypatch):
    """Count the calls of each function of kda."""
    counts = dict.fromkeys(("chunk_kda", "fused_recurrent_kda_fwd"), 0)

    def counting(name, function):
        def call(*args, **keywords):
            counts[name] += 1
            return function(*args, **keywords)

        return call

    for name in counts:
        monkeypatch.setattr(kda.calls.api, name, counting(name, getattr(kda.calls.api, name)))
    return counts


@pytest.fixture
def without_kda(monkeypatch):
    """Lets transformers compute by itself, in torch, or by another function."""

    def take(chunk=None):
        for name in FUNCTIONS:
            monkeypatch.setattr(modeling, name, chunk or inspect.unwrap(getattr(modeling, name)))

    return take


def budget(without_kda):
    """The exact losses, and how far rounding alone may take them: twice as far as it takes transformers' own code
    and the last bit of a loss."""
    without_kda()
    unpatched = train()
    without_kda(by_token)
    exact = train(torch.float64)
    return exact, 2 * (distance(unpatched, exact) + torch.finfo(torch.float32).eps)


def test_ten_steps_of_training_have_the_same_losses_with_kda(in_fla, counted, without_kda):
    with warnings.catch_warnings():
        warnings.simplefilter("error", KdaNotice)
        losses = train()
    assert counted["chunk_kda"] == STEPS
    exact, limit = budget(without_kda)
    assert counted["chunk_kda"] == STEPS                 # none of these went to kda
    assert losses[-1] < losses[0] - 0.5                  # something was learnt
    assert distance(losses, exact) <= limit < LIMIT


def test_that_budget_notices_one_wrong_token(in_fla, without_kda, monkeypatch):
    real = kda.calls.api.chunk_kda

    def broken(q, k, v, g, beta, **keywords):
        factor = torch.ones_like(beta)
        factor[:, 35] = 0
        return real(q, k, v, g, beta * factor, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(kda.calls.api, "chunk_kda", broken)
        losses = train()
    exact, limit = budget(without_kda)
    assert distance(losses, exact) > 100 * limit


def test_greedy_decoding_from_a_cache_gives_the_same_tokens_with_kda(in_fla, counted, without_kda):
    decoder = model().eval()
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))

    def tokens():
        return decoder.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)

    ours = tokens()
    assert counted == {"chunk_kda": 1, "fused_recurrent_kda_fwd": 5}
    without_kda()
    assert torch.equal(ours, tokens())


@pytest.mark.exhaustive                                  # transformers is imported anew
def test_registered_before_transformers_is_imported_kda_makes_its_calls():
    code = """
import kda.fla, kda, torch
from transformers.models.kimi_linear import modeling_kimi_linear as modeling
q = torch.randn(1, 3, 1, 2)
theirs = modeling.chunk_kimi_delta_attention(q, q, q, g=-q.abs(), beta=q[..., 0], cu_seq_lens_q=1)
print(torch.equal(theirs[0], kda.chunk_kda(q, q, q, -q.abs(), q[..., 0])[0]))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert ran.stdout.strip().endswith("True"), ran.stderr


def test_left_padding_changes_nothing_with_kda(in_fla, without_kda):
    padded = model().eval()
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        ours = padded(ids, attention_mask=mask).logits
        without_kda()
        assert distance(ours, padded(ids, attention_mask=mask).logits) < LIMIT


def test_packed_sequences_of_transformers_come_with_their_offsets(in_fla, monkeypatch):
    """Without the convolution, which transformers cannot cut at the offsets on a CPU."""

    def convolution(x, weight, bias, activation, **keywords):
        return x

    monkeypatch.setattr(modeling, "causal_conv1d_fn", convolution)
    offsets, layer = torch.tensor([0, 12, 30]), model().model.layers[0].self_attn
    with torch.no_grad():
        x = torch.randn(1, 30, 32, generator=torch.Generator().manual_seed(0))
        whole = layer(x, cu_seqlens=offsets)
        apart = torch.cat([layer(x[:, :12]), layer(x[:, 12:])], 1)
    assert distance(whole, apart) < LIMIT
