"""The base of all errors that ptxkit raises on purpose.  Each says what was asked, what was found and what to do."""

from __future__ import annotations


class PtxkitError(Exception):
    """An error that ptxkit raises on purpose."""
