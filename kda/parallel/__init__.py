"""A row of packed sequences over several GPUs or processes: docs/parallel.md."""

from __future__ import annotations

from . import operators
from .agreement import RankLost
from .context import CPContext, adopt, build_cp_context
from .halo import conv_halo

__all__ = ["CPContext", "RankLost", "adopt", "build_cp_context", "conv_halo", "operators"]
