"""`kda doctor`: what works on this machine, and how to fix the rest.

This process imports neither torch, triton nor cutlass: `probes` asks children, `findings` judges, this file prints.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import click

from kda.model.host import Host
from kda.model.problem import Problem
from kda.routing.capability import Capability
from kda.routing.dispatch import Choice, backend_names, capabilities, weigh
from kda.tools.verify.evidence import Evidence
from ptxkit.commands.layout import table
from ptxkit.commands.render import FINDING, OK, Screen, common_options, heading, program_version
from ptxkit.compile.target import TARGETS

from . import models, probes
from . import ran as ledger
from .findings import CHECKS, Diagnosis, backends_with_kernels
from .hosts import default_device, host_for
from .options import BACKEND, Name, problem_of
from .probes import MachineFacts, Probe

LIVE = "backend."                            # backend.NAME is the finding of a live call


@dataclass(frozen=True)
class BackendRow:
    """One line of the backend table."""

    name: str
    usable: bool
    auto: bool                               # whether backend="auto" picks it
    forward: bool
    backward: bool
    live: Probe                              # its small call in a child
    why: str
    rejections: tuple[str, ...]

    @property
    def evidence(self) -> Evidence | None:
        return Evidence.EXECUTED if _live_ok(self.live) else None


@dataclass(frozen=True)
class DoctorReport:
    facts: MachineFacts
    findings: tuple[Diagnosis, ...]
    rows: tuple[BackendRow, ...] = ()
    ways: tuple[models.ModelsWay, ...] = ()        # in which models would use kda; empty: not looked for
    ran: tuple[ledger.Ran, ...] = ()         # runs of the backends that are for this machine's GPU
    choice: Choice | None = None             # the choice for the table's problem
    unmet: tuple[str, ...] = ()              # --require that does not hold
    strict: bool = False

    def count(self, *statuses: str) -> int:
        return sum(finding.status in statuses for finding in self.findings)

    @property
    def exit_code(self) -> int:
        bad = ("fail", "crash", "warn") if self.strict else ("fail", "crash")
        return FINDING if self.unmet or self.count(*bad) else OK


# ---------------------------------------------------------------------------------------------- backends


def takes(backend: Capability, problem: Problem, host: Host) -> tuple[str, ...]:
    """Return the reasons against a backend that the caller names."""
    return dict(weigh(problem, host, backend.backend).tried)[backend.backend]


def live_calls(names: Sequence[str], answered: Callable[[], None]) -> dict[str, Probe]:
    def call(name: str) -> Probe:
        probe = probes.probe_backend(name)
        answered()
        return probe

    with ThreadPoolExecutor(len(names) or 1) as pool:
        return dict(zip(names, pool.map(call, names), strict=True))


def weigh_backends(facts: MachineFacts, problem: Problem, live: Mapping[str, Probe]) -> tuple[BackendRow, ...]:
    host = host_for(problem.device, facts)
    auto = weigh(problem, host, "auto")
    return tuple(_row(c, problem, host, auto, facts.torch.ok, live.get(c.backend, Probe())) for c in capabilities())


def _row(c: Capability, problem: Problem, host: Host, auto: Choice, torch_ok: bool, call: Probe) -> BackendRow:
    name, picked = c.backend, auto.backend == c.backend
    ways = (dataclasses.replace(problem, direction=direction) for direction in ("forward", "backward"))
    against, against_backward = (takes(c, way, host) for way in ways)
    runs = torch_ok and not against
    if against:
        why = _first(against)
    elif not torch_ok:
        why = "torch.import failed (above)"
    elif call.state != "skipped" and not _live_ok(call):
        why = f"{LIVE}{name} failed (above)"
    elif against_backward:
        why = f"backward: {_first(against_backward)}"
    else:
        why = "" if picked else _first(dict(auto.tried)[name])
    usable = runs and (call.state == "skipped" or _live_ok(call))
    return BackendRow(name, usable, picked, runs, runs and not against_backward, call, why, takes(c, problem, host))


def _first(reasons: Sequence[str]) -> str:
    if not reasons:
        return ""
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return reasons[0].partition(" -> ")[0] + more


def _live_ok(call: Probe) -> bool:
    return call.ok and bool(call.data.get("ok"))


def live_finding(name: str, call: Probe) -> Diagnosis:
    if _live_ok(call):
        return Diagnosis(LIVE + name, "ok", call.data["says"])
    fix = (f"kda verify --backend {name}", "kda doctor --paste, for a bug report")
    if call.state == "crashed":
        return Diagnosis(LIVE + name, "crash", f"a small call {call.says}", fix)
    return Diagnosis(LIVE + name, "fail", f"a small call failed: {call.data.get('says') or call.says}", fix)


def archs_without_kernels(backends: Sequence[Capability]) -> list[str]:
    return [name for name, target in TARGETS.items() if not backends_with_kernels(target.cc, tuple(backends))]


# ---------------------------------------------------------------------------------------------- examination


def examine(screen: Screen, checks: Sequence[str] = (), problem: str | None = None, require: Sequence[str] = (),
            strict: bool = False) -> DoctorReport:
    """Examine everything, or only the named checks; or, for a problem, only which backends accept it."""
    named = [name.removeprefix(LIVE) for name in checks if name.startswith(LIVE)]
    looked_at = [check for check in CHECKS.values() if check.id in checks or (not checks and problem is None)]
    with_table = not checks or problem is not None or bool(require) or bool(named)
    needs = {need for check in looked_at for need in check.needs} | ({"torch", "smi"} if with_table else set())
    with_models = with_table and not checks and problem is None
    with screen.progress("looking at this machine", total=len(needs)) as tell:
        facts = probes.gather(needs, tell.count)
        findings = [check(facts) for check in looked_at]
        if not with_table:
            return DoctorReport(facts, tuple(findings), strict=strict)
        wanted = Problem.parse(problem or "", device=default_device(facts))
        rows = weigh_backends(facts, wanted, {})
        if problem is None:
            called = {*named, *require} if checks else set(backend_names())
            runs = [row.name for row in rows if row.forward and row.name in called]
            tell.expect(len(runs))
            tell(f"calling {', '.join(runs) or 'no backend'}")
            live = live_calls(runs, tell.count)
            findings += [live_finding(name, call) for name, call in live.items()]
            silent = [row for row in rows if row.name in named and row.name not in live]
            findings += [Diagnosis(LIVE + row.name, "info", f"not called: {row.why}") for row in silent]
            rows = weigh_backends(facts, wanted, live)
    unmet = [row for row in rows if row.name in require and not row.usable]
    choice = weigh(wanted, host_for(wanted.device, facts))
    says = tuple(f"{row.name} is required and not usable: {row.why}" for row in unmet)
    ways = models.ways(facts) if with_models else ()
    ran = ledger.ran_on([row.name for row in rows], facts.gpus[0].cc) if with_models and facts.gpus else ()
    return DoctorReport(facts, tuple(findings), rows, ways, ran, choice, says, strict)


# ---------------------------------------------------------------------------------------------- printing


def header(facts: MachineFacts) -> str:
    system = f"{facts.system[0].lower()} {facts.system[1]}"
    device = facts.gpus[0].name if facts.gpus else "no GPU"
    return f"kda {program_version()}  python {'.'.join(map(str, facts.python))}  {system}  {device}"


def finding_lines(screen: Screen, findings: Sequence[Diagnosis]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for f in findings:
        says = f.says or (CHECKS[f.id].title if f.id in CHECKS else "")
        rows.append((f"{screen.mark(f.status)} {f.id}", says))
        rows += [("", f"{'fix: ' if i == 0 else '     '}{fix}") for i, fix in enumerate(f.fix)]
    return screen.table(rows, indent=2)


def backend_lines(screen: Screen, rows: Sequence[BackendRow], why: bool = True) -> list[str]:
    def cells(row: BackendRow) -> tuple[str, ...]:
        usable = screen.paint("usable", "green") if row.usable else "no"
        ways = ["yes" if way else "-" for way in (row.forward, row.backward)]
        name = f"{'*' if row.auto else ' '} {row.name}"
        return name, usable, *ways, evidence_cell(screen, row), *([row.why] if why else [])

    header = ("Backends", "usable", "forward", "backward", "evidence", *(["why"] if why else []))
    return screen.table([cells(row) for row in rows], header)


def evidence_cell(screen: Screen, row: BackendRow) -> str:
    if row.evidence is not None:
        seconds = row.live.data["seconds"]
        return f"{row.evidence.word} {'<0.1' if seconds < 0.1 else f'{seconds:.1f}'} s"
    return "-" if row.live.state == "skipped" else screen.paint("failed", "red")


def legend(choice: Choice) -> str:
    p = choice.problem
    picked = "*" if choice.backend else "no backend"
    where = "" if p.is_gpu else " on CPU tensors"
    example = '`kda doctor --problem "K=64 V=128 float32"`'
    return f'{picked} = what backend="auto" picks for K={p.K} V={p.V} {p.dtype}{where}; try {example}'


def summary(screen: Screen, report: DoctorReport) -> str:
    """Return the result, which is printed first; nothing if an unmet requirement is the only one."""
    failed, warned = report.count("fail", "crash"), report.count("warn")
    if not failed and not warned:
        if report.unmet:
            return ""
        return f"{screen.mark('ok')} {'Everything kda needs is here.' if report.rows else 'Nothing wrong.'}"
    counts = [f"{failed} failed"] * bool(failed) + [f"{warned} warning{'s' * (warned > 1)}"] * bool(warned)
    first = next(f.id for f in report.findings if f.status in (("fail", "crash") if failed else ("warn",)))
    if report.rows:
        counts.append(f"usable: {', '.join(row.name for row in report.rows if row.usable) or 'no backend'}")
    says = f"{'; '.join(counts)}.  `kda doctor {first}` re-runs one check, `kda doctor --paste` makes a bug report."
    return f"{screen.mark('fail' if failed else 'warn')} {says}"


def shown(report: DoctorReport, verbose: bool) -> list[Diagnosis]:
    """Return findings worth a line: all of them with -v, otherwise those that want something done."""
    return [f for f in report.findings if verbose or f.status in ("warn", "fail", "crash")]


def text_lines(screen: Screen, report: DoctorReport, verbose: bool, for_problem: bool) -> list[str]:
    lines = [screen.paint(header(report.facts), bold=True)]
    if not for_problem:
        result = [*(f"{screen.mark('fail')} {unmet}" for unmet in report.unmet), summary(screen, report)]
        lines += filter(None, result)
    elif report.choice:
        lines += [*str(report.choice).splitlines(), *report.unmet]
    if findings := shown(report, verbose):
        lines += ["", *finding_lines(screen, findings)]
    if report.rows:
        lines += ["", *backend_lines(screen, report.rows, not for_problem)]
    if report.choice and not for_problem:
        lines.append(legend(report.choice))
        if missing := archs_without_kernels(capabilities()):
            lines.append(f"No kernels yet for {', '.join(missing)}.")
    if report.ran:
        lines += ["", *ledger.lines(screen, report.ran)]
    if any(way.version for way in report.ways):
        lines += ["", *models.lines(screen, report.ways)]
    return lines


def as_json(report: DoctorReport) -> dict:
    gpu = report.facts.gpus[0] if report.facts.gpus else None
    host = {
        "gpu": gpu and gpu.name, "cc": gpu and list(gpu.cc), "sms": gpu and gpu.sms,
        "gpu_source": report.facts.gpu_source if gpu else None, "driver": report.facts.driver,
        "python": ".".join(map(str, report.facts.python)), "system": list(report.facts.system),
        "versions": dict(report.facts.versions),
    }
    out = heading(
        "doctor", report.exit_code, host=host,
        findings=[{**finding._asdict(), "fix": list(finding.fix)} for finding in report.findings],
        backends=[_row_json(row) for row in report.rows], ran=[each._asdict() for each in report.ran],
        models=[way.as_json() for way in report.ways],
    )
    return out if report.choice is None else {**out, "problem": str(report.choice.problem)}


def _row_json(row: BackendRow) -> dict:
    return {
        "name": row.name, "usable": row.usable, "auto": row.auto, "forward": row.forward, "backward": row.backward,
        "evidence": row.evidence and row.evidence.word, "seconds": row.live.data.get("seconds"),
        "why": row.why, "rejections": list(row.rejections),
    }


def paste_lines(report: DoctorReport) -> list[str]:
    """Return a block for an issue, without the names of people and machines."""
    plain, facts = Screen(utf8=False), report.facts
    gpus = "; ".join(f"{g.name} ({g.cc[0]}.{g.cc[1]})" for g in facts.gpus) or "none"
    facts_table = [
        ("kda", program_version()), ("python", ".".join(map(str, facts.python))), ("system", platform.platform()),
        ("GPUs", gpus), ("driver", facts.driver or "-"), *facts.versions.items(), *facts.env.items(),
    ]
    parts = [table(facts_table), finding_lines(plain, report.findings), backend_lines(plain, report.rows)]
    refused = [(row.name, reason) for row in report.rows for reason in row.rejections]
    parts += [plain.table(refused, ("refused", "every reason"))] * bool(refused)
    parts += [lines for lines in (ledger.lines(plain, report.ran), models.lines(plain, report.ways)) if lines]
    return ["```", *(anonymous(line) for part in parts for line in [*part, ""]), "```"]


def anonymous(text: str) -> str:
    host = platform.node()
    names = {os.path.expanduser("~"): "~", host: "<host>", host.partition(".")[0]: "<host>"}
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 3:
            text = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", names[name], text)
    return text


# ---------------------------------------------------------------------------------------------- the command


def check_names() -> list[str]:
    return [*CHECKS, *(LIVE + name for name in backend_names())]


@click.command()
@click.argument("checks", metavar="[CHECK]...", nargs=-1, type=Name("check", check_names))
@click.option("--verbose", "-v", is_flag=True, help="Print the checks that found nothing, too.")
@click.option("--list", "only_list", is_flag=True, help="List the checks and end.")
@click.option("--problem", metavar="WORDS",
              help='Say which backend accepts a problem, as in "K=64 V=128 float32 packed backward".')
@click.option("--require", type=BACKEND, multiple=True, help="Exit with 1 unless this backend is usable.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
@click.option("--paste", is_flag=True, help="Print a block for an issue, without home directory and host name.")
@common_options
def command(screen: Screen, checks: tuple[str, ...], verbose: bool, only_list: bool, problem: str | None,
            require: tuple[str, ...], strict: bool, paste: bool) -> int:
    """Say what works on this machine, and how to fix the rest.

    Exits with 1 if a check failed; a warning counts under --strict.
    """
    if only_list:
        titles = {check.id: check.title for check in CHECKS.values()}
        live = (f"{LIVE}NAME", "a small call of a usable backend agrees with the reference")
        screen.answer({"schema": 1, "command": "doctor", "checks": titles}, screen.table([*titles.items(), live]))
        return OK
    problem_of(problem or "")
    report = examine(screen, checks, problem, require, strict)
    if paste and not screen.json:
        screen.write("\n".join(paste_lines(report)))
    else:
        lines = text_lines(screen, report, verbose or bool(checks), problem is not None)
        screen.answer(as_json(report), lines)
    return report.exit_code
