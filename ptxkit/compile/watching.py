"""Who is told of kernels that are being built: stderr, unless a command shows them in its own way.

What a call says on stderr:

    ptxkit: building 2 kernels for sm90: fused, prepare (kept in ~/.cache/ptxkit; PTXKIT_QUIET=1 silences this)
    ptxkit: built 2 kernels in 21 s

The first build of a process says all of that, on two lines; a later one says only what it builds.
Of several ranks of a machine the first one speaks.  `once` says the same of what is no kernel.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from .. import application
from . import store

if TYPE_CHECKING:
    from .recipes import AnyRecipe

Built = Callable[["AnyRecipe"], None]        # called for each kernel that is done, from any thread
Watcher = Callable[["Sequence[AnyRecipe] | str"], AbstractContextManager[Built]]  # kernels, or what is built once
_watchers: list[Watcher] = []                # the last one is told
_explained = False                           # whether this process has explained it


def quiet() -> bool:
    return application.current().setting("QUIET") not in (None, "", "0")


@contextlib.contextmanager
def told_to(watcher: Watcher) -> Iterator[None]:
    """Report builds of all threads inside the `with` to this watcher."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def watched(recipes: Sequence[AnyRecipe]) -> AbstractContextManager[Built]:
    """Return the context in which these recipes are built."""
    return (_watchers[-1] if _watchers else on_stderr)(recipes)


@contextlib.contextmanager
def on_stderr(recipes: Sequence[AnyRecipe]) -> Iterator[Built]:
    global _explained
    silent = _silent()
    first, _explained = not _explained, _explained or not silent
    if not silent:
        _say(f"building {what(recipes)}{explanation() if first else ''}")
    began = time.monotonic()
    yield lambda recipe: None
    if not silent and first:
        _say(f"built {count(recipes)} in {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def once(what: str) -> Iterator[None]:
    """Report a build that a machine needs once, from begin to end of the block."""
    if _watchers:
        with _watchers[-1](what):
            yield
        return
    silent = _silent()
    if not silent:
        _say(f"building {what} ({_where()}; {_silence()})")
    began = time.monotonic()
    yield
    if not silent:
        _say(f"built it in {time.monotonic() - began:.0f} s")


def _silent() -> bool:
    return quiet() or os.environ.get("LOCAL_RANK", "0") != "0"


def count(recipes: Sequence[AnyRecipe]) -> str:
    return f"{len(recipes)} kernel{'s' * (len(recipes) != 1)}"


def what(recipes: Sequence[AnyRecipe]) -> str:
    """ "3 kernels for sm90: fused (2), prepare"."""
    archs = " and ".join(sorted({recipe.target.name for recipe in recipes}))
    names = Counter(recipe.name for recipe in recipes)
    listed = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in sorted(names.items()))
    return f"{count(recipes)} for {archs}: {listed}"


def explanation() -> str:
    ahead = application.current().ahead
    return f" ({_where()}; {ahead + ', ' if ahead else ''}{_silence()})"


def _silence() -> str:
    return f"{application.current().variable('QUIET')}=1 silences this"


def _where() -> str:
    kernels, reason = store.default(), application.current().why_uncached
    if why := kernels.distrusted():
        return f"not kept: {reason.format(check='trust', why=why)}"
    if not store.writable(kernels.folder):
        return f"not kept: {reason.format(check='dir', why=f'{kernels.folder} cannot be written')}"
    return f"kept in {kernels.folder}"


def _say(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):                       # closed, or nobody reads it
            print(f"{application.current().name}: {text}", file=sys.stderr, flush=True)
