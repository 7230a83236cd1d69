"""Kimi Delta Attention on any GPU.  Importing this package imports nothing heavier than torch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {                                   # module -> what users find in kda
    "calls.api": ("chunk_kda", "chunk_kda_fwd", "chunk_kda_bwd", "fused_recurrent_kda", "fused_recurrent_kda_fwd",
        "fused_kda_gate"),
    "calls.decode": ("decode_step",),
    "calls.rehearsal": ("explain", "Explanation"),
    "routing.dispatch": ("use_backend", "Choice"),
    "model.problem": ("Problem",),
    "model.bundles": ("Grads", "Kept", "Outputs", "Saved"),
    "errors": ("KdaError", "InputError", "InputTypeError", "NoBackendError", "PackageError"),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("hf", "nn", "parallel", "simulator")    # such as kda.simulator, imported at their first use
__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from . import hf, nn, parallel, simulator
    from .calls.api import (
        chunk_kda,
        chunk_kda_bwd,
        chunk_kda_fwd,
        fused_kda_gate,
        fused_recurrent_kda,
        fused_recurrent_kda_fwd,
    )
    from .calls.decode import decode_step
    from .calls.rehearsal import Explanation, explain
    from .errors import InputError, InputTypeError, KdaError, NoBackendError, PackageError
    from .model.bundles import Grads, Kept, Outputs, Saved
    from .model.problem import Problem
    from .routing.dispatch import Choice, use_backend


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_MODULES})


def _is_own_command() -> bool:
    """`kda doctor` must report on a torch that cannot even be imported."""
    program = (sys.argv or [""])[0].replace("\\", "/")
    return ("-m", "kda") in zip(sys.orig_argv, sys.orig_argv[1:]) or program.endswith(("/kda", "/kda.exe"))


importlib.import_module(".building", __name__)                           # names kda to ptxkit
if not _is_own_command():
    importlib.import_module(".calls.api", __name__)                            # registers torch.ops.kda
