"""What only a Hopper GPU can tell of the backward, in one call of a few minutes.

    python -m benchmarks.gpu_checks [--only PART ...] [--out FOLDER] [--wheels FILE ...] [--fla-tests CHECKOUT]

  build       the steps that are sanitized, as they are: their kernels are built and kept for the parts that follow
  memcheck    compute-sanitizer over them (benchmarks.sanitized --backwards): every kernel of the backward, packed
              and not, one item after another, cut into segments, made again and kept
  racecheck   the same with the kernels in a form that it follows
  errors      every result and gradient against float64, beside FLA's on the same problem
  fla-tests   FLA's own tests of KDA with kda behind its names (benchmarks.fla_tests), of a CHECKOUT
  host        `kda bench --host`

--wheels are those of what is not installed, fla-core and einops: they are unpacked into a folder that goes away again.
memcheck to fla-tests run side by side (--serial: one by one), host alone.  Each has a time of its own and all together
--seconds; a part's output is printed when it ends and lies in FOLDER beside what was found (gpu_checks.json).  FOLDER
is $OUT, or ./gpu_checks.  Exits with 1 if a part failed, with 3 if one could not run here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import common

if TYPE_CHECKING:
    from kda.tools.verify.cases import Case

SHAPE = dict(T=512, H=4, K=128, V=128, dtype="bfloat16", gate="bounded", seed=1)
ON_A_CPU = dict(T=40, H=1)                   # in the simulator, to see that this script runs
CASES = {
    "slow gates": dict(regime="slow"),
    "fast gates": dict(regime="fast"),
    "keys all alike": dict(regime="slow", alike=True),
    "keys all alike, beta up to 2": dict(regime="slow", alike=True, beta="2*sigmoid"),
    "softplus, slow": dict(regime="slow", gate="softplus"),
}
HOSTS = {                                    # options of kda bench --host
    "few tokens": [],
    "kept": ["--disable-recompute"],
    "Triton": ["--backend", "triton"],
    "tensor parallel": ["--tokens", "4096", "--heads", "12"],
    "packed": ["--lengths", "300,0,724", "--heads", "16"],
}
LAST = 60                                    # lines of a part that are printed
OK, FAILED, CANNOT = 0, 1, 3


class Part(NamedTuple):
    argv: list[str]
    seconds: float                           # that it may take


class Done(NamedTuple):
    status: str                              # "ok", "failed", "too slow", "not run"
    seconds: float
    says: str = ""


def parts(args: argparse.Namespace, out: Path) -> dict[str, Part | str]:
    """Each part, or why it cannot run."""
    sanitized = [sys.executable, "-m", "benchmarks.sanitized", "sm90", "--backwards"]
    sanitizer = shutil.which("compute-sanitizer")
    missing = "needs compute-sanitizer on PATH; found none"

    def tool(name: str, *options: str) -> list[str]:
        return [sanitizer or "", "--tool", name, "--error-exitcode", "1", *options]

    errors = common.again(__spec__, "--errors", out / "errors.json", "--device", args.device)
    host = common.again(__spec__, "--host-times", out / "host.json", "--device", args.device)
    tests = [sys.executable, "-m", "benchmarks.fla_tests", str(args.fla_tests), "--device", args.device, "-q"]
    return {
        "build": Part(sanitized, 200),
        # A launch from a thread without a context fails, and is made again with one: compute-sanitizer counts that.
        "memcheck": Part([*tool("memcheck", "--report-api-errors", "no"), *sanitized], 180) if sanitizer else missing,
        "racecheck": Part([*tool("racecheck"), *sanitized, "--followed"], 280) if sanitizer else missing,
        "errors": Part(errors, 240),
        "fla-tests": Part([*tests, "--maxfail", "5"], 280) if args.fla_tests else "needs --fla-tests CHECKOUT",
        "host": Part(host, 120),
    }


# ---- running


def run(name: str, part: Part | str, left: Callable[[], float], out: Path, environment: dict[str, str]) -> Done:
    """A part in a process of its own, its output in a file."""
    if isinstance(part, str):
        return Done("not run", 0.0, part)
    limit, began = min(part.seconds, left()), time.monotonic()
    if limit < 5:
        return Done("not run", 0.0, "no time was left")
    with open(out / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            part.argv, stdout=log, stderr=subprocess.STDOUT, cwd=common.ROOT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Done("too slow", time.monotonic() - began, f"stopped after {limit:.0f} s")
    status = {0: "ok", CANNOT: "not run"}.get(code, "failed")
    return Done(status, time.monotonic() - began, "" if code == 0 else f"exit {code}")


def report(name: str, done: Done, out: Path) -> None:
    """The end of a part's output, under a line that says how it went."""
    print(f"\n==== {name}: {done.status}, {done.seconds:.0f} s  {done.says}".rstrip(), flush=True)
    log = out / f"{name}.log"
    if log.exists():
        lines = log.read_text(errors="replace").splitlines()
        if len(lines) > LAST:
            print(f"... {len(lines) - LAST} lines more in {log.name}")
        print("\n".join(line[:200] for line in lines[-LAST:]), flush=True)


def environment_with(wheels: Sequence[Path], folder: Path) -> dict[str, str]:
    """Ours, with the wheels unpacked in front of nothing that is installed."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    paths = [str(common.ROOT), *([str(folder)] if wheels else []), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def check(args: argparse.Namespace) -> int:
    out = Path(args.out or os.environ.get("OUT") or "gpu_checks").resolve()
    out.mkdir(parents=True, exist_ok=True)
    began, parts_done = time.monotonic(), {}
    chosen = {name: part for name, part in parts(args, out).items() if not args.only or name in args.only}

    def left() -> float:
        return args.seconds - (time.monotonic() - began)

    with tempfile.TemporaryDirectory() as folder:
        environment = environment_with(args.wheels, Path(folder))

        first, last = (["build"] if "build" in chosen else []), (["host"] if "host" in chosen else [])
        between = [name for name in chosen if name not in (*first, *last)]
        for names in (first, between, last):
            with ThreadPoolExecutor(1 if args.serial else max(1, len(names))) as threads:
                started = {threads.submit(run, name, chosen[name], left, out, environment): name for name in names}
                for ended in as_completed(started):      # One thread prints and saves: two would mix their texts.
                    name = started[ended]
                    parts_done[name] = ended.result()
                    report(name, parts_done[name], out)
                    save(out, parts_done)
    print()
    for name, done in parts_done.items():
        print(f"{name:10} {done.status:9} {done.seconds:5.0f} s  {done.says}")
    states = {done.status for done in parts_done.values()}
    return FAILED if states & {"failed", "too slow"} else CANNOT if "not run" in states else OK


def save(out: Path, parts_done: dict[str, Done]) -> None:
    """Write the parts that are done; called after each, so that what is there when time is up comes back."""
    data: dict[str, Any] = {"parts": {name: done._asdict() for name, done in parts_done.items()}}
    for name in ("errors", "host"):
        file = out / f"{name}.json"
        data |= {name: json.loads(file.read_text())} if file.exists() else {}
    common.write(out / "gpu_checks.json", data)


# ---- errors


def compare(file: Path, device: str) -> int:
    """||x - exact|| / ||exact|| of o, final states and gradients; ours may not be larger than FLA's."""
    import torch

    from kda.tools.verify.definition import definition
    from kda.tools.verify.doors import Door, Fla
    from kda.tools.verify.simulated import SimulatedDoor
    from ptxkit.commands.layout import table

    if device == "cpu":
        from ptxkit.compile.target import parse

        ours = SimulatedDoor("sm90", parse("sm90"))
    else:
        ours = Door("sm90", device)
    fla, rows, errors = Fla(), [], {}
    for name in CASES:
        case = case_of(name, device)
        if reasons := ours.against(case, "backward"):
            print("\n".join(reasons))
            return CANNOT
        exact, mine = definition(case, torch.float64), ours.call(case, True)
        why = fla.against(case)
        theirs = {} if why else fla.call(case, True)
        errors[name] = {}
        for tensor, right in exact.items():
            both = [common.off(x[tensor], right) if tensor in x else None for x in (mine, theirs)]
            errors[name][tensor] = dict(zip(("kda", "fla"), both))
            worse = both[1] is not None and not both[0] <= both[1]
            ratio = "-" if both[1] is None else f"{both[0] / both[1]:.2f}"
            rows.append((name, tensor, *("-" if e is None else f"{1e3 * e:.3f}" for e in both), ratio, "more" * worse))
        common.write(file, errors)
    print(f"||x - exact|| / ||exact|| in thousandths, T = {case.spec.T}, {case.spec.H} heads, K = V = 128, bfloat16")
    print("\n".join(table(rows, header=("case", "tensor", "kda", "fla", "kda / fla", ""), align="llrrrl")))
    if why:
        print("\n".join(why))
        return CANNOT
    more = sum(bool(row[-1]) for row in rows)
    print(f"{len(rows) - more} of {len(rows)} errors are at most FLA's.")
    return FAILED if more else OK


def case_of(name: str, device: str) -> Case:
    from kda.tools.verify.cases import make_inputs

    words = SHAPE | CASES[name] | (ON_A_CPU if device == "cpu" else {})
    alike = words.pop("alike", False)
    case = make_inputs(**words)
    if not alike:
        return case
    k = case.keywords["k"]
    return dataclasses.replace(case, keywords=case.keywords | {"k": k[:, :1].expand_as(k).contiguous()})


# ---- the host


def host_times(file: Path, device: str) -> int:
    """`kda bench --host` of several kinds of calls."""
    stand_in, by_name, codes = ["--arch", "sm90"] if device == "cpu" else [], {}, set()
    for name, options in HOSTS.items():
        argv = [sys.executable, "-m", "kda", "bench", "--host", *options, *stand_in]
        ended = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=False)
        codes.add(ended.returncode)
        if ended.returncode:
            print(name, ended.stdout, ended.stderr, sep="\n")
        by_name[name] = json.loads(ended.stdout) if ended.stdout.startswith("{") else {"rows": []}
        for row in by_name[name]["rows"]:
            idle, busy = (f"{1e6 * row[way]['median']:.0f}" if row[way] else "-" for way in ("idle", "busy"))
            print(f"{name}: {row['direction']} of {row['backend']}, {row['problem']}: {idle} us idle, {busy} us busy, "
                  f"{row['launches']} launches, {row['launches_of_torch']} of torch, {row['allocations']} allocations",
                  flush=True)
        common.write(file, by_name)
    return next((code for code in (FAILED, 2, CANNOT) if code in codes), OK)


def main() -> None:
    parser = common.parser(__spec__, __doc__, json=False)
    names = ("build", "memcheck", "racecheck", "errors", "fla-tests", "host")
    parser.add_argument("--only", metavar="PART", choices=names, action="append", help="may be repeated")
    parser.add_argument("--out", metavar="FOLDER")
    parser.add_argument("--wheels", metavar="FILE", type=Path, nargs="+", default=[])
    parser.add_argument("--fla-tests", metavar="CHECKOUT", type=lambda text: Path(text).resolve())
    parser.add_argument("--seconds", type=float, default=460, help="of all parts together  [default: 460]")
    parser.add_argument("--serial", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu: errors and host go to the simulator and a stand-in")
    for child in ("--errors", "--host-times"):
        parser.add_argument(child, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.errors:
        sys.exit(compare(args.errors, args.device))
    sys.exit(host_times(args.host_times, args.device) if args.host_times else check(args))


if __name__ == "__main__":
    main()
