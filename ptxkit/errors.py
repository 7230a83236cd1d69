"""The base of all errors that ptxkit raises on purpose, which say what was asked, what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PtxkitError(Exception):
    """An error that ptxkit raises on purpose."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant: one that begins so, or is written alike; None where none is near."""
    names = list(names)
    near = [each for each in names if name and each.startswith(name)] or difflib.get_close_matches(name, names, n=1)
    return near[0] if near else None
