"""A row of packed sequences over several GPUs or processes: docs/parallel.md."""

from __future__ import annotations

import importlib

from . import operators as operators
from .agreement import RankLost
from .context import CPContext, adopt, build_cp_context
from .halo import conv_halo

__all__ = ["CPContext", "RankLost", "adopt", "build_cp_context", "conv_halo"]


def __getattr__(name: str):
    if name == "mesh":                       # importing DTensor is slow
        return importlib.import_module(".mesh", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
