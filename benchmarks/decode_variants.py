"""Which configuration of decode_step's kernel is fastest: `python -m benchmarks.decode_variants`, on a GPU.

For each shape every configuration is held against the reference and against the parts, as in decode_step.py, and then
timed beside the parts, their recurrence and a large copy.  The best of each shape is named, and whether it reaches
REACHED of the copy and is not slower than the parts.  Last, what `batch_invariant=True` costs a forward.  Shapes come
in order of weight, and none is begun after --seconds.

    python -m benchmarks.decode_variants --json variants.json              # at most three minutes
    python -m benchmarks.decode_variants --simulated                       # without a GPU: checked, and predicted

--simulated runs each configuration in the simulator on one sequence, where it must give the bits of the first one and
no findings, and predicts each shape on an H200.  The clock leaves out that a state goes back to HBM
(ptxkit/docs/clock.md): of float32 states, which HBM limits, it says too little.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any, NamedTuple

import torch

import kda
from kda.tools.measure.shapes import SHAPES
from kda.tools.verify.steps import bytes_moved, copied, run_step
from ptxkit.commands.render import table
from ptxkit.compile.fetching import fetch_all

from . import common
from .decode_step import Arguments, arguments, copy_speed, distance, measure, parse_config, recipes_of, seconds, using

REACHED = 0.85                               # share of a copy's bandwidth, with 64 sequences of 32 heads and more
VARIANTS = {                                 # by dtype of states and tokens, in the words of decode_step.parse_config
    ("bfloat16", 1): ("plan", "4x128", "4x128x64x1", "4x128x32x2", "2x128x16x4"),
    ("float32", 1): ("plan", "4x64x64x2", "4x64x32x1", "2x64x16x4"),
    ("bfloat16", 4): ("plan", "4x128x64", "4x32"),
    ("float32", 4): ("plan", "4x64x32", "4x32"),
}
STEPS = {                                    # (heads, sequences) by tokens
    1: ((32, 64), (32, 256), (8, 64), (32, 1), (16, 64), (96, 64), (8, 256)), 4: ((32, 64), (32, 1), (8, 64)),
}
INVARIANT = tuple(itertools.product(("h8-32k", "h16-8k", "h12-4k", "h32-8k"), ("sm90", "triton")))


class Step(NamedTuple):
    states: str
    T: int
    H: int
    N: int

    def args(self, device: str) -> argparse.Namespace:
        return argparse.Namespace(drafts=self.T - 1, tree=False, head_dim=128, dtype="bfloat16", device=device,
                                  states=[self.states], recurrences=["vk"])


def steps() -> list[Step]:
    """Those of a single token first, and of these the first shape with both dtypes."""
    return [Step(states, T, H, N) for T in STEPS for H, N in STEPS[T] for states in ("bfloat16", "float32")]


def best_of(step: Step, rows: list[Arguments], copy: float) -> Arguments:
    """What a shape's rows say."""
    times = {row["config"]: row["seconds"] for row in rows if "seconds" in row}
    name = min((each for each in VARIANTS[step.states, step.T] if each in times), key=times.__getitem__, default=None)
    if name is None:
        return step._asdict() | {"best": None}
    share = rows[0]["bytes"] / times[name] / copy
    parts = times.get("parts")
    return step._asdict() | {
        "best": name, "seconds": times[name], "plan": times.get("plan"), "parts": parts, "share_of_copy": share,
        "reached": share >= REACHED, "not_slower": parts is None or times[name] <= parts,
    }


# a GPU


def timed(limit: float, device: str) -> dict[str, Any]:
    """Time the variants; on a CPU by the reference, which has no configurations: a rehearsal."""
    begun, on_cpu = time.perf_counter(), device == "cpu"

    def left() -> bool:
        return time.perf_counter() - begun < limit

    document: dict[str, Any] = {
        "device": "a CPU" if on_cpu else torch.cuda.get_device_name(), "torch": torch.__version__,
        "copy": 1.0 if on_cpu else copy_speed(device), "rows": [], "best": [], "batch_invariant": [], "left_out": [],
    }
    if not on_cpu:
        fetch_all(recipes(device))
    for step in steps():
        if not left():
            document["left_out"].append(step._asdict())
            continue
        rows = measure(step.N, step.H, step.states, step.args(device), list(VARIANTS[step.states, step.T]))
        document["rows"] += rows
        document["best"].append(best_of(step, rows, document["copy"]))
    for name, backend in INVARIANT:
        if left():
            document["batch_invariant"].append(invariance(name, backend, device))
        else:
            document["left_out"].append({"shape": name, "backend": backend})
    return document


def recipes(device: str) -> list[Any]:
    """All kernels of the configurations, to be built side by side."""
    wanted = []
    for (states, T), names in VARIANTS.items():
        wanted += recipes_of(Step(states, T, 2, 2).args(device), [parse_config(name) for name in names])
    return list(dict.fromkeys(wanted))


def invariance(name: str, backend: str, device: str, T: int | None = None) -> Arguments:
    """Seconds of a forward with and without batch_invariant, whose results agree within their rounding."""
    s, random = SHAPES[name], torch.Generator(device).manual_seed(0)
    T, kind = T or s.T, torch.bfloat16 if device != "cpu" else torch.float32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device).to(kind)

    call: dict[str, Any] = dict(
        q=normal(1, T, s.H, s.K), k=normal(1, T, s.H, s.K), v=normal(1, T, s.H, s.V), g=normal(1, T, s.H, s.K),
        beta=normal(1, T, s.H), A_log=torch.zeros(s.H, device=device), dt_bias=normal(s.H * s.K).float() - 7,
        lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        backend=backend,
    )
    row: Arguments = {"shape": name, "backend": backend}
    ways = {"cut": False, "whole": True}
    o = [kda.chunk_kda(**call, batch_invariant=way)[0] for way in ways.values()]
    row["error"] = distance(*o)
    if row["error"] <= 1:
        for way, invariant in ways.items():
            row[way] = seconds([lambda flag=invariant: kda.chunk_kda(**call, batch_invariant=flag)], device)
    return row


# the simulator


def simulated(arch: str, chip: str) -> dict[str, Any]:
    document: dict[str, Any] = {"device": f"{chip}, predicted", "copy": 0.0, "rows": []}
    for (states, T), names in VARIANTS.items():
        few = arguments(1, 1, states, Step(states, T, 1, 1).args("cpu"))
        first: dict[str, torch.Tensor] = {}
        for name in names:
            with using(parse_config(name)):
                results = checked(few, arch)
                first = first or results
                same = all(torch.equal(results[each], first[each]) for each in first)
                document["rows"] += [predicted(Step(states, T, H, N), name, arch, chip) | {"same_bits": same}
                                     for H, N in STEPS[T]]
    return document


def checked(x: Arguments, arch: str) -> dict[str, torch.Tensor]:
    """What a configuration makes of a call in the simulator, without findings and close to the reference."""
    from ptxkit import capture

    with capture(arch=arch) as session:
        ours = run_step(copied(x), backend="triton")
    if session.findings:
        raise SystemExit(f"findings: {session.findings[:3]}")
    exact = run_step(copied(x, torch.float32) | {"states": x["states"].clone()}, backend="reference")
    if (wrong := max(distance(ours[name], exact[name]) for name in exact)) > 1:
        raise SystemExit(f"{wrong:.1f} times as far off as allowed")
    return ours


def predicted(step: Step, name: str, arch: str, chip: str) -> Arguments:
    """Predict the variants from three waves of CTAs on four SMs."""
    from ptxkit import capture
    from ptxkit.timing.clock import Setting

    x = arguments(step.N, step.H, step.states, step.args("cpu"))
    with capture(arch=arch, checks=False, clock=Setting(chip, step.N * step.H, 3, 4)) as session:
        run_step(x, backend="triton")
    clock, kernel = session.runs[0].clock, session.launches[0].kernel
    return step._asdict() | {
        "HV": step.H, "config": name, "seconds": clock.seconds, "bytes": bytes_moved(x), "registers": kernel.registers,
        "spills": kernel.spills, "ctas_of_an_sm": clock.resident,
        "instructions_of_a_head": sum(warp["issued"] for warp in clock.warps) / clock.detailed,
    }


# what is said


def lines(document: dict[str, Any]) -> list[str]:
    rows = [
        (row["states"], f"{row['T']}", f"{row['HV']}", f"{row['N']}", row["config"],
         f"{1e6 * row['seconds']:.1f}" if "seconds" in row else "wrong",
         f"{row['bytes'] / row['seconds'] / document['copy']:.0%}" if document["copy"] and "seconds" in row else "",
         "".join(f"{row[key]:,.0f} " for key in ("registers", "spills", "ctas_of_an_sm", "instructions_of_a_head")
                 if key in row).strip(), {True: "the same", False: "others", None: ""}[row.get("same_bits")])
        for row in document["rows"]
    ]
    header = ("states", "T", "heads", "sequences", "config", "us", "of a copy", "registers, spills, CTAs, instructions",
              "bits")
    said = [document["device"], *table(rows, header=header, align="lrrrlrrrl")]
    for each in document.get("best", ()):
        if each["best"]:
            said.append(
                f"{each['states']} T={each['T']} H={each['H']} N={each['N']}: {each['best']} "
                f"{1e6 * each['seconds']:.1f} us, {each['share_of_copy']:.0%} of a copy"
                f"{'' if each['reached'] else f', less than {REACHED:.0%}'}"
                f"{'' if each['not_slower'] else ', slower than the parts'}"
            )
    for each in document.get("batch_invariant", ()):
        times = f"{each['whole'] / each['cut']:.2f} times" if "whole" in each else "wrong"
        said.append(f"batch_invariant, {each['shape']} by {each['backend']}: {times}")
    if document.get("left_out"):
        said.append(f"left out for want of time: {document['left_out']}")
    return said


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--seconds", type=float, default=150, help="after which no shape is begun")
    parser.add_argument("--simulated", action="store_true", help="no GPU: check in the simulator, predict")
    args = parser.parse_args(argv)
    with torch.no_grad():
        document = simulated("sm90", "h200") if args.simulated else timed(args.seconds, "cuda:0")
    print("\n".join(lines(document)))
    common.write(args.json, document)
    return document


if __name__ == "__main__":
    wrong = [row for row in main()["rows"] if row.get("error", 0) > 1]
    sys.exit(f"wrong: {wrong}" if wrong else 0)
