"""Processes that are forked for some work and never outlive it."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch


@contextlib.contextmanager
def forked(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of copies of this process.  If the block is left by an exception, such as that of Ctrl-C, they are
    killed: inside the engine, which is C, they would notice nothing for minutes."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin) as pool:
        try:
            yield pool
        except BaseException:
            for worker in list((pool._processes or {}).values()):
                worker.kill()
            raise


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)                               # the parent is told, and kills
    torch.set_num_threads(1)                                                   # a fork has none of its parent's threads
