"""A training step made by autograd: `python -m benchmarks.steps --json benchmarks/results/h200-sm90-step.json`.

Each row is a shape and a regime of gates: a step whose backward makes again what it reads, and one that kept it
(`disable_recompute`), called and from a graph, with the peak of memory.  Both have the same bits, which is checked
first; the distance from the portable backend's gradients is that of one row per gate.  Milliseconds, medians.
"""

from __future__ import annotations

import datetime
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import kda
from kda.model.host import detect
from kda.tools.verify.cases import Case, make_inputs

from . import common
from .hopper import whole

SHAPES: dict[str, dict[str, Any]] = {
    "h64-8k": dict(T=8192, H=64), "h32-8k": dict(T=8192, H=32), "h96-8k": dict(T=8192, H=96),
    "8x1024": dict(lengths=(1024,) * 8, H=64), "b8-1024": dict(B=8, T=1024, H=64), "h16-8k": dict(T=8192, H=16),
    "h8-32k": dict(T=32768, H=8), "h64-1k": dict(T=1024, H=64), "h12-4k": dict(T=4096, H=12),
    "h64-8k softplus": dict(T=8192, H=64, gate="softplus"), "h32-8k softplus": dict(T=8192, H=32, gate="softplus"),
    "h64-8k d64": dict(T=8192, H=64, K=64, V=64), "h32-8k d64": dict(T=8192, H=32, K=64, V=64),
}
COMPARED = "h32-8k", "h32-8k softplus", "h32-8k d64"    # with Triton's gradients
CLOSE = 2e-2
DRAWERS = 10                                 # threads; each needs up to 7 GB for numbers in float64


class Step:
    """Forward and backward of a case, on leaves of its own."""

    def __init__(self, case: Case, **options: Any):
        self.options, self.do = options, case.do
        self.leaves = {
            name: x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in case.keywords.items()
        }
        self.wanted = [x for x in self.leaves.values() if isinstance(x, torch.Tensor) and x.requires_grad]

    def __call__(self) -> tuple[torch.Tensor, ...]:
        o = kda.chunk_kda(**self.leaves, **self.options)[0]
        return torch.autograd.grad(o, self.wanted, self.do)

    def from_a_graph(self) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = self()
        times = whole(graph.replay)
        del outputs
        return times

    def mebibytes(self) -> float:
        """The peak of memory, inputs and the incoming gradient included."""
        given = sum(x.nbytes for x in (*self.leaves.values(), self.do) if isinstance(x, torch.Tensor))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self()
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before + given) / 2**20, 4)


def distance(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest of all gradients, relative to the norm of what is expected."""
    pairs = [(x.float(), y.float()) for x, y in zip(results, expected, strict=True)]
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)


def drawn(name: str, regime: str) -> Case:
    return make_inputs(**dict(K=128, V=128, gate="bounded", initial_state=False) | SHAPES[name], regime=regime)


def measured(name: str, regime: str, case: Case) -> dict[str, Any]:
    again, saving = Step(case), Step(case, disable_recompute=True)
    first, second = again(), saving()
    row = dict(shape=name, regime=regime, finite=all(bool(x.isfinite().all()) for x in first))
    row["same bits kept and made again"] = all(map(torch.equal, first, second))
    if name in COMPARED and regime == "slow":
        row["largest distance from Triton's gradients"] = round(distance(first, Step(case, backend="triton")()), 5)
    del first, second
    if not row["finite"] or row.get("largest distance from Triton's gradients", 0) > CLOSE:
        raise SystemExit(f"{name}, {regime}: wrong gradients, nothing is timed: {row}")
    for mode, step in (("again", again), ("kept", saving)):
        row |= {mode: whole(step), f"{mode} graph": step.from_a_graph(), f"{mode} MiB": step.mebibytes()}
    return row


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    args = parser.parse_args()
    document = dict(
        what="A training step by autograd (benchmarks/steps.py); milliseconds, medians",
        device=torch.cuda.get_device_name(), torch=torch.__version__, kda=kda.__version__,
        arch=detect("cuda").cc, date=str(datetime.date.today()), rows=[],
    )
    rows = [(name, regime) for name in args.shape or SHAPES for regime in ("slow", "fast")]
    with ThreadPoolExecutor(min(DRAWERS, os.cpu_count() or 1)) as threads:     # drawing takes longer than measuring
        for row, case in zip(rows, threads.map(drawn, *zip(*rows, strict=True)), strict=True):
            document["rows"].append(measured(*row, case.map(lambda x: x.cuda())))
            print(json.dumps(document["rows"][-1]), flush=True)
            common.write(args.json, document)


if __name__ == "__main__":
    main()
