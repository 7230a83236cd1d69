"""What ran on a GPU: the ledger of kernels, by the digest of their PTX, and of host paths, by that of their host code.

`ledger.json` has the kernels that ship (kda/tools/verify/digests.py), the host paths, and runs: each a case that was
compared with float64 on a GPU, with the digests of the kernels that it launched and of the host code that launched
them.  A digest that changed has no evidence: what it names counts as simulated until it runs again.
`benchmarks/evidence.py` runs what is lacking and writes the file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ptxkit

FILE = Path(__file__).with_name("ledger.json")
PACKAGES = {"kda": Path(__file__).parents[2], "ptxkit": Path(ptxkit.__file__).parent}
RAN, FAILED, SIMULATED = "ran", "failed", "simulated"
GOOD = ("ok", "skipped")                     # outcomes of a run in which nothing was wrong

# The host code of a path, by the first word of its name.  Code of kernels is not in it: that has digests of its own.
COMMON = (
    "calls/autograd.py", "model/bundles.py", "model/offsets.py", "ptxkit:compile/code.py", "ptxkit:compile/driver.py",
    "ptxkit:compile/kernel.py", "ptxkit:compile/launching.py",
    *(f"backends/common/{name}.py" for name in (
        "arguments", "chunks", "cutting", "directions", "launcher", "limits", "routine", "rules", "tensors",
    )),
)
CUTE = (*COMMON, "backends/common/training*.py", "backends/common/cute/configs.py")
TRITON = (*COMMON, "ptxkit:compile/triton.py", "backends/common/triton_*.py", "backends/triton/*.py")
SM90 = (*CUTE, "backends/sm90/*.py")
POOL = ("backends/common/pool/launch.py", "backends/common/pool/plan.py")
HOST_CODE: dict[str, tuple[str, ...]] = {
    "sm90": SM90, "sm89": (*COMMON, "backends/sm89/*.py"), "sm100": (*CUTE, "backends/sm100/*.py"),
    "triton": (*TRITON, "backends/triton/decode/*plan.py", "backends/triton/decode/*launch.py"),
    "layer": (*TRITON, "nn/*.py", "backends/triton/layer/plan.py", "backends/triton/layer/launch.py"),
    "pool": (*SM90, *TRITON, *POOL), "parallel": (*SM90, *TRITON, "parallel/*.py"),
    "reference": ("backends/reference/*.py",),
}


# ---- host code


@functools.cache
def host_code(path: str) -> str:
    """Return the digest of the code on the host that a path runs."""
    return _host_code(path.partition(":")[0])


@functools.cache
def _host_code(backend: str) -> str:
    texts = []
    for name in HOST_CODE[backend]:
        package, _, pattern = name.rpartition(":")
        home = PACKAGES[package or "kda"]
        texts += [f"{file.relative_to(home.parent).as_posix()}\n{_read(file)}" for file in home.glob(pattern)]
    return hashlib.sha256("\n".join(sorted({*texts})).encode()).hexdigest()[:16]


@functools.cache
def _read(file: Path) -> str:
    return without_words(file.read_text())


def without_words(text: str) -> str:
    """Return the lines of a module less comments, docstrings and white space: the same in every version of Python."""
    lines, strings = [line.encode() for line in text.split("\n")], []
    waiting: list[ast.AST] = [ast.parse(text)]
    docstrings = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, False) is not None:
            docstrings |= {*range(node.body[0].lineno - 1, node.body[0].end_lineno or 0)}
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            strings.append(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))
        else:                                # before Python 3.12 the contents of an f-string have no place
            waiting += ast.iter_child_nodes(node)
    strings.sort()
    code = (_without_comment(n + 1, line, strings) for n, line in enumerate(lines) if n not in docstrings)
    return "\n".join(" ".join(line.decode().split()) for line in code if line.strip())


def _without_comment(number: int, line: bytes, strings: list[Any]) -> bytes:
    column = line.find(b"#")
    while column >= 0 and any(start <= (number, column) < end for start, end in strings):
        column = line.find(b"#", column + 1)
    return line if column < 0 else line[:column]


# ---- what is known


class Known(NamedTuple):
    """A kernel or a host path, and the last run that is evidence for it."""

    name: str
    state: str                               # RAN, FAILED or SIMULATED
    run: Mapping[str, Any] | None            # for SIMULATED it is the last one before the code changed
    code: str = ""                           # the digest of a kernel


class Ledger:
    def __init__(self, document: Mapping[str, Any]):
        self.compilers: Mapping[str, str] = document.get("compilers", {})
        self.shipped: Mapping[str, Mapping[str, Mapping[str, str]]] = document.get("kernels", {})
        # a path: the cases that it takes; none: any case of the path is evidence for it
        self.needed: Mapping[str, list[str]] = document.get("paths", {})
        self.runs: list[Mapping[str, Any]] = sorted(document.get("runs", []), key=lambda run: run["date"])

    @classmethod
    def read(cls, file: Path = FILE) -> Ledger:
        return cls(json.loads(file.read_text()) if file.exists() else {})

    @property
    def groups(self) -> list[str]:
        """Return the backends with archs: "sm90 sm90", "triton sm80"."""
        return list(self.shipped)

    def kernels(self, group: str) -> Iterator[Known]:
        ran = {code: run for run in self.runs if run["outcome"] == "ok" for code in run["codes"]}
        for words, kernels in self.shipped[group].items():
            for kernel, code in kernels.items():
                run = ran.get(code)
                yield Known(f"{kernel} of {words}", RAN if run else SIMULATED, run, code)

    def paths(self, backend: str | None = None) -> Iterator[Known]:
        """Yield the host paths of one backend, or of all."""
        for name in self.needed:
            if backend in (None, name.partition(":")[0]):
                yield self._path(name)

    def _path(self, name: str) -> Known:
        runs = [run for run in self.runs if run["path"] == name]
        current = [run for run in runs if run["host"] == host_code(name)]
        if failed := [run for run in current if run["outcome"] not in GOOD]:
            return Known(name, FAILED, failed[-1])
        ran = [run for run in current if run["outcome"] == "ok"]
        whole = ran and {run["case"] for run in ran}.issuperset(self.needed[name])
        last = ran or runs
        return Known(name, RAN if whole else SIMULATED, last[-1] if last else None)


def cards(known: Iterable[Known]) -> list[str]:
    """Return the GPUs on which something ran."""
    return sorted({each.run["card"] for each in known if each.state == RAN and each.run})


def last_date(known: Iterable[Known]) -> str:
    return max((each.run["date"] for each in known if each.state == RAN and each.run), default="")
