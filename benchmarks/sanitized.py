"""Every kernel of a call, packed, with tokens of nobody: what compute-sanitizer looks at.

    compute-sanitizer --tool memcheck|racecheck python benchmarks/sanitized.py [BACKEND] [--followed]

racecheck (CUDA 13.0) reports hazards of the Hopper kernels that are none, of two kinds:
- one lane arrives on an mbarrier for its warp, which met before: what the other lanes did counts as not ordered;
- in `fused` four warps of a group meet once a chunk without the other four: from then on the meetings of all eight
  count as not ordered, as if meetings were told apart by their number alone.
`--followed`: the kernels with what makes up for both and orders nothing else. All lanes arrive, and the other four
warps meet among themselves.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import kda
from kda.backends.sm90 import launch, plan
from kda.verify.cases import make_inputs

FOLLOWED = {
    "fwd/chain.py": {
        "mbarrier_init(s.empty + stage, 4)": "mbarrier_init(s.empty + stage, 128)",
        """with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(s.empty + stage)""": "cute.arch.mbarrier_arrive(s.empty + stage)",
    },
    "fwd/fused.py": {
        "mbarrier_init(ring.full + stage, 1)": "mbarrier_init(ring.full + stage, 32)",
        "mbarrier_init(ring.empty + stage, 4 * CTAS)": "mbarrier_init(ring.empty + stage, 4 * CTAS * 32)",
        """with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.empty + stage""": """if True:
                cute.arch.mbarrier_arrive(ring.empty + stage""",
        """with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)
""": """cute.arch.mbarrier_arrive(full)
        if cute.arch.lane_idx() != 0:
            cute.arch.mbarrier_arrive(full, peer_cta_rank_in_cluster=neighbour)
        else:
""",
        """if self.team.warp() == IDLEST and (chunk""": """if self.team.warp() >= 4:
                cute.arch.barrier(barrier_id=6 + self.team.number(), number_of_threads=128)
            if self.team.warp() == IDLEST and (chunk""",
    },
}  # fmt: skip


def follow(folder: Path) -> None:
    """Kernels of the Hopper backend come from a copy in `folder`, as FOLLOWED says."""
    copy, backends = folder / "followed", Path(launch.__file__).parents[1]
    for part in ("sm90", "common"):
        shutil.copytree(backends / part, copy / part)
    for name, changes in FOLLOWED.items():
        text = (copy / "sm90" / name).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {name}"
            text = text.replace(old, new)
        (copy / "sm90" / name).write_text(text)
    sys.path.insert(0, str(folder))

    def kernel(config):
        build = importlib.import_module(f"{copy.name}.{plan.KERNELS[type(config)]}").build
        (kernel,) = build(config, plan.TARGET).kernels.values()
        return kernel

    launch.kernel = kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", default="triton")
    parser.add_argument("--followed", action="store_true", help="Hopper's kernels in a form that racecheck follows")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.followed:
            follow(Path(folder))
        calls(asked.backend)


def calls(backend: str) -> None:
    plan.FUSED = False
    dtype = "float32" if backend == "sm89" else "bfloat16"
    for gate, D in (("bounded", 128), ("softplus", 128), ("bounded", 64)):
        case = make_inputs((100, 0, 65), padding=70, H=1, HV=2, K=D, V=D, dtype=dtype, gate=gate, device="cuda")
        kda.chunk_kda_fwd(**case.keywords, backend=backend)
        leaves = case.keywords | {name: case.keywords[name].detach().requires_grad_() for name in ("q", "k", "v", "g")}
        o, ht = kda.chunk_kda(**leaves, backend=backend)
        torch.autograd.backward((o, ht), (case.do, case.dht))
    if backend != "sm89":                                                                       # cut into segments
        case = make_inputs(T=4200, H=1, K=128, V=128, gate="bounded", device="cuda")
        kda.chunk_kda_fwd(**case.keywords, backend=backend)
    if backend == "sm90":                                                                       # other plans than those
        plan.FUSED = True
        case = make_inputs((300, 0, 165), padding=5, H=1, HV=3, K=128, V=128, gate="bounded", device="cuda")
        kda.chunk_kda_fwd(**case.keywords, backend=backend)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
