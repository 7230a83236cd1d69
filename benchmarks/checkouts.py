"""The same calls from several checkouts, in turn on one GPU: which one is faster, and whether bits are the same.

    python -m benchmarks.checkouts before=../old after=. --call "kept h64-8k" --call "forward h32-8k softplus"
    python -m benchmarks.checkouts before=../old after=. --build FOLDER    build the kernels of these calls, with no GPU

A call is `forward`, `step`, or `kept` for a step with disable_recompute, a shape of `kda bench --list`, and a gate.
Each checkout has a process of its own; the first one runs once more at the end, which shows how far times wander.
Times are medians of replays of a CUDA graph, in milliseconds.  Checkouts may be archives without git.

A machine that has the built kernels (KDA_CACHE_DIR=FOLDER) needs no compiler but its version: for the CuTe DSL the
package `nvidia-cutlass-dsl` without its libraries.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CALLS = (
    "forward h64-8k", "forward h96-8k", "forward h32-8k", "forward h64-8k softplus", "forward h64-8x1k",
    "forward h16-8k", "forward h8-32k", "forward h4-64k", "forward h12-4k", "forward h4-2k", "kept h64-8k",
    "kept h32-8k", "kept h64-8k softplus", "kept h64-8x1k", "kept h8-32k", "step h64-8k",
)
REPEATS, SECONDS = 40, 10.0


# ---- a child: one checkout, whose kda this process imports


def spec_of(call: str) -> tuple[str, Any, dict[str, Any]]:
    """Return the direction of a call, the spec of its inputs, whose gates are slow, and its options."""
    from kda.tools.commands.bench.asked import spec_of as of_shape
    from kda.tools.measure.shapes import SHAPES

    direction, shape, *gates = call.split()
    spec = of_shape(SHAPES[shape]._replace(gate=(*gates, "bounded")[0]), "slow")
    return "forward" if direction == "forward" else "step", spec, {"disable_recompute": direction == "kept"}


def case_of(call: str, device: str) -> tuple[str, Any]:
    """Return the direction of a call, and its inputs."""
    from kda.tools.verify.cases import make

    direction, spec, options = spec_of(call)
    case = make(spec, device, device)
    return direction, dataclasses.replace(case, keywords=case.keywords | options)


def timed(call: str, backend: str) -> dict[str, Any]:
    """Return a call's time, from a graph on a GPU, and a digest of each of its results."""
    from kda.tools.measure.clocks import clock_of, interleaved
    from kda.tools.measure.timing import launch
    from kda.tools.verify.doors import Door

    door = Door(backend)
    clock = clock_of(door.device)
    direction, case = case_of(call, door.device)
    make = functools.partial(launch, door, case, direction)
    first = {name: digest(x) for name, x in make()().items()}
    graph = hasattr(clock, "captured")
    (timings, results), = interleaved([clock.captured(make) if graph else make()], clock, REPEATS, SECONDS)
    found = {name: digest(x) for name, x in results.items()}
    return {"ms": 1e3 * timings.median, "p20": 1e3 * timings.quantile(0.2), "same again": found == first, "bits": found}


def digest(x: Any) -> str:
    """Return a number that another order or another bit of x changes, computed where x is."""
    import torch

    bits = x.detach().contiguous().view(torch.uint8).flatten()
    total = 0
    for piece in bits.split(1 << 26):
        odd = 2 * torch.arange(piece.numel(), device=x.device) + 1
        total = (3 * total + int((odd * (odd ^ odd >> 7) * (piece + 1)).sum())) % 2**64
    return f"{total:016x}"


def run(calls: list[str], backend: str, file: Path) -> None:
    """Time each call; one that fails says why."""
    rows: dict[str, Any] = {}
    for call in calls:
        try:
            rows[call] = timed(call, backend)
        except Exception as error:
            rows[call] = {"error": f"{type(error).__name__}: {error}"}
        file.write_text(json.dumps(rows))


def recipes_of(direction: str, spec: Any, options: dict[str, Any]) -> list[Any]:
    """Return the kernels of a call, as `spec_of` describes it, on the host that stands in."""
    from kda.calls import ahead
    from kda.model.bundles import Save
    from kda.routing.dispatch import choose, route
    from kda.tools.commands.bench.asked import problem_of

    p = dataclasses.replace(problem_of(spec, "forward", "cuda:0"), **options)
    offsets = "int64" if p.packed else None
    if direction == "forward":
        return [*ahead.recipes_of(choose(p, "auto").backend or "", p, Save.NOTHING, offsets)]
    return [*ahead.recipes_of_step(route(p, training=True), offsets)]


def build(calls: list[str], backend: str) -> None:
    """Build the kernels of the calls for GPUs of the backend."""
    from kda.model.host import host_of, standing_in
    from ptxkit.compile import fetching

    with standing_in(host_of(backend)):
        fetching.fetch_all(dict.fromkeys(recipe for call in calls for recipe in recipes_of(*spec_of(call))))


# ---- the parent


def child(checkout: Path, *options: object, **variables: str) -> None:
    """Run this file with the packages of a checkout."""
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | variables
    subprocess.run([sys.executable, __file__, *map(str, options)], cwd=checkout, env=environment, check=True)


def named(calls: list[str]) -> list[str]:
    return [word for call in calls for word in ("--call", call)]


def told(found: Mapping[str, Mapping[str, Any]], calls: list[str]) -> Iterator[str]:
    """Yield a line for each call: times by checkout, and whose bits are not those of the first one."""
    first = next(iter(found.values()))
    for call in calls:
        words = []
        for name, rows in found.items():
            row = rows.get(call, {"error": "not run"})
            if "error" in row:
                words.append(f"{name} {row['error']}")
            else:
                other = "" if row["bits"] == first.get(call, row).get("bits", row["bits"]) else ", other bits"
                again = "" if row["same again"] else ", other bits each time"
                words.append(f"{name} {row['ms']:.4f}{other}{again}")
        yield f"{call}: {'; '.join(words)}"


def compare(checkouts: Mapping[str, Path], calls: list[str], backend: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    first = next(iter(checkouts))
    with tempfile.TemporaryDirectory() as folder:
        for name, checkout in [*checkouts.items(), (f"{first} again", checkouts[first])]:
            file = Path(folder, "rows.json")
            child(checkout, "--child", file, "--backend", backend, *named(calls))
            found[name] = json.loads(file.read_text())
    return found


def checkout(word: str) -> tuple[str, Path]:
    name, equals, path = word.partition("=")
    if not equals or not Path(path, "kda", "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{word}: write NAME=PATH, a path with the packages kda and ptxkit")
    return name, Path(path).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=checkout, metavar="NAME=PATH")
    parser.add_argument("--call", action="append", help="a call, may be repeated")
    parser.add_argument("--backend", default="sm90")
    parser.add_argument("--build", metavar="FOLDER", type=Path, help="build kernels into this folder, and time nothing")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was found")
    parser.add_argument("--child", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    calls = args.call or [*CALLS]
    if args.child:
        run(calls, args.backend, args.child)
    elif args.build and not args.checkouts:
        build(calls, args.backend)
    elif not args.checkouts:
        parser.error("name the checkouts, as NAME=PATH")
    elif args.build:
        for _, path in args.checkouts:
            cache = str(args.build.resolve())
            child(path, "--build", cache, "--backend", args.backend, *named(calls), KDA_CACHE_DIR=cache)
    else:
        found = compare(dict(args.checkouts), calls, args.backend)
        print("\n".join(told(found, calls)))
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
