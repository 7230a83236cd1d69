"""What a command is doing, on stderr: which step, how many of how many, and about how long it will still take.

Nothing is said in a command's first two seconds, nor in the first half second of a step, nor with PTXKIT_QUIET.  On a
terminal one line is kept up to date and wiped in the end; into a file goes a line every ten seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ptxkit.compile import watching

from .layout import is_terminal, width_of

if TYPE_CHECKING:
    from ptxkit.compile.recipes import AnyRecipe

PATIENCE = 2.0                               # seconds of a command before anything is said
SHORTEST = 0.5                               # seconds of what is done before it is said
EVERY = {True: 0.5, False: 10.0}             # seconds between two lines: on a terminal, elsewhere
_command_began: float | None = None


def a_command_begins() -> None:
    """Begin to measure the wait before torch is imported, as that comes before most of what is shown."""
    global _command_began
    _command_began = time.monotonic()


def _patience() -> float:
    """Return the seconds until what begins now is shown."""
    gone = 0.0 if _command_began is None else time.monotonic() - _command_began
    return min(PATIENCE, max(SHORTEST, PATIENCE - gone))


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Progress:
    """`tell(text)` says what is being done now; `tell.step(text)` also counts the step before it as done."""

    def __init__(self, text: str, total: int | None = None):
        self.text, self.total, self.done = text, total, 0
        self.builds: Progress | None = None                                  # kernels that are built meanwhile
        self._began = time.monotonic()
        self._steps, self._last = 0, 0.0     # begun; seconds until the last one was done
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        self.text = text

    def step(self, text: str | None = None) -> None:
        self._now_done(self._steps)
        self._steps += 1
        self.text = text or self.text

    def _now_done(self, parts: int) -> None:
        self.done, self._last = parts, time.monotonic() - self._began

    def expect(self, total: int) -> None:
        """Start to count anew, towards `total` steps."""
        self.total, self.done, self._steps, self._began = total, 0, 0, time.monotonic()

    def count(self) -> None:
        """Count one more part as done; for work whose parts end in any order."""
        with self._lock:
            self._now_done(self.done + 1)

    def words(self, now: float | None = None) -> str:
        """Return the line to show: what is done, how far it is and how long it takes."""
        now = time.monotonic() if now is None else now
        seconds = now - self._began
        if builds := self.builds:            # another thread may end them meanwhile
            return f"{self.text}; {builds.words(now)}"
        if not self.total:
            return f"{self.text}; {duration(seconds)}"
        # what the parts that are done let expect; 0 where they do not, and below where it took longer
        left = self._last * self.total / self.done - seconds if 0 < self.done < self.total else 0.0
        time_words = f"about {duration(left)} left" if left >= 1 else duration(seconds)
        return f"{self.text}; {min(self.done, self.total)} of {self.total} done; {time_words}"

    @contextlib.contextmanager
    def of_builds(self, what: Sequence[AnyRecipe] | str) -> Iterator[watching.Built]:
        """Return a watcher of builds (ptxkit.compile.watching) that shows them here."""
        one = isinstance(what, str)
        self.builds = builds = Progress(f"building {what}") if one else Progress("building kernels", len(what))
        try:
            yield lambda recipe: builds.count()
        finally:
            self.builds = None


def fitting(words: str, room: int) -> str:
    """Fit `words` into one line by cutting the front: the end says how much is done and how long it takes."""
    return words if len(words) <= room else f"... {words[len(words) + 4 - room:].partition(' ')[2]}"


@contextlib.contextmanager
def showing(shown: Progress) -> Iterator[Progress]:
    """Show progress inside the `with`, where nothing else is printed; it counts the kernels that are built there."""
    over = threading.Event()
    terminal = is_terminal(sys.stderr)
    wrote = False

    def show() -> None:
        nonlocal wrote
        wait = _patience()
        while not over.wait(wait):
            words, wait, wrote = f"{shown.words()} ...", EVERY[terminal], True
            if terminal:                     # one line: a second one could not be wiped
                words = f"\r\x1b[K{fitting(words, (width_of(sys.stderr) or 80) - 1)}"
            with contextlib.suppress(OSError, ValueError):                   # nobody reads the stream
                click.echo(words, err=True, nl=not terminal, color=terminal)

    thread = threading.Thread(target=show, daemon=True)
    if not watching.quiet():
        thread.start()
    try:
        with watching.told_to(shown.of_builds):
            yield shown
    finally:
        over.set()
        if thread.is_alive():
            thread.join()
        if wrote and terminal:
            with contextlib.suppress(OSError, ValueError):
                click.echo("\r\x1b[K", err=True, nl=False, color=True)
