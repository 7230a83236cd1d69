"""Calls of `kda bench`, and a result."""

from __future__ import annotations

from click.testing import CliRunner

from kda.cli import cli
from kda.tools.measure.timing import Machine, TimedLine

QUICK = ("--tokens", "70", "--heads", "1", "-K", "8", "-V", "8", "--dtype", "float32", "--repeats", "3")
ONE = (*QUICK, "--regime", "slow", "--direction", "forward")
LINE = TimedLine(
    "custom", "B=1 T=70 H=1 K=V=8 fp32", "slow", "forward", "reference", launches=3, median=1.0, p20=0.98, p80=1.02,
    flops=10, bytes=10, host_inside=False, floor=None, baseline=None,
)
H200 = Machine("NVIDIA H200", "gpu", driver="580.95", clock=1980, highest_clock=1980, copy=4e12)


def run(*args):
    return CliRunner().invoke(cli, ["bench", *args])
