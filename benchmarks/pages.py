"""Puts figures into the text of a page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import takewhile


def table_row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def with_rows(text: str, header: str, rows: Iterable[str]) -> str:
    """Other rows under the two lines of a table's header."""
    above, head, below = text.partition(f"\n{header}\n")
    if not head:
        raise LookupError(f"the page has no table {header}")
    rule, *lines = below.split("\n")
    old = len(list(takewhile(lambda line: line.startswith("|"), lines)))
    return above + head + "\n".join([rule, *rows, *lines[old:]])


def with_data(text: str, header: str, rows: Iterable[str]) -> str:
    """Other rows under a header in a file of docs/data, of which docs/written.py writes a page."""
    tables = json.loads(text)
    if header not in tables:
        raise LookupError(f"the page has no table {header}")
    return json.dumps(tables | {header: [*rows]}, indent=1) + "\n"


def match_of(text: str, sentence: str) -> re.Match[str]:
    """Find a sentence of a page, with a figure for each `#`, on as many lines as it takes."""
    pattern = re.escape(sentence).replace(r"\#", r"([\d.,]*\d)").replace(r"\ ", r"\s+")
    if match := re.search(pattern, text):
        return match
    raise LookupError(f"the page does not say {sentence}")


def with_figures(text: str, sentence: str, figures: Iterable[str]) -> str:
    """Other figures in that sentence."""
    match = match_of(text, sentence)
    for group, figure in reversed(list(enumerate(figures, 1))):
        text = text[: match.start(group)] + figure + text[match.end(group) :]
    return text
