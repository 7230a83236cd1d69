"""Source lines that PTX names: the local file, and the comment about a redundant instruction."""

from __future__ import annotations

import functools
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
SUFFIXES = (".py", ".cu", ".cuh")
_REDUNDANT = re.compile(r"(?:#|//)\s*redundant:\s*(\S.*?)\s*$")


@functools.cache
def _own_files() -> tuple[Path, ...]:
    return tuple(path for path in sorted(PACKAGE.rglob("*")) if path.suffix in SUFFIXES)


@functools.cache
def located(file: str) -> Path:
    """Return the local file: a kernel of this package may have been built at another path."""
    path = Path(file)
    for length in range(len(path.parts), 0, -1):
        same = [candidate for candidate in _own_files() if candidate.parts[-length:] == path.parts[-length:]]
        if len(same) == 1:
            return same[0]
        if length == len(path.parts) and path.exists() and PACKAGE.name not in path.parts:
            return path
    return path


@functools.cache
def shown(file: str) -> str:
    """Return a file's name for people: relative to the package's folder or the current one, if it is inside."""
    path = located(file)
    for home in (PACKAGE.parent, Path.cwd()):
        if path.is_relative_to(home):
            return str(path.relative_to(home))
    return str(path)


@functools.cache
def text_of(file: str) -> str:
    """Return a file's text, which is empty if there is none."""
    try:
        return located(file).read_text(errors="replace")
    except OSError:
        return ""


def reason(file: str, line: int) -> str | None:
    """Return what `# redundant: ...` (`// ...`) on a line, or in a comment right above, says; lines count from 1."""
    text = text_of(file).splitlines()
    if not 0 < line <= len(text):
        return None
    above = text[line - 2].strip() if line > 1 else ""
    for words in (text[line - 1], above if above.startswith(("#", "//")) else ""):
        if match := _REDUNDANT.search(words):
            return match[1]
    return None
