"""PTX text -> syntax tree: `parse(text)` gives a `Module`, or a `PtxError` that quotes the line."""

from . import syntax
from .parser import parse
from .syntax import *  # noqa: F403

__all__ = ["parse"]
__all__ += syntax.__all__
