"""What became of every weakened synchronising instruction of the shipped kernels: docs/data/mutants.json.

    python tests/helpers/mutant_table.py                 what differs from the file
    python tests/helpers/mutant_table.py --write         write it anew
    python tests/helpers/mutant_table.py --only sm90     one backend; the others stay as the file has them

A row is known by a file, a statement, an instruction and what was done to it, not by line numbers, so that edits
elsewhere leave the file as it is.  docs/written.py makes a page of it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kda
from kda.tools.verify.mutants import CALLS, calls
from ptxkit.compile import target
from ptxkit.mutation import WAYS, Mutants, Outcome, mutants
from ptxkit.mutation.sources import SUFFIXES, located, text_of
from ptxkit.mutation.table import opcode_of

FILE = Path(kda.__file__).parents[1] / "docs" / "data" / "mutants.json"
PACKAGE = Path(kda.__file__).parent / "backends"
LONGEST = 80                                 # most characters of a statement


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
    statement = statement_of(lines[loc.line - 1]) if 0 < loc.line <= len(lines) else ""
    return Key(file, statement, opcode_of(outcome.mutant), outcome.mutant.mutation)


def statement_of(line: str) -> str:
    return line.split("  #")[0].split("  //")[0].strip()[:LONGEST].strip()


def statements() -> set[tuple[str, str]]:
    """Return (file, statement) for each line of the backends' files."""
    files = (path for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES)
    return {(path.relative_to(PACKAGE).as_posix(), statement_of(line))
            for path in files for line in path.read_text().splitlines()}


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


def section(found: Mutants) -> dict[str, Any]:
    """Return what the file has of a backend: mutants by what noticed them, and a row for each key."""
    ways = Counter(outcome.way for outcome in found.outcomes)
    rows = [[*key, *entry] for key, entry in entries(found.outcomes).items()]
    return {"ways": {way: ways[way] for way in WAYS}, "rows": json.loads(json.dumps(rows))}


def text(sections: dict[str, dict[str, Any]]) -> str:
    """Return the file's text, a line for each row."""
    def lines(rows: list[Any]) -> str:
        return ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)

    parts = [f'"{backend}": {{"ways": {json.dumps(part["ways"])}, "rows": [\n{lines(part["rows"])}\n]}}'
             for backend, part in sections.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text())


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
    backends = [asked.only] if asked.only else [*CALLS]
    now = read() | {backend: section(looked_at(backend, workers=asked.workers)) for backend in backends}
    if asked.write:
        FILE.write_text(text(now))
        return
    both = FILE.read_text().splitlines(), text(now).splitlines()
    lines = list(difflib.unified_diff(*both, FILE.name, "now", lineterm="", n=0))
    print("\n".join(lines))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
