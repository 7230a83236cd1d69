"""The interface to CUDA C++: source text to a kernel, through NVRTC, without a GPU.

NVRTC compiles machine code for one arch and returns the PTX as well, so a kernel built for sm_89 runs on every later
GPU: there the driver compiles the PTX. libnvrtc is found by cuda-python: in a CUDA toolkit, or in the
wheel nvidia-cuda-nvrtc, which a CUDA build of PyTorch brings along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import store
from .errors import BuildError, MissingCompilerError
from .kernel import Kernel
from .recipes import ConfiguredRecipe, imported
from .target import Target, parse

_WHEEL = "`pip install nvidia-cuda-nvrtc` installs it (a CUDA build of PyTorch and a CUDA toolkit contain it)."


def compile(
    source: str, entry: str, *, target: str | Target = "sm89", defines: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None, options: Sequence[str] = (), file: str = "kernel.cu",
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


class Recipe(ConfiguredRecipe):
    """`function` ("kernels.source:source_of") gives a Source of a config, whose `kernel` is its name."""

    door = "ptxkit.compile.nvrtc"
    compiler, form = "nvrtc", "nvrtc kernel 1"

    @property
    def name(self) -> str:
        return self.config.kernel

    def build(self) -> store.Entry:
        load()
        text, entry, defines, headers, file = imported(self.function)(self.config)
        return _build(text, entry, _flags(self.target, defines, ()), dict(headers), file)


def load() -> None:
    """Load libnvrtc; raise a MissingCompilerError if there is none."""
    version()


def version() -> tuple[int, int]:
    """Return the version of libnvrtc."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingCompilerError("building CUDA C++", "cuda-python", "`pip install cuda-python` has it.") from error
    try:
        code, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:                                            # cuda-python is there, libnvrtc is not
        raise MissingCompilerError("building CUDA C++", "libnvrtc", _WHEEL) from error
    return _checked(nvrtc, code) or (major, minor)


def macros(defines: Mapping[str, Any] | None) -> list[str]:
    """Return the macros as flags; nvcc knows the same flags."""
    if defines is not None and not isinstance(defines, Mapping):
        raise TypeError(f"defines: macros and their values, such as {{'N': 4}}; found {type(defines).__name__}")
    return [f"-D{name}={value}" for name, value in (defines or {}).items()]


def _flags(target: Target, defines: Mapping[str, Any] | None, options: Sequence[str]) -> list[str]:
    given = macros(defines)
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
