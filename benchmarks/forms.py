"""Calls of the Hopper backend in the form that constants of its plan choose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kda.backends.sm90 import launch, plan
from ptxkit.temporary import replaced


@contextlib.contextmanager
def planned(**constants: Any) -> Iterator[None]:
    """Give kda/backends/sm90/plan.py these constants inside the block."""
    try:
        with replaced(plan, **constants):
            launch.forget_plans()
            yield
    finally:
        launch.forget_plans()
