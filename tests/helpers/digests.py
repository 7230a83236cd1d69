"""The PTX of shipped kernels beside digests.json: a change that should not change code cannot.

    python tests/helpers/digests.py                       what differs from digests.json
    python tests/helpers/digests.py --write               the differences were meant: write digests.json anew
    python tests/helpers/digests.py --write --new         add the kernels that it lacks; the others are not built
    python tests/helpers/digests.py --keep FOLDER         write each kernel's normalised PTX, to compare two trees

kda/tools/verify/digests.py says what is digested, and of which kernels.  The ledger of what ran on a GPU has the same
digests: write it anew, too (python -m benchmarks.evidence --write).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kda.tools.verify.digests import PROBLEMS, Digest, digest, labelled, normalised, version
from ptxkit.compile.fetching import fetch_all
from ptxkit.compile.recipes import AnyRecipe

COMMITTED = Path(__file__).with_name("digests.json")
LONG = 4000                                  # instructions: the DSL takes seconds for each thousand


def fetched(recipes: dict[str, AnyRecipe]) -> dict[str, str]:
    """Build the kernels and return the PTX of each label."""
    return dict(zip(recipes, (kernel.ptx for kernel in fetch_all(recipes.values()))))


def committed() -> dict[str, Any]:
    return json.loads(COMMITTED.read_text())


def changes(was: dict[str, Any], now: dict[str, Digest]) -> Iterator[str]:
    """Yield a line for each difference: for people, and for a test to quote."""
    for label, new in now.items():
        old = was.get(label)
        if old is None:
            yield f"{label}: new"
        elif old["code"] != new.code:
            before, after = Counter(old["instructions"]), Counter(new.instructions)
            words = [f"{n:+d} {opcode}" for opcode in sorted(before | after) if (n := after[opcode] - before[opcode])]
            yield f"{label}: {', '.join(words) or 'the same instructions, other registers or order'}"
    for label in was.keys() - now.keys():
        yield f"{label}: gone"


def measured(backend: str, arch: str, labels: Iterable[str] | None = None) -> dict[str, Digest]:
    recipes = labelled(backend, arch)
    chosen = recipes if labels is None else {label: recipes[label] for label in labels}
    return {label: digest(ptx) for label, ptx in fetched(chosen).items()}


def of_a_name(backend: str, long: bool) -> list[str]:
    """Return the first label of each kernel, of those kernels that are long or of those that are not."""
    names: dict[str, str] = {}
    for label in labelled(backend, backend):
        names.setdefault(label.split(": ")[1].split()[0], label)
    known = committed()["kernels"]
    return [label for label in names.values() if (sum(known[label]["instructions"].values()) > LONG) == long]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--new", action="store_true", help="only kernels that digests.json lacks")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--backend", help="by default all")
    asked = parser.parse_args()
    document = committed() if COMMITTED.exists() else {"compilers": {}, "kernels": {}}
    differences = []
    for backend, arch in PROBLEMS:
        if asked.backend not in (None, backend):
            continue
        was = {label: entry for label, entry in document["kernels"].items() if label.startswith(f"{backend} {arch}:")}
        recipes = labelled(backend, arch)
        known = {label: Digest(**was[label]) for label in recipes if asked.new and label in was}
        ptx = fetched({label: recipe for label, recipe in recipes.items() if label not in known})
        now = known | {label: digest(text) for label, text in ptx.items()}
        for label, text in ptx.items() if asked.keep else ():
            asked.keep.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]+", "_", label)
            (asked.keep / f"{name}.ptx").write_text(normalised(text))
        differences += changes(was, now)
        document["compilers"][backend] = version(backend)
        document["kernels"] = {label: entry for label, entry in document["kernels"].items() if label not in was}
        document["kernels"] |= {label: entry._asdict() for label, entry in now.items()}
    print("\n".join(differences) or "no kernel changed")
    if asked.write:
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(document["kernels"].items()))
        head = json.dumps(document["compilers"])
        COMMITTED.write_text(f'{{"compilers": {head},\n "kernels": {{\n{lines}\n}}}}\n')
    sys.exit(bool(differences) and not asked.write)


if __name__ == "__main__":
    main()
