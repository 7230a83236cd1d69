"""attention-gym: host functions of its Triton and CuTe DSL kernels.

Its `__init__` asks for FlexAttention, which torch compiles on a CPU to code for that CPU: those kernels never exist.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .cases import agree, host_functions, near
from .fla import _recurrence

gym = host_functions("attention-gym", package="attn_gym", bare=("attn_gym",))
B, H, T, D, TOP, POOL, WINDOW = 1, 2, 32, 64, 3, 16, 8


def _selected(q, near, far, picked, sink):
    """Return attention to the last WINDOW tokens and to picked entries of a pool, one head of keys that are values,
    too."""
    ages = torch.arange(T)[:, None] - torch.arange(T)
    scores = (q @ near.mT) * D**-0.5
    scores = scores.masked_fill((ages < 0) | (ages >= WINDOW), -math.inf)
    rows = far[:, 0][torch.arange(B)[:, None, None], picked]                    # (batch, token, top, channel)
    more = torch.einsum("bhtd,btkd->bhtk", q, rows) * D**-0.5
    sinks = sink.view(1, H, 1, 1).expand(B, H, T, 1)
    weights = torch.cat([scores, more, sinks], -1).softmax(-1)
    return weights[..., :T] @ near + torch.einsum("bhtk,btkd->bhtd", weights[..., T:-1], rows)


def _selected_inputs():
    shapes = (B, H, T, D), (B, 1, T, D), (B, 1, POOL, D), (H,)
    q, near, far, sink = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return q, near, far, torch.randn(B, T, POOL).topk(TOP).indices, sink


@gym("selected_attention, forward")
def _(ops):
    with torch.no_grad():
        inputs = _selected_inputs()
        got = ops("sparse.selected_attention.api").selected_attention(*inputs, sliding_window_size=WINDOW)
        return near((got, _selected(*inputs)), limit=2e-3)


@gym("selected_attention, forward and backward")
def _(ops):
    inputs = _selected_inputs()
    leaves = [x for x in inputs if x.requires_grad]
    dy = torch.randn(B, H, T, D)
    ops("sparse.selected_attention.api").selected_attention(*inputs, sliding_window_size=WINDOW).backward(dy)
    got = [x.grad for x in leaves]
    return near(*zip(got, torch.autograd.grad(_selected(*inputs), leaves, dy)), limit=4e-3)


@gym("l2norm, forward")
def _(ops):
    x = torch.randn(1, 64, 2, 128)
    got = ops("linear.kda.fwd.triton.l2norm_fwd").l2norm(x)
    return agree((got, x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()))


def _gate(tokens, chunk):
    raw, rate, bias = torch.randn(1, tokens, H, 128).bfloat16(), torch.rand(H), torch.randn(H, 128) / 8
    bounded = -5 * torch.sigmoid(rate.exp()[:, None] * (raw.float() + bias)) * math.log2(math.e)
    return (raw, rate, bias), bounded.view(1, -1, chunk, H, 128).cumsum(2).view(1, tokens, H, 128)


@gym("bounded_gate_cumsum, forward")
def _(ops):
    inputs, wanted = _gate(128, 64)
    return near((ops("linear.kda.fwd.triton.gate_fwd").bounded_gate_cumsum(*inputs), wanted), limit=1e-3)


def _kda(tokens):
    q, k, v = (torch.randn(1, tokens, H, 128) for _ in range(3))
    q, k, v = F.normalize(q, dim=-1).bfloat16(), F.normalize(k, dim=-1).bfloat16(), v.bfloat16()
    beta = torch.rand(1, tokens, H)
    g = -torch.rand(1, tokens, H, 128) / 8                                      # a logarithm to base 2
    return (q, k, v, beta), g, _recurrence(q, k, v, g * math.log(2), beta)


@gym("recurrent_kda")
def _(ops):
    (q, k, v, beta), g, wanted = _kda(16)
    with torch.no_grad():
        got = ops("linear.kda.api").recurrent_kda(q, k, v, g, beta, output_final_state=True, autotune=False)
    return near(*zip(got, wanted))


@gym("chunk_kda, forward", arch="sm_100a")
def _(ops):
    (q, k, v, beta), g, wanted = _kda(128)
    sums = g.view(1, 2, 64, H, 128).cumsum(2).view_as(g)
    with torch.no_grad():
        got = ops("linear.kda.api").chunk_kda(q, k, v, sums, beta, output_final_state=True, autotune=False)
    return near(*zip(got, wanted))


@gym("short_conv: causal_conv1d, forward and backward")
def _(ops):
    x, w = torch.randn(2, 32, 128, requires_grad=True), torch.randn(128, 4, requires_grad=True)
    dy = torch.randn(2, 32, 128)
    ops("linear.kda.short_conv.cute").causal_conv1d(x, w, activation="silu").backward(dy)
    wanted = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), w[:, None], groups=128)).mT
    return agree(*zip((x.grad, w.grad), torch.autograd.grad(wanted, (x, w), dy)), tolerance=1e-3)
