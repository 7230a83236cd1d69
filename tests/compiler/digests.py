"""Digests of the PTX of shipped kernels: a change that should not change code cannot.

    python tests/compiler/digests.py                       what differs from digests.json
    python tests/compiler/digests.py --write               the differences were meant: write digests.json anew
    python tests/compiler/digests.py --keep FOLDER         write each kernel's normalised PTX, to compare two trees

A kernel is known by its backend, arch, problem and place among the recipes of that problem, not by names in Python, so
that these may change.  Kernel names, comments, lines of source and debug sections are left out of what is digested.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kda.compile import recipes as known
from kda.compile.fetching import fetch_all
from kda.compile.recipes import AnyRecipe
from kda.problem import Problem
from kda.simulator.chips import host_of

COMMITTED = Path(__file__).with_name("digests.json")

STATES = "state_dtype=float32 final_state=true"
MODEL = f"bounded dt_bias=true l2norm beta=sigmoid {STATES}"
# Every option of a kernel stands in at least one row; each row is a class of problems that models or tests use.
FORWARDS = (
    f"bfloat16 {MODEL}",
    f"bfloat16 {MODEL} packed H=2 HV=4",
    f"bfloat16 {MODEL} batch_invariant=true state_v_first=true intermediate_states=true g_dtype=float32",
    f"bfloat16 softplus l2norm packed beta=2*sigmoid {STATES} beta_dtype=float32",
    "bfloat16 g_dtype=float32 state_dtype=bfloat16 state_v_first=true",
    "bfloat16 bounded lower_bound=-5 packed H=2 HV=4 C=32",
)
SMALL = (f"bfloat16 K=64 V=64 {MODEL}", f"bfloat16 K=64 V=128 softplus packed {STATES}")
FLOATS = (
    f"float32 K=64 V=64 {MODEL} forward", f"float32 K=64 V=64 {MODEL} backward",
    f"float32 softplus dt_bias=true l2norm packed C=32 {STATES} forward",
    f"float32 softplus dt_bias=true l2norm packed C=32 {STATES} backward",
    "float32 beta=2*sigmoid state_v_first=true forward", "float32 beta=2*sigmoid state_v_first=true backward",
)  # fmt: skip
BOTH = (
    f"bfloat16 {MODEL} forward", f"bfloat16 {MODEL} backward", f"bfloat16 {MODEL} disable_recompute=true forward",
    f"bfloat16 {MODEL} disable_recompute=true backward", f"bfloat16 softplus packed H=2 HV=4 {STATES} forward",
    f"bfloat16 softplus packed H=2 HV=4 {STATES} backward", "float16 g_dtype=float32 recurrent",
    f"bfloat16 softplus recurrent packed slots=4 inplace=true {STATES}",
)  # fmt: skip
PROBLEMS = {
    ("sm100", "sm100"): FORWARDS + SMALL[:1], ("sm100", "sm103"): FORWARDS[:1], ("sm90", "sm90"): FORWARDS + SMALL,
    ("sm89", "sm89"): FLOATS, ("triton", "sm80"): BOTH[:2], ("triton", "sm90"): BOTH, ("triton", "sm100"): BOTH[:2],
}  # fmt: skip
COMPILERS = {"sm100": "cutedsl", "sm90": "cutedsl", "sm89": "nvrtc", "triton": "triton"}     # of known.COMPILERS


class Digest(NamedTuple):
    """Of one kernel's code."""

    code: str
    instructions: dict[str, int]             # opcode -> how often it stands there


def labelled(backend: str, arch: str) -> dict[str, AnyRecipe]:
    """Recipes under the names by which digests are kept, each once."""
    plan = importlib.import_module(f"kda.backends.{backend}.plan")
    found: dict[AnyRecipe, str] = {}
    for words in PROBLEMS[backend, arch]:
        numbers = Counter[str]()
        for recipe in plan.recipes(Problem.parse(words), host_of(arch)):
            found.setdefault(recipe, f"{backend} {arch}: {recipe.name} {numbers[recipe.name]} of {words}")
            numbers[recipe.name] += 1
    return {label: recipe for recipe, label in found.items()}


def version(backend: str) -> str:
    """Of the compiler that makes a backend's kernels."""
    name, of = known.COMPILERS[COMPILERS[backend]]
    return f"{name} {of()}"


_COMMENTS = re.compile(r"/\*.*?\*/", re.DOTALL)
_NOT_CODE = re.compile(r"//[^\n]*|^[ \t]*\.(?:loc|file)\b[^\n]*|^[ \t]*\$L__(?:tmp|func|info)\w*:", re.MULTILINE)
_SECTION = re.compile(r"^[ \t]*\.section[^{]*\{.*?^[ \t]*\}", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)")
_OPCODE = re.compile(r"^[ \t]*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z]\w*)[.\w:]*[ \t;]", re.MULTILINE)


def normalised(ptx: str) -> str:
    """The code alone."""
    ptx = _NOT_CODE.sub("", _SECTION.sub("", _COMMENTS.sub("", ptx)))
    for number, name in enumerate(_ENTRY.findall(ptx)):
        ptx = ptx.replace(name, f"kernel_{number}")
    return "\n".join(" ".join(line.split()) for line in ptx.splitlines() if line.strip())


def digest(ptx: str) -> Digest:
    code = normalised(ptx)
    return Digest(hashlib.sha256(code.encode()).hexdigest()[:16], dict(sorted(Counter(_OPCODE.findall(code)).items())))


def made(recipes: dict[str, AnyRecipe]) -> dict[str, str]:
    """Label -> PTX."""
    return dict(zip(recipes, (kernel.ptx for kernel in fetch_all(recipes.values()))))


def committed() -> dict[str, Any]:
    return json.loads(COMMITTED.read_text())


def changes(was: dict[str, Any], now: dict[str, Digest]) -> Iterator[str]:
    """What differs, a line each: for people, and for a test to quote."""
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
    return {label: digest(ptx) for label, ptx in made(chosen).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--backend", help="by default all")
    asked = parser.parse_args()
    document = committed() if COMMITTED.exists() else {"compilers": {}, "kernels": {}}
    differences = []
    for backend, arch in PROBLEMS:
        if asked.backend not in (None, backend):
            continue
        ptx = made(labelled(backend, arch))
        now = {label: digest(text) for label, text in ptx.items()}
        for label, text in ptx.items() if asked.keep else ():
            asked.keep.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]+", "_", label)
            (asked.keep / f"{name}.ptx").write_text(normalised(text))
        was = {label: of for label, of in document["kernels"].items() if label.startswith(f"{backend} {arch}:")}
        differences += changes(was, now)
        document["compilers"][backend] = version(backend)
        document["kernels"] = {label: of for label, of in document["kernels"].items() if label not in was}
        document["kernels"] |= {label: of._asdict() for label, of in now.items()}
    print("\n".join(differences) or "no kernel changed")
    if asked.write:
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(document["kernels"].items()))
        head = json.dumps(document["compilers"])
        COMMITTED.write_text(f'{{"compilers": {head},\n "kernels": {{\n{lines}\n}}}}\n')
    sys.exit(bool(differences) and not asked.write)


if __name__ == "__main__":
    main()
