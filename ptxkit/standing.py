"""What stands in for the machine's GPU: inside of a capture its chip.

A package that chooses by the machine asks here first.  It may put in what it likes for a block, such as its own
description of a machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_STAND_IN: ContextVar[Any] = ContextVar("ptxkit_stand_in", default=None)


@contextlib.contextmanager
def standing_in(machine: Any) -> Iterator[None]:
    """Let `machine` stand in for the GPU inside the `with`, in this thread or task."""
    token = _STAND_IN.set(machine)
    try:
        yield
    finally:
        _STAND_IN.reset(token)


def stand_in() -> Any:
    """Return what stands in for the GPU: a `ptxkit.chips.Chip` in a capture, None outside."""
    return _STAND_IN.get()
