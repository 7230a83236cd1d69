"""cuLA: host functions of its CuTe DSL kernels, and its launcher of the Hopper kernel in CUTLASS, which nvcc builds in
minutes: that of cula.cudac, without the code for torch's C++ library."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

import ptxkit

from .cases import case, host_functions, near
from .fla import _recurrence

cula = functools.partial(
    host_functions("cuLA", package="cula", bare=("cula", "cula.ops", "cula.kda")), arch="sm_100a"
)
T, H, D, C = 128, 2, 128, 64  # tokens, heads, channels, tokens of a chunk


def _bf16(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).bfloat16()


@cula("la_decode: linear_attention_decode")
def _(ops):
    q, k, v, state = _bf16(2, H, D), _bf16(2, H, D), _bf16(2, H, D), torch.randn(2 * H, D, D)
    out, decay, slots = torch.zeros(2, H, D).bfloat16(), torch.rand(H), torch.arange(2, dtype=torch.int32)
    outer = (v[..., None].float() * k[..., None, :].float()).view(2 * H, D, D)
    wanted = state * (-decay).exp().repeat(2)[:, None, None] + outer
    ops("ops.la_decode").linear_attention_decode(q, k, v, state, out, D**-0.5, 0, 0, 0, 0, 0, slots, decay, D, D, D)
    shown = (wanted * q.float().view(2 * H, 1, D)).sum(-1).view(2, H, D) * D**-0.5
    return near((out, shown), (state, wanted))


def _decoded(n):
    q, k, v = _bf16(n, 1, H, D), _bf16(n, 1, H, D), _bf16(n, 1, H, D)
    a, b, state = _bf16(n, 1, H, D, scale=0.1), _bf16(n, 1, H), torch.randn(n, H, D, D) / 10
    rate, bias = -2 * torch.rand(H), torch.randn(H, D) / 10
    decay = (-rate.exp()[:, None] * F.softplus(a[:, 0].float() + bias)).exp()
    unit_q, unit_k = (F.normalize(x[:, 0].float(), dim=-1) for x in (q, k))
    decayed = state * decay[:, :, None]
    new = (v[:, 0].float() - (decayed * unit_k[:, :, None]).sum(-1)) * b[:, 0].float().sigmoid()[..., None]
    wanted = decayed + new[..., None] * unit_k[:, :, None]
    arguments = rate, bias, q, k, v, a, b, state, torch.arange(n, dtype=torch.int32)
    return arguments, (wanted * unit_q[:, :, None]).sum(-1) * D**-0.5, wanted


def decode(n, batch):
    @cula(f"kda_decode, {batch} batch", arch="sm_90a")
    def _(ops):
        arguments, out, state = _decoded(n)
        got = ops("ops.kda_decode").kda_decode(*arguments)
        return near((got[:, 0], out), (arguments[-2], state))


decode(2, "small")
decode(32, "large")


@cula("fwd_o: chunk_gla_fwd_o")
def _(ops):
    q, v, h = _bf16(1, T, H, D), _bf16(1, T, H, D), _bf16(1, T // C, H, D, D, scale=0.1)
    g, a, o = torch.randn(1, T, H, D) / 10, _bf16(1, T, H, C, scale=0.1), torch.zeros(1, T, H, D).bfloat16()
    ops("ops.fwd_o").chunk_gla_fwd_o(q, v, g, h, o, a, D**-0.5)
    scaled = (q.float() * g.exp2()).view(T // C, C, H, D) * D**-0.5
    inside = a.float().view(T // C, C, H, C).transpose(1, 2).tril() @ v.float().view(T // C, C, H, D).transpose(1, 2)
    entered = torch.einsum("nchk,nhkv->nchv", scaled, h[0].float())
    return near((o.view(T // C, C, H, D), entered + inside.transpose(1, 2)))


@cula("chunk_delta_h: chunk_gated_delta_rule_fwd_h")
def _(ops):
    k, w, u = _bf16(1, T, H, D, scale=0.1), _bf16(1, T, H, D, scale=0.1), _bf16(1, T, H, D)
    gk = -torch.rand(1, T, H, D).view(T // C, C, H, D).cumsum(1).view(1, T, H, D) / 64
    delta_h = ops("ops.chunk_delta_h")
    got = delta_h.chunk_gated_delta_rule_fwd_h(k, w, u, gk=gk, output_final_state=True)
    state, states, news = torch.zeros(H, D, D), [], []
    for t in range(0, T, C):
        kc, wc, uc = (x[0, t : t + C].transpose(0, 1).float() for x in (k, w, u))
        states.append(state)
        news.append((uc - wc @ state).transpose(0, 1))
        state = state * gk[0, t + C - 1].exp2()[..., None] + kc.mT @ (uc - wc @ state)
    return near((got[0][0], torch.stack(states)), (got[1][0], torch.cat(news)), (got[2][0], state))


@cula("lightning_attn: lightning_attn_fwd")
def _(ops):
    q, k, v, decay = _bf16(1, T, H, D), _bf16(1, T, H, D), _bf16(1, T, H, D), torch.rand(H) / 8
    out, last = ops("ops.lightning_attn").lightning_attn_fwd(q, k, v, decay, D**-0.5, output_final_state=True)
    state, wanted = torch.zeros(H, D, D), []
    for t in range(T):
        state = state * (-decay).exp()[:, None, None] + k[0, t, :, :, None].float() * v[0, t, :, None].float()
        wanted.append((state * q[0, t, :, :, None].float()).sum(1) * D**-0.5)
    return near((out[0], torch.stack(wanted)), (last[0].mT, state))


HOPPER = """
#define CULA_SM90A_ENABLED
#include "kda/sm90/prefill_kernel_kda_fwd_sm90.cuh"
using bf16 = cute::bfloat16_t;
void once(bf16 *o, float *state, bf16 *q, bf16 *k, bf16 *v, float *alpha, float *beta, int *cu, unsigned char *work,
          int n, int h, long total, float scale, int sms) {
    kda::sm90::launch_kda_fwd_prefill_kernel_gbai<true, true, false, true, cutlass::arch::Sm90>(
        nullptr, o, state, q, k, v, static_cast<float const *>(nullptr), alpha, beta, cu, work, n, h, 128, total, scale,
        sms);
}
"""
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math", "-w",
         "-DCUTE_USE_PACKED_TUPLE=1"]


@case("cuLA", "csrc/kda/sm90: FlatKernelTmaWarpSpecializedKdaFwd", "sm_90a")
def _(folder):
    csrc, cutlass = folder / "cuLA" / "csrc", folder / "cutlass"
    include = [csrc, csrc / "kerutils" / "include", cutlass / "include", cutlass / "tools" / "util" / "include"]
    lib = ptxkit.library(HOPPER, arch="sm_90a", include=include, options=FLAGS)
    q, k, v = (F.normalize(torch.randn(T, H, D), dim=-1).bfloat16() for _ in range(3))
    g, beta = -torch.rand(T, H, D) / 8, torch.rand(T, H)                        # a logarithm to base 2
    sums = g.view(T // C, C, H, D).cumsum(1).view_as(g)
    out, state, work = torch.zeros_like(q), torch.zeros(1, H, D, D), torch.zeros(132 * 128, dtype=torch.uint8)
    with ptxkit.capture(arch="sm_90a") as session:
        lib.once(out, state, q, k, v, sums, beta, torch.tensor([0, T], dtype=torch.int32), work, 1, H, T, D**-0.5, 132)
    wanted, last = _recurrence(*(x[None] for x in (q, k, v, g * math.log(2), beta)))
    return near((out, wanted[0].float()), (state[0].mT, last[0].float())), session.runs
