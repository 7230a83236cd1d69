"""Source lines that PTX names: the local file, and the comment about a redundant instruction."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from .. import application

SUFFIXES = (".py", ".cu", ".cuh")
_REDUNDANT = re.compile(r"(?:#|//)\s*redundant:\s*(\S.*?)\s*$")


@functools.cache
def packages() -> tuple[Path, ...]:
    """Return the folders of ptxkit and of the program that is built on it."""
    found = map(importlib.util.find_spec, sorted({application.PACKAGE, *application.current().packages}))
    return tuple(Path(place) for spec in found if spec for place in spec.submodule_search_locations or ())


@functools.cache
def _own_files() -> tuple[Path, ...]:
    return tuple(path for home in packages() for path in sorted(home.rglob("*")) if path.suffix in SUFFIXES)


@functools.cache
def located(file: str) -> Path:
    """Return the local file: a kernel of these packages may have been built at another path."""
    path, ours = Path(file), {home.name for home in packages()}
    for length in range(len(path.parts), 0, -1):
        same = [candidate for candidate in _own_files() if candidate.parts[-length:] == path.parts[-length:]]
        if len(same) == 1:
            return same[0]
        if length == len(path.parts) and path.exists() and ours.isdisjoint(path.parts):
            return path
    return path


@functools.cache
def shown(file: str) -> str:
    """Return a file's name for people: from its package on, or relative to the current folder if it is inside."""
    path = located(file)
    for home in (*(package.parent for package in packages()), Path.cwd()):
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
