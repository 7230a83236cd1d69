"""`kda bench` without other words: calls that were compared, then timed.

kda/tools/measure/shapes.py holds the named shapes and the formulas for FLOPs, bytes and the floor;
kda/tools/measure/timing.py compares and times, by the clocks; this file asks, refuses and prints.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kda.errors import NoBackendError
from kda.model.host import detect
from kda.routing.dispatch import backend_asked, backend_names, capability
from kda.tools.measure.shapes import CUSTOM, DIRECTIONS, BenchShape, too_large
from ptxkit.commands.render import CANNOT_JUDGE, FINDING, OK, CannotJudge, Screen, heading, write_file
from ptxkit.compile.target import code_for

from ..options import option_of, timed_arch
from .asked import (
    REGIMES,
    SETTINGS,
    backend_for,
    both,
    names_a_shape,
    problems_of,
    setting,
    shapes_asked,
    spec_of,
    ways,
)
from .report import (
    KEY,
    Change,
    compare_lines,
    header,
    parity_lines,
    refused_captures,
    remarks,
    says_why,
    stage_lines,
    timing_lines,
)

if TYPE_CHECKING:
    from kda.tools.measure.timing import Checked, Machine, MeasuredShape, TimedLine
    from kda.tools.verify.cases import Spec
    from kda.tools.verify.doors import Door

LAUNCHES = {"cpu": 20, "gpu": 200}


# ---------------------------------------------------------------------------------------------- what is refused


def refuse_large(
    shapes: dict[str, BenchShape], options: dict[str, Any], device: str, threads: int | None
) -> tuple[dict[str, BenchShape], list[str]]:
    """Return the shapes that are run, and a sentence for each default one that is not; one that was asked for ends it
    all."""
    if options["force"]:
        return shapes, []
    directions, memory = ways(options["directions"]), detect(device).memory
    why = {name: says for name, shape in shapes.items() if (says := too_large(shape, directions, threads, memory))}
    left_out = [f"{name} ({shapes[name].label}) {says}; --force runs it all the same" for name, says in why.items()]
    small = {name: shape for name, shape in shapes.items() if name not in why}
    if why and (not small or options["names"] or CUSTOM in shapes):
        raise CannotJudge(*left_out, *(["--shape tiny takes seconds"] if device == "cpu" else []))
    return small, left_out


def doors_for(spec: Spec, options: dict[str, Any], device: str) -> list[Door]:
    """Return the backend and the baseline, both of which accept the problem here."""
    from kda.tools.verify.cases import make
    from kda.tools.verify.doors import PEERS, Door

    requested, saved, directions = options["backend"], options["disable_recompute"], ways(options["directions"])
    needed = [way for way in DIRECTIONS if way in directions or "step" in directions]
    try:
        problems = problems_of(spec, needed, device, saved, backend_asked(requested))
        for problem in problems:
            requested = backend_for(problem, backend_asked(requested))
    except NoBackendError as error:
        forward_runs = error.choice.problem.direction != needed[0]
        more = ["--direction forward times what there is"] if forward_runs else predictable(options["backend"], device)
        if not names_a_shape(options):
            default_device = "a CPU" if device == "cpu" else "a GPU"
            more = [f"no shape was named, so this is one for {default_device}; --list shows all, for --shape", *more]
        raise CannotJudge(*str(error).splitlines(), *more) from None
    doors = [Door(requested, device)]
    reasons: Sequence[str] = ()
    if options["against"] in PEERS:
        doors.append(PEERS[options["against"]]())
        small = make(dataclasses.replace(spec, lengths=None, B=1, T=1))
        reasons = [reason for problem in problems for reason in doors[1].against(small, problem.direction)]
    elif options["against"]:
        doors.append(Door(options["against"], device))
        reasons = [reason for problem in problems for reason in doors[1].against_problem(problem)]
    refuse_baseline(options["against"], reasons)
    return doors


def refuse_baseline(name: str, reasons: Iterable[str]) -> None:
    if once := dict.fromkeys(reasons):
        raise CannotJudge(*(f"the baseline {name} cannot run here: {reason}" for reason in once))


def predictable(requested: str | None, device: str) -> list[str]:
    """Return the hint for a backend whose GPUs this machine lacks, if the simulator has a clock for one of them."""
    backend, cc, arch = backend_asked(requested), detect(device).cc, timed_arch(requested)
    if backend not in backend_names() or not arch or (cc and code_for(cc, capability(backend).archs)):
        return []
    return [f"--backend {backend} --predicted --arch {arch} predicts its times without such a GPU"]


# ---------------------------------------------------------------------------------------------- measuring


def compare_and_time(screen: Screen, options: dict[str, Any], old: dict[str, Any] | None) -> int:
    from kda.tools.measure.clocks import clock_of
    from kda.tools.measure.timing import How, MeasuredShape, ask_clocks, measure, this_machine
    from kda.tools.verify.cases import make
    from kda.tools.verify.doors import PEERS, default_device

    device = default_device()
    machine = this_machine(device)
    if options["graph"] and machine.kind == "cpu":
        raise CannotJudge("--graph needs a GPU: there are no CUDA graphs on a CPU")
    if old and (differs := machine.differs(old["host"]) or other_settings(options, old)):
        raise CannotJudge(f"{options['compare']} cannot be compared: {differs}")
    if options["against"] in PEERS:          # before shapes are too large for a CPU, which such a baseline never is on
        refuse_baseline(options["against"], PEERS[options["against"]]().absent())
    shapes, left_out = refuse_large(shapes_asked(options, machine.kind), options, device, machine.threads)
    cases = [(name, shape, regime) for name, shape in shapes.items() for regime in both(options["regime"], REGIMES)]
    doors = {case: doors_for(spec_of(*case[1:]), options, device) for case in cases}
    results, clock, directions = [], clock_of(device), ways(options["directions"])
    how = How(options["repeats"] or LAUNCHES[machine.kind], options["seconds"], options["stages"], options["graph"],
              setting(options["disable_recompute"]))
    steps = sum(2 + len(directions) + len(doors[case]) - 1 for case in cases) + len(cases) * options["stages"]
    with screen.progress("measuring the copy bandwidth" if machine.kind == "gpu" else "drawing inputs", steps) as tell:
        if machine.kind == "gpu":
            machine = machine._replace(copy=clock.copy_bandwidth())      # type: ignore[union-attr]
        for name, shape, regime in cases:
            def say(text: str, about: str = f"{name}, {regime} gates") -> None:
                tell.step(f"{about}: {text}")

            say("drawing inputs")
            case = make(spec_of(shape, regime), device, drawn_on=device)
            measured = measure(doors[name, shape, regime], case, directions, clock, how, say)
            results.append(MeasuredShape(name, shape, regime, measured))
            if options["save"] and (waiting := cases[len(results):]):
                save_right(options, machine, results, [*left_out, *map(stopped, waiting)], CANNOT_JUDGE)
        if machine.kind == "gpu":
            machine = ask_clocks(machine, clock, device)                # type: ignore[arg-type]
    return report(screen, options, machine, results, left_out, old)


def save_right(
    options: dict[str, Any], machine: Machine, results: Sequence[MeasuredShape], left_out: Sequence[str], code: int
) -> bool:
    """The file of --save without wrong results, if there are others.  It is written after each case, so that a run that
    is stopped leaves what it has measured."""
    from kda.tools.measure.timing import lines_of

    right = [result for result in results if result.measured.right]
    wrong = [f"{result.name}, {result.regime} gates: not saved, its results are wrong; `kda verify` finds where"
             for result in results if not result.measured.right]
    if right:
        lines = [line for result in right for line in lines_of(result, machine)]
        save(options["save"], as_json(machine, right, lines, [], [*left_out, *wrong], code, options))
    return bool(right)


def stopped(case: tuple[str, BenchShape, str]) -> str:
    name, _, regime = case
    return f"{name}, {regime} gates: not measured, kda bench was stopped before"


def save(file: str, data: dict[str, Any]) -> None:
    write_file(Path(file), json.dumps(data, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------- comparing


def read_results(file: str) -> dict[str, Any]:
    try:
        old = json.loads(Path(file).read_text())
        good = old["command"] == "bench" and isinstance(old["host"], dict)
        good = good and all(key(row) and 0 < row["p20"] <= row["median"] <= row["p80"] for row in old["rows"])
        good = good and isinstance(old.get("settings", {}), dict)
    except (OSError, ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise click.UsageError(f"{file} holds no results that `kda bench --save` wrote")
    return old


def other_settings(options: dict[str, Any], old: dict[str, Any]) -> str | None:
    """Return what a file that was saved before there were settings says nothing of was off."""
    for name in SETTINGS:
        mine, theirs = setting(options[name]), setting(old.get("settings", {}).get(name))
        if mine != theirs:
            words = [f"with {flag(name, x)}" if x else f"without {option_of(name)}" for x in (mine, theirs)]
            return f"these timings are made {words[0]}, the saved ones {words[1]}"
    return None


def key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def compared(lines: Sequence[TimedLine], old: dict[str, Any], limit: float) -> list[Change]:
    """Return the timings that both have, each slower or faster only by more than the limit and beyond both spreads."""
    before = {key(row): row for row in old["rows"]}
    pairs = [(line, before.get(key(dataclasses.asdict(line)))) for line in lines]
    return [Change(line, row, verdict(line, row, limit)) for line, row in pairs if row]


def verdict(line: TimedLine, row: dict[str, Any], limit: float) -> str:
    change = line.median / row["median"]
    if change > 1 + limit:
        return "slower" if line.p20 > row["p80"] else "noise"
    if change < 1 - limit:
        return "faster" if line.p80 < row["p20"] else "noise"
    return "same"


# ---------------------------------------------------------------------------------------------- reporting


def report(
    screen: Screen, options: dict[str, Any], machine: Machine, results: Sequence[MeasuredShape],
    left_out: Sequence[str], old: dict[str, Any] | None,
) -> int:
    from kda.tools.measure.timing import lines_of

    lines = [line for result in results for line in lines_of(result, machine)]
    right = all(result.measured.right for result in results)
    changes = compared(lines, old, options["fail_above"]) if old else []
    slower = [change for change in changes if change.verdict == "slower"]
    refused = refused_captures(results)
    code = FINDING if not right or slower else CANNOT_JUDGE if refused or (old and not changes) else OK
    data = as_json(machine, results, lines, changes, left_out, code, options)
    notes = [*left_out, *map(says_why, refused), *remarks(machine, lines)]
    if options["save"] and right:
        save(options["save"], data)
        notes.append(f"saved    {options['save']}")
    elif options["save"] and save_right(options, machine, results, left_out, code):
        notes.append(f"saved    {options['save']}, without the wrong results")
    if lines and (options["plot"] or options["html"]):
        from .drawn import groups_of, write

        details, said = "  ".join([header(machine), *flags(options)]), parity_lines(Screen(), results, False)
        said += remarks(machine, lines)
        notes += write(screen, options, machine.device, details, said, groups_of(lines, machine.device),
                       lines[0].backend)
    if screen.json:
        screen.emit_json(data)
        return code
    verbose = options["verbose"]
    head = "  ".join([header(machine), *flags(options)])
    for text in [screen.paint(head, bold=True), *parity_lines(screen, results, verbose)]:
        screen.line(text)
    if not right:
        screen.line("Wrong results are not timed, and no ratio is printed; `kda verify` finds the first wrong stage.")
    for text in ["", *timing_lines(screen, lines, verbose), *stage_lines(screen, results)]:
        screen.line(text)
    if old:
        for text in ["", *compare_lines(screen, changes, options)]:
            screen.line(text)
    for text in notes:
        screen.line(text if text.startswith(("saved", "drawn")) else f"{screen.sign('warn')} {text}", hang=2)
    if not verbose:
        screen.line("-v prints rates, memory with inputs, and each comparison.")
    return code


def flags(options: dict[str, Any]) -> list[str]:
    return [flag(name, options[name]) for name in SETTINGS if options[name]]


def flag(name: str, x: Any) -> str:
    return option_of(name) + (f" {x}" if x == "states" else "")


def as_json(
    machine: Machine, results: Sequence[MeasuredShape], lines: Sequence[TimedLine], changes: Sequence[Change],
    left_out: Sequence[str], code: int, options: dict[str, Any],
) -> dict[str, Any]:
    """Return the results as JSON, with times in seconds and memory in bytes."""
    from kda.tools.measure.timing import summary

    return {
        **heading("bench", code), "host": machine._asdict(), "left_out": list(left_out),
        "settings": {name: setting(options[name]) for name in SETTINGS}, "not_captured": refused_captures(results),
        "parity": [parity_json(result, check) for result in results for check in result.checks],
        "rows": [{**vars(line), "ratio": line.ratio, "x_floor": line.x_floor} for line in lines],
        "stages": [{"shape": result.name, "problem": result.shape.label, "regime": result.regime, "stage": name,
                    **summary(result.measured.checks[0].backend, timing)}
                   for result in results for name, timing in result.measured.stages.items()],
        "comparison": [{**{name: c.old[name] for name in KEY}, "before": c.old["median"], "now": c.line.median,
                        "verdict": c.verdict} for c in changes],
    }


def parity_json(result: MeasuredShape, check: Checked) -> dict[str, Any]:
    used = {row.tensor: row.measure.used for row in check.rows}
    return {
        "shape": result.name, "problem": result.shape.label, "regime": result.regime, "backend": check.backend,
        "against": check.against, "timed": bool(result.measured.timed_wrong),
        "wrong": [row.tensor for row in check.wrong],
        "used": {name: share if math.isfinite(share) else None for name, share in used.items()},
    }
