"""`import kda.fla`: FLA, its layers and everything else that calls FLA ask kda first.

FLA has a registry of backends for some of its functions and consults it at every call: the first backend whose verifier
accepts the call runs it, and if none does, FLA's own Triton kernels do.  This module registers one such backend.  Its
verifier is the package's own dispatch (`kda.calls.rehearsal.rehearse`), so it accepts a call if and only if
`kda.chunk_kda` would.  A declined call is explained once per reason (`kda.notices`).  docs/fla.md lists which calls go
where.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from . import notices
from .calls import api, rehearsal
from .errors import KdaError, PackageError

_INSTALL = "pip install 'fla-core>=0.5.2'"

try:
    import fla
    import fla.ops.kda
    import fla.ops.kda.chunk
except ModuleNotFoundError as error:
    if str(error.name).startswith("fla.") and not hasattr(sys.modules.get("fla"), "__path__"):
        raise PackageError(f"kda.fla: `fla` must be the package FLA; found the file {sys.modules['fla'].__file__}, "
                           "which hides it. Give that another name.", name="fla") from None
    if str(error.name).startswith("fla."):
        raise PackageError(f"kda.fla: FLA is installed only in part: {error}. {_INSTALL}", name="fla") from error
    if error.name != "fla":
        raise PackageError(f"kda.fla: importing fla failed: {error}. `{_INSTALL}` again, or install {error.name}.",
                           name=error.name) from error
    raise PackageError(f"kda.fla: FLA must be installed for kda to register in it; found no package fla. {_INSTALL}",
                       name="fla") from None
try:
    import fla.backends as _fla  # from 0.6
except ModuleNotFoundError:
    try:
        import fla.ops.backends as _fla  # 0.5
    except ModuleNotFoundError:
        _fla = None

FUNCTIONS = ("chunk_kda", "fused_recurrent_kda_fwd", "fused_kda_gate")  # functions of FLA that ask a registered backend
SWITCH = "FLA_KDA"                           # FLA_KDA=0: FLA does not ask kda


def _verdict(function: str, args: tuple, keywords: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether kda accepts a call of FLA's function, and why not."""
    try:
        rehearsal.rehearse(function, *args, **keywords)
    except (KdaError, TypeError) as error:
        notices.say_once(
            f"kda.fla: FLA runs this call of {function}, because kda does not accept it: {error}\n"
            "(shown once per reason)",
            "kda.fla", function, notices.reason_of(error),
        )
        return False, str(error)
    return True, None


class _Backend(_fla.BaseBackend if _fla else object):  # type: ignore[misc]
    backend_type = "kda"
    package_name = "kda"
    env_var = SWITCH
    priority = 1                             # FlashKDA, which accepts some calls without gradients, has 3

    def chunk_kda_verifier(self, *args: Any, **keywords: Any) -> tuple[bool, str | None]:
        return _verdict("chunk_kda", args, keywords)

    def chunk_kda(self, *args: Any, **keywords: Any) -> tuple:
        return api.chunk_kda(*args, **keywords)

    def fused_recurrent_kda_fwd_verifier(self, *args: Any, **keywords: Any) -> tuple[bool, str | None]:
        return _verdict("fused_recurrent_kda_fwd", args, keywords)

    def fused_recurrent_kda_fwd(self, *args: Any, **keywords: Any) -> tuple:
        return api.fused_recurrent_kda_fwd(*args, **keywords)

    def fused_kda_gate_verifier(self, g: Any, *args: Any, **keywords: Any) -> tuple[bool, str | None]:
        """Refuse on a GPU: FLA has a kernel for the gate alone, and kda has none."""
        return (False, "FLA's own kernel runs it on a GPU") if g.is_cuda else (True, None)

    def fused_kda_gate(self, *args: Any, **keywords: Any) -> Any:
        return api.fused_kda_gate(*args, **keywords)


def _registries() -> dict[str, Any]:
    """FLA's registry of each function for which it asks backends; empty if it is told to ask none."""
    chunk = inspect.unwrap(fla.ops.kda.chunk.chunk_kda)
    if _fla is not None and not _differs(chunk):
        if getattr(_fla, "_DISPATCH_DISABLED", False):
            return {}
        registry = getattr(_fla, "_function_registries", {}).get(chunk)
        if registry is not None:                                                    # from 0.6
            return {name: _fla._get_operation_registry("kda") for name in FUNCTIONS} | {"chunk_kda": registry}
        if hasattr(getattr(_fla, "BackendRegistry", None), "ensure_initialized"):        # 0.5
            _fla.BackendRegistry.ensure_initialized("kda")
            operation = _fla.BackendRegistry._registries["kda"]
            return {name: operation for name in FUNCTIONS if name != "fused_recurrent_kda_fwd"}
    version = getattr(fla, "__version__", "of an unknown version")
    raise PackageError(f"kda.fla: FLA must be 0.5.2 or newer, with a registry of backends and the arguments of "
                       f"kda.chunk_kda; found {version}. {_INSTALL}", name="fla")


def _differs(chunk: Callable) -> bool:
    """Whether FLA's function has other positional arguments than ours."""
    theirs = [p for p in inspect.signature(chunk).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return any(p.name != ours for p, ours in zip(theirs, inspect.signature(api.chunk_kda).parameters))


def use() -> None:
    """Register kda in FLA, as importing this module does; needed only after `disable`.

    Raises PackageError if this FLA has no registry that kda supports.  With FLA_DISABLE_BACKEND_DISPATCH=1, FLA asks no
    backend; a notice then says that nothing changes.
    """
    registries = _registries()
    if not registries:
        notices.say_once("kda.fla: FLA_DISABLE_BACKEND_DISPATCH=1 was set when fla was imported: FLA asks no backend, "
                         "kda included. Unset it and restart.", "kda.fla", "disabled")
    backend = _Backend()
    for registry in registries.values():
        registry.register(backend)


def disable() -> None:
    """Remove kda from FLA again: every call runs as it did before `import kda.fla`."""
    for registry in _registries().values():
        registry._backends.pop(_Backend.backend_type, None)
        registry._logged -= {key for key in registry._logged if key.split(":")[2:3] == [_Backend.backend_type]}
    notices.forget("kda.fla")


def asked() -> dict[str, list[str]]:
    """Return, for each function of FLA that kda can run, the backends that FLA asks now, in order."""
    return {
        function: [b.backend_type for b in registry._get_sorted_backends() if b.is_available() and b.is_enabled()]
        for function, registry in _registries().items()
    }


def in_use() -> tuple[str, ...]:
    """The functions of FLA whose calls kda runs, if it accepts them."""
    return tuple(function for function, backends in asked().items() if _Backend.backend_type in backends)


use()
