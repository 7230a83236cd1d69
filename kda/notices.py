"""Notices: what kda leaves to other code, or what has no effect.  Each kind and reason is shown once, as a warning of
category `KdaNotice`."""

from __future__ import annotations

import sys
import warnings

from .errors import InputError, NoBackendError

_BETWEEN = ("kda", "fla", "torch", "importlib", "contextlib")       # packages between a caller and a notice
_said: set[tuple[str, ...]] = set()


class KdaNotice(UserWarning):
    """A call that kda was offered and does not accept, one without effect, or a switch that keeps calls away."""


def say_once(text: str, *kind: str) -> None:
    """Warn, at the line that called kda or FLA, unless a notice of this kind was shown before.

    Args:
        text: what happens, why, and what to do about it.
        kind: who says it, about what, and a short reason without numbers: ("kda.fla", "chunk_kda", "cp_context.none").
    """
    if kind not in _said:
        _said.add(kind)
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
            frame = frame.f_back
        warnings.warn_explicit(text, KdaNotice, frame.f_code.co_filename, frame.f_lineno)


def forget(who: str) -> None:
    """Show notices again whose kind begins with `who`."""
    _said.difference_update([kind for kind in _said if kind[0] == who])


def reason_of(error: Exception) -> str:
    """Why a call is not accepted, in short: ids of checks and rules, without numbers that differ from call to call."""
    if isinstance(error, InputError):
        return f"{error.check} {error.argument}"
    if isinstance(error, NoBackendError):
        return " ".join(reason.partition(":")[0] for _, reasons in error.choice.tried for reason in reasons)
    return type(error).__name__
