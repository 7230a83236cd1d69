"""Damaged PTX never ends the process, and never in an error of Python's: it is refused, or it runs."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.simulated

PROGRAM = Path(__file__).parents[2] / "helpers" / "mutated.py"

pytest.importorskip("resource", reason="the memory of a process cannot be limited here")


@pytest.mark.parametrize("first, count", [(0, 25), pytest.param(1000, 400, marks=pytest.mark.exhaustive)])
def test_damaged_kernels_are_refused_or_run(first, count):
    words = [sys.executable, str(PROGRAM), str(first), str(count)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600 + 20 * count)
    lines = done.stdout.split("\n")[:-1]
    assert done.returncode == 0, f"{done.stdout.split(chr(10))[-1]}: exit code {done.returncode}\n{done.stderr[-2000:]}"
    came = Counter(line.split()[-1] for line in lines)
    assert came.total() == count and came["refused"] and came["found"] + came["ran"]
