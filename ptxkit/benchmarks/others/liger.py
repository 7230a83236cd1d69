"""Liger-Kernel: its host functions on CPU tensors, their Triton kernels captured."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .cases import agree, both_ways, host_functions

liger = host_functions("liger", package="liger_kernel.ops")


@liger("rms_norm, forward and backward")
def _(ops):
    x, w, dy = torch.randn(8, 256), torch.randn(256), torch.randn(8, 256)
    norm = ops("rms_norm").LigerRMSNormFunction.apply
    return agree(*both_ways(
        lambda x, w: norm(x, w, 1e-6, 0.0, "llama", False), lambda x, w: F.rms_norm(x, (256,), w, 1e-6), [x, w], dy
    ))


@liger("layer_norm, forward and backward")
def _(ops):
    x, dy, w, b = torch.randn(8, 256), torch.randn(8, 256), torch.randn(256), torch.randn(256)
    norm = ops("layer_norm").LigerLayerNormFunction.apply
    return agree(*both_ways(
        lambda x, w, b: norm(x, w, b, 1e-6), lambda x, w, b: F.layer_norm(x, (256,), w, b, 1e-6), [x, w, b], dy
    ))


@liger("softmax, forward and backward")
def _(ops):
    x, dy = torch.randn(8, 300), torch.randn(8, 300)
    return agree(*both_ways(ops("softmax").LigerSoftmaxFunction.apply, lambda x: x.softmax(-1), [x], dy))


@liger("swiglu, forward and backward")
def _(ops):
    a, b, dy = torch.randn(8, 256), torch.randn(8, 256), torch.randn(8, 256)
    return agree(*both_ways(ops("swiglu").LigerSiLUMulFunction.apply, lambda a, b: F.silu(a) * b, [a, b], dy))


@liger("geglu, forward and backward")
def _(ops):
    a, b, dy = torch.randn(8, 256), torch.randn(8, 256), torch.randn(8, 256)
    theirs, ours = ops("geglu").LigerGELUMulFunction.apply, lambda a, b: F.gelu(a, approximate="tanh") * b
    return agree(*both_ways(theirs, ours, [a, b], dy), tolerance=1e-3)


@liger("cross_entropy, forward and backward")
def _(ops):
    x, target = torch.randn(8, 500), torch.randint(0, 500, (8,))
    loss = ops("cross_entropy").LigerCrossEntropyFunction.apply
    return agree(*both_ways(lambda x: loss(x, target, None)[0], lambda x: F.cross_entropy(x, target), [x]))


@liger("rope, forward and backward")
def _(ops):
    q, k = torch.randn(1, 2, 16, 64), torch.randn(1, 1, 16, 64)
    angles = torch.arange(16.0)[:, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None] for f in (torch.cos, torch.sin))
    turned = lambda x: x * cos[:, None] + torch.cat([-x[..., 32:], x[..., :32]], -1) * sin[:, None]  # noqa: E731
    wanted = turned(q), turned(k)
    return agree(*zip(ops("rope").LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin), wanted))


@liger("kl_div, forward and backward")
def _(ops):
    x, target = torch.randn(8, 300).log_softmax(-1), torch.randn(8, 300).softmax(-1)
    loss = ops("kl_div").LigerKLDivLossFunction.apply
    return agree(*both_ways(
        lambda x: loss(x, target, "batchmean", False, 1e-10), lambda x: F.kl_div(x, target, reduction="batchmean"), [x]
    ))


@liger("group_norm, forward")
def _(ops):
    x, w, b = torch.randn(2, 8, 40), torch.randn(8), torch.randn(8)
    got = ops("group_norm").LigerGroupNormFunction.apply(x, w, b, 8, 2, 1e-6)
    return agree((got, F.group_norm(x, 2, w, b, 1e-6)))


@liger("dyt, forward")
def _(ops):
    x, alpha, gamma, beta = torch.randn(8, 256), torch.rand(1), torch.randn(256), torch.randn(256)
    got = ops("dyt").LigerDyTFunction.apply(x, alpha, gamma, beta)
    return agree((got, gamma * (alpha * x).tanh() + beta))


@liger("fused_add_rms_norm, forward")
def _(ops):
    x, r, w = torch.randn(8, 256), torch.randn(8, 256), torch.randn(256)
    y, s = ops("fused_add_rms_norm").LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)
    return agree((s, x + r), (y, F.rms_norm(x + r, (256,), w, 1e-6)))


@liger("tvd, forward and backward")
def _(ops):
    p, q = torch.randn(8, 300).softmax(-1), torch.randn(8, 300).softmax(-1)
    got = ops("tvd").LigerTVDLossFunction.apply(p, q, None, "batchmean")
    return agree((got, 0.5 * (p - q).abs().sum(-1).mean()))
