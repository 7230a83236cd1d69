"""The door to CUDA C++: source text to a kernel, through NVRTC, without a GPU.

NVRTC is asked for machine code of one arch and gives the PTX beside it, so a kernel built for sm_89 runs on every
later GPU as well: there the driver finishes the PTX. libnvrtc is found by cuda-python: in a CUDA toolkit, or in the
wheel nvidia-cuda-nvrtc, which a CUDA build of PyTorch brings along.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from . import store
from .errors import BuildError, MissingCompilerError
from .kernel import Kernel
from .recipes import Constant, imported, nvrtc_version, source
from .target import Target, parse

_WHEEL = "`pip install nvidia-cuda-nvrtc` has it (a CUDA build of PyTorch brings it along; so does a CUDA toolkit)."


def compile(
    source: str,
    entry: str,
    *,
    target: str | Target = "sm89",
    defines: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    file: str = "kernel.cu",
    keep_in: store.Store | None = None,
) -> Kernel:
    """Build one kernel of `source`.

    `entry` is a kernel's name, or a template's with its arguments: "scan<128>".  `headers` are texts by the name that
    #include uses; `file` is what line information and messages call the source.  A launch takes tensors, ints, floats
    and, for structs, bytes.
    """
    target = parse(target) if isinstance(target, str) else target
    flags, headers = _flags(target, defines, options), dict(headers or {})
    key = store.digest("nvrtc 1", version(), source, entry, flags, headers, file)
    about = {"kernel": entry, "arch": target.name, "file": file}
    built = (keep_in or store.default()).fetch(key, lambda: _build(source, entry, flags, headers, file), about)
    return Kernel.of(built["name"].decode(), built["ptx"].decode(), built["cubin"], target)


class Source(NamedTuple):
    """What NVRTC is given, in the words of `compile`."""

    text: str
    entry: str
    defines: Mapping[str, Any]
    headers: Mapping[str, str]
    file: str


@dataclass(frozen=True)
class Recipe:
    """One kernel to be built, and what it is launched with; hashable."""

    function: str                            # "kda.backends.sm89.plan:source_of": of a config, gives a Source
    config: Any                              # a frozen dataclass whose repr tells all of it; `kernel` is its name,
    target: Target                           # `shared` the dynamic shared memory of a CTA
    door = "kda.compile.nvrtc"
    options = signature = MappingProxyType({})

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @property
    def name(self) -> str:
        return self.config.kernel

    @property
    def constants(self) -> Mapping[str, Constant]:
        return dataclasses.asdict(self.config)

    @functools.cached_property
    def key(self) -> str:
        """Its name in the store: a digest of the recipe and of all that a build of it depends on."""
        parts = (self.function, repr(self.config), self.target.spelling)
        return store.digest("nvrtc kernel 1", nvrtc_version(), self._source, parts)

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """What its entry says of it."""
        known = {"kernel": self.name, "arch": self.target.name, "module": self.module, "config": repr(self.config)}
        return known | {"source": self._source, "nvrtc": nvrtc_version()}

    @functools.cached_property
    def _source(self) -> str:
        return source(self.module)

    def build(self) -> store.Entry:
        load()
        text, entry, defines, headers, file = imported(self.function)(self.config)
        return _build(text, entry, _flags(self.target, defines, ()), dict(headers), file)

    def opened(self, entry: store.Entry) -> Kernel:
        return Kernel.of(entry["name"].decode(), entry["ptx"].decode(), entry["cubin"], self.target)

    def dynamic_shared(self, kernel: Kernel) -> int:
        return self.config.shared

    def __reduce__(self):
        return Recipe, (self.function, self.config, self.target)             # less the key of this process


def load() -> None:
    """Whether there is a libnvrtc."""
    version()


def version() -> tuple[int, int]:
    """Of libnvrtc."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingCompilerError("building CUDA C++", "cuda-python", "`pip install cuda-python` has it.") from error
    try:
        code, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:                                            # cuda-python is there, libnvrtc is not
        raise MissingCompilerError("building CUDA C++", "libnvrtc", _WHEEL) from error
    return _checked(nvrtc, code) or (major, minor)


def _flags(target: Target, defines: Mapping[str, Any] | None, options: Sequence[str]) -> list[str]:
    given = [f"-D{name}={value}" for name, value in (defines or {}).items()]
    return [f"--gpu-architecture={target.spelling}", "--std=c++17", "-lineinfo", *given, *options]


def _build(source: str, entry: str, flags: list[str], headers: dict[str, str], file: str) -> store.Entry:
    from cuda.bindings import nvrtc

    texts, names = [t.encode() for t in headers.values()], [n.encode() for n in headers]
    program = _checked(nvrtc, *nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), len(texts), texts, names))
    try:
        _checked(nvrtc, *nvrtc.nvrtcAddNameExpression(program, entry.encode()))
        (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        if int(code) != 0:
            log = _text(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            said = log.rstrip(b"\0").decode(errors="replace").strip()
            raise BuildError(f"NVRTC {version()} cannot build {entry} of {file} with {' '.join(flags)}:\n{said}")
        name = _checked(nvrtc, *nvrtc.nvrtcGetLoweredName(program, entry.encode()))
        return {
            "name": name,
            "ptx": _text(nvrtc, program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0"),
            "cubin": _text(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
        }
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(nvrtc: Any, program: Any, size: Any, read: Any) -> bytes:
    text = b" " * _checked(nvrtc, *size(program))                            # NVRTC writes into it
    _checked(nvrtc, *read(program, text))
    return text


def _checked(nvrtc: Any, code: Any, *values: Any) -> Any:
    if int(code) != 0:
        raise BuildError(f"NVRTC answered {code.name} ({int(code)}): {nvrtc.nvrtcGetErrorString(code)[1].decode()}.")
    return values[0] if values else None
