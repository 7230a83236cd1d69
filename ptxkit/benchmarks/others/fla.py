"""flash-linear-attention: host functions of its Triton kernels, also those that its operators share.

Their results are compared with the recurrences that define them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .cases import agree, both_ways, host_functions, near

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


@fla("l2norm, forward and backward")
def _(ops):
    x, dy = torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 64)
    return agree(*both_ways(
        ops("modules.l2norm").l2norm, lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), [x], dy
    ))


@fla("token_shift, forward and backward")
def _(ops):
    x, dy = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
    return agree(*both_ways(ops("modules.token_shift").token_shift, lambda x: F.pad(x, (0, 0, 1, -1)) - x, [x], dy))


@fla("rms_norm_gated, forward and backward")
def _(ops):
    x, g, w, dy = torch.randn(8, 256), torch.randn(8, 256), torch.randn(256), torch.randn(8, 256)
    norm = ops("modules.fused_norm_gate").rms_norm_gated
    return agree(*both_ways(
        lambda x, g, w: norm(x, g, w, None), lambda x, g, w: F.rms_norm(x, (256,), w, 1e-6) * F.silu(g), [x, g, w], dy
    ))


@fla("mean_pooling, forward and backward")
def _(ops):
    x, dy, pool = torch.randn(1, 128, 2, 64), torch.randn(1, 4, 2, 64), ops("ops.utils.pooling").mean_pooling
    return agree(*both_ways(lambda x: pool(x, 32), lambda x: x.view(1, 4, 32, 2, 64).mean(2), [x], dy))


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
    return near((got, wanted), limit=2e-3)


@fla("fused_recurrent_hgrn, forward and backward")
def _(ops):
    x, g, dy = torch.randn(2, 32, 64), -torch.rand(2, 32, 64), torch.randn(2, 32, 64)

    def walked(x, g):
        states = [x[:, 0]]
        for t in range(1, 32):
            states.append(states[-1] * g[:, t].exp() + x[:, t])
        return torch.stack(states, 1)

    hgrn = ops("ops.hgrn.fused_recurrent").fused_recurrent_hgrn
    return agree(*both_ways(lambda x, g: hgrn(x, g)[0], walked, [x, g], dy))


@fla("fused_recurrent_gla, forward")
def _(ops):
    q, k, v = _qkv(t=32, dtype=torch.float32)
    g = -torch.rand(1, 32, 2, 64)
    o, _ = ops("ops.gla.fused_recurrent").fused_recurrent_gla(q, k, v, gk=g)
    return near((o, _recurrence(q, k, v, g)[0]), limit=1e-4)


@fla("chunk_gla, forward")
def _(ops):
    q, k, v = _qkv()
    g = -torch.rand(1, 128, 2, 64) / 8
    o, state = ops("ops.gla.chunk").chunk_gla(q, k, v, g, output_final_state=True)
    return near(*zip((o, state), _recurrence(q, k, v, g)))


@fla("chunk_simple_gla, forward")
def _(ops):
    q, k, v = _qkv()
    g = -torch.rand(1, 128, 2) / 8
    o, state = ops("ops.simple_gla.chunk").chunk_simple_gla(q, k, v, g, output_final_state=True)
    return near(*zip((o, state), _recurrence(q, k, v, g)))


@fla("chunk_delta_rule, forward")
def _(ops):
    q, k, v = _qkv()
    beta = torch.rand(1, 128, 2).bfloat16()
    o, state = ops("ops.delta_rule.chunk").chunk_delta_rule(q, k, v, beta, output_final_state=True)
    return near(*zip((o, state), _recurrence(q, k, v, beta=beta)))


@fla("chunk_gated_delta_rule, forward")
def _(ops):
    q, k, v = _qkv()
    g, beta = -torch.rand(1, 128, 2) / 8, torch.rand(1, 128, 2).bfloat16()
    o, state = ops("ops.gated_delta_rule.chunk").chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    return near(*zip((o, state), _recurrence(q, k, v, g, beta)))
