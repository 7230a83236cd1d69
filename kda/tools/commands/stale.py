"""Whether an entry of the folder of built kernels will be asked for again.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxkit.compile.recipes import outdated

ENGINE = "ptxkit.engine.build"        # the module of the simulator's own library


def why_stale(about: Mapping[str, Any]) -> str | None:
    """Say why a readable entry (a kernel, or the simulator's library) may not be used; None if it may."""
    if about.get("module") != ENGINE:
        return outdated(about)
    from ptxkit.engine.build import source

    return None if about.get("source") == source() else "other source"
