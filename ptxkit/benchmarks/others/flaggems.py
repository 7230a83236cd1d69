"""FlagGems: its operators, called by name; some generate their Triton code when they are called first."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from .cases import agree, host_functions

os.environ.setdefault("GEMS_VENDOR", "nvidia")  # it would ask nvidia-smi
flaggems = host_functions("FlagGems", root="src", package="flag_gems")


@flaggems("softmax, forward and backward")
def _(ops):
    x, dy = torch.randn(8, 300), torch.randn(8, 300)
    y = ops("ops.softmax").softmax(x, 1)
    dx = ops("ops.softmax").softmax_backward(dy, y, 1, torch.float32)
    wanted = x.softmax(1)
    return agree((y, wanted), (dx, wanted * (dy - (wanted * dy).sum(1, keepdim=True))))


@flaggems("layer_norm, forward")
def _(ops):
    x, w, b = torch.randn(8, 256), torch.randn(256), torch.randn(256)
    y, mean, _ = ops("ops.layernorm").layer_norm(x, (256,), w, b, 1e-5)
    return agree((y, F.layer_norm(x, (256,), w, b)), (mean.view(-1), x.mean(1)))


@flaggems("cumsum")
def _(ops):
    x = torch.randn(4, 500)
    return agree((ops("ops.cumsum").cumsum(x, 1), x.cumsum(1)), tolerance=1e-3)


@flaggems("mm")
def _(ops):
    a, b = torch.randn(64, 96).half(), torch.randn(96, 80).half()
    return agree((ops("ops.mm").mm(a, b), a.float() @ b.float()), tolerance=3e-2)


@flaggems("topk")
def _(ops):
    x = torch.randperm(1024).float().view(4, 256)
    values, index = ops("ops.topk").topk(x, 5)
    wanted = x.topk(5)
    return torch.equal(values, wanted.values) and torch.equal(index, wanted.indices)


@flaggems("argmax")
def _(ops):
    x = torch.randperm(2048).float().view(8, 256)
    return torch.equal(ops("ops.argmax").argmax(x, dim=1), x.argmax(1))


@flaggems("sort")
def _(ops):
    x = torch.randint(0, 100, (2, 300), dtype=torch.int32)
    values, index = ops("ops.sort").sort(x)
    return torch.equal(values, x.sort(1).values) and torch.equal(x.gather(1, index), values)


@flaggems("var_mean")
def _(ops):
    x = torch.randn(8, 300)
    var, mean = ops("ops.var_mean").var_mean(x, dim=[1], correction=1)
    return agree((var, x.var(1)), (mean, x.mean(1)))


@flaggems("isin")
def _(ops):
    x, some = torch.randint(0, 100, (500,)), torch.randint(0, 100, (30,))
    return torch.equal(ops("ops.isin").isin(x, some), torch.isin(x, some))


@flaggems("where, generated")
def _(ops):
    a, b = torch.randn(20, 30), torch.randn(20, 30)
    return torch.equal(ops("ops.where").where_self(a > 0, a, b), torch.where(a > 0, a, b))
