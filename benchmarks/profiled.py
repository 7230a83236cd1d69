"""What binds the kernels of a call on a GPU: ncu's counters of each kernel.

    python -m benchmarks.profiled --json FILE                      CALLS
    python -m benchmarks.profiled --call "kept h64-8k softplus"    one call; more of these for more

A call is `forward`, `step`, or `kept` for a step with disable_recompute, a shape of `kda bench --list`, and a gate.
A child process makes each call twice; ncu looks at the second one.  The child says which kernels it launched there,
ncu says what it counted for each, in the same order.  A row has the kernel's time, shares of what an SM or the memory
can do at most, and the reasons for which a warp waits, in warps for each instruction that is issued.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import common
from .checkouts import case_of, named

CALLS = (
    "forward h64-8k", "forward h32-8k", "forward h16-8k", "forward h8-32k", "forward h4-64k", "forward h12-4k",
    "forward h4-2k", "forward h64-8x1k", "forward h64-mixed", "forward h96-8k", "forward h64-1k",
    "forward h64-8k softplus", "forward h64-8k-64", "kept h64-8k", "kept h32-8k",
    "kept h16-8k", "kept h8-32k", "kept h64-8k softplus", "step h64-8k",
)
METRICS = {                                  # what a row calls it -> what ncu calls it
    "seconds": "gpu__time_duration.sum",     # ns
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issued": "sm__inst_issued.avg.per_cycle_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
}
WAIT = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
WAITS = {                                    # ncu's reason -> in words
    "long_scoreboard": "global memory", "short_scoreboard": "shared memory or MUFU", "barrier": "bar.sync",
    "wait": "a fixed latency", "math_pipe_throttle": "a busy pipe", "mio_throttle": "the queue of shared memory",
    "lg_throttle": "the queue of global memory", "not_selected": "another warp", "gmma": "wgmma",
    "membar": "a fence", "sleeping": "nanosleep", "no_instruction": "instructions", "branch_resolve": "a branch",
    "dispatch_stall": "dispatch", "imc_miss": "constants",
}
MOST = 3                                     # reasons that a row names
LEAST = 0.1
OURS = "regex:^kernel_cutlass_kernel_kda"


# ---- the child: makes the calls


def make_calls(calls: Iterable[str], file: Path) -> None:
    import torch

    from kda.tools.measure.predicted import family_of
    from kda.tools.measure.timing import launch
    from kda.tools.verify.doors import Door
    from ptxkit.compile import listening

    found, door = [], Door("sm90")
    for call in calls:
        direction, case = case_of(call, door.device)
        again = launch(door, case, direction)
        kernels: list[Any] = []
        with listening.launched(kernels):
            again()
            torch.cuda.synchronize()
            kernels.clear()
            torch.cuda.profiler.start()
            again()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        found.append([call, [family_of(kernel.name) for kernel in kernels]])
        common.write(file, found)


# ---- the parent: asks ncu


def counted(lines: Iterable[str]) -> list[dict[str, float]]:
    """Return ncu's metrics of each kernel, in the order of launches."""
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    kernels: dict[int, dict[str, float]] = {}
    for row in table:
        value = row["Metric Value"].replace(",", "")
        kernels.setdefault(int(row["ID"]), {})[row["Metric Name"]] = float("nan" if value == "n/a" else value)
    return [kernels[number] for number in sorted(kernels)]


def rows(launched: Iterable[tuple[str, list[str]]], kernels: list[dict[str, float]]) -> Iterator[dict[str, Any]]:
    names = [(call, kernel) for call, each in launched for kernel in each]
    if len(names) < len(kernels):
        raise ValueError(f"ncu counted {len(kernels)} kernels, and {len(names)} were launched")
    for (call, kernel), found in zip(names, kernels):
        row = {name: found[metric] for name, metric in METRICS.items()}
        yield {"call": call, "kernel": kernel, **row, "seconds": 1e-9 * row["seconds"], "waits": waits(found)}


def waits(found: Mapping[str, float]) -> dict[str, float]:
    """Return the most frequent reasons to wait, in words."""
    reasons = {says: found[WAIT.format(reason)] for reason, says in WAITS.items()}
    named = sorted(reasons, key=reasons.__getitem__, reverse=True)[:MOST]
    return {name: round(reasons[name], 2) for name in named if reasons[name] >= LEAST}


def profile(calls: list[str]) -> list[dict[str, Any]]:
    metrics = [*METRICS.values(), *map(WAIT.format, WAITS)]
    with tempfile.TemporaryDirectory() as folder:
        said, table = Path(folder, "launched.json"), Path(folder, "ncu.csv")
        command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none", "--csv",
                   "--print-units", "base", "--log-file", str(table), "-k", OURS, "--kernel-name-base", "function",
                   "--metrics", ",".join(metrics), *common.again(__spec__, *named(calls), "--child", said)]
        ran = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True)
        if not table.exists() or not said.exists():
            sys.exit(f"ncu counted nothing: {(ran.stderr or ran.stdout).strip()[-2000:]}")
        return [*rows(json.loads(said.read_text()), counted(table.read_text().splitlines()))]


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--call", action="append", help="a call to look at, may be repeated")
    parser.add_argument("--child", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    calls = args.call or [*CALLS]
    if args.child:
        make_calls(calls, args.child)
        return
    found = profile(calls)
    for row in found:
        print(f"{row['call']}, {row['kernel']}: {1e3 * row['seconds']:.3f} ms, memory {row['memory']:.0f}%, "
              f"{row['issued']:.2f} instructions a clock, waits for {row['waits']}")
    common.write(args.json, {"rows": found})


if __name__ == "__main__":
    main()
