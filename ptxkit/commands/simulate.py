"""The command `simulate`: runs a script with a simulated GPU, reports on its kernels.  Imports torch when it runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptxkit import application
from ptxkit.compile.target import Target, parse

from . import mutants as of_mutants
from .options import ARCH, Count, OutputFile, chip_for, needs_a_clock
from .render import CANNOT_JUDGE, ERROR, FINDING, OK, Screen, common_options, heading, program_version, write_file

if TYPE_CHECKING:
    from ptxkit.mutation import Mutants
    from ptxkit.scripts import Simulated

HEAD = ("", "kernel", "launches", "findings", "warp instructions", "global bytes", "bank conflicts", "us")
SCHEDULES = 3
LIMIT = 100_000_000                          # warp instructions: at 0.3 to 10 million a second, minutes
SCHEDULE_OF_MUTANTS = -1                     # in --json: the finding is of no schedule of ours
FILE = OutputFile(path_type=Path)
NO_LAUNCH = (
    "{script} launched no kernel in the capture of this command, which sees those of Triton, of the CuTe DSL, of "
    "ptxkit.compile, of ptxkit.run, and PTX that cuda-python loads. If it calls ptxkit.launch or opens ptxkit.capture, "
    "run it with python instead."
)


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--arch", type=ARCH, default="sm100", show_default=True,
              help="The arch or card that is simulated. A script sees one chip for each arch, such as H200 for h100.")
@click.option("--schedules", type=Count(1), default=SCHEDULES, show_default=True,
              help="Orders of warps and copies under which each launch runs.")
@click.option("--strict", is_flag=True, help="Rules that hardware tolerates count as findings, not as notes.")
@click.option("--limit", type=Count(1), default=LIMIT,
              help="Warp instructions after which a launch is given up: for loops that never end.  "
                   f"[default: {LIMIT:,}]")
@click.option("--mutants", is_flag=True, help="Weaken each synchronising instruction: is it noticed?")
@click.option("--workers", type=Count(1), default=1, show_default=True, help="Processes for --mutants.")
@click.option("--clock", is_flag=True, help="Predict the time of each launch, too.")
@click.option("--html", type=FILE, help="A page with the kernels' source, line by line.")
@click.option("--sarif", type=FILE, help="A SARIF 2.1.0 file, which code hosts show at the lines of a change.")
@common_options
def command(
    screen: Screen, script: Path, args: tuple[str, ...], arch: Target, schedules: int, strict: bool,
    limit: int, mutants: bool, workers: int, clock: bool, html: Path | None, sarif: Path | None,
) -> int:
    """Run a Python SCRIPT with a GPU that is simulated: races, missing fences, counters, time.

    Options come before SCRIPT; what follows it are the script's own arguments.  Exit codes: 0 nothing is wrong, 1 a
    finding or a mutant that survived, 2 the script failed or the command is wrong, 3 it launched no kernel.
    """
    from ptxkit.engine.build import compiler
    from ptxkit.scripts import run

    if clock:
        needs_a_clock(arch, "--clock")
    compiler()                               # the script would fail where it first launches
    with screen.lent():
        simulated = run(
            script, args, arch=arch.spelling, schedules=schedules, keep=mutants, strict=strict, limit=limit,
            watch=partial(_watched, screen), **({"clock": chip_for(arch)[0].name} if clock else {}),
        )
    judged = _mutants(screen, simulated, strict, workers) if mutants else None
    home, survivors = Path.cwd().resolve(), judged.survivors if judged else []
    code = FINDING if simulated.findings or survivors else OK
    if simulated.failed or not simulated.session.runs:
        code = ERROR if simulated.failed else CANNOT_JUDGE
    if html:
        from ptxkit.scripts.pages import page

        write_file(html, page(simulated, survivors, home))
    if sarif:
        from ptxkit.scripts.sarif import log

        log_of = log(simulated.findings + simulated.notes, survivors, program_version(), home)
        write_file(sarif, json.dumps(log_of, indent=1) + "\n")
    files = {name: str(path) for name, path in (("html", html), ("sarif", sarif)) if path}
    if screen.json:
        screen.emit_json(as_json(simulated, judged, code, files))
    else:
        _print(screen, simulated, mutants, judged, files)
    if simulated.failed:
        screen.line(f"{simulated.script} failed: {simulated.failed}", err=True)
    elif not simulated.session.runs:
        screen.line(NO_LAUNCH.format(script=simulated.script), err=True)
    if hint := _misplaced(args):
        screen.line(hint, err=True)
    return code


@contextmanager
def _watched(screen: Screen, kernel: str, runs: int) -> Iterator[Callable[[], None]]:
    """Show a launch that takes long; the script waits meanwhile, its own output comes before and after."""
    from ptxkit.findings import shortened

    with screen.progress(f"simulating {shortened(kernel)}", total=runs if runs > 1 else None) as shown:
        yield shown.count


def _mutants(screen: Screen, simulated: Simulated, strict: bool, workers: int) -> Mutants | None:
    """Return the mutants; None if there is nothing to judge: a script that failed, kernels with findings, or none."""
    from ptxkit import SimulationError

    if simulated.failed or simulated.findings or not simulated.first:
        return None
    with screen.progress("looking for mutants") as shown:
        try:
            return simulated.mutants(strict=strict, workers=workers, tell=of_mutants.reporter(shown))
        except SimulationError as error:     # their schedules find what ours did not
            simulated.add(error.findings, SCHEDULE_OF_MUTANTS)
            return None


def _misplaced(args: tuple[str, ...]) -> str:
    """Return a hint, where the script was given an option of ours."""
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    mine = [arg for arg in args if arg.split("=")[0] in options]
    program = application.current().name
    return f"{', '.join(mine)} went to the script; options of {program} simulate come before it" if mine else ""


def as_json(simulated: Simulated, judged: Mutants | None, code: int, files: dict[str, str]) -> dict[str, Any]:
    runs = simulated.session.runs
    return heading(
        "simulate", code, script=simulated.script, arch=simulated.arch,
        schedules=simulated.schedules, failed=simulated.failed,
        milliseconds=simulated.session.milliseconds if simulated.session.options.get("clock") and runs else None,
        launches=[
            {"kernel": run.kernel, "grid": run.grid, "block": run.block, "cluster": run.cluster,
             "counters": run.counters, "incomplete": run.incomplete,
             "milliseconds": run.clock.milliseconds if run.clock else None}
            for run in runs
        ],
        findings=[by_name(finding) | {"schedule": schedule} for finding, schedule in simulated.seen.values()],
        varying=sorted(simulated.varying), mutants=judged.as_json() if judged else None, files=files,
    )


def by_name(x: Any) -> Any:
    """Return dataclasses and named tuples as objects of JSON, whatever they are part of."""
    if is_dataclass(x):
        return {field.name: by_name(getattr(x, field.name)) for field in fields(x)}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return {name: by_name(value) for name, value in zip(x._fields, x)}
    return [by_name(each) for each in x] if isinstance(x, tuple | list) else x


def _print(
    screen: Screen, simulated: Simulated, with_mutants: bool, judged: Mutants | None, files: dict[str, str]
) -> None:
    """Print what was found; `with_mutants` says whether mutants were requested."""
    kernels: dict[str, list[Any]] = defaultdict(list)
    for run in simulated.session.runs:
        kernels[run.kernel].append(run)
    if kernels:
        from ptxkit.scripts.pages import many

        launches, different = many(len(simulated.session.runs), "launch", "es"), many(len(kernels), "kernel")
        each = many(simulated.schedules, "schedule")
        timed = any(run.clock for run in simulated.session.runs)
        screen.line(f"{launches} of {different} on {simulated.arch}, simulated under {each}")
        if timed:
            screen.line(f"predicted for {chip_for(parse(simulated.arch))[1]}")
        rows = [_row(screen, name, runs, simulated) for name, runs in kernels.items()]
        header, align = (HEAD, "llrrrrrr") if timed else (HEAD[:-1], "llrrrrr")
        screen.lines(screen.table([row[: len(header)] for row in rows], header, align))
    for finding in simulated.findings + simulated.notes:
        screen.line()
        screen.line(str(finding), hang=4)
    for name in sorted(simulated.varying):
        screen.line()
        screen.line(f"{name}: its results depend on the schedule (atomic additions of floats do that, too)")
    if judged:
        screen.line()
        screen.lines(of_mutants.lines(screen, judged))
        if not judged.outcomes:
            screen.line("no mutants: these kernels have no synchronising instruction")
    elif with_mutants and simulated.findings:
        screen.line()
        screen.line("no mutants: fix the findings first, which would hide what a mutant changes")
    if files:
        screen.line()
    for path in files.values():
        screen.line(f"{path}: written")


def _row(screen: Screen, name: str, runs: list[Any], simulated: Simulated) -> list[str]:
    from ptxkit.findings import shortened

    def total(*counters: str) -> str:
        return f"{sum(run.counters[counter] for run in runs for counter in counters):,}"

    findings = [finding for finding in simulated.findings if finding.kernel == name]
    time = f"{1e3 * sum(run.clock.milliseconds for run in runs):,.1f}" if all(run.clock for run in runs) else "-"
    return [
        screen.sign("fail" if findings else "ok"), shortened(name), str(len(runs)), str(len(findings)),
        total("warp_instructions"), total("global_bytes_read", "global_bytes_written"), total("bank_conflicts"), time,
    ]
