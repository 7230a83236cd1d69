"""LightLLM: the host functions of its Triton kernels. The packages' own __init__ import models and servers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .cases import agree, host_functions

lightllm = host_functions(
    "lightllm",
    package="lightllm",
    bare=["lightllm", "lightllm.models", "lightllm.models.llama", "lightllm.common", "lightllm.common.basemodel"],
)
LLAMA, COMMON = "models.llama.triton_kernel", "common.basemodel.triton_kernel"


@lightllm("rmsnorm")
def _(ops):
    x, w = torch.randn(8, 256), torch.randn(256)
    return agree((ops(f"{LLAMA}.rmsnorm").rmsnorm_forward(x, w, 1e-6), F.rms_norm(x, (256,), w, 1e-6)))


@lightllm("silu_and_mul")
def _(ops):
    x, y = torch.randn(20, 512), torch.zeros(20, 256)
    ops(f"{LLAMA}.silu_and_mul").silu_and_mul_fwd(x, y)
    return agree((y, F.silu(x[:, :256]) * x[:, 256:]))


@lightllm("rotary_emb")
def _(ops):
    q, k, cos, sin = torch.randn(20, 4, 64), torch.randn(20, 2, 64), torch.randn(20, 32), torch.randn(20, 32)

    def turned(x):
        a, b = x[..., :32], x[..., 32:]
        return torch.cat([a * cos[:, None] - b * sin[:, None], a * sin[:, None] + b * cos[:, None]], -1)

    wanted = turned(q), turned(k)
    ops(f"{LLAMA}.rotary_emb").rotary_emb_fwd(q, k, cos, sin)
    return agree(*zip((q, k), wanted))


@lightllm("token_attention_nopad_softmax")
def _(ops):
    lengths = torch.tensor([5, 16, 11], dtype=torch.int32)
    starts = torch.tensor([0, 5, 21], dtype=torch.int32)
    x, out = torch.randn(4, 32), torch.zeros(4, 32)
    ops(f"{LLAMA}.token_attention_nopad_softmax").token_softmax_fwd(x, starts, lengths, out, 16)
    return agree((out, torch.cat([part.softmax(-1) for part in x.split(lengths.tolist(), 1)], 1)))


@lightllm("context_flashattention_nopad: context_attention_fwd_no_prompt_cache")
def _(ops):
    lengths = torch.tensor([100, 40], dtype=torch.int32)
    starts = torch.tensor([0, 100], dtype=torch.int32)
    q, k, v = torch.randn(140, 4, 64).half(), torch.randn(140, 2, 64).half(), torch.randn(140, 2, 64).half()
    out = torch.zeros_like(q)
    where = ops(f"{LLAMA}.context_flashattention_nopad")
    where.context_attention_fwd_no_prompt_cache(q, k, v, out, starts, lengths, 100)
    wanted = [
        F.scaled_dot_product_attention(
            *(t[a : a + n].float().transpose(0, 1) for t in (q, k, v)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        for a, n in zip(starts.tolist(), lengths.tolist())
    ]
    return agree((out, torch.cat(wanted)), tolerance=1e-2)


@lightllm("embedding")
def _(ops):
    tokens, table = torch.randint(0, 64, (20,), dtype=torch.int32), torch.randn(64, 128)
    out = torch.zeros(20, 128)
    ops(f"{LLAMA}.embedding").embedding(tokens, table, 0, 64, out)
    return torch.equal(out, table[tokens.long()])


@lightllm("destindex_copy_kv: destindex_copy_quantize_kv")
def _(ops):
    x, to = torch.randn(10, 4, 64).half(), torch.randperm(16)[:10].int()
    out, scale = torch.zeros(16, 4, 64, dtype=torch.int8), torch.zeros(16, 4, 1).half()
    ops(f"{COMMON}.destindex_copy_kv").destindex_copy_quantize_kv(x, to, out, scale)
    got = out[to.long()].float() * scale[to.long()].float()
    return bool(((got - x.float()).abs() <= 1.01 * scale[to.long()].float()).all())  # it truncates


@lightllm("quantize_gemm_int8: quantize_int8_perrow, matmul_int8")
def _(ops):
    a, b, b_scale = torch.randn(32, 128).half(), torch.randint(-127, 127, (128, 64)).to(torch.int8), torch.rand(64)
    b = b.t().contiguous().t()
    got = ops(f"{COMMON}.quantize_gemm_int8").matmul_quantize_int8(a, b, b_scale.half())
    wanted = a.float() @ (b.float() * b_scale.half().float())
    return bool((got.float() - wanted).norm() / wanted.norm() < 2e-2)


@lightllm("add_in_place")
def _(ops):
    a, b = torch.randn(1000), torch.randn(1000)
    wanted = a + 2 * b
    ops(f"{COMMON}.add_in_place").add_in_place(a, b, alpha=2)
    return agree((a, wanted))
