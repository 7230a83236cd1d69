"""Threads of a program take turns at what a capture remembers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Turns:
    """What has methods that one thread at a time may be in."""

    def __init__(self, other: Turns | None = None) -> None:
        """`other` has the same turns: whoever is in a method of one may call methods of both."""
        self.turn: Any = threading.RLock() if other is None else other.turn


def in_turn(method: Method) -> Method:
    """Let a method of a Turns wait until no other thread is in one of these."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return called                            # type: ignore[return-value]
