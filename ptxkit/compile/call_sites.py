"""The lines from which a kernel's short helpers are called, listed in comments at the end of its PTX.

The CuTe DSL names one source line per instruction, the innermost, which is useless for a helper that only forwards
a call, such as `def sync(self): cute.arch.barrier(...)`.  Here the column of such a line is the number of a call
site, and `// call site 1007: file:line < file:line` names the calls, up to the first that is in a longer
function.  PTX can describe inlined calls, but the DSL keeps neither their files nor more than one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

SHORT = 8                                    # lines of a function that only passes a call on
FIRST, LAST = 1000, 65535                    # columns that are numbers of call sites
ENTRY = "kernel_wrapper"                     # the DSL's function that calls a kernel's function while it is traced
KERNEL, FOREIGN = "kernel", "foreign"        # other functions: the kernel's, and those of the DSL and of Python

Place = tuple[str, int]                      # file, line
_LOC = re.compile(r"^\s*\.loc\s+\d+\s+\d+\s+(\d{4,5})\b", re.MULTILINE)
_CALL_SITE = re.compile(r"^// call site (\d+): (.*)$", re.MULTILINE)
_PLACE = re.compile(r"(.+?):(\d+)(?: < |$)")


class CallSites:
    """Numbers of the calls that were met."""

    def __init__(self):
        self._numbers: dict[tuple[Place, ...], int] = {}

    def number(self, callers: tuple[Place, ...]) -> int | None:
        """Return the number of a stack of callers; None once there are too many of them."""
        number = self._numbers.setdefault(callers, FIRST + len(self._numbers))
        return number if number <= LAST else None

    def told_in(self, ptx: str) -> str:
        """Return the text, with a comment for each call site that it names."""
        used = {int(column) for column in _LOC.findall(ptx)}
        named = ((number, callers) for callers, number in self._numbers.items() if number in used)
        lines = [f"// call site {number}: {' < '.join(f'{file}:{line}' for file, line in callers)}\n"
                 for number, callers in named]
        return ptx.rstrip("\0\n") + "\n" + "".join(lines) if lines else ptx


def read(ptx: str) -> dict[int, tuple[Place, ...]]:
    """Return the calls that the comments of a text name, by their number."""
    return {int(number): tuple(places_in(callers)) for number, callers in _CALL_SITE.findall(ptx)}


def places_in(text: str) -> list[Place]:
    """Return files and lines of "file:line < file:line < ..."; a file's name may contain " < ", too."""
    return [(file, int(line)) for file, line in _PLACE.findall(text)]


_KEEPING: list[CallSites] = []               # the innermost one counts: a compilation inside of a capture has its own


@contextlib.contextmanager
def numbering() -> Iterator[CallSites]:
    """Make the DSL number the calls of kernels' short helpers while it traces inside the block."""
    sites, op = CallSites(), sys.modules.get("cutlass._mlir_helpers.op")
    transform, foreign = getattr(op, "loc_transform", None), getattr(op, "_is_framework_stack_frame", None)
    if transform is None or foreign is None:                                 # another version of the DSL
        yield sites
        return
    from cutlass._mlir import ir

    frames = _Frames(foreign)

    def numbered(loc: Any) -> Any:
        if loc is None or _KEEPING[-1] is not sites:
            return loc
        places = frames.callers(sys._getframe(1))
        number = sites.number(places[1:]) if len(places) > 1 else None
        return loc if number is None else ir.Location.file(*places[0], number)  # type: ignore[attr-defined]

    _KEEPING.append(sites)
    try:
        with transform(numbered):
            yield sites
    finally:
        _KEEPING.pop()


class _Frames:
    """Walks from each traced operation to the functions of the kernel that it stands in, a dozen frames every time."""

    def __init__(self, foreign: Callable[[FrameType], bool]):
        self._foreign = foreign
        # by ids of code objects, which are quicker than their hashes; what is kept holds them
        self._codes: dict[int, tuple[str, CodeType]] = {}
        self._lines: dict[tuple[int, int], _Line] = {}

    def callers(self, frame: FrameType | None) -> tuple[Place, ...]:
        """Return the line of a short function that the kernel is in, and who called that, up to a longer function."""
        places: list[Place] = []
        before = None
        while frame is not None:
            kind, _ = self._codes.get(id(frame.f_code)) or self._looked_at(frame)
            if kind == ENTRY:
                break
            if kind == KERNEL:
                line = self._lines.get((id(frame.f_code), frame.f_lasti)) or self._line_of(frame)
                if line.function != before:                                  # the DSL makes functions of branches
                    places.append(line.place)
                if line.is_in_a_long_function:
                    break
                before = line.function
            frame = frame.f_back
        return tuple(places)                                                 # the kernel itself may be short

    def _looked_at(self, frame: FrameType) -> tuple[str, CodeType]:
        code = frame.f_code
        kind = ENTRY if code.co_name == ENTRY else FOREIGN if self._foreign(frame) else KERNEL
        return self._codes.setdefault(id(code), (kind, code))

    def _line_of(self, frame: FrameType) -> _Line:
        place = frame.f_code.co_filename, frame.f_lineno
        return self._lines.setdefault((id(frame.f_code), frame.f_lasti), _Line(place, (place[0], span(*place))))


class _Line(NamedTuple):
    """A line of a kernel, and the first and the last line of the function that it stands in."""

    place: Place
    function: tuple[str, tuple[int, int] | None]

    @property
    def is_in_a_long_function(self) -> bool:
        lines = self.function[1]
        return lines is None or lines[1] - lines[0] >= SHORT


@functools.cache
def span(file: str, line: int) -> tuple[int, int] | None:
    """Return the first and the last line of the innermost function that a line stands in."""
    return max(((first, last) for first, last, _ in functions_in(file) if first <= line <= last), default=None)


@functools.cache
def functions_in(file: str) -> tuple[tuple[int, int, str], ...]:
    """Return (first line, last line, name) of the functions of a Python file; none of a file that is not there."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):                               # there is no such file, as with "<stdin>"
        return ()
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return tuple((node.lineno, node.end_lineno or node.lineno, node.name) for node in functions)
