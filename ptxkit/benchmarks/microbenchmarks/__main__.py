"""`python -m ptxkit.benchmarks.microbenchmarks`, from the root of a checkout."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import ptxkit
from ptxkit.compile.target import parse

from . import groups
from .figures import Results
from .groups import GROUPS, FoundGpu, Message

ROOT = Path(__file__).resolve().parents[3]
BUILDING = 600.0                             # seconds for the kernels of a group


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description="What a GPU's units take.")
    parser.add_argument("--group", default=",".join(GROUPS), help="which, with commas between: %(default)s")
    parser.add_argument("--json", type=Path, help="write all figures, anew after each")
    parser.add_argument("--lines", action="store_true", help="print a JSON object per figure instead of text")
    parser.add_argument("--seconds", type=float, default=200, help="that measuring may take in all (%(default)s)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--build", metavar="ARCH", help="only build, for sm90, sm100, ...: no GPU")
    how.add_argument("--simulate", metavar="ARCH", help="run in ptxkit: results are checked, nothing is timed")
    args = parser.parse_args()
    names = args.group.split(",")
    if unknown := set(names) - set(GROUPS):
        parser.error(f"no group is called {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    if arch := args.build or args.simulate:
        return check(names, arch, "dry" if args.build else "simulated")
    gpu = ask()
    if gpu is None or gpu.target is None:
        print(f"{__package__} needs a GPU that ptxkit has code for; found {gpu}. --build needs none.", file=sys.stderr)
        return 2
    say(f"{gpu.name} {gpu.cc[0]}.{gpu.cc[1]}, {gpu.sms} SMs, driver {gpu.driver}, torch {torch.__version__}")
    began = time.monotonic()
    built = check(names, gpu.target.name, "dry")
    say(f"built in {time.monotonic() - began:.0f} seconds{'' if not built else ', with faults'}")
    return measure(names, gpu, Results(args.json, head(gpu)), args)


def say(text: str) -> None:
    print(text, flush=True)


def ask() -> FoundGpu | None:
    """Ask in a child process: this one must not touch the GPU, or its children could not."""
    answers = []
    for message in groups.in_child(lambda send: send(Message("gpu", groups.the_gpu())), 60):
        if message.kind == "gpu":
            answers.append(message.content)
        elif message.kind == "failed":
            print(message.content, file=sys.stderr)
    return answers[0] if answers else None


def head(gpu: FoundGpu) -> dict:
    try:
        git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
        commit = git.stdout.strip() or None
    except OSError:
        commit = None
    versions = {"torch": torch.__version__}
    about = {"device": gpu.name, "cc": list(gpu.cc), "sms": gpu.sms, "driver": gpu.driver, "versions": versions}
    return {"schema": 1, "ptxkit": ptxkit.__version__, "command": "microbenchmarks", "commit": commit} | about


def check(names: list[str], arch: str, way: str) -> int:
    """Check all groups at once, as far as there are cores."""
    target = parse(arch)
    faults = 0

    def one(name: str) -> list[Message]:
        return list(groups.in_child(groups.checking(name, target, way), BUILDING))

    with ThreadPoolExecutor(max_workers=max(torch.get_num_threads(), 2)) as pool:
        for name, messages in zip(names, pool.map(one, names)):
            for message in messages:
                if message.kind == "done":
                    continue
                say(f"{name:8} {message.kind}: {message.content}")
                faults += message.kind != "skip"
    return int(faults > 0)


def measure(names: list[str], gpu: FoundGpu, results: Results, args: argparse.Namespace) -> int:
    ends, faults = time.monotonic() + args.seconds, 0
    for name in names:
        left, began = ends - time.monotonic(), time.monotonic()
        if left <= 1:
            results.skipped[name] = f"the {args.seconds:.0f} seconds are over"
            continue
        for message in groups.in_child(groups.measuring(name, gpu), min(GROUPS[name].limit, left)):
            if message.kind == "figure":
                results.figures.append(message.content.record())
                faults += bool(message.content.fault)
                say(json.dumps(results.figures[-1]) if args.lines else str(message.content))
            elif message.kind == "skip":
                results.skipped[name] = message.content
            elif message.kind == "failed":
                results.failed[name] = message.content
            if message.kind in ("skip", "failed"):
                say(f"{name:8} {message.kind}: {message.content}")
            results.write()
        results.seconds[name] = round(time.monotonic() - began, 1)
    results.write()
    failed = f"{faults} with faults, {len(results.failed)} groups failed"
    say(f"{len(results.figures)} figures, {failed}; seconds: {results.seconds}")
    return int(faults > 0 or bool(results.failed))


if __name__ == "__main__":
    sys.exit(main())
