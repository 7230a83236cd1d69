"""All printing of commands.  Beside the package's errors it imports click and the standard library alone.

A command looks like this; what it returns is its exit code (None is 0):

    @click.command()
    @common_options                      # adds --json, --color, --debug and hands over the Screen
    @click.option("--level")
    def command(screen, level):
        with screen.progress("tracing", total=2) as tell:      # stderr, and only if it takes over two seconds
            tell.step("tracing fwd/gate")
            ...
            tell.step("tracing fwd/intra")
        lines = [f"{screen.mark('fail')} {screen.paint('fwd/state', 'red')}"]
        lines += screen.table(rows, header=("stage", "error"), align="lr")
        screen.answer(heading("verify", FINDING, rows=rows), lines)          # one object, or lines, on stdout
        return FINDING

Lines and tables fit the terminal (layout.py).  `mark` gives "[ok]"-like marks for ok, info, warn, fail and crash;
`sign` the same without brackets.  Cells of a table may be painted.  A PtxkitError ends a command with its message on
stderr and exit code 2, any other exception too, with a traceback under --debug; a compiler that is not installed ends
it with exit code 3.  Output that nobody reads any more (`| head -1`) is dropped, also that of a script which a command
runs (`lent`); the exit code stays.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import click

from ptxkit import application
from ptxkit.compile.errors import MissingCompilerError
from ptxkit.errors import PtxkitError

from .layout import fold, is_terminal, table, width_of
from .progress import Progress, a_command_begins, showing

OK, FINDING, ERROR, CANNOT_JUDGE = range(4)          # exit codes; the last: asked for what this host cannot judge
INTERRUPTED = 130                                    # exit code of shells


class CannotJudge(Exception):
    """A command was asked for what this host or a backend cannot do, for these reasons."""

    def __init__(self, *reasons: str):
        super().__init__(*reasons)
        self.reasons = list(reasons)


# status -> sign, the same without UTF-8, colour
SIGNS = {
    "ok": ("✓", "ok", "green"), "info": ("·", "--", None), "warn": ("!", "!!", "yellow"), "fail": ("✗", "XX", "red"),
    "crash": ("☠", "XX", "red"),
}


def program_version() -> str:
    return application.current().version


def heading(command: str, code: int, **more: Any) -> dict[str, Any]:
    """Return the JSON object of a command, which begins alike for all of them."""
    program = application.current()
    return {"schema": 1, program.name: program.version, "command": command, "exit": code, **more}


def wants_color(choice: str, terminal: bool, env: Mapping[str, str]) -> bool:
    """--color, then NO_COLOR, then FORCE_COLOR, then whether this is a terminal."""
    if choice != "auto" or env.get("NO_COLOR"):
        return choice == "always"
    return env["FORCE_COLOR"] != "0" if env.get("FORCE_COLOR") else terminal


def speaks_utf8(stream: TextIO | None) -> bool:
    try:
        return codecs.lookup(getattr(stream, "encoding", None) or "ascii").name == "utf-8"
    except LookupError:
        return False


class OutputError(PtxkitError):
    """A file or stream cannot be written; mostly the disk is full."""

    def __init__(self, error: OSError, file: Path | None = None):
        what, fix = ("the output", "Send it elsewhere.") if file is None else (file, "Name another file.")
        super().__init__(f"{application.current().name}: {what} cannot be written ({error.strerror or error}). {fix}")


def write_file(file: Path, text: str) -> None:
    """A file that a command writes; a name in it that is not UTF-8 is shown with escapes."""
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OutputError(error, file) from error


@contextlib.contextmanager
def unread_is_dropped(stream: TextIO) -> Iterator[None]:
    """Drop the output of the `with` block, and all later output, once nobody reads the stream any more."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Lent:
    """A stream to which somebody else's code writes, and which it takes for the stream itself."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with unread_is_dropped(self._stream):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with unread_is_dropped(self._stream):
            self._stream.flush()


@dataclass
class Screen:
    """The place and manner in which one command prints."""

    json: bool = False
    color: bool = False
    debug: bool = False
    utf8: bool = True
    width: int | None = None                 # columns of the terminal; None: lines are as long as they like

    @classmethod
    def from_options(cls, json: bool = False, color: str = "auto", debug: bool = False) -> Screen:
        return cls(json, wants_color(color, is_terminal(sys.stdout), os.environ), debug, speaks_utf8(sys.stdout),
                   width_of(sys.stdout))

    def line(self, text: str = "", err: bool = False, hang: int | None = None) -> None:
        """Print a text, folded where the terminal ends; `hang` indents its later lines."""
        width = width_of(sys.stderr) if err else self.width
        self.write("\n".join(part for line in text.split("\n") for part in fold(line, width, hang)), err)

    def lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.line(line)

    def answer(self, as_json: object, lines: Iterable[str]) -> None:
        """Print what a command has found: one JSON object under --json, lines otherwise."""
        if self.json:
            self.emit_json(as_json)
        else:
            self.lines(lines)

    def table(
        self, rows: Sequence[Sequence[str]], header: Sequence[str] = (), align: str = "", indent: int = 0
    ) -> list[str]:
        return table(rows, header, align, indent, self.width)

    def write(self, text: str, err: bool = False) -> None:
        """Print a text as it is."""
        stream = sys.stderr if err else sys.stdout
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            with unread_is_dropped(stream):
                click.echo(text.encode(encoding, "replace").decode(encoding), err=err, color=self.color)
        except OSError as error:
            raise OutputError(error) from error

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Somebody else's code prints inside the `with`; with --json, all of it goes to stderr."""
        out, err = (cast(TextIO, Lent(stream)) for stream in (sys.stderr if self.json else sys.stdout, sys.stderr))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield

    def paint(self, text: str, color: str | None = None, **style: Any) -> str:
        return click.style(text, fg=color, **style) if self.color and text else text

    def sign(self, status: str, form: str = "{}") -> str:
        sign, plain, color = SIGNS[status]
        return self.paint(form.format(sign if self.utf8 else plain), color)

    def mark(self, status: str) -> str:
        return self.sign(status, "[{}]")

    def emit_json(self, obj: object) -> None:
        self.write(json.dumps(obj, indent=1))

    def progress(self, text: str, total: int | None = None) -> AbstractContextManager[Progress]:
        """Say on stderr what goes on inside the `with`: see progress.py."""
        return showing(Progress(text, total))


def explain_error(error: Exception, debug: bool) -> str:
    """Return what stderr gets for an exception that ends a command."""
    if debug:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    if isinstance(error, PtxkitError):
        return str(error)
    program = application.current()
    return f"{program.name}: internal error, {type(error).__name__}: {error} (--debug shows where{program.report})"


def common_options(function: Callable[..., int | None]) -> Callable[..., None]:
    """--json, --color and --debug for a click command, which receives them as `screen` and returns its exit code."""

    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
                  help="Colour; `auto` asks NO_COLOR, FORCE_COLOR and the terminal.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object and no text.")
    @functools.wraps(function)
    def run(*args: Any, as_json: bool, color: str, debug: bool, **kwargs: Any) -> None:
        a_command_begins()
        screen = Screen.from_options(as_json, color, debug)
        try:
            code = function(*args, screen=screen, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            screen.line(explain_error(error, debug), err=True)
            code = CANNOT_JUDGE if isinstance(error, MissingCompilerError) else ERROR
        click.get_current_context().exit(code or OK)

    return run
