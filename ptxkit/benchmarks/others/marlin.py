"""Marlin: its kernel through its own host function, on weights that its own layer packs."""

from __future__ import annotations

import importlib
import sys
import types

import torch

import ptxkit

from .cases import case, importable


def packed(layer, k, n):
    """Return (what the weights stand for, in 16 bits; the packed weights; their scales), one scale for each column."""
    weight = torch.randn(k, n).half()
    scale = weight.abs().amax(0, keepdim=True) * 2 / 15
    whole = torch.clamp(torch.round(weight / scale).int() + 8, 0, 15)
    meant = (whole - 8).half() * scale
    linear = torch.nn.Linear(k, n)
    linear.weight.data = meant.t()
    module = layer(256, 256, groupsize=-1)
    module.k, module.n, module.groupsize = k, n, k
    module.B, module.s = torch.empty((k // 16, n * 2), dtype=torch.int), torch.empty((1, n), dtype=torch.half)
    module.pack(linear, scale.t())
    return meant, module.B, module.s


def marlin(m, n, k, thread_k, thread_n):
    @case("marlin", f"Marlin, {m} x {n} x {k}, tiles of {thread_k} x {thread_n}", "sm_80")
    def _(folder):
        sys.modules.setdefault("marlin_cuda", types.ModuleType("marlin_cuda"))  # its extension for torch
        importable(folder, folder / "marlin", ())
        file = folder / "marlin/marlin/marlin_cuda_kernel.cu"
        lib = ptxkit.library(file, arch="sm_80", options=["--expt-relaxed-constexpr"])
        weight, b, s = packed(importlib.import_module("marlin").Layer, k, n)
        a, c = torch.randn(m, k).half(), torch.zeros(m, n, dtype=torch.half)
        locks = torch.zeros(n // 128 * 16, dtype=torch.int)
        with ptxkit.capture(arch="sm_80", sms=4) as session:
            refused = lib.marlin_cuda(a, b, c, s, m, n, k, locks, -1, 0, 0, thread_k, thread_n, -1, 16)
        wanted = a.float() @ weight.float()
        return not refused and (c.float() - wanted).abs().mean() < 1e-3 * wanted.abs().mean(), session.runs


marlin(16, 512, 256, 128, 128)
marlin(24, 512, 256, 64, 256)
