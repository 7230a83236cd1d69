"""What a script's kernels did, as a self-contained page: their source, line by line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ..findings import ENDED, Finding
from ..mutation import Outcome
from ..timing.pages import document
from . import places
from .places import PageLine
from .running import Simulated

AROUND = 3                                   # lines of the source above and below those that ran
# counter -> its column; a column of zeros is left out
COLUMNS = {
    "issued": "warp instructions", "global_read": "global bytes read", "global_written": "global bytes written",
    "wavefronts": "shared wavefronts", "conflicts": "bank conflicts", "flops": "tensor FLOPs",
    "stalled": "clocks waited",
}
STYLE = Path(__file__).with_name("pages.css").read_text()


class Remark(NamedTuple):
    """A remark that stands below a line."""

    kind: str                                # "error", "note", "survivor": a class of the style
    name: str
    says: str


def page(simulated: Simulated, survivors: Iterable[Outcome], home: Path) -> str:
    """Return the page; `survivors` are mutants that nothing noticed."""
    remarks = _remarks(simulated, survivors, home)
    kernels: dict[str, list[int]] = defaultdict(list)
    for n, run in enumerate(simulated.session.runs):
        kernels[run.kernel].append(n)
    body = [f"<h1>{escape(simulated.script)} on {escape(simulated.arch)}</h1>", _summary(simulated, len(kernels))]
    body += [_kernel(simulated, name, numbers, remarks.get(name, {}), home) for name, numbers in kernels.items()]
    return document(f"{simulated.script} on {simulated.arch}", "\n".join(body), STYLE)


def many(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural if n != 1 else ''}"


def _summary(simulated: Simulated, kernels: int) -> str:
    session = simulated.session
    errors, notes, launches = len(simulated.findings), len(simulated.notes), len(session.runs)
    time = f", {1e3 * session.milliseconds:,.1f} us predicted" if session.options.get("clock") else ""
    text = f"{many(launches, 'launch', 'es')} of {many(kernels, 'kernel')}, "
    text += f"{many(simulated.schedules, 'schedule')} of each{time}; {many(errors, 'finding')}, {many(notes, 'note')}"
    text += "; the script failed" if simulated.failed else "" if launches else "; the script launched no kernel"
    clean = launches and not errors and not simulated.failed
    return f'<p class="{"clean" if clean else ""}">{escape(text)}</p>'


def _remarks(simulated: Simulated, survivors: Iterable[Outcome], home: Path) -> dict[str, dict[PageLine, list[Remark]]]:
    """Return kernel -> line -> what is said there."""
    said: dict[str, dict[PageLine, list[Remark]]] = defaultdict(lambda: defaultdict(list))
    for finding in simulated.findings + simulated.notes:
        remark = Remark(finding.grade, finding.kind, _told(finding, home))
        said[finding.kernel][places.line_of_place(finding.place, home)].append(remark)
    for outcome in survivors:
        mutant = outcome.mutant
        remark = Remark("survivor", "mutant survived", f"{mutant.mutation}: {mutant.instruction}")
        said[mutant.kernel][places.line_of_mutant(mutant, home)].append(remark)
    return said


def _told(finding: Finding, home: Path) -> str:
    times = f", {finding.count} times" if finding.count > 1 else ""
    text = f"CTA {finding.cta}, warp {finding.warp}, lane {finding.lane}: {finding.says}{times}"
    if finding.other:
        line = places.line_of_place(finding.other, home)
        text += f"; the other is {places.shown(line.file, home) if line.file else 'PTX'}:{line.line}"
    return f"{text}; {ENDED}" if finding.ended else text


def _kernel(
    simulated: Simulated, name: str, numbers: Sequence[int], remarks: Mapping[PageLine, list[Remark]], home: Path
) -> str:
    runs, launches = simulated.session.runs, simulated.session.launches
    counts: dict[PageLine, dict[str, float]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0))
    for n in numbers:
        for source, ptx_line, line in runs[n].lines():
            counted = counts[places.line_of(source, ptx_line, home)]
            for column in COLUMNS:
                conflicts = line["wavefronts"] - line["wavefronts_needed"]
                counted[column] += conflicts if column == "conflicts" else line[column]
    files = dict.fromkeys(counted.file for counted in (*counts, *remarks))
    run = runs[numbers[0]]
    grid, block, cluster = ("x".join(map(str, shape)) for shape in (run.grid, run.block, run.cluster))
    count = many(len(numbers), "launch", "es")
    head = f"<h2>{escape(name)}</h2>\n<p>{count}, the first with grid {grid}, block {block}, cluster "
    ptx = launches[numbers[0]].kernel.ptx.splitlines()
    tables = (_table(file, _text(file, ptx), counts, remarks, home) for file in files)
    return f"{head}{cluster}</p>\n" + "\n".join(tables)


def _text(file: str | None, ptx: list[str]) -> list[str]:
    if file is None:
        return ptx
    try:
        return Path(file).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _table(
    file: str | None, text: list[str], counts: Mapping[PageLine, Mapping[str, float]],
    remarks: Mapping[PageLine, list[Remark]], home: Path,
) -> str:
    """Return one file: the lines that ran or of which something is said, and a few around each."""
    counted = {place.line: line for place, line in counts.items() if place.file == file}
    said = {place.line: says for place, says in remarks.items() if place.file == file}
    columns = [column for column in COLUMNS if any(line[column] for line in counted.values())]
    most = {column: max(line[column] for line in counted.values()) for column in columns}
    near = {n + d for n in (*counted, *said) for d in range(-AROUND, AROUND + 1)}
    shown = sorted(n for n in near if n in counted or n in said or 0 < n <= len(text))
    title = places.shown(file, home) if file else "PTX (it names no source)"
    rows, before = [], None
    for n in shown:
        if before is not None and n > before + 1:
            rows.append(f'<tr><td class="n" colspan="{len(columns) + 1}"></td><td class="code">...</td></tr>')
        rows += _row(n, text[n - 1] if n <= len(text) else "", counted.get(n), said.get(n, []), columns, most)
        before = n
    heads = "".join(f"<th>{COLUMNS[column]}</th>" for column in columns)
    return (
        f'<div class="scroll"><table><tr>{heads}<th></th><th class="code">{escape(title)}</th></tr>\n'
        + "\n".join(rows) + "</table></div>"
    )


def _row(
    number: int, code: str, line: Mapping[str, Any] | None, remarks: list[Remark], columns: list[str],
    most: Mapping[str, float],
) -> list[str]:
    numbers = [(line[column] if line else 0, most[column]) for column in columns]
    cells = "".join(f'<td class="n{" most" * (n == top)}">{n:,.0f}</td>' if n else '<td class="n"></td>'
                    for n, top in numbers)
    classes = " ".join(["ran"] * bool(line) + ["found"] * bool(remarks))
    weighed = "stalled" if "stalled" in columns else "issued"
    heat = round(40 * line[weighed] / most[weighed]) if line and most.get(weighed) else 0
    rows = [f'<tr class="{classes}" style="--heat: {heat}">{cells}<td class="n">{number}</td>'
            f'<td class="code">{escape(code)}</td></tr>']
    rows += [f'<tr class="{r.kind}"><td colspan="{len(columns) + 1}"></td><td class="says"><b>{escape(r.name)}</b> '
             f"{escape(r.says)}</td></tr>" for r in remarks]
    return rows
