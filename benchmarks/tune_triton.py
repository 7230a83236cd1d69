"""Times the Triton backend's kernels one by one over a list of configurations, each checked against the first.

    python benchmarks/tune_triton.py --out results.json [--kernel prepare] [--shape "B=1 T=8192 H=64"]
"""

import argparse
import dataclasses
import json
import statistics
import sys

import torch

import kda
from kda.backends.triton import launch, plan
from kda.host import detect
from kda.problem import Inputs, Options
from kda.verify.cases import Spec, make


def milliseconds(call, times=10):
    for _ in range(3):
        call()
    found = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def inputs(B, T, H, regime, dtype=torch.bfloat16, K=128, V=128, lengths=None):
    g = torch.Generator(device="cuda").manual_seed(0)
    n = lambda *s: torch.randn(*s, device="cuda", generator=g, dtype=torch.float32).to(dtype)
    u = lambda lo, hi, *s: lo + (hi - lo) * torch.rand(*s, device="cuda", generator=g)
    fast = regime == "fast"
    kw = dict(q=n(B, T, H, K), k=n(B, T, H, K), v=n(B, T, H, V), g=n(B, T, H, K), beta=n(B, T, H),
              A_log=u(0, 1, H) if fast else torch.zeros(H, device="cuda"), dt_bias=u(0, 1, H * K) if fast else u(-8, -6, H * K),
              lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    if lengths is not None:
        kw["cu_seqlens"] = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], device="cuda")
    return kw
