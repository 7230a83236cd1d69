"""Liger-Kernel: its host functions on CPU tensors, their Triton kernels captured."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .cases import agree as _agree
from .cases import host_functions

liger = host_functions("liger", package="liger_kernel.ops")


@liger("rms_norm, forward and backward")
def _(ops):
    x, w, dy = torch.randn(8, 256, requires_grad=True), torch.randn(256, requires_grad=True), torch.randn(8, 256)
    y = ops("rms_norm").LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)
    y.backward(dy)
    got = y.detach(), x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    wanted = F.rms_norm(x, (256,), w, 1e-6)
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, x.grad, w.grad)))


@liger("layer_norm, forward and backward")
def _(ops):
    x, dy = torch.randn(8, 256, requires_grad=True), torch.randn(8, 256)
    w, b = torch.randn(256, requires_grad=True), torch.randn(256, requires_grad=True)
    y = ops("layer_norm").LigerLayerNormFunction.apply(x, w, b, 1e-6)
    y.backward(dy)
    got = y.detach(), x.grad.clone(), w.grad.clone(), b.grad.clone()
    x.grad = w.grad = b.grad = None
    wanted = F.layer_norm(x, (256,), w, b, 1e-6)
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, x.grad, w.grad, b.grad)))


@liger("softmax, forward and backward")
def _(ops):
    x, dy = torch.randn(8, 300, requires_grad=True), torch.randn(8, 300)
    y = ops("softmax").LigerSoftmaxFunction.apply(x)
    y.backward(dy)
    got = y.detach(), x.grad.clone()
    x.grad = None
    wanted = x.softmax(-1)
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, x.grad)))


@liger("swiglu, forward and backward")
def _(ops):
    a, b, dy = torch.randn(8, 256, requires_grad=True), torch.randn(8, 256, requires_grad=True), torch.randn(8, 256)
    y = ops("swiglu").LigerSiLUMulFunction.apply(a.clone(), b.clone())  # the backward overwrites them
    y.backward(dy.clone())
    got = y.detach().clone(), a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    wanted = F.silu(a) * b
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, a.grad, b.grad)))


@liger("geglu, forward and backward")
def _(ops):
    a, b, dy = torch.randn(8, 256, requires_grad=True), torch.randn(8, 256, requires_grad=True), torch.randn(8, 256)
    y = ops("geglu").LigerGELUMulFunction.apply(a.clone(), b.clone())
    y.backward(dy.clone())
    got = y.detach().clone(), a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    wanted = F.gelu(a, approximate="tanh") * b
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, a.grad, b.grad)), tolerance=1e-3)


@liger("cross_entropy, forward and backward")
def _(ops):
    x, target = torch.randn(8, 500, requires_grad=True), torch.randint(0, 500, (8,))
    given = x.detach().clone().requires_grad_()
    loss, *_ = ops("cross_entropy").LigerCrossEntropyFunction.apply(given, target, None)
    loss.backward()
    wanted = F.cross_entropy(x, target)
    wanted.backward()
    return _agree((loss.detach(), wanted), (given.grad, x.grad))


@liger("rope, forward and backward")
def _(ops):
    q, k = torch.randn(1, 2, 16, 64), torch.randn(1, 1, 16, 64)
    angles = torch.arange(16.0)[:, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None] for f in (torch.cos, torch.sin))
    turned = lambda x: x * cos[:, None] + torch.cat([-x[..., 32:], x[..., :32]], -1) * sin[:, None]  # noqa: E731
    wanted = turned(q), turned(k)
    return _agree(*zip(ops("rope").LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin), wanted))


@liger("kl_div, forward and backward")
def _(ops):
    x = torch.randn(8, 300).log_softmax(-1).requires_grad_()
    target = torch.randn(8, 300).softmax(-1)
    loss = ops("kl_div").LigerKLDivLossFunction.apply(x, target, "batchmean", False, 1e-10)
    loss.backward()
    got = loss.detach(), x.grad.clone()
    x.grad = None
    wanted = F.kl_div(x, target, reduction="batchmean")
    wanted.backward()
    return _agree(*zip(got, (wanted, x.grad)))


@liger("group_norm, forward")
def _(ops):
    x, w, b = torch.randn(2, 8, 40), torch.randn(8), torch.randn(8)
    got = ops("group_norm").LigerGroupNormFunction.apply(x, w, b, 8, 2, 1e-6)
    return _agree((got, F.group_norm(x, 2, w, b, 1e-6)))


@liger("dyt, forward")
def _(ops):
    x, alpha, gamma, beta = torch.randn(8, 256), torch.rand(1), torch.randn(256), torch.randn(256)
    got = ops("dyt").LigerDyTFunction.apply(x, alpha, gamma, beta)
    return _agree((got, gamma * (alpha * x).tanh() + beta))


@liger("fused_add_rms_norm, forward")
def _(ops):
    x, r, w = torch.randn(8, 256), torch.randn(8, 256), torch.randn(256)
    y, s = ops("fused_add_rms_norm").LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)
    return _agree((s, x + r), (y, F.rms_norm(x + r, (256,), w, 1e-6)))


@liger("tvd, forward and backward")
def _(ops):
    p, q = torch.randn(8, 300).softmax(-1), torch.randn(8, 300).softmax(-1)
    got = ops("tvd").LigerTVDLossFunction.apply(p, q, None, "batchmean")
    return _agree((got, 0.5 * (p - q).abs().sum(-1).mean()))
