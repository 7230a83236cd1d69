"""Lines that fit a terminal: text is folded between words, and the columns of a table give way.

No word is ever broken, and a command between backticks stays on one line where it fits into one.  Where output goes
into a file or a pipe, a width is None and lines are as long as they like: programs read them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TextIO

GAP = 2                                      # spaces between columns
LATER = 4                                    # indent of lines that hold the columns for which a line has no room
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_WORD = re.compile(r" *(?:[^ `]*`[^`]*`[^ `]*|[^ ]+)")
_LABEL = re.compile(r" *(?:\[\S+\] |\S+  +|fix: )")    # "[✓] ", "replay   ", "fix: "
_PLAIN_WORD = re.compile(r" *[^ ]+")


def strip_ansi(text: str) -> str:
    return _ANSI.sub("", text)


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def width_of(stream: TextIO | None) -> int | None:
    """Return COLUMNS, or else the terminal's columns; None where there is no terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream and stream.isatty() else None
    except (OSError, ValueError):
        return None


def seen(text: str) -> int:
    """Return how many columns a text takes."""
    return len(strip_ansi(text))


def fold(text: str, width: int | None, hang: int | None = None) -> list[str]:
    """Return the lines of a text; those after the first are indented by `hang`: left out, what stands behind a mark or
    a label goes on below itself, indented text below itself, other text two columns to the right."""
    if width is None or seen(text) <= width:
        return [text]
    hang = min(_hang(text) or 2 if hang is None else hang, width // 2)
    lines, current = [], ""
    for word in _words(text, width - hang):
        if current.strip() and seen(current + word) > width:
            lines.append(current)
            current, word = " " * hang, word.lstrip(" ")
        current += word
    return [*lines, current.rstrip()]


def _hang(text: str) -> int:
    label = _LABEL.match(strip_ansi(text))
    return label.end() if label else len(text) - len(text.lstrip(" "))


def _words(text: str, room: int) -> Iterator[str]:
    for word in _WORD.findall(text):
        yield from [word] if seen(word.lstrip()) <= room else _PLAIN_WORD.findall(word)


def shell_lines(words: Sequence[str], width: int | None, hang: int = 0) -> list[str]:
    """Return a command for a shell, continued over lines where it has to be."""
    text = shlex.join(words)
    if width is None or seen(text) + hang <= width:
        return [text]
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1] and seen(f"{lines[-1]} {word} \\") + hang > width:
            lines[-1] += " \\"
            lines.append(" " * hang + "  " + word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines


# ---------------------------------------------------------------------------------------------- tables


def table(
    rows: Sequence[Sequence[str]], header: Sequence[str] = (), align: str = "", indent: int = 0,
    width: int | None = None,
) -> list[str]:
    """Aligned lines, two spaces between columns; `align` is one letter per column, "l" or "r".

    Too wide a table folds its left-aligned cells, the widest columns first, or has its last column below the others
    where that takes fewer lines; columns for which even that leaves no room go to lines of their own, too.
    """
    return [line for row in row_lines(rows, header, align, indent, width) for line in row]


def row_lines(
    rows: Sequence[Sequence[str]], header: Sequence[str] = (), align: str = "", indent: int = 0,
    width: int | None = None,
) -> list[list[str]]:
    """Return the same, by row: first the header's lines, if there is one."""
    cells = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    columns = max((len(row) for row in cells), default=0)
    cells = [row + [""] * (columns - len(row)) for row in cells]
    align = align.ljust(columns, "l")
    natural = [max(seen(row[i]) for row in cells) for i in range(columns)]
    least = [max(map(_longest, (row[i] for row in cells))) if align[i] == "l" else natural[i] for i in range(columns)]
    laid_out = _in_groups(cells, natural, least, align, indent, width, _groups(least, indent, width))
    if width is not None and columns > 2 and align[-1] == "l" and indent + sum(natural) + GAP * (columns - 1) > width:
        below = [*_groups(natural[:-1], indent, width), [columns - 1]]
        other = _in_groups(cells, natural, least, align, indent, width, below)
        if len(below) == 2 and sum(map(len, other)) < sum(map(len, laid_out)):
            return other
    return laid_out


def _in_groups(
    cells: Sequence[Sequence[str]], natural: Sequence[int], least: Sequence[int], align: str, indent: int,
    width: int | None, groups: Sequence[Sequence[int]],
) -> list[list[str]]:
    """Return the lines of each row; each group of columns has lines of its own."""
    lines_of: list[list[str]] = [[] for _ in cells]
    for group in groups:
        left = indent + LATER * (group[0] > 0)
        room = None if width is None else width - left - GAP * (len(group) - 1)
        widths = _fitted([natural[i] for i in group], [least[i] for i in group], room)
        for row, lines in zip(cells, lines_of):
            lines += _laid_out([row[i] for i in group], widths, [align[i] for i in group], left)
    return lines_of


def _longest(cell: str) -> int:
    return max((seen(word.strip()) for word in _PLAIN_WORD.findall(cell)), default=0)


def _groups(least: Sequence[int], indent: int, width: int | None) -> list[list[int]]:
    """Return columns that share a line, as many as it has room for."""
    groups: list[list[int]] = [[]] if least else []
    used = indent
    for i, needed in enumerate(least):
        if groups[-1] and width is not None and used + GAP + needed > width:
            groups.append([])
            used = indent + LATER
        used += needed + GAP * bool(groups[-1])
        groups[-1].append(i)
    return groups


def _fitted(natural: Sequence[int], least: Sequence[int], room: int | None) -> list[int]:
    """Return widths that fit, the widest column made narrower first."""
    widths = list(natural)
    while room is not None and sum(widths) > room and (able := [i for i, n in enumerate(widths) if n > least[i]]):
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _laid_out(row: Sequence[str], widths: Sequence[int], align: Sequence[str], indent: int) -> list[str]:
    if not any(row) and len(row) == 1:
        return []                            # there is nothing to say below the others
    folded = zip_longest(*(fold(cell, wide, _hang(cell)) for cell, wide in zip(row, widths)), fillvalue="")
    return [(" " * indent + (" " * GAP).join(map(_padded, cells, widths, align))).rstrip() for cells in folded]


def _padded(cell: str, width: int, align: str) -> str:
    space = " " * (width - seen(cell))
    return space + cell if align == "r" else cell + space
