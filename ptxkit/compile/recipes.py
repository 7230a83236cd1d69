"""What a kernel is built from, by names alone: made, compared and looked up without importing a compiler.

`triton.Recipe` is that of a Triton kernel, `cutedsl.Recipe` in the CuTe DSL, `nvrtc.Recipe` in CUDA C++.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from . import store
from .errors import BuildError
from .kernel import Kernel
from .sources import files
from .target import Target

if TYPE_CHECKING:
    from . import triton

Constant = int | float | bool | str | None
# what `ptxkit.compile.fetching` makes a kernel of: hashable, equal to what reads alike, and pickled by its names
AnyRecipe: TypeAlias = "ConfiguredRecipe | triton.Recipe"


def source(*modules: str) -> str:
    """Return one name for all source that kernels in some modules are built from.  Nothing of it is imported."""
    return store.digest(files(*modules))


def imported(function: str) -> Any:
    """Return what "module:name" names."""
    module, _, name = function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BuildError(f"{function} cannot be imported: {type(error).__name__}: {error}") from error


def outdated(about: Mapping[str, Any], source: Callable[..., str] = source) -> str | None:
    """Return why an entry of the store is stale, as far as it shows; None if it may still be used.  Who asks for many
    entries passes a `source` that remembers what it has read."""
    for compiler, (name, version) in COMPILERS.items():
        if about.get(compiler) not in (None, version()):
            return f"{name} {about[compiler]}"
    if about.get("source") is None:
        return None
    try:
        return None if source(*about.get("modules", [about["module"]])) == about["source"] else "other source"
    except BuildError:
        return "source that is gone"


def triton_version() -> str | None:
    """Return the version of the installed Triton."""
    return _version("triton", "pytorch-triton")


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")              # libnvrtc's wheels
# What an entry calls a compiler whose version it names -> what people call it, and its installed version.
COMPILERS: dict[str, tuple[str, Callable[[], str | None]]] = {
    "triton": ("Triton", triton_version),
    "cutedsl": ("CuTe DSL", functools.partial(_version, "nvidia-cutlass-dsl")),
    "nvrtc": ("NVRTC", functools.partial(_version, *NVRTC, "cuda-python")),    # the last: the library of a CUDA toolkit
}


def known_version(name: str, version: Callable[[], str | None]) -> str | None:
    """Return the version of an installed compiler; None where it is not there, or nothing says which it is."""
    return _version(*NVRTC) if name == "NVRTC" else version()


@dataclass(frozen=True)
class ConfiguredRecipe:
    """One kernel that a function builds for a configuration, and its launch options; hashable.  A compiler's subclass
    defines what is built (`build`), the kernel's name (`name`), `door`, `compiler` and `form`."""

    function: str                            # "module:function"
    config: Any                              # a frozen dataclass whose repr tells all of it; `shared` bytes of a CTA
    target: Target
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    signature: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    door: ClassVar[str]                      # the module of this package that loads the compiler
    compiler: ClassVar[str]                  # its name in COMPILERS
    form: ClassVar[str]                      # another one where what is kept changes
    if TYPE_CHECKING:
        @property
        def name(self) -> str: ...

        def build(self) -> store.Entry: ...

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @property
    def modules(self) -> list[str]:
        """Return what a build begins with: the function's module, and that of the configuration."""
        return [self.module, type(self.config).__module__]

    @property
    def constants(self) -> Mapping[str, Constant]:
        return dataclasses.asdict(self.config)

    @functools.cached_property
    def key(self) -> str:
        """Return its name in the store: a digest of the recipe and of all that a build of it depends on."""
        parts = (self.function, repr(self.config), self.target.spelling)
        return store.digest(self.form, COMPILERS[self.compiler][1](), self._source, parts)

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """Return what its entry says about it."""
        known = {"kernel": self.name, "arch": self.target.name, "module": self.module, "config": repr(self.config)}
        return known | {"modules": self.modules, "source": self._source, self.compiler: COMPILERS[self.compiler][1]()}

    @functools.cached_property
    def _source(self) -> str:
        return source(*self.modules)

    def opened(self, entry: store.Entry) -> Kernel:
        return Kernel.of(entry["name"].decode(), entry["ptx"].decode(), entry["cubin"], self.target)

    def dynamic_shared(self, kernel: Kernel) -> int:
        return self.config.shared

    def __reduce__(self):
        return type(self), (self.function, self.config, self.target)          # less the key of this process
