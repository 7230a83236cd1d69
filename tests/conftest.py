import gc
import os
import sys
from collections import Counter

import pytest
import torch

os.environ.pop("COLUMNS", None)  # commands would fold their output
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


@pytest.fixture(autouse=True)
def same_draws():
    """Every test draws the same numbers whatever ran before it in the process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """torch.compile gives up on a function that earlier tests compiled too often."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def plan_says(monkeypatch):
    """Sets constants of the Hopper backend's plan, until the test ends."""
    from kda.backends.sm90 import launch, plan

    def say(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(plan, name, value)
        launch.forget_plans()

    yield say
    monkeypatch.undo()
    launch.forget_plans()


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="run each N-th selected case, from the K-th on: 0/3, 1/3, 2/3")


class Part:
    """Leaves one part of what was selected; it comes after `-m` and `-k`."""

    def __init__(self, words):
        first, _, parts = words.partition("/")
        if not (first.isdigit() and parts.isdigit() and int(first) < int(parts)):
            raise pytest.UsageError(f"--part asks for K/N with K < N, such as 0/3; found {words!r}")
        self.chosen = slice(int(first), None, int(parts))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        others = [*items]
        del others[self.chosen]
        config.hook.pytest_deselected(items=others)
        items[:] = items[self.chosen]


def pytest_configure(config):
    if words := config.getoption("--part"):
        config.pluginmanager.register(Part(words), "part")


def pytest_collection_finish():
    """What was imported and collected stays: the garbage collector need not look through it again and again, nor what
    looks for tensors among all objects.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`spread(every=n, first=m)` leaves the cases m, m + n, ... of a test to every run; the others are `exhaustive`, as
    are those that have this mark already and do not count.
    """
    cases = Counter()
    for item in items:
        spread = item.get_closest_marker("spread")
        if spread and not item.get_closest_marker("exhaustive"):
            test = item.nodeid.partition("[")[0]
            if (cases[test] - spread.kwargs.get("first", 0)) % spread.kwargs["every"]:
                item.add_marker(pytest.mark.exhaustive)
            cases[test] += 1
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
