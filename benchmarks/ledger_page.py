"""The page of the ledger, and README's column of it: what ran on which GPU, and what has not since its code changed.

docs/written.py writes the page. `python -m benchmarks.evidence --write` and `--merge` write the column, and a test
compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kda.tools.verify.ledger import FAILED, RAN, SIMULATED, Known, Ledger, cards, host_code, last_date

from . import common
from .pages import with_rows

README = common.ROOT / "README.md"
KERNELS = "| backend | built for | kernels | ran | on | last | compiler |"
PATHS = "| host path | evidence | cases | closest to its budget |"
MISSING = "| built for | class of problems | kernels without evidence |"
BACKENDS = "| GPU | backend | forward | backward | has run on | this code |"


PAGE = """# Evidence: what ran on a GPU

Each kernel of the classes of problems in `kda/tools/verify/digests.py` is known by the digest of its PTX, and each host
path, which is a call with the plan that launches its kernels, by the digest of the code on the host that runs it. The
classes have every option, and the default calls of models; a call that combines options otherwise may have kernels that
none of them has: `kda explain` counts those of a call. The ledger (`kda/tools/verify/ledger.json`) says when each last
ran on a GPU. Code that changed after that has no evidence any more: it is *simulated*, which means
that its kernels ran on a CPU, from their PTX, in the tests.

A run is a case: a class of problems, a path and a shape. Its results and gradients are compared with float64 on the
same GPU, in fast and in slow gates, within [budgets](../numerics.md); they must have the same bits when fresh and freed
memory holds nan, and when a CUDA graph that was captured with other numbers is replayed. What is no plan of `chunk_kda`
is run by the tests of `tests/gpu`.

`python -m benchmarks.evidence --list` prints what is missing, and on a machine with a GPU
`python -m benchmarks.evidence --minutes 9` runs it ([how](../../CONTRIBUTING.md#run-it-on-a-gpu)).

## Kernels

A kernel counts once for each class of problems that names it. Code for sm80 and sm89 runs on later GPUs, where the
driver finishes it: that is what the column *on* says.

{kernels}

## Host paths

*Closest to its budget*: the result that used most of it, in any of the cases; 1 is the limit.

{paths}

## Kernels without evidence

Numbers are the places of kernels of one name among those of the class. `python -m benchmarks.evidence --list` says
which of them no case launches. What is built ahead for a class on Hopper includes walks over segments by more CTAs than
SMs, which exist for packed sequences alone, and what a forward keeps for another backend's backward, which only single
stages ask for where K = V.

{missing}
"""


def page(ledger: Ledger) -> str:
    tables = {"kernels": (KERNELS, kernels), "paths": (PATHS, paths), "missing": (MISSING, missing)}
    return PAGE.format(**{name: table(header, rows(ledger)) for name, (header, rows) in tables.items()})


def table(header: str, rows: Iterable[str]) -> str:
    return "\n".join([header, "|---" * header.count(" | ") + "|---|", *rows])


def kernels(ledger: Ledger) -> Iterator[str]:
    for group in ledger.groups:
        backend, arch = group.split()
        known = [*ledger.kernels(group)]
        ran = sum(each.state == RAN for each in known)
        yield (f"| `{backend}` | {arch} | {len(known)} | {ran or SIMULATED} | {', '.join(cards(known)) or '-'} "
               f"| {last_date(known) or '-'} | {ledger.compilers[backend]} |")


def paths(ledger: Ledger) -> Iterator[str]:
    for each in ledger.paths():
        runs = [run for run in ledger.runs if run["path"] == each.name and run["outcome"] == "ok"
                and run["host"] == (each.run or {}).get("host")]
        used = max((run for run in runs if "used" in run), key=lambda run: run["used"], default=None)
        closest = f"{used['result']}: {used['used']:.2f}" if used else "-"
        yield f"| {each.name} | {state(each)} | {cases(ledger, each, len(runs))} | {closest} |"


def cases(ledger: Ledger, known: Known, ran: int) -> str:
    needed = len(ledger.needed[known.name])
    return f"{ran} of {needed}" if needed else str(ran or "-")


def state(known: Known) -> str:
    if known.run is None:
        return SIMULATED
    where = f"{known.run['card']}, {known.run['date']}"
    if known.state != SIMULATED:
        return f"failed: {where}" if known.state == FAILED else where
    if known.run["host"] == host_code(known.name):
        return f"in part: {where}"
    return f"{SIMULATED} since its code changed (before: {where})"


def missing(ledger: Ledger) -> Iterator[str]:
    """A row for each class of problems: names of kernels with their numbers."""
    for group in ledger.groups:
        kernels_of: dict[str, list[str]] = {}
        for each in ledger.kernels(group):
            if each.state != RAN:
                kernel, _, words = each.name.partition(" of ")
                kernels_of.setdefault(words, []).append(kernel)
        if kernels_of and not any(each.state == RAN for each in ledger.kernels(group)):
            yield f"| {group} | all | all |"
            continue
        yield from (f"| {group} | {words} | {', '.join(numbered(names))} |" for words, names in kernels_of.items())


def numbered(names: Iterable[str]) -> Iterator[str]:
    """chain 1, chain 3, walk 0 -> chain 1 3, walk 0"""
    numbers: dict[str, list[str]] = {}
    for name in names:
        kernel, _, number = name.rpartition(" ")
        numbers.setdefault(kernel, []).append(number)
    return (f"{kernel} {' '.join(sorted(variants, key=int))}" for kernel, variants in numbers.items())


# ---- README


def with_states(text: str, ledger: Ledger) -> str:
    """README's table of backends with the last cell of each row anew."""
    below = text.partition(f"\n{BACKENDS}\n")[2]
    rows = [row for row in below.split("\n\n")[0].splitlines() if row.startswith("|") and not row.startswith("|---")]
    return with_rows(text, BACKENDS, (f"{row.rsplit('|', 2)[0]}| {of_backend(row, ledger)} |" for row in rows))


def of_backend(row: str, ledger: Ledger) -> str:
    backend = re.findall(r"`(\w+)`", row)[0]
    groups = {group.split()[1]: [*ledger.kernels(group)] for group in ledger.groups if group.split()[0] == backend}
    ran = {arch: kernels for arch, kernels in groups.items() if any(each.state == RAN for each in kernels)}
    kernels, paths = [each for some in ran.values() for each in some], [*ledger.paths(backend)]
    archs = f"kernels for {' and '.join(ran)}" if len(ran) < len(groups) else "kernels"    # others are simulated
    counts = [f"{sum(each.state == RAN for each in known)} of {len(known)} {what}"
              for what, known in ((archs, kernels), ("host paths", paths)) if known]
    where = cards([*kernels, *paths])
    if not where:
        return SIMULATED if groups else "ran on CPUs, in the tests"
    failed = sum(each.state == FAILED for each in paths)
    words = [*counts, *([f"{failed} failed"] if failed else [])]
    return f"{', '.join(words)} ran on {', '.join(where)}, last on {last_date([*kernels, *paths])}"
