"""Whether an entry of the folder of built kernels will be asked for again.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kda.compile.recipes import outdated

ENGINE = "kda.simulator.engine.build"        # the module of the simulator's own library


def why_stale(about: Mapping[str, Any]) -> str | None:
    """Of a readable entry: of a kernel, or of the simulator's library; None if it may still be used."""
    if about.get("module") != ENGINE:
        return outdated(about)
    from kda.simulator.engine.build import source

    return None if about.get("source") == source() else "other source"
