"""Writes the table of mbarriers and named barriers in the docstring of each CuTe kernel, from its configurations:
`python docs/pictures/protocols.py`.  A test compares the docstrings with it."""

from __future__ import annotations

import importlib
import itertools
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import kda
from kda.backends.common.cute.barriers import Arrivals, Meeting, Pipeline
from kda.backends.sm90 import configs as sm90
from kda.backends.sm90.reverse_config import ReverseConfig as ReverseOfHopper
from kda.backends.sm100.reverse_config import ReverseConfig as ReverseOfBlackwell
from kda.tools.verify.digests import labelled

BACKENDS = pathlib.Path(kda.__file__).parent / "backends"
ARCHS = "sm90", "sm100"
HEAD = "  pipeline, barrier"
TABLE = re.compile(rf"^{HEAD}\b.*?(?=\n\n|\n?\"\"\")", re.MULTILINE | re.DOTALL)
LAST = "both"                                # title of the part that stands behind the others
WIDTH, GAP = 120, 2
NARROWEST = 14                               # characters of a column


class TableRow(NamedTuple):
    """Cells of a row; a title has only the first."""

    name: str
    arrivals: str = ""
    waits: str = ""
    says: str = ""


def configurations() -> dict[pathlib.Path, list[Any]]:
    """Return all configurations with a protocol that the digests know, by the files of their kernels."""
    found: dict[pathlib.Path, list[Any]] = {}
    for arch in ARCHS:
        kernels = importlib.import_module(f"kda.backends.{arch}.plan").KERNELS
        for recipe in labelled(arch, arch).values():
            if recipe.config.pipelines or recipe.config.meetings:
                file = BACKENDS / f"{kernels[type(recipe.config)].replace('.', '/')}.py"
                found.setdefault(file, []).append(recipe.config)
    return found


def sections(config: Any) -> dict[str, tuple[Pipeline | Meeting, ...]]:
    """Return the protocol of a configuration, by the title of its part of the table."""
    if isinstance(config, sm90.StreamConfig):
        makes = (*config.group_pipelines, *config.meetings)
        return {"a CTA that makes tiles": makes, "a CTA that walks": config.walker_pipelines}
    if isinstance(config, ReverseOfHopper | ReverseOfBlackwell):
        walks = *config.walker_pipelines, *(one for one in config.meetings if one not in config.grads.meetings)
        computes = *config.grads.pipelines, *config.grads.meetings
        return {"a CTA that walks": walks, "a CTA that computes gradients": computes}
    if isinstance(config, sm90.FusedConfig):
        form = "a cluster of four" if config.helped else "a CTA alone, or a cluster of two"
        return {form: config.pipelines, LAST: config.meetings}
    return {"": (*config.pipelines, *config.meetings)}


def counts(found: list[Arrivals]) -> str:
    return " or ".join(map(str, sorted({arrivals.count for arrivals in found})))


def row_of(same: list[Any]) -> TableRow:
    """Return the row of what configurations have of one name: counts differ, words do not."""
    first = same[0]
    if isinstance(first, Meeting):
        threads = " or ".join(map(str, sorted({meeting.barrier.threads for meeting in same})))
        says = "; ".join(dict.fromkeys(meeting.says for meeting in same))
        group = ", of each group" if first.barrier.ids_per_group else ""
        return TableRow(first.barrier.name, f"{threads}{group}", first.roles, says)
    by_role: dict[str, list[Arrivals]] = {}
    for arrivals in itertools.chain.from_iterable(pipeline.arrivals for pipeline in same):
        by_role.setdefault(str(arrivals), []).append(arrivals)
    places = f"{first.places} of " if first.places > 1 else ""
    several = first.each != "stage" or any(pipeline.stages > 1 for pipeline in same)
    name = f"{first.name}, {places}each {first.each}" if several else first.name
    terms = "; ".join(f"{counts(found)} of {words}" for words, found in by_role.items())
    assert len({(pipeline.waits, pipeline.says) for pipeline in same}) == 1, name
    return TableRow(name, terms, first.waits, first.says)


def rows_of(configs: list[Any]) -> Iterator[TableRow]:
    by_title: dict[str, dict[str, list[Any]]] = {}
    for config in configs:
        for title, parts in sections(config).items():
            for part in parts:
                name = part.barrier.name if isinstance(part, Meeting) else part.name
                by_title.setdefault(title, {}).setdefault(name, []).append(part)
    for title, by_name in sorted(by_title.items(), key=lambda item: item[0] == LAST):
        if title:
            yield TableRow(title)
        yield from map(row_of, sorted(by_name.values(), key=lambda same: isinstance(same[0], Meeting)))


def lines_of(row: TableRow, widths: tuple[int, ...]) -> list[str]:
    """Return the lines of a row, whose cells are wrapped."""
    if not row[1]:
        return [f"  {row.name}:"]
    cells = [textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
             for cell, width in zip(row, widths, strict=True)]
    gap = " " * GAP
    return [
        f"  {gap.join(part.ljust(width) for part, width in zip(parts, widths, strict=True))}".rstrip()
        for parts in itertools.zip_longest(*cells, fillvalue="")
    ]


def table(configs: list[Any]) -> str:
    """Return the table with the fewest lines that so many columns of text can have."""
    rows = [TableRow(HEAD.strip(), "arrivals", "waits", "says"), *rows_of(configs)]
    name = max(len(row.name) for row in rows if row.arrivals)
    widths = [
        (name, arrivals, waits, rest - arrivals)
        for waits in sorted({min(max(len(row.waits) for row in rows), most) for most in (14, WIDTH)})
        for rest in [WIDTH - 2 - name - waits - 3 * GAP]
        for arrivals in range(NARROWEST, rest - NARROWEST)
    ]
    tables = [[line for row in rows for line in lines_of(row, each)] for each in widths]
    return "\n".join(min(tables, key=len))


def written(file: pathlib.Path, configs: list[Any]) -> str:
    """Return the source of a kernel with the table that its configurations give."""
    found = file.read_text()
    if not TABLE.search(found):
        raise ValueError(f"the docstring of {file} has no table of mbarriers and named barriers: add a line {HEAD!r}")
    return TABLE.sub(lambda _: table(configs), found, count=1)


def sources() -> dict[pathlib.Path, str]:
    return {file: written(file, configs) for file, configs in configurations().items()}


if __name__ == "__main__":
    for path, text in sources().items():
        path.write_text(text)
