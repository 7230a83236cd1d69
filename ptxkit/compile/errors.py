"""Errors on the way from source to a running kernel; each message says what to do."""

from __future__ import annotations

from ptxkit.errors import PtxkitError


class BuildError(PtxkitError, RuntimeError):
    """A kernel that could not be built, packed or launched."""


class MissingCompilerError(BuildError, ImportError):
    """A compiler, or a library that it needs, that is not installed."""

    def __init__(self, asked: str, missing: str, get: str):
        super().__init__(f"{asked} needs {missing}, which is not installed here. {get}")
        self.asked, self.missing, self.get = asked, missing, get

    def __reduce__(self):
        return type(self), (self.asked, self.missing, self.get)
