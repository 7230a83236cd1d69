"""Processes that are forked for work end with it."""

import os
import time

import pytest

from ptxkit.workers import forked

pytestmark = pytest.mark.simulated


def test_workers_are_killed_when_the_work_is_interrupted():
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), forked(2) as pool:
        worker = pool.submit(os.getpid).result()
        pool.submit(time.sleep, 600)
        pool.submit(time.sleep, 600)
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 500
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_a_worker_ignores_the_interruption_that_its_parent_gets():
    with forked(1) as pool:
        assert pool.submit(_interrupted).result() == "went on"


def _interrupted():
    os.kill(os.getpid(), 2)
    return "went on"
