"""Modules of Python that are written in C or C++: built once for this Python, and kept with the built kernels."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import platform
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import c_compiler, sources, store
from .errors import BuildError


def module(name: str, source: Path, program: str, flags: Sequence[str], *parts: object) -> ModuleType:
    """Return the module, which `program` builds with these flags; `parts` are what it depends on besides."""
    tag = sysconfig.get_config_var("SOABI") or platform.python_version()
    key = store.digest(f"{name} 3", program, tag, platform.machine(), flags, source.read_text(), *parts)
    about = {"kernel": name.replace("_", " "), "arch": platform.machine(), "module": __name__,
             "file": _in_packages(source), "source": store.sources(source)}
    file = f"{name}.so"
    kept = store.default().fetch(key, lambda: {file: _built(file, source, program, flags)}, about)
    return _imported(name, kept[file])


def outdated(about: Mapping[str, Any]) -> str | None:
    """Return why the store's entry of such a module is stale; None if it may still be used."""
    if "file" not in about:                  # an entry that an older version keyed otherwise
        return "other source"
    root, _, rest = about["file"].partition("/")
    try:
        found = [path for place in sources.places_of(root, rest) if (path := place / rest).is_file()]
    except BuildError:
        found = []
    if not found:
        return "source that is gone"
    return None if store.sources(found[0]) == about.get("source") else "other source"


def _in_packages(source: Path) -> str:
    """Return the name of a file with those of the packages that it lies in, such as package/folder/file.cpp."""
    folder = source.parent
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return source.relative_to(folder.parent).as_posix()


def _built(file: str, source: Path, program: str, flags: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        command = [program, f"-I{sysconfig.get_path('include')}", str(source), *flags, "-fPIC", "-shared", "-o", file]
        c_compiler.run(command, folder := Path(name), BuildError, f"{program} could not build {source.name}")
        return (folder / file).read_bytes()


def _imported(name: str, library: bytes) -> ModuleType:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.so")
        path.write_bytes(library)
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        imported = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))  # type: ignore
        loader.exec_module(imported)
    return imported
