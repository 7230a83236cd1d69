"""Every error of the package says what was required, what was found and what to do."""

from __future__ import annotations

from typing import Any

from ptxkit.errors import PtxkitError
from ptxkit.errors import nearest as nearest

QUOTED = ("chunk_size",)                     # as FLA writes it: code that matches FLA's message also matches ours
SHORT = 60                                   # characters of a value that a message repeats


def in_words(x: Any) -> str:
    """A value of a wrong type: its type, and itself if that is short."""
    text = repr(x)
    if x is None:
        return text
    return type(x).__name__ + (f" {text}" if len(text) <= SHORT and "\n" not in text else "")


KdaError = PtxkitError                       # the base of all errors that kda and ptxkit raise on purpose


class InputError(KdaError, ValueError):
    """An invalid argument; `check` is the id of its row in docs/data/errors.json, or begins with `nn.` for a layer."""

    def __init__(self, op: str, argument: str, asked: str, found: str, fix: str, check: str):
        name = f"`{argument}`" if argument in QUOTED else argument
        super().__init__(f"{op}: {name} must be {asked}; found {found}. {fix} [{check}]")
        self.op, self.argument, self.asked, self.found, self.fix, self.check = op, argument, asked, found, fix, check

    def as_of(self, op: str) -> InputError:
        """The same error of the function that was called, if this one is of the function that it consists of."""
        if not op.startswith(self.op):
            return self
        copy = type(self)(op, self.argument, self.asked, self.found, self.fix, self.check)
        return copy.with_traceback(self.__traceback__)

    def __reduce__(self):
        return type(self), (self.op, self.argument, self.asked, self.found, self.fix, self.check)


class InputTypeError(InputError, TypeError):
    """The same for an argument of the wrong Python type, or one that does not exist."""


class PackageError(KdaError, ImportError):
    """A required package is missing, or has the wrong version."""


class NoBackendError(KdaError, RuntimeError):
    """No backend accepts the call: the message has every reason of the named backend, or of each if none was named."""

    def __init__(self, choice):
        super().__init__(str(choice))
        self.choice = choice

    def __reduce__(self):
        return type(self), (self.choice,)
