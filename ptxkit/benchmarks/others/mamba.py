"""Mamba: the host functions of its Triton kernels. The package's own __init__ needs extensions in C++."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .cases import agree, both_ways, host_functions

mamba = host_functions("mamba", package="mamba_ssm.ops.triton", bare=["mamba_ssm", "mamba_ssm.ops", "mamba_ssm.utils"])


@mamba("layer_norm, rms_norm with residual, forward and backward")
def _(ops):
    x, w, r, dy = torch.randn(8, 256), torch.randn(256), torch.randn(8, 256), torch.randn(8, 256)
    norm = ops("layer_norm").rms_norm_fn
    return agree(*both_ways(
        lambda x, w: norm(x, w, None, residual=r, eps=1e-6), lambda x, w: F.rms_norm(x + r, (256,), w, 1e-6), [x, w], dy
    ))


@mamba("layernorm_gated, forward and backward")
def _(ops):
    x, z, w, dy = torch.randn(8, 256), torch.randn(8, 256), torch.randn(256), torch.randn(8, 256)
    norm = ops("layernorm_gated").rmsnorm_fn
    return agree(*both_ways(
        lambda x, z, w: norm(x, w, None, z=z, eps=1e-6, norm_before_gate=False),
        lambda x, z, w: F.rms_norm(x * F.silu(z), (256,), w, 1e-6), [x, z, w], dy,
    ))


@mamba("k_activations, swiglu forward and backward")
def _(ops):
    xy, dout = torch.randn(8, 512), torch.randn(8, 256)
    return agree(*both_ways(ops("k_activations").swiglu, lambda xy: F.silu(xy[:, :256]) * xy[:, 256:], [xy], dout))


@mamba("selective_state_update")
def _(ops):
    b, d, n = 2, 64, 16
    state, x, dt, z = torch.randn(b, d, n), torch.randn(b, d), torch.randn(b, d), torch.randn(b, d)
    a, bb, c, skip, bias = -torch.rand(d, n), torch.randn(b, n), torch.randn(b, n), torch.randn(d), torch.randn(d)
    step = F.softplus(dt + bias)
    after = state * (step[..., None] * a).exp() + (step * x)[..., None] * bb[:, None]
    wanted = ((after * c[:, None]).sum(-1) + skip * x) * F.silu(z)
    got = ops("selective_state_update").selective_state_update(
        state, x, dt, a, bb, c, D=skip, z=z, dt_bias=bias, dt_softplus=True
    )
    return agree((got, wanted), (state, after))


@mamba("ssd_bmm, forward")
def _(ops):
    a, b = torch.randn(1, 128, 2, 32).half(), torch.randn(1, 128, 2, 32).half()
    got = ops("ssd_bmm")._bmm_chunk_fwd(a, b, 64, output_dtype=torch.float32)
    a, b = (t.float().view(1, 2, 64, 2, 32).transpose(2, 3) for t in (a, b))
    return agree((got, a @ b.mT), tolerance=1e-3)


@mamba("ssd_chunk_state: chunk_cumsum, forward")
def _(ops):
    dt, a, bias = torch.randn(1, 128, 4), -torch.rand(4), torch.randn(4)
    total, out = ops("ssd_chunk_state")._chunk_cumsum_fwd(dt, a, 64, dt_bias=bias, dt_softplus=True)
    wanted = F.softplus(dt + bias).view(1, 2, 64, 4).permute(0, 3, 1, 2)
    return agree((out, wanted), (total, (wanted * a[None, :, None, None]).cumsum(-1)))


@mamba("ssd_chunk_state: chunk_state, forward")
def _(ops):
    b, x = torch.randn(1, 128, 1, 32).half(), torch.randn(1, 128, 2, 32).half()
    dt = torch.rand(1, 2, 2, 64)
    total = -torch.rand(1, 2, 2, 64).cumsum(-1) / 8
    got = ops("ssd_chunk_state")._chunk_state_fwd(b, x, dt, total)
    decay = dt * (total[..., -1:] - total).exp()  # (batch, head, chunk, row)
    xs, bs = x.float().view(1, 2, 64, 2, 32), b.float().view(1, 2, 64, 1, 32).expand(1, 2, 64, 2, 32)
    return agree((got, torch.einsum("bclhn,bhcl,bclhp->bchpn", bs, decay, xs)), tolerance=2e-2)


@mamba("ssd_state_passing, forward")
def _(ops):
    states, decay, first = torch.randn(1, 3, 2, 64), -torch.rand(1, 2, 3), torch.randn(1, 2, 64)
    out, last = ops("ssd_state_passing")._state_passing_fwd(states, decay, initial_states=first)
    wanted, state = [], first
    for chunk in range(3):
        wanted.append(state)
        state = state * decay[:, :, chunk, None].exp() + states[:, chunk]
    return agree((out, torch.stack(wanted, 1)), (last, state))
