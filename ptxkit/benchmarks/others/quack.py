"""QuACK: host functions of its CuTe DSL kernels, through tvm-ffi."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from .cases import agree, host_functions

os.environ.setdefault("QUACK_CACHE_ENABLED", "0")  # it would keep object files, which hold no PTX
quack = host_functions("quack", package="quack")


@quack("rmsnorm, forward")
def _(ops):
    x, w = torch.randn(8, 256).bfloat16(), torch.randn(256)
    y, *_ = ops("rmsnorm").rmsnorm_fwd(x, w)
    return agree((y, F.rms_norm(x.float(), (256,), w, 1e-6)), tolerance=2e-2)


@quack("softmax, forward and backward")
def _(ops):
    x, dy = torch.randn(8, 256), torch.randn(8, 256)
    y = ops("softmax").softmax_fwd(x)
    dx = ops("softmax").softmax_bwd(dy, y)
    wanted = x.softmax(1)
    return agree((y, wanted), (dx, wanted * (dy - (wanted * dy).sum(1, keepdim=True))))


@quack("cross_entropy, forward")
def _(ops):
    x, target = torch.randn(8, 512), torch.randint(0, 512, (8,))
    return agree((ops("cross_entropy").cross_entropy_fwd(x, target), F.cross_entropy(x, target, reduction="none")))


@quack("topk, forward")
def _(ops):
    x = torch.randperm(1024).float().view(4, 256)
    values, index = ops("topk").topk_fwd(x, 8)
    wanted = x.topk(8)
    return torch.equal(values, wanted.values) and torch.equal(index.long(), wanted.indices)
