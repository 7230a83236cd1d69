"""Which line of a program a kernel's line is: the PTX names files of libraries, and lines where they are inlined."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ptxkit.compile.call_sites import places_in

from ..findings import FindingPlace
from ..mutation import Mutant
from ..mutation.table import frames as inlined


class PageLine(NamedTuple):
    """A line of a file; of the PTX itself where the PTX names no source."""

    file: str | None                         # None: the PTX
    line: int


def frames(source: str) -> list[PageLine]:
    """Return a line and those it was inlined at, innermost first, as a Place writes them; without line 0, which stands
    for code of no line, and without lines of a text that no file has, such as "<string>"."""
    lines = [PageLine(*place) for place in places_in(source)]
    return [frame for frame in lines if frame.line and not str(frame.file).startswith("<")]


def line_of(source: str | None, ptx_line: int, home: Path) -> PageLine:
    """Return the innermost line inside a folder; where there is none, the innermost of all."""
    places = frames(source or "")
    files = ((each, Path(each.file)) for each in places if each.file)
    inside = (each for each, path in files if path.resolve().is_relative_to(home) and _is_of_user(path))
    return next(inside, places[0] if places else PageLine(None, ptx_line))


def line_of_place(place: FindingPlace, home: Path) -> PageLine:
    return line_of(place.source, place.line, home)


def line_of_mutant(mutant: Mutant, home: Path) -> PageLine:
    return line_of(" < ".join(f"{line.file}:{line.line}" for line in inlined(mutant.loc)), mutant.line, home)


def _is_of_user(file: Path) -> bool:
    """Return whether a file is no installed package's: an environment may lie in the project's folder."""
    return not {"site-packages", "dist-packages"} & set(file.parts)


def shown(file: str, home: Path) -> str:
    """Return a file's name for people: relative to a folder if it is inside."""
    path = Path(file).resolve()
    return path.relative_to(home).as_posix() if path.is_relative_to(home) else file
