"""The source files of a kernel: its module, everything that it imports, and so on.  Nothing is actually imported.

Files that only host code imports are not included, so editing a launch or a plan does not invalidate built kernels.
All imports count, also those in functions and for types; modules named in strings do not, so builds import by name
(tests/ptxkit/compile/test_sources.py checks that for the package).  Files in other languages name no
modules: all of them in the kernel's package count, or in the folders that the application names.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import application
from .errors import BuildError

OTHER_LANGUAGES = {".cu", ".cuh"}


def files(*modules: str) -> dict[str, bytes]:
    """Name -> text of all that kernels in some modules are built from, of those modules' top-level packages."""
    places = {root: places_of(root, module) for root, module in ((m.partition(".")[0], m) for m in modules)}
    contents: dict[str, bytes] = {}
    waiting = [name for module in modules for name in _with_packages(module)]
    while waiting:
        name = waiting.pop()
        root, _, rest = name.partition(".")
        if name in contents or root not in places or name in application.current().unfollowed:
            continue
        if (path := _file(places[root], rest)) is not None:
            contents[name] = path.read_bytes()
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            waiting += (each for imported in _imports(contents[name], package) for each in _with_packages(imported))
    for module in modules:
        contents |= _in_other_languages(module, places[module.partition(".")[0]])
    return contents


def places_of(root: str, module: str) -> list[Path]:
    """Return the folders of a top-level package, or the file of a top-level module that is not a package."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        raise BuildError(f"there is no module {root} to build a kernel of {module} from. Name it as Python does.")
    return [Path(place) for place in spec.submodule_search_locations or [str(spec.origin)]]


def _file(places: list[Path], rest: str) -> Path | None:
    """Return the file of the module `rest` of a top-level package; None if it has no Python source."""
    for place in places:
        if place.is_file():
            return None if rest else place
        stem = place.joinpath(*filter(None, rest.split(".")))
        for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if path.is_file() and (rest or path.name == "__init__.py"):
                return path
    return None


def _with_packages(module: str) -> Iterator[str]:
    """Yield a module and its parent packages: importing it runs them all."""
    while module:
        yield module
        module = module.rpartition(".")[0]


@functools.cache
def parameters(function: str) -> Mapping[str, bool]:
    """Return the parameters of "module:name" in order, and whether each has an annotation: in Triton, tl.constexpr."""
    module, _, name = function.partition(":")
    root, _, rest = module.partition(".")
    path = _file(places_of(root, module), rest)
    found = re.search(rf"^def {name}\(.*?\)[^()\n]*:\n", path.read_text() if path else "", re.DOTALL | re.MULTILINE)
    if not found:
        raise BuildError(f"{function} is not in the source of {root}.")
    signature: Any = ast.parse(f"{found[0]} pass").body[0]                   # alone: a whole module takes longer
    return {x.arg: x.annotation is not None for x in signature.args.args}


@functools.cache
def _imports(text: bytes, package: str) -> frozenset[str]:
    """Return what a module of a package imports: modules, and names in them, which may be modules."""
    try:
        tree = ast.parse(text)
    except SyntaxError:                                                      # a build says so
        return frozenset()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def _in_other_languages(module: str, places: list[Path]) -> dict[str, bytes]:
    folders = application.current().folders(module) or [""]
    return {
        path.relative_to(place).as_posix(): path.read_bytes()
        for place in places
        for folder in folders
        for path in (place / folder).rglob("*")
        if path.suffix in OTHER_LANGUAGES
    }
