"""Threads that a program starts: on a real machine each of them sees the GPU."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executors
from types import FrameType

from ptxkit.compile.launching import redirect
from ptxkit.standing import standing_in
from ptxkit.temporary import replaced

from ..capture import Capture
from .allocations import Allocations
from .patching import current, knows


@contextlib.contextmanager
def followed(session: Capture) -> Iterator[None]:
    """Inside the block threads that the program starts are captured, too; those of the application are not.  At its end
    they have ended as at the end of a program: daemons and the threads of executors may go on."""
    begin, started = threading.Thread.start, list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        if current() is session.gpu and not knows(_starter(sys._getframe(1))):
            started.append(thread)
            thread.run = functools.partial(_captured, session, thread.run)     # type: ignore[method-assign]
        begin(thread)

    with replaced(threading.Thread, start=start):
        yield
        for thread in started:               # it grows while a thread starts others
            if not thread.daemon and thread not in executors._threads_queues:
                thread.join()


def _starter(frame: FrameType) -> FrameType:
    """Return the frame that a thread is started for: executors and asyncio start those of others."""
    first: FrameType | None = frame
    while first and first.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        first = first.f_back
    return first or frame


def _captured(session: Capture, run: Callable[[], None]) -> None:
    gpu = session.gpu
    with redirect(session), standing_in(session.device), gpu.mode, Allocations(gpu.arena):
        run()
