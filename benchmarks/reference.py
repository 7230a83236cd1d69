"""The chunked path of the reference against its token-by-token recurrence: `python -m benchmarks.reference`.

One row, float32, gate given, no l2norm.  Each implementation is timed in this process, where the allocator is warm, and
in one of its own, whose first call pays for page faults.
`kda bench --backend reference --stages` times the stages of the chunked path.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from kda.backends.reference import launch
from kda.backends.reference.ragged import Ragged
from kda.backends.reference.recurrent import recurrent
from kda.tools.verify.cases import make_inputs
from ptxkit.commands.layout import table

from . import common

NAMES = ("recurrent", "chunked 64", "chunked 32")
H, K = 8, 64


def implementation(name: str, T: int) -> Callable[[], torch.Tensor]:
    kind, _, C = name.partition(" ")
    case = make_inputs(T=T, H=H, K=K, V=K, C=int(C or 64), dtype="float32", gate="given", beta="given", l2norm=False,
                       initial_state=False, regime="slow")
    p, x = case.problem(), case.inputs
    if kind == "chunked":
        return lambda: launch.forward(p, x).o
    tokens = (x.q[0], x.k[0], x.v[0], x.g[0], x.beta[0].unsqueeze(-1))
    S, row = torch.zeros(1, H, K, K), Ragged([0], [T], T, 1, x.q.device)
    return lambda: recurrent(*tokens, S, p.scale, row)[0].unsqueeze(0)


def seconds(call: Callable[[], Any], launches: int) -> list[float]:
    taken = []
    for _ in range(launches):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return taken


def timed(name: str, T: int, launches: int) -> dict[str, float]:
    first, *others = seconds(implementation(name, T), launches + 1)
    return {"first": first, "median": statistics.median(others), "fastest": min(others)}


def in_a_fresh_process(name: str, T: int, launches: int) -> dict[str, float]:
    argv = common.again(__spec__, "--only", name, "--tokens", T, "--launches", launches, "--threads",
                        torch.get_num_threads())
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, cwd=common.ROOT).stdout)


def disagreement(T: int) -> float:
    """Return the distance of the chunked outputs from those of the recurrence, relative to their norm."""
    exact, *others = (implementation(name, T)() for name in NAMES)
    return max(common.off(x, exact) for x in others)


def measure(T: int, launches: int) -> dict[str, Any]:
    return {
        "T": T, "H": H, "K": K, "V": K, "dtype": "float32", "threads": torch.get_num_threads(),
        "torch": torch.__version__, "disagreement": disagreement(T),
        "here": {name: timed(name, T, launches) for name in NAMES},
        "fresh": {name: in_a_fresh_process(name, T, launches) for name in NAMES},
    }


def report(measured: dict[str, Any]) -> list[str]:
    own_process, fresh = measured["here"], measured["fresh"]
    base = own_process["recurrent"]["median"], fresh["recurrent"]["median"]
    rows = []
    for name in NAMES:
        a, b = own_process[name], fresh[name]
        rows.append((name, *map(ms, (a["median"], a["fastest"])), f"{base[0] / a['median']:.1f}x",
                     *map(ms, (b["first"], b["median"])), f"{base[1] / b['median']:.1f}x"))
    return [
        f"T={measured['T']} H={H} K=V={K} float32, {measured['threads']} threads, torch {measured['torch']}; "
        f"the outputs differ by {measured['disagreement']:.1e}",
        *table(rows, header=("forward, ms", "median", "fastest", "", "fresh: first", "median", ""), align="lrrrrrr"),
    ]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--launches", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch; 1 where other processes keep the cores busy")
    parser.add_argument("--only", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.only:
        print(json.dumps(timed(args.only, args.tokens, args.launches)))
        return
    measured = measure(args.tokens, args.launches)
    print("\n".join(report(measured)))
    common.write(args.json, measured)


if __name__ == "__main__":
    main()
