"""Which line of a program a kernel's line is: the PTX names files of libraries, and lines where they are inlined."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ptxkit.compile.call_sites import places_in

from ..findings import Place


class Line(NamedTuple):
    """A line of a file; of the PTX itself where the PTX names no source."""

    file: str | None                         # None: the PTX
    line: int


def frames(source: str) -> list[Line]:
    """A line and those it was inlined at, innermost first, as a Place writes them; without line 0, which stands for
    code of no line, and without lines of a text that no file has, such as "<string>"."""
    lines = [Line(*place) for place in places_in(source)]
    return [at for at in lines if at.line and not str(at.file).startswith("<")]


def line_of(source: str | None, ptx_line: int, home: Path) -> Line:
    """Return the innermost line inside a folder; where there is none, the innermost of all."""
    found = frames(source or "")
    own = (at for at in found if at.file and Path(at.file).resolve().is_relative_to(home) and _is_of_user(at.file))
    return next(own, found[0] if found else Line(None, ptx_line))


def of(place: Place, home: Path) -> Line:
    return line_of(place.source, place.line, home)


def _is_of_user(file: str) -> bool:
    """Return whether a file is no installed package's: an environment may lie in the project's folder."""
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


def shown(file: str, home: Path) -> str:
    """Return a file's name for people: relative to a folder if it is inside."""
    path = Path(file).resolve()
    return path.relative_to(home).as_posix() if path.is_relative_to(home) else file
