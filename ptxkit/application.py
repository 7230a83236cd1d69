"""The program that kernels are built for: it names the cache folder, the environment variables and the messages.

Alone, that is ptxkit itself.  A package with kernels that is built on ptxkit says once who it is, when it is imported:

    application.serve(Application("mykernels"))          # ~/.cache/mykernels, MYKERNELS_CACHE_DIR, MYKERNELS_QUIET
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import __version__ as VERSION

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Application:
    name: str = PACKAGE
    version: str = VERSION
    ahead: str = ""                          # how kernels are built before they are needed, in words
    why_uncached: str = "{why}"              # how to learn why nothing is cached; `check` is "trust" or "dir"
    broken: str = ""                         # how to learn why a command cannot be loaded
    report: str = ""                         # how to report an internal error, after `--debug shows where`
    # top-level packages that see the machine as it is inside of a capture
    packages: frozenset[str] = frozenset({PACKAGE})
    unfollowed: frozenset[str] = frozenset()             # modules whose text is no part of the key of a kernel
    # folders of the package in which a kernel's module finds source in other languages; None: everywhere in it
    folders: Callable[[str], Sequence[str] | None] = lambda module: None

    def variable(self, word: str) -> str:
        """Return the name of an environment variable: "QUIET" gives "PTXKIT_QUIET"."""
        return f"{self.name.upper()}_{word}"

    def setting(self, word: str) -> str | None:
        """Return the value of that environment variable; None if it is not set."""
        return os.environ.get(self.variable(word))


_current = Application()


def serve(application: Application) -> None:
    """Build kernels for this program from now on."""
    global _current
    _current = application


def current() -> Application:
    return _current
