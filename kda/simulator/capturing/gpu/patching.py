"""Functions of other modules, replaced for the length of a block, and for the thread that opened it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from ....compile.launching import taker

Table = Mapping[str, Callable[..., Any]]     # name -> what it answers: (gpu, arguments) -> ...
_MISSING = object()
_BUILT: dict[tuple[int, str], Callable] = {}  # replacements, made once: a capture may be opened thousands of times


def knows(frame: FrameType) -> bool:
    """Whether code sees the machine as it is: kda's own, and torch.testing's, which compares where tensors lie."""
    name = frame.f_globals.get("__name__", "")
    return name == "kda" or name.startswith(("kda.", "torch.testing."))


def current() -> Any:
    """The GPU of this thread's capture; None where there is none."""
    return getattr(taker(), "gpu", None)


class Patches(contextlib.ExitStack):
    """What was replaced; all of it returns at the end of the `with`."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, for every thread."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:                                                                # missing, or inherited
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def answer(self, owner: Any, table: Table) -> None:
        """Replace functions of a module, for the thread that captures and for all code but what knows."""
        for name, answer in table.items():
            if (id(owner), name) not in _BUILT:
                _BUILT[id(owner), name] = _answered(owner, name, answer)
            self.put(owner, name, _BUILT[id(owner), name])


def _answered(owner: Any, name: str, answer: Callable) -> Callable:
    original: Any = getattr(owner, name, _MISSING)

    def answered(*args: Any, **kwargs: Any) -> Any:
        gpu = current()
        if gpu is not None and not knows(sys._getframe(1)):
            return answer(gpu, *args, **kwargs)
        if original is _MISSING:
            raise AttributeError(f"module {owner.__name__!r} has no attribute {name!r}")
        return original(*args, **kwargs)

    named = original if callable(original) else answer
    functools.update_wrapper(answered, named, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    return answered
