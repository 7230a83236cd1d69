"""FlashAttention 4: the host function of its kernels in CuTe DSL. The package's own __init__ loads an extension."""

from __future__ import annotations

import torch

from .cases import agree, host_functions

flash_attention = host_functions("flash-attention", package="flash_attn.cute", bare=["flash_attn"])


def attention(causal, arch, head_dim=64, length=192, backward=False):
    how, direction = "causal, " if causal else "", "forward and backward" if backward else "forward"
    named = f"flash_attn_func, {how}head dimension {head_dim}, {direction}"

    @flash_attention(named, arch)
    def _(ops):
        q, k, v = (torch.randn(1, length, 2, head_dim).bfloat16().requires_grad_(backward) for _ in range(3))
        ops("interface")._get_device_arch.cache_clear()  # it was found for the case before
        o = ops("interface").flash_attn_func(q, k, v, causal=causal)
        o = o[0] if isinstance(o, tuple) else o
        exact = [x.detach().float().requires_grad_(backward) for x in (q, k, v)]
        wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in exact), is_causal=causal)
        pairs = [(o, wanted.transpose(1, 2))]
        if backward:
            do = torch.randn_like(o)
            grads = torch.autograd.grad(o, (q, k, v), do)
            pairs += zip(grads, torch.autograd.grad(wanted.transpose(1, 2), exact, do.float()))
        return agree(*pairs, tolerance=3e-2)


for causal in (False, True):
    attention(causal, "sm_90a")
attention(True, "sm_90a", head_dim=128)
attention(True, "sm_90a", backward=True)
attention(True, "sm_100a", head_dim=128)
