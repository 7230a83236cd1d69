"""`kda verify`: a backend against the definition, and where it first goes wrong.  Imports torch when it runs."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from kda.model.stages import OF_WALK, STAGES, find, holder
from kda.routing.dispatch import Choice, backend_names, capabilities, capability, weigh
from ptxkit.commands import render
from ptxkit.commands.layout import shell_lines
from ptxkit.commands.options import ARCH, Count, OutputFile
from ptxkit.commands.render import CANNOT_JUDGE, FINDING, OK, Screen, common_options

from . import mutants
from .hosts import own_host
from .options import (
    BACKEND,
    Name,
    NoKernelsYet,
    backend_in_force,
    built_for,
    check_value_heads,
    known,
    must_have_kernels,
    refuse,
    shape_options,
)

if TYPE_CHECKING:
    from kda.tools.verify.cases import Case, Spec
    from kda.tools.verify.doors import Door
    from kda.tools.verify.parity import ParityReport, ParityRow

LENGTHS = (65, 0, 63)                        # a tail, an empty sequence, and one that is shorter than a chunk
DRAWN = (
    *("lengths", "batch", "tokens", "heads", "value_heads", "k", "v", "dtype"),
    *("gate", "gate_per_head", "regime", "chunk_size", "seed"),
)
OF_MUTANTS = ("verbose", "arch", "mutants", "sample", "workers", "as_json", "color", "debug")
BAR = 10                                     # signs of a used-up budget


class StageName(Name):
    """A stage, a run of stages, or one of some other words."""

    def __init__(self, *others: str) -> None:
        super().__init__("stage", lambda: [*others, *STAGES, *OF_WALK])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if "+" not in value:
            return super().convert(value, param, ctx)
        try:
            return find(value).name
        except ValueError as error:
            raise click.UsageError(str(error)) from None


@click.command()
@click.option("--backend", type=BACKEND, help="The backend to verify; left out, the one that auto picks.")
@click.option("--arch", type=ARCH,
              help="Run its kernels on a simulated GPU of this arch or card, such as sm100 or h100.")
@click.option("--against", type=Name("backend", lambda: ["definition", "fla", *backend_names()]),
              default="definition", show_default=True, help="Compare whole calls with it, too.")
@shape_options(heads=2, lengths="Packed sequences.  [default: 65,0,63]", dtype=None,
               dtype_help="[default: bfloat16, or float32 of a backend that handles no bfloat16]")
@click.option("--gate", type=click.Choice(["given", "softplus", "bounded"]), default="bounded", show_default=True,
              help="given: g is the logarithm of a decay.  softplus, bounded: it is computed from logits.")
@click.option("--gate-per-head", is_flag=True, help="One gate for all channels of a head.")
@click.option("--regime", type=click.Choice(["fast", "slow"]), default="slow", show_default=True,
              help="Gates that forget within 16 tokens, or remember for hundreds.")
@click.option("--chunk-size", type=click.Choice(["32", "64"]), default="64", show_default=True,
              help="Tokens of a chunk.")
@click.option("--stage", type=StageName("all"), default="all", show_default=True,
              help="One stage alone, such as fwd/state.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the inputs that are drawn.")
@click.option("--exact", is_flag=True, help="Require equal bits: run after run, and packed against alone.")
@click.option("--fault", metavar="NAME", help="Plant a known fault; `--fault list` lists them.")
@click.option("--mutants", is_flag=True,
              help="Weaken each synchronising instruction of the kernels of --arch, and say what notices.")
@click.option("--sample", type=Count(1), default=1, show_default=True, help="Only every n-th mutant.")
@click.option("--workers", type=Count(1), default=1, show_default=True, help="Processes that run mutants.")
@click.option("--dump", metavar="FILE", type=OutputFile(), help="Save the case's tensors.")
@click.option("--load", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="Read the case from a file.")
@click.option("--keep-going", is_flag=True, help="Go on to the backward even if the forward is wrong.")
@click.option("--verbose", "-v", is_flag=True, help="Print the tensors that are within budget, too.")
@common_options
def command(screen: Screen, **options: Any) -> int:
    """Compare a backend with the definition in float64 and find the first wrong stage.

    A budget is twice the error of an independent rounding of the same maths.  Exits with 1 if one is exceeded, with 3
    if the backend does not accept the problem here.
    """
    fault = options["fault"]
    if fault == "list":
        return list_faults(screen)
    if fault:
        from kda.tools.verify.faults import FAULTS

        known("fault", fault, list(FAULTS))
        check_stage_of_fault(fault, FAULTS[fault].place, options["stage"])
    check_combinations(options)
    if options["mutants"]:
        return mutants.report(screen, options["arch"], options)
    from kda.tools.verify import cases, faults

    planted = faults.FAULTS[fault] if fault else None
    if options["load"]:
        case = loaded(options["load"])
        if planted and planted.suited(case.spec) != case.spec:
            raise click.UsageError(f"--fault {fault} would be no fault in that case")
    else:
        options["dtype"] = options["dtype"] or usual_dtype(options)
        spec = spec_of(options)
        case = cases.make(planted.suited(spec) if planted else spec)
    return verify(screen, case, options, planted)


def not_alone(name: str, stages: Sequence[str]) -> str:
    """Return why a stage that is none of a backend's cannot be looked at."""
    held = holder(name, stages)
    part = f", which is a part of its {held}" if held else ""
    return f"cannot run {name} alone{part}; it runs {', '.join(stages) or 'whole calls only'}"


def check_combinations(options: dict[str, Any]) -> None:
    if options["mutants"]:
        why = "--mutants weakens all kernels of an arch in calls of its own"
        refuse(why, *(name for name in options if name not in OF_MUTANTS))
        if not options["arch"]:
            raise click.UsageError(f"{why}; name their GPU with --arch")
    if not options["mutants"] and (options["sample"] > 1 or options["workers"] > 1):
        raise click.UsageError("--sample and --workers go with --mutants")
    if options["load"]:
        refuse("--load brings its own problem", *DRAWN)
    if options["lengths"] is not None and (options["batch"] or options["tokens"]):
        raise click.UsageError("--lengths packs sequences in one row; leave out --batch and --tokens")
    check_value_heads(options)
    if options["arch"] and options["against"] == "fla":
        raise click.UsageError("fla runs on a real GPU; leave out --arch")
    if options["stage"] != "all" and (options["exact"] or options["against"] != "definition"):
        raise click.UsageError("--exact and --against look at whole calls; leave out --stage")


def check_stage_of_fault(fault: str, place: str, stage: str) -> None:
    """One stage alone notices what is wrong in it or with the inputs."""
    if stage == "all" or place == "inputs" or place in [each.name for each in find(stage).members]:
        return
    advice = f"--stage {place}, or leave --stage out" if place in STAGES else "all stages: leave --stage out"
    raise click.UsageError(f"--fault {fault} sits in {place}, and {stage} need not notice it; look at {advice}")


def usual_dtype(options: dict[str, Any]) -> str:
    """Return the usual dtype of the requested backend; it is bfloat16 where auto picks one."""
    name = options["backend"] or (first_with_kernels(options) if options["arch"] else None)
    return next((c.usual_dtype for c in capabilities() if c.backend == name), "bfloat16")


def spec_of(options: dict[str, Any]) -> Spec:
    from kda.tools.verify.cases import Spec

    dense = options["batch"] or options["tokens"]
    return Spec(
        lengths=None if dense else options["lengths"] or LENGTHS, B=options["batch"] or 1, T=options["tokens"] or 128,
        H=options["heads"], HV=options["value_heads"], K=options["k"], V=options["v"], C=int(options["chunk_size"]),
        dtype=options["dtype"], gate=options["gate"], gate_per_head=options["gate_per_head"],
        regime=options["regime"], seed=options["seed"],
    )


def loaded(file: str) -> Case:
    from kda.tools.verify.cases import load

    try:
        return load(file)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def list_faults(screen: Screen) -> int:
    from kda.tools.verify.faults import FAULTS

    says = {name: fault.says for name, fault in FAULTS.items()}
    rows = [(name, fault.place, fault.says) for name, fault in FAULTS.items()]
    screen.answer({"schema": 1, "command": "verify", "faults": says}, screen.table(rows))
    return OK


# ---------------------------------------------------------------------------------------------- running


def verify(screen: Screen, case: Case, options: dict[str, Any], planted) -> int:
    from kda.tools.verify import cases, parity
    from kda.tools.verify.doors import Fla
    from kda.tools.verify.faults import Planted

    name = options["backend"] or (first_with_kernels(options) if options["arch"] else weigh_here(case).backend)
    if name is None:
        refusal = f"{weigh_here(case)}\n--backend NAME verifies one that auto does not pick"
        return cannot_judge(screen, case, None, (refusal,))
    door = door_to(name, options)
    if reasons := unable(door, case, options["stage"]):
        return cannot_judge(screen, case, name, reasons)
    other = None
    if options["against"] != "definition":
        other = Fla() if options["against"] == "fla" else door_to(options["against"], options)
        if reasons := other.against(case):
            return cannot_judge(screen, case, other.name, reasons)
    if planted and planted.place in STAGES and not holder(planted.place, door.stages):
        why = not_alone(planted.place, door.stages)
        raise click.UsageError(f"--fault {options['fault']} sits in {planted.place}; {name} {why}")
    simulated, door = door, Planted(door, planted) if planted else door
    stage = None if options["stage"] == "all" else options["stage"]
    with screen.progress(f"verifying {name}", parity.parts(door, case, stage, options["exact"])) as tell:
        report = parity.examine(door, case, stage, other, options["exact"], options["keep_going"], tell.step)
        small = None
        if report.wrong and not options["load"]:
            tell.expect(0)
            tell("looking for a smaller case")
            small = parity.smaller(door, report, planted)
    saved = None
    if options["dump"]:
        cases.save(case, options["dump"])
        saved = options["dump"]
    objections = [str(finding) for finding in getattr(simulated, "findings", ())]
    code = FINDING if report.wrong or objections else OK
    objects = ["The simulator objects:", *objections] if objections else []
    screen.answer({**as_json(report, door, options, small, saved, code), "objections": objections},
                  [*lines(screen, report, door, options, small, saved), *objects])
    return code


def door_to(name: str, options: dict[str, Any]) -> Door:
    """Return the backend here, or on the simulated arch; one without kernels has nothing to simulate."""
    from kda.tools.verify.doors import Door

    door = Door(name)
    if not options["arch"]:
        return door
    must_have_kernels(name, options["arch"])
    from kda.tools.verify.simulated import SimulatedDoor

    return SimulatedDoor(name, options["arch"])


def first_with_kernels(options: dict[str, Any]) -> str:
    target = options["arch"]
    capabilities = built_for(target)
    if not capabilities:
        raise NoKernelsYet(target)
    return capabilities[0].backend


def weigh_here(case: Case) -> Choice:
    host = own_host()
    return weigh(case.problem(device=host.device), host, backend_in_force())


def unable(door: Door, case: Case, stage: str) -> tuple[str, ...]:
    """Return the reasons for which this backend cannot be asked here."""
    if reasons := door.against(case):
        return reasons
    if stage != "all" and stage not in door.stages:
        return (f"it {not_alone(stage, door.stages)}",)
    return door.against(case, "backward") if stage != "all" and find(stage).backward else ()


def cannot_judge(screen: Screen, case: Case, name: str | None, reasons: Sequence[str]) -> int:
    lines = [problem_line(case), *(f"{name} cannot be judged here: {why}" if name else why for why in reasons)]
    if arch := arch_elsewhere(case, name, reasons):
        lines.append(f"--arch {arch} runs its kernels in the simulator, without such a GPU.")
    fields = {"backend": name, "rejections": list(reasons), "rows": []}
    screen.answer({**heading(case, CANNOT_JUDGE), **fields}, lines)
    return CANNOT_JUDGE


def arch_elsewhere(case: Case, name: str | None, reasons: Sequence[str]) -> str | None:
    """Return an arch for which a backend has kernels, if it is refused here only because there is no such GPU."""
    if name not in backend_names() or not any(reason.startswith(f"{name}.gpu:") for reason in reasons):
        return None
    from kda.model.host import host_of

    arch = capability(name).archs[0]
    return arch if weigh(case.problem(device="cuda"), host_of(arch), name).backend == name else None


# ---------------------------------------------------------------------------------------------- printing


def problem_line(case: Case) -> str:
    p, spec = case.problem(), case.spec
    heads = f"H={p.H}" if p.H == p.HV else f"H={p.H} HV={p.HV}"
    packed = f", packed {list(spec.lengths)}" if spec.lengths is not None else ""
    return (
        f"problem  B={p.B} T={p.T} N={p.N} {heads} K={p.K} V={p.V} C={p.C} {p.dtype}{packed}, "
        f"{p.gate} gate{' per head' * p.gate_per_head}, {spec.regime}   seed {spec.seed}"
    )


def lines(
    screen: Screen, report: ParityReport, door: Door, options: dict[str, Any], small: Spec | None, saved: str | None
) -> list[str]:
    against = "" if options["against"] in ("definition", door.name) else f" and {options['against']}"
    fault = f", with the fault {options['fault']} planted" if options["fault"] else ""
    out = [
        problem_line(report.case),
        f"backend  {door.name} on {where(door, options)}, against the definition in float64{against}{fault}",
        *([f"{screen.mark('fail')} {says}" if i == 0 else f"    {says}" for i, says in enumerate(verdict(report, door))]
          if report.wrong else [f"{screen.mark('ok')} {all_well(report)}"]),
    ]
    if report.wrong:
        out += replay_lines(screen, report, options, small)
    if saved:
        out.append(f"saved    {saved}")
    if report.wrong or options["verbose"]:
        out += ["", *table_lines(screen, report, options["exact"])]
    if report.stopped:
        out.append("bwd      not run, because the forward is wrong; --keep-going runs it")
    elif report.no_backward:
        out.append(f"bwd      {door.name} has no backward here: {report.no_backward[0]}")
    if not report.wrong and not options["verbose"]:
        out.append("         -v prints each stage and tensor")
    return out


def table_lines(screen: Screen, report: ParityReport, exact: bool) -> list[str]:
    measured = ["bits", ""] if exact else ["error", "budget", "used", "", "worst at"]
    header = ["stage", "tensor", *measured]
    return screen.table(list(cells(screen, report)), header, "lll" if exact else "llrrrll")


def replay_lines(screen: Screen, report: ParityReport, options: dict[str, Any], small: Spec | None) -> list[str]:
    """Return the command, which may be copied as it stands."""
    first, *more = shell_lines(replay(report, options, small), screen.width, len("replay   "))
    return [f"replay   {first}", *more, *(["         (the smallest case that still fails)"] if small else [])]


def where(door: Door, options: dict[str, Any]) -> str:
    return f"a simulated {options['arch'].spelling}" if options["arch"] else door.device


def cells(screen: Screen, report: ParityReport) -> Iterator[tuple[str, ...]]:
    from kda.tools.verify.parity import used_words, worst

    previous = None
    for row in report.rows:
        m = row.measure
        remark = ""
        if row.wrong:
            why = f"follows from {row.follows_from}" if row.follows_from else worst(row)
            remark = f"{screen.sign('fail')} {why}"
        used = screen.paint(used_words(m), "red" if row.wrong else None)
        measured: tuple[str, ...]
        if m.kind == "bits":
            measured = (used,)
        elif m.kind in ("norm", "peak"):
            measured = (f"{m.error:.1e}", f"{m.budget:.1e}", used, bar(screen, m.used))
        else:
            measured = ("", "", used, bar(screen, m.used))
        yield (row.stage if row.stage != previous else "", row.tensor, *measured, remark)
        previous = row.stage


def bar(screen: Screen, used: float) -> str:
    length = round(BAR * used) if used <= 1 else BAR
    return ("█" if screen.utf8 else "#") * length


def all_well(report: ParityReport) -> str:
    worst = max(report.rows, key=lambda row: row.measure.used)
    if worst.measure.kind == "bits":
        return f"{len(report.rows)} of {len(report.rows)} comparisons agree in every bit."
    return (
        f"{len(report.rows)} of {len(report.rows)} tensors within budget; "
        f"the closest is {worst.tensor} of {worst.stage}, which uses {worst.measure.used:.0%}."
    )


def verdict(report: ParityReport, door: Door) -> list[str]:
    """Return the first wrong stage, whose fault it is, and the shape of what is wrong."""
    first = report.first
    assert first is not None
    if not first.of_stage:
        looked = [row for row in report.rows if row.of_stage]
        if first.measure.kind == "bits":
            says = f"Not the same bits: {first.tensor}, {first.stage}, {first.measure.error:.2%} of the elements."
        elif looked:
            says = f"Every stage is within budget, {first.tensor} of the whole call is not: what joins them is wrong."
        else:
            says = f"{first.tensor} is over budget; {door.name} declares no stages to look into."
        return [says, *([first.pattern] if first.pattern else [])]
    reads = ", ".join(find(first.stage).reads)
    if first.itself:
        whose = f"It is still wrong with correct inputs ({reads}), so the stage itself is wrong."
    else:
        cause = f" ({first.follows_from})" if first.follows_from else ""
        whose = f"It is correct with correct inputs ({reads}), so its inputs are wrong{cause}, not the stage."
    before = list(dict.fromkeys(row.stage for row in report.rows if row.of_stage))
    before = before[: before.index(first.stage)]
    fine = f"{' to '.join(dict.fromkeys((before[0], before[-1])))} within budget." if before else ""
    shape = "  ".join(filter(None, (first.pattern, fine)))
    return [f"First wrong stage: {first.stage}.  {whose}", *([shape] if shape else [])]


def replay(report: ParityReport, options: dict[str, Any], small: Spec | None) -> list[str]:
    first = report.first
    assert first is not None
    words = ["kda", "verify", "--backend", report.backend]
    words += ["--stage", first.stage] if first.of_stage and first.follows_from is None else []
    words += ["--fault", options["fault"]] if options["fault"] else []
    words += ["--arch", options["arch"].name] if options["arch"] else []
    words += ["--exact"] if options["exact"] else []
    words += ["--against", options["against"]] if first.stage.startswith("to ") else []
    words += ["--load", options["load"]] if options["load"] else (small or report.case.spec).arguments()
    return words


# ---------------------------------------------------------------------------------------------- JSON


def heading(case: Case, code: int) -> dict[str, Any]:
    spec = case.spec
    return render.heading("verify", code, problem=str(case.problem()), spec=dataclasses.asdict(spec), seed=spec.seed)


def as_json(
    report: ParityReport, door: Door, options: dict[str, Any], small: Spec | None, saved: str | None, code: int
) -> dict:
    first = report.first
    return {
        **heading(report.case, code), "backend": report.backend, "device": door.device, "against": options["against"],
        "fault": options["fault"], "rejections": [], "evidence": "simulated" if options["arch"] else "executed",
        "arch": options["arch"] and options["arch"].name,
        "rows": [row_json(row) for row in report.rows],
        "stopped": report.stopped, "no_backward": list(report.no_backward),
        "first_wrong": first and {"stage": first.stage, "tensor": first.tensor, "itself": first.itself,
                                  "follows_from": first.follows_from, "pattern": first.pattern},
        "replay": shlex.join(replay(report, options, small)) if first else None, "saved": saved,
    }


def row_json(row: ParityRow) -> dict[str, Any]:
    """Return a row with null for numbers that JSON does not have; `kind` says why."""
    m = row.measure
    return {
        "stage": row.stage, "tensor": row.tensor, "status": "fail" if row.wrong else "ok", "kind": m.kind,
        "error": finite(m.error), "budget": finite(m.budget), "used": finite(m.used),
        "worst": {**row.where, "got": finite(m.got), "want": finite(m.want)} if m.index is not None else None,
        "itself": row.wrong and row.itself, "follows_from": row.follows_from, "pattern": row.pattern,
    }


def finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
