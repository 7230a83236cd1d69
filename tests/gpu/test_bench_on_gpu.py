"""`kda bench` on a GPU: queues, events, the floor, graphs, memory."""

import json

import pytest
import torch
from bench_calls import QUICK, run

from kda.tools.measure import clocks

pytestmark = pytest.mark.gpu



def test_a_gpu_times_the_reference_behind_a_queue():
    result = run(*QUICK, "--backend", "reference", "--against", "reference", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["host"]["copy"] > 1e10
    assert all(row["floor"] > 0 and row["median"] > row["floor"] for row in found["rows"])


def test_a_gpu_call_that_does_not_wait_is_timed_without_its_host():
    clock = clocks.clock_of("cuda:0")
    x = torch.randn(256, 256, device="cuda:0")
    (timed, y), = clocks.interleaved([lambda: x @ x], clock, 20, 5.0)
    assert not timed.host_inside and timed.median < 1e-3 and y.shape == x.shape


SHORT = ("--heads", "4", "--regime", "slow", "--repeats", "5", "--backend", "triton", "--graph", "--json")


@pytest.mark.parametrize("recompute", [(), ("--disable-recompute",)], ids=["recomputed", "kept"])
@pytest.mark.parametrize("tokens", [("--tokens", "1024"), ("--lengths", "65,0,63")], ids=" ".join)
def test_short_calls_are_replayed_from_a_graph_and_their_memory_is_counted(tokens, recompute):
    result = run(*SHORT, *tokens, *recompute)
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["not_captured"] == [], result.stdout
    assert found["settings"] == {"graph": True, "disable_recompute": bool(recompute)}
    forward, backward = found["rows"]
    assert 0 < forward["memory"] <= backward["memory"]
    for row in (forward, backward):
        assert row["floor"] < row["median"] and not row["host_inside"]
        assert row["memory_with_inputs"] > row["memory"]


def test_a_call_that_waits_is_not_captured_and_the_next_call_is():
    clock = clocks.clock_of("cuda:0")
    x = torch.randn(64, 64, device="cuda:0")
    with pytest.raises(clocks.CannotCapture, match="it waits for the GPU"):
        clock.captured(lambda: lambda: x.sum().item())
    replay = clock.captured(lambda: lambda: x @ x)
    x.fill_(1.0)
    assert (replay() == 64).all()
    (timed, y), = clocks.interleaved([replay], clock, 20, 5.0)
    assert not timed.host_inside and (y == 64).all()


def test_peak_memory_counts_what_a_call_frees_again_and_nothing_from_before():
    clock = clocks.clock_of("cuda:0")
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    found = clock.peak_memory(lambda: torch.empty(5 << 20, dtype=torch.uint8, device=kept.device).numel())
    assert 5 << 20 <= found < 7 << 20
