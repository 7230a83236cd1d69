"""Keywords that a function does not have: the error says which one was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch

from kda.errors import InputTypeError, nearest


def names_of(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.items()
    return [name for name, p in parameters if p.kind is not p.VAR_KEYWORD and name != "self"]


def refuse_unknown(
    op: str, unknown: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> NoReturn:
    """Raise an error for the first of `unknown`; `elsewhere`: keywords of other packages, and what to do instead."""
    name = next(iter(unknown))
    fix = (elsewhere or {}).get(name) or _meant(name, tuple(known))
    if torch.compiler.is_compiling():  # torch.compile does not know kda's errors
        raise TypeError(f"{op}: {name} is not a keyword. {fix}")
    raise InputTypeError(op, name, "an existing keyword", "an unknown one", fix, "keyword.unknown")


def _meant(name: str, known: tuple[str, ...]) -> str:
    near = nearest(name, known)
    return f"Did you mean {near!r}?" if near else f"Known: {', '.join(known)}."


vars(_meant)["_dynamo_marked_constant"] = True                               # torch.compile calls it untraced
