"""`kda bench --host`: what is refused, printed and counted, on a machine without a GPU."""

from __future__ import annotations

import contextvars
import json
import threading
from types import SimpleNamespace

import pytest
import torch
from bench_calls import run

from kda.tools.measure.host import QUEUE, SPARE, WARMUPS, PresentGpu, StandIn, Timed, calls, cost
from kda.tools.verify.cases import make_inputs
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.launch_list import LaunchList, Location
from ptxkit.compile.target import parse

PTX = """
.version 8.0
.target sm_90a
.visible .entry bound(.param .u64 a, .param .u64 b, .param .u32 c, .param .f32 d) {}
"""
SMALL = ("--host", "--tokens", "9", "--heads", "1", "-K", "16", "-V", "16", "--dtype", "float32", "--repeats", "3")
STAND_IN = (*SMALL, "--arch", "sm90", "--backend", "reference")


@pytest.mark.parametrize(("words", "says"), [
    (("--arch", "sm90"), "--arch needs --predicted or --host"),
    ((*STAND_IN, "--graph"), "--host times calls of the host; leave out --graph"),
    ((*STAND_IN, "--predicted"), "leave out --predicted"),
    ((*STAND_IN, "--direction", "backward"), "--host times a forward, a step and a layer"),
    (("--direction", "layer"), "--direction layer needs --host"),
    ((*SMALL, "--arch", "sm9"), "sm9"),
])
def test_what_is_no_timing_of_the_host_is_refused(words, says):
    result = run(*words)
    assert result.exit_code == 2 and says in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_cannot_judge_and_says_what_can_be_done():
    result = run(*SMALL)
    assert result.exit_code == 3 and "--host needs a GPU" in result.stdout and "--arch sm90" in result.stdout
    refused = json.loads(run(*SMALL, "--json").stdout)
    assert refused["exit"] == 3 and refused["rows"] == []


def test_a_backend_that_such_a_gpu_does_not_have_is_named():
    result = run("--host", "--arch", "sm90", "--backend", "sm100")
    assert result.exit_code == 2 and "--arch sm90: sm100 has kernels for sm100, sm103, sm110." in result.stderr


def test_a_stand_in_is_said_to_be_one():
    result = run(*STAND_IN)
    assert result.exit_code == 0, result.output
    assert "launches go to a stand-in of H200: the driver's part is left out" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines() if "reference" in line] == [
        "forward", "step", "layer"]


def test_json_has_a_row_for_each_requested_direction():
    found = json.loads(run(*STAND_IN, "--direction", "step", "--json").stdout)
    (row,) = found["rows"]
    assert found["stand_in"] == "simulated H200" and row["direction"] == "step" and row["backend"] == "reference"
    assert row["ratio_to_empty_function"] == row["idle"]["median"] / row["empty"]["median"] > 0
    assert row["busy"] is None and row["launches"] == 0 and row["allocations"] > 0
    assert 0 < row["idle"]["p20"] <= row["idle"]["median"] <= row["idle"]["p80"] and row["idle"]["calls"] == 3


@pytest.mark.parametrize("state", [False, True])
def test_a_step_and_the_empty_one_make_every_gradient_and_leave_inputs_without(state):
    case = make_inputs(T=5, H=1, K=8, V=8, dtype="float32", initial_state=state)
    timed = calls("reference", case)["step"]
    grads = timed.call()
    assert len(grads) == len(timed.call()) == 7 + state and all(grad.isfinite().all() for grad in grads)
    assert [None if grad is None else grad.shape for grad in timed.empty()] == [grad.shape for grad in grads]
    assert not any(x.requires_grad for x in case.keywords.values() if isinstance(x, torch.Tensor))


def test_launches_and_allocations_are_counted_for_each_layer():
    """A list of launches in C counts as well as a launch by Python, in any thread."""
    kernel = Kernel.of("bound", PTX, None, parse("sm90"))
    bound, tensors = kernel.bound(8, -5, 1.5, block=128), []
    listed = LaunchList([(bound, (Location(0), None))] * 2, 1)

    def call():
        tensors.append([torch.empty(4) for _ in range(6)][-1])
        bound(None, None)
        thread = threading.Thread(target=lambda: contextvars.copy_context().run(listed, [tensors[-1]]))
        thread.start()
        thread.join()

    stand_in = StandIn(parse("sm90"))
    with stand_in.used():
        found = cost("layer", "mine", Timed(call, lambda: None, 3), stand_in, 7)
    assert found.launches == 1 and found.allocations == 2 and found.ratio > 1
    assert len(found.idle.seconds) == len(found.empty.seconds) == 7 and len(tensors) == WARMUPS + 2 + 7


@pytest.fixture
def busy_gpu(monkeypatch):
    """Make a GPU up; return how long it was told to be busy, and whether it still was when the host was done."""
    gpu, waits, dry = PresentGpu.__new__(PresentGpu), [], []
    gpu.device, gpu.clock = "cuda:0", SimpleNamespace(busy=waits.append)
    event = SimpleNamespace(record=lambda: None, query=lambda: bool(dry))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return gpu, waits, dry


def test_calls_are_made_in_batches_that_the_queue_holds_while_the_gpu_is_busy(busy_gpu):
    gpu, waits, _ = busy_gpu
    calls = []
    found = gpu.while_busy(lambda: calls.append(None), 50, 10, 1e-3)
    batch = QUEUE // (10 + SPARE)
    assert len(calls) == len(found.seconds) == -(-50 // batch) * batch and not found.host_inside
    assert len(waits) == len(calls) // batch and all(seconds > 2 * batch * 1e-3 for seconds in waits)


def test_a_gpu_that_ran_dry_is_noticed(busy_gpu):
    gpu, _, dry = busy_gpu
    dry.append(True)
    assert gpu.while_busy(lambda: None, 5, 10, 1e-3).host_inside
