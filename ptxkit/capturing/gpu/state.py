"""What a GPU that is stood in for remembers during one capture."""

from __future__ import annotations

import itertools
import math
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ... import limits
from ...chips import Chip
from ...findings import SimulationError
from ...timing.clock import together
from .. import memory
from ..arena import Arena
from .order import DEFAULT, Order

if TYPE_CHECKING:
    from ..session import Session

FIRST_STREAM = 16                            # handles below are special to CUDA: 0 is the default stream
CUDA = torch.device("cuda", 0)


class Gpu:
    """The stand-in for the GPU of one session."""

    def __init__(self, session: Session):
        self.session = session
        self.places: Any = WeakTensorKeyDictionary()  # tensor -> "cuda" or "cpu", where the program said so
        self._of_thread = threading.local()
        self.mode: Any = None                # in which tensors say that they are here (tensors.py)
        self.graph: Any = None  # the one that records launches now
        self.order = Order(session)
        self.arena = Arena(session.options.get("schedule", 0), lambda: self.stream_number, self.reused, session)
        self.peak = 0                        # bytes of memory in use when somebody asked
        self.allocations: dict[int, torch.Tensor] = {}  # by address, for cudaMalloc and its like
        self.objects: dict[int, Any] = {}    # what cuda-python made: modules, kernels, events, by handle
        self._handles = itertools.count(FIRST_STREAM)

    @property
    def stream(self) -> Any:
        """Return the thread's current stream; None: the default stream."""
        return getattr(self._of_thread, "stream", None)

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._of_thread.stream = stream

    @property
    def default_device(self) -> torch.device | None:
        """Return what the thread gave torch.set_default_device."""
        return getattr(self._of_thread, "default_device", None)

    @default_device.setter
    def default_device(self, device: torch.device | None) -> None:
        self._of_thread.default_device = device

    @property
    def chip(self) -> Chip:
        return self.session.device

    @property
    def name(self) -> str:
        return f"NVIDIA {self.chip.name}"

    @property
    def memory(self) -> int:
        return limits.GLOBAL

    @property
    def stream_number(self) -> int:
        """Return the current stream's handle."""
        return self.stream.cuda_stream if self.stream is not None else DEFAULT

    def new_stream(self, blocking: bool = False) -> int:
        """Return the handle of a stream; `blocking`: the default stream waits for it, and it for that one."""
        number = self.handle()
        self.order.created(number, blocking)
        return number

    def reused(self, all_streams: bool = False) -> None:
        """Let the current stream, or each one, get memory that was freed in it."""
        self.arena.settle()
        left, stream = self.arena.left, self.stream_number
        self.arena.left = [block for block in left if not (all_streams or block.stream == stream)]
        findings = [each for block in left if block not in self.arena.left for each in self.order.freed(block)]
        if findings and self.session.options.get("raises"):
            raise SimulationError(findings)

    def handle(self) -> int:
        """Return a number that nothing else of this GPU has."""
        return next(self._handles)

    def milliseconds(self, first: int, end: int | None = None) -> float:
        """Return the time that the clock predicts for the runs from one number to another; nan without a clock."""
        if not self.session.options.get("clock"):
            return math.nan
        return 1e3 * together([run for run in self.session.runs[first:end] if run.clock])

    def allocated(self) -> int:
        """Return the bytes of the tensors that there are."""
        now = sum(whole.numel() for whole in memory.live().values())
        self.peak = max(self.peak, now)
        return now


def only(device: Any) -> int:
    """Return a GPU's number in any spelling: there is one. What names no device is the current one, as in torch."""
    device = torch.device(device) if isinstance(device, str) else device
    index = device if isinstance(device, int) else device.index if isinstance(device, torch.device) else 0
    if index not in (0, None, -1):
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}: a capture stands in for one GPU, cuda:0")
    return 0
