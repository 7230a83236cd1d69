"""Cuts PTX into statements and operand lists into operands. How a statement or a number is spelled is a row here."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

NAME = r"(?:[A-Za-z][\w$]*|[_$%][\w$]+)"  # a lone `_` is the sink, not a name
LINKING = r"(?:\.(?:visible|extern|weak|common)\s+)*"

# Tried in this order at every place of the text; only `unknown` takes what PTX does not allow.
# No `instruction` runs across a brace that opens or closes a scope: its own braces hold no `;`.
STATEMENTS = {
    "loc": r"\.loc\s+\d+\s+\d+\s+\d+"
    r"(?:\s*,\s*function_name\s+[\w$]+(?:\s*\+\s*\d+)?\s*,\s*inlined_at\s+\d+\s+\d+\s+\d+)?",
    "targets": rf"{NAME}\s*:\s*\.branchtargets\b[^;]*;",
    "prototype": rf"{NAME}\s*:\s*\.call(?:prototype|targets)\b[^;]*;",
    "label": rf"{NAME}\s*:(?!:)",
    "instruction": rf"(?:@\s*!?\s*{NAME}\s+)?[A-Za-z][^;{{}}]*(?:\{{[^;{{}}]*\}}[^;{{}}]*)*;",
    "open": r"\{",
    "close": r"\}",
    "register": r"\.reg\b[^;{}]*;",
    "variable": rf"{LINKING}\.(?:global|const|shared|local|param)\b[^;]*;",
    "pragma": r'\.pragma\s+"[^"]*"(?:\s*,\s*"[^"]*")*\s*;',
    "file": r'\.file\s+\d+\s+"[^"]*"(?:\s*,\s*\d+\s*,\s*\d+)?',
    "section": r"\.section\s+[\w.$]+\s*\{[^{}]*\}",
    "function": rf'{LINKING}\.(?:entry|func)\b(?:\.pragma\s+"[^"]*"\s*;|[^;{{}}])*[;{{]',
    "version": r"\.version\s+\S+",
    "target": r"\.target\s+\w+(?:\s*,\s*\w+)*",
    "address_size": r"\.address_size\s+\d+",
    "unknown": r"\S[^\n]*",
}
_STATEMENT = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in STATEMENTS.items()))
_COMMENT_OR_STRING = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_ASSEMBLY = re.compile(r"//\s*begin inline asm\n.*?//\s*end inline asm\n", re.DOTALL)
_LOC = re.compile(r"^[ \t]*\.loc\s[^\n]*$", re.MULTILINE)
_GROUPED = r"\[[^\[\]]*\]|\((?:[^()]|\([^()]*\))*\)|\{(?:[^{}]|\{[^{}]*\})*\}"
_ITEM = re.compile(rf"\s*([^,()\[\]{{}}]*(?:(?:{_GROUPED})[^,()\[\]{{}}]*)*)(,|$)")
_BRACKET = re.compile(r"[()\[\]{}]")
_INTEGER = re.compile(r"\s*([+-]?)\s*(?:0[xX]([\da-fA-F]+)|0[bB]([01]+)|(0[0-7]*)|([1-9]\d*))U?\s*")
_RAW_FLOAT = re.compile(r"0(?:[fF]([\da-fA-F]{8})|[dD]([\da-fA-F]{16}))")
_DECIMAL_FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")


class Statement(NamedTuple):
    kind: str  # a key of STATEMENTS
    text: str
    line: int  # where its first character is, from 1
    start: int = 0  # its place in the text


def without_comments(text: str) -> str:
    """Blank every comment; lines keep their numbers, strings their slashes."""
    return _COMMENT_OR_STRING.sub(lambda m: m[0] if m[0][0] == '"' else " " + "\n" * m[0].count("\n"), text)


def without_lines_of_assembly(text: str) -> str:
    """Blank each `.loc` inside of inline assembly: LLVM counts lines of the assembly there (Triton 3.9), of which the
    source has one."""
    return _ASSEMBLY.sub(lambda m: _LOC.sub("", m[0]), text)


def statements(text: str) -> Iterator[Statement]:
    """Yield all statements of a text without comments, in order."""
    line, counted = 1, 0
    for match in _STATEMENT.finditer(text):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        yield Statement(str(match.lastgroup), match[0], line, counted)


def split_list(text: str) -> list[str] | None:
    """Return the items of a comma-separated list, brackets and braces kept whole; None where these do not pair up."""
    text = text.strip()
    if not text:
        return []
    if not _BRACKET.search(text):
        return [item.strip() for item in text.split(",")]
    items, place, comma = [], 0, ","
    while comma:
        if not (match := _ITEM.match(text, place)):
            return None
        items.append(match[1].rstrip())
        place, comma = match.end(), match[2]
    return items


def integer(text: str) -> int | None:
    """`-5`, `0x1F`, `017`, `0b101`, `7U`; None for anything else."""
    if not (match := _INTEGER.fullmatch(text)):
        return None
    sign, *digits = match.groups()
    value = next(int(d, base) for d, base in zip(digits, (16, 2, 8, 10)) if d is not None)
    return -value if sign == "-" else value


def number(text: str) -> tuple[int | float, int | None] | None:
    """Return (value, raw bits of a 0f or 0d literal), or None for what is not a number."""
    if (value := integer(text)) is not None:
        return value, None
    if match := _RAW_FLOAT.fullmatch(text):
        raw = bytes.fromhex(match[1] or match[2])
        return struct.unpack(">f" if match[1] else ">d", raw)[0], int.from_bytes(raw, "big")
    if _DECIMAL_FLOAT.fullmatch(text):
        return float(text), None
    return None
