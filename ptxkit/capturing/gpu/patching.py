"""Functions of other modules, replaced for the length of a block, and for the thread that opened it."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from ptxkit import application
from ptxkit.compile.launching import launch_sink
from ptxkit.temporary import replaced

Table = Mapping[str, Callable[..., Any]]     # name -> what it answers: (gpu, arguments) -> ...
_MISSING = object()
# replacements by module and names, made once: a capture may be opened thousands of times
_BUILT: dict[tuple[int, frozenset[str]], dict[str, Callable]] = {}


def knows(frame: FrameType) -> bool:
    """Return whether code sees the machine as it is: the application's does, which asks `ptxkit.standing`, and
    torch.testing's, which compares where tensors lie."""
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in application.current().packages or name.startswith("torch.testing.")


def current() -> Any:
    """Return the GPU of this thread's capture; None where there is none."""
    return getattr(launch_sink(), "gpu", None)


class Patches(contextlib.ExitStack):
    """Attributes that were replaced; all of them are put back at the end of the `with`."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, for every thread."""
        self.enter_context(replaced(owner, **{name: value}))

    def answer(self, owner: Any, table: Table) -> None:
        """Replace functions of a module, for the thread that captures and for all code but what knows."""
        if not table:
            return
        key = id(owner), frozenset(table)
        if key not in _BUILT:
            _BUILT[key] = {name: _answered(owner, name, answer) for name, answer in table.items()}
        if not isinstance(owner, types.ModuleType):
            for name, answered in _BUILT[key].items():
                self.put(owner, name, answered)
            return
        inside = vars(owner)                 # at once: one attribute after the other takes milliseconds
        before = {name: inside[name] for name in table if name in inside}
        self.callback(inside.update, before)
        for name in table.keys() - before.keys():
            self.callback(inside.pop, name)
        inside.update(_BUILT[key])


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
