"""The simulator, under the name that it has in kda: `kda.simulator.capture` is `ptxkit.capture`."""

from __future__ import annotations

from typing import Any

import ptxkit

__all__ = list(ptxkit.__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(ptxkit, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
