"""What ptxkit is told of kda, for which it builds and simulates kernels: names, messages, and where source lies."""

from __future__ import annotations

from collections.abc import Sequence

from ptxkit.application import Application, serve

from . import __version__


def folders(module: str) -> Sequence[str] | None:
    """Return the folders whose CUDA source the kernels of a module are built from: the backend's and what all share."""
    parts = module.split(".")
    return (f"backends/{parts[2]}", "backends/common") if parts[:2] == ["kda", "backends"] and len(parts) > 2 else None


serve(Application(
    "kda", __version__,
    ahead="`kda compile` builds ahead of time",
    why_uncached="`kda doctor cache.{check}` says why",
    broken="; `kda doctor` looks for the cause.",
    report=", `kda doctor --paste` makes a bug report",
    packages=frozenset({"kda", "ptxkit"}),
    unfollowed=frozenset({"kda"}),           # its __init__ imports what a kernel never runs
    folders=folders,
))
