"""The pages of the site that are written by programs, which its build does, too.

    python docs/written.py            # writes them, and those of ptxkit/docs; PAGES names them

What they say lies in git as data that tests compare with the code: docs/data, kda/tools/verify/ledger.json and
kda/tools/measure/errors.json. What ranks cost is computed here.
"""

import argparse
import functools
import json
import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import clock_page, keys_page, ledger_page, ranks, status_page
from kda.routing.dispatch import capabilities
from kda.tools.measure.predicted import ERRORS as CLOCK
from kda.tools.verify.ledger import Ledger
from ptxkit.docs import from_data, shared

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
ERRORS, MUTANTS, COUNTED = HERE / "data" / "errors.json", HERE / "data" / "mutants.json", HERE / "data" / "counted"

OF_ERRORS = """# Every error that a function can raise

A message ends with the id of a check, in brackets. Here are all ids, each with the message of a call that fails it;
checks whose messages differ in the argument alone share a row, with the message of the first. Ids that begin with
`gate.` are of `fused_kda_gate`, with `decode.` of `decode_step`. All are `kda.InputError` (a `ValueError`); those that
end in `.type` are also a `TypeError`. `error.check` is the id; `error.argument`, `error.asked`, `error.found` and
`error.fix` are the parts of the message. A call that no backend accepts raises `kda.NoBackendError`, with the reasons
of the named backend, or of each if none was named, and the backends that would accept the call. A derivative or a
transform of torch.func that a call does not have raises a `kda.KdaError` without an id, a rank that does not answer
`kda.parallel.RankLost`.

Values in tensors are read only on the CPU: a call never waits for the GPU. Pass `cu_seqlens_cpu` to have offsets
checked that are on a GPU. A precomputed `g` is assumed to be <= 0 and is not checked.

The layer, `kda.nn`, has checks of its own, with ids that begin with `nn.`; their messages are made in the same way, and
they have no row here.

| ids | message |
|---|---|
"""

OF_MUTANTS = """# Every synchronising instruction has a reason

`ptxkit.mutants` removes or weakens every synchronising instruction of a kernel, one at a time, and reports what notices
it; [the simulator's page](../ptxkit/docs/simulator.md) explains how. These are the shipped kernels in small problems,
packed and with grouped heads, under four schedules ([`kda/tools/verify/mutants.py`](../kda/tools/verify/mutants.py)).
`kda verify --mutants --arch sm100` runs it again.

A mutant is noticed by a race, a deadlock, a broken rule of the PTX manual, or a wrong result. Kernels contain no
instruction that nothing needs, unless the source says why beside it (`# redundant: ...`).

"""

OF_COUNTS = """# Counts: instructions, bytes, registers

The simulator counts instructions, which are those of PTX, and bytes; registers and spills of a thread are those of
ptxas. `python -m benchmarks write --only counted` counts again, and [a
test](../../tests/repository/test_tables.py) compares.

"""
COUNTS = {                                   # file in docs/data/counted -> section, with its tables in turn
    "sm90_forward": """## Hopper, forward

Per chunk of 32 tokens and value head, K = V = 128, with l2norms and a sigmoid. Bytes are those that instructions
request, and those of all sectors that are touched. Roles of `fused` share out the registers of the launch.

{}""",
    "sm90_backward": """## Hopper, backward

Per 64 tokens and value head, with a gate bounded by -5, l2norms and a sigmoid: instructions and the bytes that they
request. `fused` saves what a backward reads, in clusters of two. "or" separates a CTA that has an SM to itself from one
that shares it.

{}
{}""",
    "sm100_backward": """## Blackwell, backward

Registers as ptxas chooses them for sm_100a, from the least to the most of all classes with l2norms:

{}
{}
Per 64 tokens and value head, with a bounded gate, l2norms and a sigmoid. About one in seven instructions is a move that
has none in SASS.

{}
Milliseconds for B = 1, T = 8192 with everything saved, at 2.4 instructions per clock, 1.85 GHz and 8 TB/s over 148 SMs:
counted, **not measured**. With 8 and 16 heads sequences are cut; the times of record and walk then include `carry` and
`compose`.

{}""",
    "sm89": """## float32

Per chunk of 64 tokens and value head, with a softplus gate, K = V = 64 (8 columns) and 128 (16 columns). Registers are
those for sm_89; no configuration spills. Instructions are without `mov`.

{}""",
}


def cell(text):
    return text.replace("|", "\\|")


def code(text):
    return f"`{cell(text)}`" if text else ""


def errors():
    rows = {}                                # a message of any argument -> ids, and the message of the first
    for id, (argument, text) in json.loads(ERRORS.read_text()).items():
        _, _, said = text.partition(": ")
        rows.setdefault(said.replace(argument, "#"), ([], text))[0].append(id)
    return OF_ERRORS + "".join(f"| {', '.join(map(code, ids))} | {cell(text)} |\n" for ids, text in rows.values())


def became_of(mutants, noticed, redundant, reason, survived):
    """Return what the last column of a row says of its mutants."""
    parts = [", ".join(noticed)] if noticed else []
    if redundant:
        number = f"{redundant} " if redundant < mutants else ""
        parts.append(f"{number}redundant: {reason}")
    if survived:
        parts.append(f"**{survived} survived**")
    return "; ".join(parts)


def mutants():
    found = json.loads(MUTANTS.read_text())
    ways = next(iter(found.values()))["ways"]
    titles = "kernels", "mutants", *(f"by {way}" for way in ways), "redundant", "survived", "noticed"
    page = f"{OF_MUTANTS}| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n"
    for backend, section in found.items():
        total, redundant, survived = (sum(row[place] for row in section["rows"]) for place in (4, 6, 8))
        numbers = total, *section["ways"].values(), redundant, survived
        share = sum(section["ways"].values()) / (total - redundant)
        page += f"| {backend} | {' | '.join(map(str, numbers))} | {share:.1%} |\n"
    for backend, section in found.items():
        page += f"\n## {backend}\n\n| file | statement | instruction | what was done | mutants | noticed by |\n"
        page += "|---|---|---|---|---|---|\n"
        for file, statement, instruction, mutation, *became in section["rows"]:
            cells = file, code(statement), code(instruction), mutation, str(became[0]), cell(became_of(*became))
            page += f"| {' | '.join(cells)} |\n"
    return page


def evidence():
    return ledger_page.page(Ledger.read())


def status():
    return status_page.page(Ledger.read(), capabilities(), status_page.read_changelog())


def counts():
    page = OF_COUNTS
    for name, section in COUNTS.items():
        found = json.loads((COUNTED / f"{name}.json").read_text())
        tables = ["\n".join([header, "|" + "---|" * header.count(" |"), *rows, ""]) for header, rows in found.items()]
        page += section.format(*tables) + "\n"
    return page.rstrip() + "\n"


def costs_of_ranks():
    return ranks.page(ranks.Costs())


def clock():
    return clock_page.page(json.loads(CLOCK.read_text())["rows"], json.loads(clock_page.DATA.read_text()))


def of_the_repository(name):
    """Return a page above this folder as one of the site, outside its menu."""
    front = "```{{image}} pictures/h200-{0}.svg\n:class: only-{0}\n```\n"
    text = (ROOT / name).read_text()
    text = re.sub(r"<picture>.*?</picture>\n", "\n".join(map(front.format, ("light", "dark"))), text, flags=re.DOTALL)

    def moved(link):
        target = (ROOT / link[2]).resolve()
        return f"[{link[1]}]({os.path.relpath(shared.ROOT_PAGES.get(target, target), HERE)}{link[3] or ''})"

    return "---\norphan: true\n---\n\n" + shared.LINK.sub(moved, text)


PAGES = {
    **{page: functools.partial(of_the_repository, file.name) for file, page in shared.ROOT_PAGES.items()},
    HERE / "errors.md": errors, HERE / "mutants.md": mutants, HERE / "results" / "evidence.md": evidence,
    HERE / "results" / "clock_errors.md": clock, HERE / "stages" / "counted.md": counts,
    HERE / "ranks.md": costs_of_ranks, HERE / "status.md": status,
    HERE / "json.md": keys_page.page,
}


def write(*_):
    """Write the pages that are not as they should be; Sphinx calls this with its application."""
    shared.write(PAGES)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for pages in (PAGES, from_data.PAGES):
        shared.write(pages)
        print(*(page.relative_to(ROOT) for page in pages), sep="\n")
