"""Whether an entry of the folder of built kernels will be asked for again.  Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ptxkit.compile import extension, recipes

ENGINE = "ptxkit.engine.build"        # the module of the simulator's own library
EXTENSION = extension.__name__        # that of the modules in C and C++ that run calls on the host


def judge() -> Callable[[Mapping[str, Any]], str | None]:
    """Return a function that says why a readable entry (a kernel, or a library for the host) may not be used, and None
    if it may.  It reads what kernels are built from once, however many entries there are."""
    from ptxkit.engine import build

    source, of_engine = functools.cache(recipes.source), functools.cache(build.source)

    def why_stale(about: Mapping[str, Any]) -> str | None:
        module = about.get("module")
        if module == EXTENSION:
            return extension.outdated(about)
        if module == ENGINE:
            return None if about.get("source") == of_engine() else "other source"
        return recipes.outdated(about, source)

    return why_stale
