"""The kernels of the Hopper forward, each on its own: `python benchmarks/hopper.py --shape h64-8k [--stages 3,6]`.

Results are held against the portable backend first; then a call is timed as a whole, from a graph, and with events
around each kernel.  Milliseconds, medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import kda
from kda.backends.sm90 import launch
from kda.backends.sm90.configs import ChainConfig
from kda.verify.cases import make_inputs

CALLS, CLOSE = 31, 1e-2
SHAPES = {
    "h64-8k": dict(T=8192, H=64),
    "h64-8x1k": dict(lengths=(1024,) * 8, H=64),
    "h64-mixed": dict(lengths=(1300, 547, 2048, 963, 271, 3063), H=64),
    "h8-32k": dict(T=32768, H=8),
    "h16-8k": dict(T=8192, H=16),
    "h64-1k": dict(T=1024, H=64),
    "h64-64x128": dict(lengths=(128,) * 64, H=64),
}


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))


def median(pairs: list) -> float:
    torch.cuda.synchronize()
    return round(statistics.median(a.elapsed_time(b) for a, b in pairs), 4)


def whole(call) -> float:
    found = []
    for _ in range(CALLS):
        found.append(events())
        found[-1][0].record()
        call()
        found[-1][1].record()
    return median(found)


def replayed(call) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return whole(graph.replay)


def each(call, run) -> dict[str, float]:
    """Kernels of a call, by `run`, which launches one."""
    found = defaultdict(list)

    def timed(config, *args):
        pair = events()
        pair[0].record()
        run(config, *args)
        pair[1].record()
        found[" ".join((launch.KERNELS[type(config)], getattr(config, "walk", "")))].append(pair)

    launch.run = timed
    for _ in range(CALLS):
        call()
    launch.run = run
    return {name.strip(): median(pairs) for name, pairs in found.items()}


def measured(case, stages: int | None) -> dict[str, float]:
    """Of calls whose chains have so many stages; None: as planned."""
    plain = launch.run

    def changed(config, *args):
        given = stages and isinstance(config, ChainConfig)
        plain(dataclasses.replace(config, stages=stages) if given else config, *args)

    def call():
        return kda.chunk_kda_fwd(**case.keywords, backend="sm90").o

    launch.run = changed
    try:
        found = call().float()
        expected = kda.chunk_kda_fwd(**case.keywords, backend="triton").o.float()
        error = float((found - expected).norm() / expected.norm())
        return dict(error=error, **each(call, changed), call=whole(call), graph=replayed(call))
    finally:
        launch.run = plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--regime", default="slow")
    parser.add_argument("--gate", default="bounded")
    parser.add_argument("--stages", default="0", help="of chain; 0: as planned")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    for name in asked.shape or SHAPES:
        case = make_inputs(K=128, V=128, gate=asked.gate, regime=asked.regime, initial_state=False, device="cuda",
                           **SHAPES[name])  # fmt: skip
        for stages in map(int, asked.stages.split(",")):
            row = dict(shape=name, gate=asked.gate, regime=asked.regime, stages=stages) | measured(case, stages)
            print(json.dumps(row), flush=True)
            rows.append(row)
            if not row["error"] < CLOSE:
                raise SystemExit(f"{name}: off by {row['error']}")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
