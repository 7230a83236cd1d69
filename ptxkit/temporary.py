"""What holds for the length of a block alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes other values inside the block; one that was missing or inherited is so again afterwards."""
    inside = vars(owner)
    before = {name: inside[name] for name in values if name in inside}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Stop the garbage collector inside the block: what is made there stays, and would be looked through repeatedly."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
