"""How `kda bench` times calls."""

from __future__ import annotations

import contextlib
import functools
import weakref

import pytest
import torch

from kda.tools.measure import clocks
from kda.tools.measure.clocks import CpuClock, Timings


def test_a_quantile_lies_between_launches():
    t = Timings((4.0, 1.0, 3.0, 2.0))
    assert (t.quantile(0), t.median, t.quantile(1)) == (1.0, 2.5, 4.0)


def test_calls_alternate_and_stop_at_the_limit():
    order, clock = [], CpuClock()
    found = clocks.interleaved([lambda: order.append("a"), lambda: order.append("b")], clock, 4, 10.0)
    assert order == ["a", "b", *["a", "b"] * 4]
    assert [len(t.seconds) for t, _ in found] == [4, 4]
    found = clocks.interleaved([lambda: 7], clock, 1000, 0.0)
    assert (len(found[0][0].seconds), found[0][1]) == (clocks.LEAST, 7)


def test_late_launches_are_reported():
    class Late(CpuClock):
        def once(self, call):
            return (*super().once(call)[:2], True)

    assert clocks.interleaved([int], Late(), 3, 1.0)[0][0].host_inside


# graphs and memory, with a torch.cuda that only takes notes


class Notes(list):
    """What a stubbed torch.cuda was told, in order."""

    def context(self, name, leaves=lambda error: None):
        @contextlib.contextmanager
        def inside(*args, **keywords):
            self.append(f"{name} {{")
            try:
                yield
            except BaseException as error:
                leaves(error)
                raise
            finally:
                self.append("}")

        return inside

    def call(self, nth=0, raises=None):
        """Return a call that notes itself, and that raises the `nth` time."""

        def call():
            self.append("call")
            if self.count("call") == nth:
                raise raises
            return {"o": self.count("call")}

        return call


@pytest.fixture
def notes(monkeypatch):
    notes = Notes()

    class Stream:
        def wait_stream(self, other):
            notes.append("wait")

    class Graph:
        def replay(self):
            notes.append("replay")

    def broken(error):
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    stubs = {
        "Stream": lambda device: Stream(), "current_stream": lambda device: Stream(), "CUDAGraph": Graph,
        "stream": notes.context("stream"), "graph": notes.context("capture", broken),
        "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": lambda mode: notes.append(f"mode {mode}"),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return notes


@pytest.fixture
def cuda_clock():
    clock = object.__new__(clocks.CudaClock)
    clock.device, clock.failed = torch.device("cuda:0"), None
    return clock


WARMED_UP = ["wait", "stream {", "made", "call", "mode error", "call", "mode 0"]


def test_a_call_is_made_and_captured_on_one_stream_and_replayed(notes, cuda_clock):
    replay = cuda_clock.captured(lambda: notes.append("made") or notes.call())
    assert notes == [*WARMED_UP, "capture {", "call", "}", "}", "wait"]
    assert [replay(), replay()] == [{"o": 3}] * 2
    assert notes[-2:] == ["replay"] * 2 and notes.count("call") == 3


def test_a_call_that_waits_is_found_before_a_capture_breaks_off(notes, cuda_clock):
    waits = notes.call(2, RuntimeError("called a synchronizing CUDA operation"))
    with pytest.raises(clocks.CannotCapture, match="it waits for the GPU"):
        cuda_clock.captured(lambda: notes.append("made") or waits)
    assert notes == [*WARMED_UP, "}"]
    cuda_clock.captured(notes.call)


def test_a_bug_of_a_call_is_not_taken_for_waiting(notes, cuda_clock):
    with pytest.raises(RuntimeError, match="a bug"):
        cuda_clock.captured(lambda: notes.call(2, RuntimeError("a bug")))
    assert notes[-2:] == ["mode 0", "}"]


def test_after_a_capture_that_broke_off_no_other_is_tried(notes, cuda_clock):
    says = "CUDA error: operation not permitted when stream is capturing\nSearch for it."
    with pytest.raises(clocks.CannotCapture, match=r"not permitted when stream is capturing$"):
        cuda_clock.captured(lambda: notes.call(3, RuntimeError(says)))
    assert notes[-2:] == ["}", "}"]
    with pytest.raises(clocks.CannotCapture, match="an earlier capture broke off: CUDA error"):
        cuda_clock.captured(notes.call)


def test_peak_memory_is_that_of_a_warm_call_beyond_what_was_there(monkeypatch, cuda_clock):
    now, peak, built = 100, 5000, []

    def call():
        nonlocal now, peak
        if not built:
            built.append("a table that stays")
            now += 1000
        peak = max(peak, now + 30)

    def forget(device):
        nonlocal peak
        peak = now

    stubs = {"synchronize": lambda device: None, "memory_allocated": lambda device: now,
             "reset_peak_memory_stats": forget, "max_memory_allocated": lambda device: peak}
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    assert cuda_clock.peak_memory(call) == 30


def test_a_clock_holds_no_call_that_is_over(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            self.record = self.synchronize = lambda: None
            self.query, self.elapsed_time = lambda: True, lambda other: 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    clock = object.__new__(clocks.CudaClock)
    clock.waits, clock.flush, clock.cycles_per_second = weakref.WeakKeyDictionary(), torch.empty(1), 1
    call = functools.partial(int)
    assert clock.once(call) == (1e-3, 0, True) and clock.waits[call] == 2e-3
    del call
    assert not clock.waits
