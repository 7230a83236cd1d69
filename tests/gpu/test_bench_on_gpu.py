"""`kda bench` on a GPU: queues, events, the floor."""

import json

import pytest
import torch
from click.testing import CliRunner

from kda.cli import cli
from kda.commands import timing

pytestmark = pytest.mark.gpu

QUICK = ("--tokens", "70", "--heads", "1", "-K", "8", "-V", "8", "--dtype", "float32", "--repeats", "3")


def run(*args):
    return CliRunner().invoke(cli, ["bench", *args])


def test_a_gpu_times_the_reference_behind_a_queue():
    result = run(*QUICK, "--backend", "reference", "--against", "reference", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["host"]["copy"] > 1e10
    assert all(row["floor"] > 0 and row["median"] > row["floor"] for row in found["rows"])


def test_a_gpu_call_that_does_not_wait_is_timed_without_its_host():
    clock = timing.clock_of("cuda:0")
    x = torch.randn(256, 256, device="cuda:0")
    (timed, y), = timing.interleaved([lambda: x @ x], clock, 20, 5.0)
    assert not timed.host_inside and timed.median < 1e-3 and y.shape == x.shape
