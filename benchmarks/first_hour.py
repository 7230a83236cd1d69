"""The first hour on a Blackwell GPU: this measures what the clock assumes, checks every result, times the kernels, and
prints what differs from what was predicted.

    python -m benchmarks.first_hour [--out FOLDER] [--minutes N] [--only PART ...] [--report]

  doctor      what kda says of the machine
  units       the microbenchmarks: each constant of the clock beside what this GPU takes
  selftest    every kernel against the reference
  verify      results and gradients on random problems
  evidence    the cases of the ledger that have not run with this code (benchmarks.evidence)
  times       forwards, kept steps and steps from a CUDA graph, both gate regimes
  predicted   the same by the simulator's clock, which needs no GPU

Parts run one after the other, as times must not share the machine.  Each has a limit of its own and a log in FOLDER
($OUT, or ./first_hour).  --report prints again what differs in a FOLDER that is there.  Exits with 1 if a part failed
or something differs, with 3 if there is no Blackwell GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptxkit.benchmarks.microbenchmarks.assumptions import differences
from ptxkit.timing.chips import CHIPS, ChipClock, of_card

from . import common
from .gpu_checks import CANNOT, FAILED, OK, Done, Part, report, run

BACKEND, CAPABILITY = "sm100", 10
SHAPES = "h64-8k", "h96-8k", "h32-8k", "h16-8k", "h12-8k", "h12-512", "h8-64k", "h64-8x1k", "h64-8k-64"
WAYS = {                                     # file -> options of kda bench
    "forward": ["--direction", "forward"],
    "kept": ["--direction", "step", "--disable-recompute"],
    "step": ["--direction", "step"],
}
FAR_CONSTANT, FAR_TIME = 0.05, 0.15          # shares by which a constant, or a time, differs enough to be printed


def parts(out: Path, chip: str, minutes: float) -> dict[str, Part]:
    """Return the processes of each part, in their order."""
    kda, shapes = [sys.executable, "-m", "kda"], [word for name in SHAPES for word in ("--shape", name)]
    bench = [*kda, "bench", "--backend", BACKEND, *shapes]
    evidence = [sys.executable, "-m", "benchmarks.evidence", "--no-matrix", "--out", str(out)]
    units = [sys.executable, "-m", "ptxkit.benchmarks.microbenchmarks", "--seconds", "400"]
    found = {
        "doctor": Part([*kda, "doctor"], 120),
        "units": Part([*units, "--json", str(out / "units.json")], 900),
        "selftest": Part([*kda, "selftest", "--backend", BACKEND], 900),
        "verify": Part([*kda, "verify", "--backend", BACKEND], 900),
        "evidence": Part([*evidence, "--minutes", str(minutes)], 60 * minutes + 300),
    }
    for name, options in WAYS.items():
        found[f"times-{name}"] = Part([*bench, "--graph", *options, "--save", str(out / f"{name}.json")], 600)
    for name, options in WAYS.items():
        found[f"predicted-{name}"] = Part([*bench, "--predicted", "--arch", chip, *options, "--json"], 1200)
    return found


# ---- what differs


def read(out: Path, name: str) -> Mapping[str, Any]:
    """Return the JSON object that a part left, in a log behind what it said of its progress; an empty one if there is
    none."""
    try:
        text = (out / name).read_text()
        return json.loads(text[text.index("{"):])
    except (OSError, ValueError):
        return {}


def far_constants(chip: ChipClock, units: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the clock assumes otherwise than this GPU measures, and what could not be measured."""
    for one in differences(chip, units.get("figures", [])):
        if one.off > FAR_CONSTANT or one.measured is None:
            yield str(one)
    for name, why in (units.get("failed", {}) | units.get("skipped", {})).items():
        yield f"the group {name} was not measured: {why}"


def far_times(way: str, timed: Mapping[str, Any], predicted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the calls whose median is far from its prediction, or has none, of each regime."""
    expected = {row["problem"]: row["predicted"] for row in predicted.get("rows", [])}
    rows = timed.get("rows", [])
    if not rows:
        yield f"{way}: no call was timed"
    for row in rows:
        seconds, taken = expected.get(row["problem"]), f"{1e3 * row['median']:.3f} ms"
        if seconds is None:
            yield f"{way}, {row['shape']}, {row['regime']} gates: {taken}, without a prediction"
        elif abs(row["median"] / seconds - 1) > FAR_TIME:
            yield f"{way}, {row['shape']}, {row['regime']} gates: {taken}, predicted {1e3 * seconds:.3f} ms"
    yield from (f"{way}: {each}" for each in timed.get("left_out", []))


def wrong_cases(evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cases of the ledger that did not end well."""
    for row in evidence.get("rows", []):
        if row["outcome"] != "ok":
            yield f"{row['case']}: {row['outcome']}"


def what_differs(out: Path, chip: ChipClock) -> dict[str, list[str]]:
    """Return heading -> lines, of what a folder holds."""
    times = [line for way in WAYS for line in
             far_times(way, read(out, f"{way}.json"), read(out, f"predicted-{way}.log"))]
    return {
        f"Constants that differ by more than {FAR_CONSTANT:.0%}, or were not measured":
            [*far_constants(chip, read(out, "units.json"))],
        f"Times that differ by more than {FAR_TIME:.0%} from what was predicted, or were not taken": times,
        "Cases of the ledger that did not end well": [*wrong_cases(read(out, "evidence.json"))],
    }


def summary(found: Mapping[str, Sequence[str]]) -> str:
    lines: list[str] = []
    for heading, rows in found.items():
        lines += ["", heading, *(f"  {row}" for row in rows or ["none"])]
    return "\n".join(lines)


# ---- running


def card() -> tuple[str, int]:
    """Return the name and the major capability of the GPU here; ("", 0) without one."""
    import torch

    if not torch.cuda.is_available():
        return "", 0
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability()[0]


def chip_of(name: str) -> ChipClock:
    """Return the clock of a card; that of a B200 stands for those of its family that have none."""
    return of_card(name, 100) or CHIPS["b200"]


def main() -> int:
    parser = common.parser(__spec__, __doc__, json=False)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "first_hour"))
    parser.add_argument("--minutes", type=float, default=18.0, help="for the ledger  [default: 18]")
    parser.add_argument("--only", metavar="PART", action="append", help="may be repeated")
    parser.add_argument("--report", action="store_true", help="run nothing: what differs in FOLDER")
    args = parser.parse_args()
    out = args.out.resolve()
    name, major = card()
    if args.report:
        found = what_differs(out, chip_of(read(out, "units.json").get("device", name)))
        print(summary(found))
        return FAILED if any(found.values()) else OK
    if major != CAPABILITY:
        print(f"The first hour needs a GPU of compute capability 10.0 or 10.3; found {name or 'no GPU'}. --report "
              "reads a FOLDER that is there; `kda selftest --arch sm100` checks the kernels in the simulator.")
        return CANNOT
    out.mkdir(parents=True, exist_ok=True)
    chip, done = chip_of(name), dict[str, Done]()
    for part, process in parts(out, chip.name, args.minutes).items():
        if not args.only or part in args.only:
            done[part] = run(part, process, lambda: float("inf"), out, dict(os.environ))
            report(part, done[part], out)
    found = what_differs(out, chip)
    found["Parts that did not end well"] = [f"{part}: {one.status} {one.says}" for part, one in done.items()
                                            if one.status != "ok"]
    print(summary(found))
    return FAILED if any(found.values()) else OK


if __name__ == "__main__":
    sys.exit(main())
