"""`kda selftest`: proof of the kernels of an arch or a backend, as far as this host goes.  Imports torch when it runs.

Driven by declarations: what can be proven of a `Capability` makes the columns, its stages the rows.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from kda.model.problem import Problem
from kda.routing import dispatch
from kda.routing.capability import Capability
from kda.tools.verify import evidence
from kda.tools.verify.evidence import Evidence, Proof
from ptxkit.commands import render
from ptxkit.commands.layout import fold, row_lines, seen
from ptxkit.commands.options import ARCH
from ptxkit.commands.progress import Progress
from ptxkit.commands.render import CANNOT_JUDGE, FINDING, OK, CannotJudge, Screen, common_options, program_version
from ptxkit.compile.errors import MissingCompilerError
from ptxkit.compile.target import Target, code_for

from .hosts import own_host
from .options import BACKEND, backend_in_force, built_for, must_have_kernels, no_kernels
from .verify import StageName, finite, not_alone

LEVELS = {"simulate": Evidence.SIMULATED, "execute": Evidence.EXECUTED}
HEADERS = {Evidence.SIMULATED: "simulated (of budget)", Evidence.EXECUTED: "executed (of budget)"}


@dataclass
class StageLine:
    stage: str
    proofs: dict[Evidence, Proof] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(proof.passed for proof in self.proofs.values())


@dataclass
class CaseLine:
    name: str
    words: str
    rows: list = field(default_factory=list)                                  # verify.parity.ParityRow
    refused: str = ""
    crashed: str = ""

    @property
    def passed(self) -> bool:
        return not self.crashed and not any(row.wrong for row in self.rows)


@dataclass
class BackendResult:
    backend: str
    levels: tuple[Evidence, ...]
    device: str                              # the device on which it was executed; "" if it was not
    stages: list[StageLine] = field(default_factory=list)
    cases: list[CaseLine] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(line.passed for line in self.stages) and all(case.passed for case in self.cases)

    @property
    def judged(self) -> bool:
        return bool(self.levels and self.stages) or any(not case.refused for case in self.cases)


class NotInstalled(CannotJudge):
    """What it takes to judge a backend is not installed here."""


@click.command()
@click.option("--arch", type=ARCH, help="The backends with kernels for this arch or card, such as sm100 or h100.")
@click.option("--backend", type=BACKEND, help="One backend; without --arch and --backend, the one that auto picks.")
@click.option("--level", type=click.Choice(list(LEVELS)),
              help="How far to go.  [default: with --arch all levels that this host can; without it the last of them]")
@click.option("--stage", type=StageName(), help="One stage of the backend alone, such as fwd/gate+intra+wy.")
@click.option("--quick", is_flag=True, help="Fewer whole calls; all stages are checked.")
@click.option("--verbose", "-v", is_flag=True, help="Print the calls that passed, too.")
@common_options
def command(
    screen: Screen, arch: Target | None, backend: str | None, level: str | None, stage: str | None, quick: bool,
    verbose: bool,
) -> int:
    """Check the kernels of an arch or a backend, as far as this host can.

    Exits with 1 if a check failed, with 3 if nothing here can be judged or a compiler is not installed.
    """
    wanted = LEVELS[level] if level else None
    try:
        chosen = chosen_backends(screen, arch, backend)
        results, unable = prove_all(screen, chosen, arch, wanted, stage, quick)
    except CannotJudge as error:
        screen.answer({**json_heading(arch, CANNOT_JUDGE), "why": str(error), "backends": []}, [str(error)])
        return CANNOT_JUDGE
    code, why = exit_code(results, unable), list(map(str, unable))
    screen.answer({**as_json(results, arch, code), "unable": why}, [*text(screen, results, arch, verbose), *why])
    return code


def exit_code(results: Sequence[BackendResult], unable: Sequence[CannotJudge]) -> int:
    if not all(result.passed for result in results):
        return FINDING
    return CANNOT_JUDGE if any(isinstance(error, NotInstalled) for error in unable) else OK


def chosen_backends(screen: Screen, target: Target | None, backend: str | None) -> list[Capability]:
    if target is not None:
        must_have_kernels(backend, target)
        if not (built := built_for(target)):
            raise CannotJudge(no_kernels(target))
        return [c for c in built if backend in (None, c.backend)]
    name = backend or auto(screen)
    return [c for c in dispatch.capabilities() if c.backend == name]


def auto(screen: Screen) -> str:
    """Return what auto picks here; where it picks nothing, the first backend that runs here once it is named."""
    host, requested = own_host(), backend_in_force()
    problem = Problem(device=host.device)
    choice = dispatch.weigh(problem, host, requested)
    if choice.backend is not None:
        return choice.backend
    named = [name for name in dispatch.backend_names() if dispatch.weigh(problem, host, name).backend]
    if requested != "auto" or not named:
        raise CannotJudge(str(choice))
    screen.line(f"auto picks no backend on {host}; this proves {named[0]}, which has to be named there", err=True)
    return named[0]


# ---------------------------------------------------------------------------------------------- proving


def prove_all(
    screen: Screen, chosen: Sequence[Capability], target: Target | None, wanted: Evidence | None, stage: str | None,
    quick: bool,
) -> tuple[list[BackendResult], list[CannotJudge]]:
    """Return the results, and why some backends have none; raises CannotJudge if all have none."""
    results, unable = [], []
    for c in chosen:
        try:
            results.append(prove(screen, c, target, wanted, stage, quick))
        except CannotJudge as error:
            unable.append(error)
    unable += [CannotJudge(refusal(result)) for result in results if not result.judged]
    if not any(result.judged for result in results):
        raise CannotJudge("\n".join(map(str, unable)))
    return results, unable


def is_here(c: Capability, target: Target | None) -> bool:
    """Whether kernels of the backend, for the target, run on this machine's GPU; code without kernels runs anywhere."""
    if not c.archs:
        return True
    cc = own_host().cc
    built = code_for(cc, c.archs) if cc else None
    return built is not None and target in (None, built)


def levels_of(c: Capability, target: Target | None, wanted: Evidence | None) -> tuple[Evidence, ...]:
    provable, present = evidence.provable(c), is_here(c, target)
    possible = [e for e in provable if present or e is not Evidence.EXECUTED]
    if wanted is None:                                                         # without --arch the verdict is soon
        return tuple(possible if target else possible[-1:])
    if wanted not in provable:
        why = "kernels; --arch, such as h100, names a GPU that is simulated" if c.stages else "stages"
        raise CannotJudge(f"{c.backend} cannot be {wanted.word}: it has no {why}")
    if wanted not in possible:
        where = target.spelling if target else ", ".join(c.archs)
        raise CannotJudge(f"{c.backend} cannot be executed here: this host has no {where}. Leave out --level to go as "
                          "far as this host can.")
    return tuple(e for e in possible if e <= wanted)


def prove(
    screen: Screen, c: Capability, target: Target | None, wanted: Evidence | None, stage: str | None, quick: bool
) -> BackendResult:
    levels, stages = levels_of(c, target, wanted), evidence.stages_of(c)
    if stage and stage not in stages:
        raise CannotJudge(f"{c.backend} {not_alone(stage, stages)}")
    from kda.model.host import detect

    if reasons := c.broken("installed", Problem(), detect()):
        raise NotInstalled(f"{c.backend} cannot be judged here: {'; '.join(reasons)}")
    if Evidence.SIMULATED in levels:
        needs_a_c_compiler(c)
    executes = Evidence.EXECUTED in levels
    result = BackendResult(c.backend, levels, "")
    names = [stage] if stage else stages
    with screen.progress(c.backend) as tell:
        total = len(names) * len(levels)
        if executes:
            trials = importlib.import_module("kda.tools.verify.trials")             # torch takes its time
            total += 0 if stage else len(trials.trials(quick))
            result.device = own_host().device
        began = time.monotonic()
        tell.expect(total)
        if executes:
            build_together(c.backend, names, () if stage else trials.trials(quick))
        for name in names:
            line = StageLine(name)
            result.stages.append(line)
            for level in levels:
                tell.step(f"{c.backend}: {name}, {level.word}")
                line.proofs[level] = proof(c, level, name, target)
                if not line.passed:
                    break
        if executes and not stage:
            result.cases = list(tried(c.backend, quick, tell))
        result.seconds = time.monotonic() - began
    return result


def build_together(backend: str, stages: Sequence[str], trials: Sequence[Any]) -> None:
    """Build the kernels that stages and trials launch here: all at once takes less time than each when it comes."""
    from kda.tools.verify import together
    from kda.tools.verify.doors import Door
    from ptxkit.compile import fetching

    fetching.build_together(together.recipes_of(Door(backend), stages, trials))


def needs_a_c_compiler(c: Capability) -> None:
    """Report a missing compiler now, not after minutes of building kernels."""
    from ptxkit.engine.build import compiler

    try:
        compiler()
    except MissingCompilerError as error:
        raise NotInstalled(f"{c.backend} cannot be {Evidence.SIMULATED.word} here: {error}") from error


def proof(c: Capability, level: Evidence, stage: str, target: Target | None) -> Proof:
    """Return what the prover found; a prover that breaks is a proof that failed, one without its compiler is none."""
    try:
        return evidence.prove(level, c.backend, stage, target)
    except MissingCompilerError as error:
        raise NotInstalled(f"{c.backend} cannot be {level.word} here: {error}") from error
    except Exception as error:
        return Proof(False, "CRASH", (f"{c.backend}, {stage}: {type(error).__name__}: {error}",))


def tried(backend: str, quick: bool, tell: Progress) -> Iterator[CaseLine]:
    from kda.tools.verify import trials
    from kda.tools.verify.doors import Door

    door = Door(backend)
    for trial in trials.trials(quick):
        tell.step(f"{backend}: {trial.name}")
        line = CaseLine(trial.name, trial.words)
        reasons = trials.against(door, trial)
        if reasons:
            line.refused = reasons[0]
        else:
            try:
                line.rows = trials.attempt(door, trial)
            except Exception as error:
                line.crashed = f"{type(error).__name__}: {error}"
        yield line


# ---------------------------------------------------------------------------------------------- printing


def text(screen: Screen, results: Sequence[BackendResult], target: Target | None, verbose: bool) -> list[str]:
    """Return the verdicts first; then each stage, and of the whole calls those that failed, or all with -v."""
    judged = [result for result in results if result.judged]
    lines = [heading(results, target)]
    lines += [f"{screen.mark('ok' if result.passed else 'fail')} {ending(result, target)}" for result in judged]
    for result in judged:
        if result.stages and result.levels:
            lines += ["", *stage_lines(screen, result, f"{result.backend}: " if len(judged) > 1 else "")]
        if cases := [case for case in result.cases if verbose or not case.passed]:
            lines += ["", *case_lines(screen, cases)]
    hints = []
    if any(result.stages and result.levels for result in judged):
        hints.append("A number is the largest error of a tensor, as a part of what its budget allows; 1.00 is all.")
    if not verbose and any(result.cases for result in judged):
        refused = any(case.refused for result in judged for case in result.cases)
        hints.append(f"-v prints each call{', and why some were not accepted' * refused}.")
    if any(could_be_simulated(result) for result in judged):
        hints.append("--level execute simulates the kernels, too, which finds races and takes some minutes.")
    return [*lines, *([""] if hints else []), *hints]


def could_be_simulated(result: BackendResult) -> bool:
    """Whether kernels were executed alone, which the simulator can look into as well."""
    provable = evidence.provable(dispatch.capability(result.backend))
    return Evidence.SIMULATED in provable and result.levels == (Evidence.EXECUTED,)


def heading(results: Sequence[BackendResult], target: Target | None) -> str:
    names = ", ".join(result.backend for result in results)
    if target is None:
        return f"kda {program_version()}, {names}"
    levels = [level for result in results for level in result.levels]
    executed = any(result.device for result in results)
    where = "on this host's GPU" if executed else f"on a host without one ({own_host().name})"
    how = f": {max(levels).word}" if levels else ""
    return f"kda {program_version()}, {names}, arch {target.spelling}, {where}{how}"


def stage_lines(screen: Screen, result: BackendResult, whose: str) -> list[str]:
    """Return the table, with the details of a failure under its row."""
    header = (f"{whose}stage", *(HEADERS.get(level, level.word) for level in result.levels))
    rows = [(line.stage, *(cell(screen, line, level) for level in result.levels)) for line in result.stages]
    top, *printed = row_lines(rows, header, width=screen.width)
    lines, indent = top, max(seen(row[0]) for row in [header, *rows]) + 2
    for line, texts in zip(result.stages, printed):
        lines += texts
        details = [detail for p in line.proofs.values() if not p.passed for detail in p.details or (p.says,)]
        for i, detail in enumerate(details):
            text = f"{' ' * indent}{screen.sign('fail') if i == 0 else ' '} {detail}"
            lines += fold(text, screen.width, indent + 2)
    return lines


def cell(screen: Screen, line: StageLine, level: Evidence) -> str:
    proof = line.proofs.get(level)
    if proof is None:
        return "not run"
    return proof.says if proof.passed else screen.paint("FAIL" if proof.says != "CRASH" else proof.says, "red")


def case_lines(screen: Screen, cases: Sequence[CaseLine]) -> list[str]:
    header = ("case", "closest", "error", "budget", "used", "")
    return screen.table([case_cells(screen, case) for case in cases], header, "llrrrl")


def case_cells(screen: Screen, case: CaseLine) -> tuple[str, ...]:
    from kda.tools.verify.parity import used_words, worst

    if case.refused or case.crashed:
        sign = screen.sign("crash") if case.crashed else screen.sign("info")
        return case.name, "-", "", "", "", f"{sign} {case.crashed or 'not accepted: ' + case.refused}"
    row = closest(case)
    used = screen.paint(used_words(row.measure), "red" if row.wrong else None)
    says = f"{screen.sign('fail')} {case.words}: {worst(row)}" if row.wrong else case.words
    return case.name, row.tensor, f"{row.measure.error:.1e}", f"{row.measure.budget:.1e}", used, says


def closest(case: CaseLine):
    return max(case.rows, key=lambda row: row.measure.used)


def ending(result: BackendResult, target: Target | None) -> str:
    stages, cases = result.stages, [case for case in result.cases if not case.refused]
    counts = []
    if stages and result.levels:
        counts.append(f"{sum(line.passed for line in stages)} of {len(stages)} stages")
    if cases:
        counts.append(f"{sum(case.passed for case in cases)} of {len(cases)} cases")
    refused = len(result.cases) - len(cases)
    skipped = f", {refused} not accepted" if refused else ""
    passed = f"{result.backend}: {' and '.join(counts)}"
    if result.device:
        return f"{passed} within budget{skipped}; executed on {result.device} in {result.seconds:.1f} s"
    if target:
        return f"{passed} within budget in the simulator; nothing was executed on {target.spelling}"
    stands_for = evidence.simulated_as(dispatch.capability(result.backend), None)
    where = f"{stands_for.name} ({stands_for.examples})"
    return f"{passed} within budget in the simulator, as on {where}; nothing was executed on a GPU"


def refusal(result: BackendResult) -> str:
    if not result.levels:
        return (f"{result.backend} declares no `stages` that can be proven here; "
                f"`kda verify --backend {result.backend}` compares whole calls")
    return "\n".join(
        [f"{result.backend} accepts no call here", *(f"  {case.name}: {case.refused}" for case in result.cases)]
    )


# ---------------------------------------------------------------------------------------------- JSON


def json_heading(target: Target | None, code: int) -> dict[str, Any]:
    return render.heading("selftest", code, arch=target and target.name)


def as_json(results: Sequence[BackendResult], target: Target | None, code: int) -> dict[str, Any]:
    return {**json_heading(target, code), "backends": [result_json(result, target) for result in results]}


def result_json(result: BackendResult, target: Target | None) -> dict[str, Any]:
    simulated = None
    if Evidence.SIMULATED in result.levels:
        simulated = evidence.simulated_as(dispatch.capability(result.backend), target).name
    return {
        "name": result.backend, "passed": result.passed, "levels": [level.word for level in result.levels],
        "device": result.device or None, "simulated_as": simulated, "seconds": round(result.seconds, 3),
        "stages": [
            {"stage": line.stage, "passed": line.passed, "evidence": reached(line),
             "proofs": {level.word: p._asdict() for level, p in line.proofs.items()}}
            for line in result.stages
        ],
        "cases": [case_json(case) for case in result.cases],
    }


def reached(line: StageLine) -> str | None:
    """Return the highest level that passed."""
    passed = [level for level, p in line.proofs.items() if p.passed]
    return max(passed).word if passed else None


def case_json(case: CaseLine) -> dict[str, Any]:
    row = closest(case) if case.rows else None
    return {
        "case": case.name, "problem": case.words,
        "status": "skipped" if case.refused else "crash" if case.crashed else "ok" if case.passed else "fail",
        "says": case.refused or case.crashed or None, "tensor": row and row.tensor,
        "error": row and finite(row.measure.error), "budget": row and finite(row.measure.budget),
        "used": row and finite(row.measure.used),
    }
