"""flash-linear-attention: host functions of its Triton kernels, also those that its operators share.

Their results are compared with the recurrences that define them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .cases import agree, host_functions

fla = host_functions("flash-linear-attention", package="fla")


def _recurrence(q, k, v, g=None, beta=None, scale=None):
    """Return a linear attention whose state decays by exp(g), and with beta by the delta rule: (output, last state)."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))  # (batch, head, time, channel)
    state, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    scale = scale or q.shape[-1] ** -0.5
    for t in range(q.shape[2]):
        if g is not None:
            decay = g.double().transpose(1, 2)[:, :, t].exp()
            state = state * (decay[..., None] if g.dim() == 4 else decay[..., None, None])
        new = v[:, :, t]
        if beta is not None:
            new = (new - (state * k[:, :, t, :, None]).sum(-2)) * beta.double().transpose(1, 2)[:, :, t, None]
        state = state + k[:, :, t, :, None] * new[..., None, :]
        out.append(scale * (state * q[:, :, t, :, None]).sum(-2))
    return torch.stack(out, 2).transpose(1, 2), state


def _qkv(t=128, heads=2, channels=64, dtype=torch.bfloat16):
    q, k, v = (torch.randn(1, t, heads, channels, dtype=dtype) for _ in range(3))
    return q, F.normalize(k.float(), dim=-1).to(dtype), v


def _near(*pairs, limit=1e-2):
    return all((got.double() - wanted).norm() <= limit * wanted.norm() for got, wanted in pairs)


@fla("l2norm, forward and backward")
def _(ops):
    x, dy = torch.randn(2, 16, 2, 64, requires_grad=True), torch.randn(2, 16, 2, 64)
    y = ops("modules.l2norm").l2norm(x)
    y.backward(dy)
    got = y.detach(), x.grad.clone()
    x.grad = None
    wanted = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    wanted.backward(dy)
    return agree(*zip(got, (wanted, x.grad)))


@fla("token_shift, forward and backward")
def _(ops):
    x, dy = torch.randn(2, 16, 64, requires_grad=True), torch.randn(2, 16, 64)
    y = ops("modules.token_shift").token_shift(x)
    y.backward(dy)
    got = y.detach(), x.grad.clone()
    x.grad = None
    wanted = F.pad(x, (0, 0, 1, -1)) - x
    wanted.backward(dy)
    return agree(*zip(got, (wanted, x.grad)))


@fla("rms_norm_gated, forward and backward")
def _(ops):
    x, g = torch.randn(8, 256, requires_grad=True), torch.randn(8, 256, requires_grad=True)
    w, dy = torch.randn(256, requires_grad=True), torch.randn(8, 256)
    y = ops("modules.fused_norm_gate").rms_norm_gated(x, g, w, None)
    y.backward(dy)
    got = y.detach(), x.grad.clone(), g.grad.clone(), w.grad.clone()
    x.grad = g.grad = w.grad = None
    wanted = F.rms_norm(x, (256,), w, 1e-6) * F.silu(g)
    wanted.backward(dy)
    return agree(*zip(got, (wanted, x.grad, g.grad, w.grad)))


@fla("mean_pooling, forward and backward")
def _(ops):
    x, dy = torch.randn(1, 128, 2, 64, requires_grad=True), torch.randn(1, 4, 2, 64)
    y = ops("ops.utils.pooling").mean_pooling(x, 32)
    y.backward(dy)
    got = y.detach(), x.grad.clone()
    x.grad = None
    wanted = x.view(1, 4, 32, 2, 64).mean(2)
    wanted.backward(dy)
    return agree(*zip(got, (wanted, x.grad)))


@fla("chunk_local_cumsum")
def _(ops):
    g = torch.randn(1, 128, 2, 64)
    return agree((ops("ops.utils.cumsum").chunk_local_cumsum(g, 64), g.view(1, 2, 64, 2, 64).cumsum(2).view_as(g)))


@fla("solve_tril")
def _(ops):
    a = torch.randn(1, 128, 2, 64).mul(0.3)
    a = a.view(1, 2, 64, 2, 64).transpose(2, 3).tril(-1)
    got = ops("ops.utils.solve_tril").solve_tril(a.transpose(2, 3).reshape(1, 128, 2, 64).contiguous())
    wanted = torch.linalg.inv(torch.eye(64).double() + a.double()).transpose(2, 3).reshape(1, 128, 2, 64)
    return _near((got, wanted), limit=2e-3)


@fla("fused_recurrent_hgrn, forward and backward")
def _(ops):
    x, g = torch.randn(2, 32, 64, requires_grad=True), (-torch.rand(2, 32, 64)).requires_grad_()
    dy, y = torch.randn(2, 32, 64), ops("ops.hgrn.fused_recurrent").fused_recurrent_hgrn(x, g)[0]
    y.backward(dy)
    got = y.detach(), x.grad.clone(), g.grad.clone()
    x.grad = g.grad = None
    state, wanted = 0, []
    for t in range(32):
        state = state * g[:, t].exp() + x[:, t]
        wanted.append(state)
    wanted = torch.stack(wanted, 1)
    wanted.backward(dy)
    return agree(*zip(got, (wanted, x.grad, g.grad)))


@fla("fused_recurrent_gla, forward")
def _(ops):
    q, k, v = _qkv(t=32, dtype=torch.float32)
    g = -torch.rand(1, 32, 2, 64)
    o, _ = ops("ops.gla.fused_recurrent").fused_recurrent_gla(q, k, v, gk=g)
    return _near((o, _recurrence(q, k, v, g)[0]), limit=1e-4)


@fla("chunk_gla, forward")
def _(ops):
    q, k, v = _qkv()
    g = -torch.rand(1, 128, 2, 64) / 8
    o, state = ops("ops.gla.chunk").chunk_gla(q, k, v, g, output_final_state=True)
    return _near(*zip((o, state), _recurrence(q, k, v, g)))


@fla("chunk_simple_gla, forward")
def _(ops):
    q, k, v = _qkv()
    g = -torch.rand(1, 128, 2) / 8
    o, state = ops("ops.simple_gla.chunk").chunk_simple_gla(q, k, v, g, output_final_state=True)
    return _near(*zip((o, state), _recurrence(q, k, v, g)))


@fla("chunk_delta_rule, forward")
def _(ops):
    q, k, v = _qkv()
    beta = torch.rand(1, 128, 2).bfloat16()
    o, state = ops("ops.delta_rule.chunk").chunk_delta_rule(q, k, v, beta, output_final_state=True)
    return _near(*zip((o, state), _recurrence(q, k, v, beta=beta)))


@fla("chunk_gated_delta_rule, forward")
def _(ops):
    q, k, v = _qkv()
    g, beta = -torch.rand(1, 128, 2) / 8, torch.rand(1, 128, 2).bfloat16()
    o, state = ops("ops.gated_delta_rule.chunk").chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    return _near(*zip((o, state), _recurrence(q, k, v, g, beta)))
