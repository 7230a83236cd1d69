"""docs/mutants.md: what became of every weakened synchronising instruction of the shipped kernels.

    python tests/helpers/mutants_docs.py                 what differs from docs/mutants.md
    python tests/helpers/mutants_docs.py --write         write it anew
    python tests/helpers/mutants_docs.py --only sm90     one backend; the others stay as the page has them

A row is known by a file, a statement, an instruction and what was done to it, not by line numbers, so that edits
elsewhere leave the page as it is.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import kda
from kda.tools.verify.mutants import CALLS, calls
from ptxkit.compile import target
from ptxkit.mutation import SCHEDULES, WAYS, Mutants, Outcome, mutants
from ptxkit.mutation.sources import located, text_of
from ptxkit.mutation.table import opcode_of

PAGE = Path(kda.__file__).parents[1] / "docs" / "mutants.md"
PACKAGE = Path(kda.__file__).parent / "backends"
LONGEST = 80                                 # most characters of a statement
ENOUGH = 0.98                                # share of the mutants that matter

HEAD = """# Every synchronising instruction has a reason

`ptxkit.mutants` removes or weakens every synchronising instruction of a kernel, one at a time, and reports
what notices it; [the simulator's page](../ptxkit/docs/simulator.md) explains how. These are the shipped kernels in
small problems, packed and with grouped heads, under {schedules} schedules
([`kda/tools/verify/mutants.py`](../kda/tools/verify/mutants.py)).
`kda verify --mutants --arch sm100` runs it again; `tests/helpers/mutants_docs.py --write` writes this page.

A mutant is noticed by a race, a deadlock, a broken rule of the PTX manual, or a wrong result. Kernels contain no
instruction that nothing needs, unless the source says why beside it (`# redundant: ...`).
"""


class Key(NamedTuple):
    file: str
    statement: str
    instruction: str
    mutation: str


class Entry(NamedTuple):
    mutants: int
    noticed: tuple[str, ...]                 # kinds of findings and the like, sorted
    redundant: int
    reason: str
    survived: int


def key_of(outcome: Outcome) -> Key:
    loc = outcome.mutant.loc
    if loc is None:
        return Key("PTX", "", opcode_of(outcome.mutant), outcome.mutant.mutation)
    path = located(loc.file)
    file = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name
    lines = text_of(loc.file).splitlines()
    statement = lines[loc.line - 1].split("  #")[0].split("  //")[0].strip() if 0 < loc.line <= len(lines) else ""
    return Key(file, statement[:LONGEST].strip(), opcode_of(outcome.mutant), outcome.mutant.mutation)


def entries(found: Sequence[Outcome]) -> dict[Key, Entry]:
    by_key = defaultdict(list)
    for outcome in found:
        by_key[key_of(outcome)].append(outcome)
    return {key: entry_of(outcomes) for key, outcomes in sorted(by_key.items())}


def entry_of(outcomes: Sequence[Outcome]) -> Entry:
    status = Counter(outcome.status for outcome in outcomes)
    noticed = sorted({how for outcome in outcomes for how in outcome.noticed})
    reason = next((outcome.reason for outcome in outcomes if outcome.status == "redundant"), None)
    return Entry(len(outcomes), tuple(noticed), status["redundant"], reason or "", status["survived"])


def says(entry: Entry) -> str:
    parts = [", ".join(entry.noticed)] if entry.noticed else []
    if entry.redundant:
        number = f"{entry.redundant} " if entry.redundant < entry.mutants else ""
        parts.append(f"{number}redundant: {entry.reason}")
    if entry.survived:
        parts.append(f"**{entry.survived} survived**")
    return "; ".join(parts)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def rows(found: Sequence[Outcome]) -> Iterator[str]:
    """Lines of a table, a line for each key."""
    yield "| file | statement | instruction | what was done | mutants | noticed by |"
    yield "|---|---|---|---|---|---|"
    for key, entry in entries(found).items():
        statement = f"`{cell(key.statement)}`" if key.statement else ""
        cells = key.file, statement, f"`{key.instruction}`", key.mutation, entry.mutants, cell(says(entry))
        yield f"| {' | '.join(map(str, cells))} |"


def summary(found: dict[str, Mutants]) -> Iterator[str]:
    yield f"| kernels | mutants | {' | '.join(f'by {way}' for way in WAYS)} | redundant | survived | noticed |"
    yield "|---|" + "---|" * (len(WAYS) + 4)
    for backend, judged in found.items():
        ways = Counter(outcome.way for outcome in judged.outcomes)
        status = Counter(outcome.status for outcome in judged.outcomes)
        numbers = [len(judged.outcomes), *[ways[way] for way in WAYS], status["redundant"], status["survived"]]
        yield f"| {backend} | {' | '.join(map(str, numbers))} | {judged.share:.1%} |"


def page(found: dict[str, Mutants]) -> str:
    lines = [HEAD.format(schedules={4: "four"}[len(SCHEDULES)]), *summary(found)]
    for backend, judged in found.items():
        lines += ["", f"## {backend}", "", *rows(judged.outcomes)]
    return "\n".join(lines) + "\n"


def renewed(before: str, backend: str, judged: Mutants) -> str:
    """The page with another section, and another line of the summary, of one backend."""
    head, *sections = before.split("\n## ")
    line = list(summary({backend: judged}))[-1]
    head = "\n".join(line if old.startswith(f"| {backend} |") else old for old in head.split("\n"))
    body = "\n".join([backend, "", *rows(judged.outcomes), ""])
    sections = [body if section.startswith(f"{backend}\n") else section for section in sections]
    return "\n## ".join([head, *sections]).rstrip("\n") + "\n"


def looked_at(backend: str, sample: int = 1, workers: int = 1, first: int | None = None) -> Mutants:
    """Judge mutants like `kda verify --mutants` does, or in the first calls alone."""
    return mutants(
        *calls(backend)[:first], arch=target.parse(backend).spelling, strict=True, sample=sample, workers=workers,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=list(CALLS))
    asked = parser.parse_args()
    before = PAGE.read_text() if PAGE.exists() else ""
    if asked.only:
        now = renewed(before, asked.only, looked_at(asked.only, workers=asked.workers))
    else:
        now = page({backend: looked_at(backend, workers=asked.workers) for backend in CALLS})
    if asked.write:
        PAGE.write_text(now)
        return
    both = before.splitlines(), now.splitlines()
    lines = list(difflib.unified_diff(*both, "docs/mutants.md", "now", lineterm="", n=0))
    print("\n".join(lines))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
