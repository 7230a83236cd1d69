"""`kda.hf.use()`: the modules of transformers call kda, without FLA.

At every call, transformers' KDA models look up two functions in their own module, a chunked and a recurrent one.  `use`
replaces them with functions that call `kda.chunk_kda` and `kda.fused_recurrent_kda`; `disable` restores the old ones.
A call that kda does not accept runs as before, and a notice says why, once per reason.  Packed sequences stay separate,
whereas transformers' own torch convolution and recurrence mix them: `kda.nn.short_convolution` convolves packed calls.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from . import nn, notices
from .calls.api import chunk_kda, fused_recurrent_kda
from .errors import InputError, KdaError, PackageError

Tensor = torch.Tensor

MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
FUNCTIONS = {"chunk_kimi_delta_attention": chunk_kda, "recurrent_kimi_delta_attention": fused_recurrent_kda}
CONVOLUTION = "causal_conv1d_fn"
_INSTALL = "pip install 'transformers>=5.20'"             # 5.20.2 is the last one for Python 3.10
_replaced: dict[tuple[ModuleType, str], tuple[Callable, Callable]] = {}      # transformers' own, ours


def use(models: str | Iterable[str] = MODELS) -> tuple[str, ...]:
    """Let transformers' modules of these models call kda: existing ones and those created later.

    Args:
        models: one or several names of `kda.hf.MODELS`.

    Returns:
        The models whose modules call kda now. A requested model that this transformers lacks is left out, and a notice
        says so.

    Raises:
        PackageError: transformers is not installed, or has none of the models.
        InputError: an unknown name.
    """
    asked = (models,) if isinstance(models, str) else tuple(models) if isinstance(models, Iterable) else (models,)
    unknown = [name for name in asked if name not in MODELS]
    if unknown or not asked:
        found = repr(unknown[0]) if unknown else "none"
        raise InputError("kda.hf.use", "models", f"among {', '.join(MODELS)}", found,
                         "Leave it out to replace all of them.", "hf.models")
    absent = {}
    for name in asked:
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except ImportError as error:
            absent[name] = f"{type(error).__name__}: {error}"
            continue
        if lacking := [function for function in FUNCTIONS if not hasattr(module, function)]:
            absent[name] = f"its module has no {' and no '.join(lacking)}"
            continue
        ours: Any
        for function, ours in FUNCTIONS.items():
            _replace(module, function, functools.partial(_served, ours))
        if hasattr(module, CONVOLUTION):
            _replace(module, CONVOLUTION, _convolution)
    if len(absent) == len(asked):
        having = {reason: [name for name in absent if absent[name] == reason] for reason in absent.values()}
        reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in having.items())
        raise PackageError(f"kda.hf: transformers must be installed, with one of the models {', '.join(asked)}; found "
                           f"none ({reasons}). {_INSTALL}", name="transformers")
    for name, reason in absent.items():
        notices.say_once(f"kda.hf: {name} does not call kda, because this transformers lacks its module as kda "
                         f"expects it "
                         f"({reason}). {_INSTALL}", "kda.hf", name, "absent")
    return tuple(name for name in asked if name not in absent)


def disable() -> None:
    """Restore transformers' own functions, but not where somebody else has put another one since."""
    for (module, name), (old, ours) in _replaced.items():
        if getattr(module, name) is ours:
            setattr(module, name, old)
    _replaced.clear()
    notices.forget("kda.hf")


def in_use() -> tuple[str, ...]:
    """The models whose modules call kda."""
    served = {module.__name__.split(".")[-2] for module, _ in _replaced}
    return tuple(name for name in MODELS if name in served)


def _replace(module: ModuleType, name: str, make: Callable[[Callable], Callable]) -> None:
    if (module, name) not in _replaced:
        old = getattr(module, name)
        _replaced[module, name] = old, make(old)
        setattr(module, name, _replaced[module, name][1])


def offsets_of(keywords: dict[str, Any]) -> Tensor | None:
    """Return the offsets of packed sequences; a collator that packs for attention names them cu_seq_lens_q."""
    given = keywords.get("cu_seqlens")
    return keywords.get("cu_seq_lens_q") if given is None else given


def _served(ours: Callable, old: Callable) -> Callable:
    """Return the function that transformers calls instead of `old`."""
    known = frozenset(inspect.signature(ours).parameters) - {"unknown"}

    @functools.wraps(old)
    def call(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        given = {name: x for name, x in keywords.items() if name in known}
        offsets = offsets_of(keywords)
        if offsets is not None:
            given["cu_seqlens"] = offsets
        if torch.compiler.is_compiling() and not args:
            return ours(q, k, v, **given)
        try:
            if args:                                                           # the sixth is a chunk size, or a scale
                raise InputError(ours.__name__, "the arguments after v", "given by name", f"{len(args)} positional",
                                 "Name them.", "hf.positional")
            return ours(q, k, v, **given)
        except KdaError as error:                                              # before anything was computed
            if offsets is not None:                                            # the old one would mix the sequences up
                raise
            notices.say_once(
                f"kda.hf: transformers runs this call of {old.__name__} in {old.__module__}, because kda does not "
                f"accept it: {error}\n(shown once per reason)",
                "kda.hf", old.__name__, notices.reason_of(error),
            )
            return old(q, k, v, *args, **keywords)

    return call


def _convolution(old: Callable) -> Callable:
    """The causal convolution of (B, C, T): kda's for packed sequences, otherwise the old one."""

    @functools.wraps(old)
    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **keywords: Any):
        offsets = offsets_of(keywords)
        if offsets is None or keywords.get("seq_idx") is not None:
            return old(x, weight, bias, activation, **keywords)
        if activation not in ("silu", "swish") or x.shape[0] != 1:
            raise InputError("kda.hf", "packed sequences", "in one row (B = 1), with SiLU after the convolution",
                             f"B = {x.shape[0]} and {activation}", "Do not pack this model.", "hf.packed")
        rows = x.transpose(1, 2)
        if rows.shape[1] <= weight.shape[-1]:                                  # a cache fills up so few from the left
            rows = rows[:, rows.shape[1] - int(offsets[-1]) :]
        sequences = nn.Sequences.of_offsets(offsets, rows.shape[1], rows.device)
        return nn.short_convolution(rows.contiguous(), weight, bias, None, sequences).transpose(1, 2)

    return call

