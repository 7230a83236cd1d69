"""Every kernel of a call, packed, with tokens of nobody: what compute-sanitizer looks at.

    compute-sanitizer --tool memcheck|racecheck python benchmarks/sanitized.py [BACKEND]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import kda
from kda.backends.sm90 import plan
from kda.verify.cases import make_inputs

backend = (sys.argv[1:] or ["triton"])[0]
plan.FUSED = False
for gate in ("bounded", "softplus"):
    case = make_inputs((100, 0, 65), padding=70, H=1, HV=2, K=128, V=128, gate=gate, device="cuda")
    kda.chunk_kda_fwd(**case.keywords, backend=backend)
    leaves = case.keywords | {name: case.keywords[name].detach().requires_grad_() for name in ("q", "k", "v", "g")}
    o, ht = kda.chunk_kda(**leaves, backend=backend)
    torch.autograd.backward((o, ht), (case.do, case.dht))
case = make_inputs(T=4200, H=1, K=128, V=128, gate="bounded", device="cuda")               # cut into segments
kda.chunk_kda_fwd(**case.keywords, backend=backend)
if backend == "sm90":                                                                       # other plans than those
    plan.FUSED = True
    case = make_inputs((300, 0, 165), padding=5, H=1, HV=3, K=128, V=128, gate="bounded", device="cuda")
    kda.chunk_kda_fwd(**case.keywords, backend=backend)
torch.cuda.synchronize()
