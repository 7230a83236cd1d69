"""Streams and events during a capture. Launches run one after the other; `order.py` is told who waits for whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .order import Mark
from .patching import current
from .state import CUDA, Gpu

DEFAULT = 0


def gpu_of(what: str) -> Gpu:
    if (gpu := current()) is None:
        raise RuntimeError(f"this torch.cuda.{what} is the one of a capture that has ended, or of another thread")
    return gpu


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        self.gpu = gpu_of("Stream")
        given = kwargs.get("stream_ptr", kwargs.get("stream_id"))
        self.cuda_stream: int = self.gpu.new_stream() if given is None else int(given)
        self.device, self.priority, self.device_index = CUDA, priority, 0

    stream_id = property(lambda self: self.cuda_stream)
    _as_parameter_ = property(lambda self: self.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.gpu.order.host_waits(self.gpu.order.reached(self.cuda_stream))

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph records; every optimizer of torch asks before its step."""
        return self.gpu.graph is not None

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.gpu.order.wait(self.cuda_stream, self.gpu.order.reached(stream.cuda_stream))

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before: list[Any] = [*getattr(self, "_before", []), self.gpu.stream]
        self.gpu.stream = self
        return self

    def __exit__(self, *error: Any) -> None:
        self.gpu.stream = self._before.pop()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}, simulated>"


class ExternalStream(Stream):
    """torch.cuda.ExternalStream."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any):
        super().__init__(device, stream_ptr=stream_ptr)


class Event:
    """torch.cuda.Event: a place in the order of launches."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
                 external: bool = False):
        self.gpu, self.device, self.timing = gpu_of("Event"), CUDA, enable_timing
        self.runs_before: int | None = None           # launches before it
        self.mark: Mark | None = None        # those that it comes after
        self.cuda_event = self.gpu.handle()

    _as_parameter_ = property(lambda self: self.cuda_event)

    def record(self, stream: Any = None) -> None:
        self.runs_before = len(self.gpu.session.runs)
        self.mark = self.gpu.order.reached(self._number(stream))

    def wait(self, stream: Any = None) -> None:
        self.gpu.order.wait(self._number(stream), self.mark)

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.gpu.order.host_waits(self.mark or {})

    def _number(self, stream: Any) -> int:
        return self.gpu.stream_number if stream is None else stream.cuda_stream

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds that the clock predicts for the launches in between; nan without a clock."""
        if not self.timing or not end.timing:
            raise ValueError("both events must be created with enable_timing=True before their time is requested")
        if self.runs_before is None or end.runs_before is None:
            raise ValueError("both events must be recorded before their time is requested")
        return self.gpu.milliseconds(self.runs_before, end.runs_before)

    def ipc_handle(self) -> Any:
        raise RuntimeError("a capture is one process: its events have no handle for others")


@contextlib.contextmanager
def entered(gpu: Gpu, stream: Any) -> Iterator[None]:
    """Do what `with torch.cuda.stream(stream)` does; None changes nothing."""
    before = gpu.stream
    gpu.stream = before if stream is None else stream
    try:
        yield
    finally:
        gpu.stream = before
