"""The door to the CuTe DSL: a @cute.jit host function and fake tensors to something that can be called, without a GPU.

The DSL compiles for one arch at a time, kept in a process-wide setting; this door sets it for the length of a
compile, under a lock, so that one process can build for several. PTX and cubin are read back into memory.

Tracing and compiling takes 0.15 to 6 s. With a `key` that names everything a build depends on, the host object is
kept on disk beside PTX and cubin, and loading it takes milliseconds; the DSL itself caches nothing that went through
cute.compile. Of a `Recipe` the one kernel that its host function launches is kept, without the host object: where
that is there, nothing of the DSL is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import platform
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..temporary import replaced, uncollected
from . import call_sites, store
from .code import entries
from .errors import BuildError, MissingCompilerError
from .kernel import Kernel
from .launching import launch_sink
from .recipes import ConfiguredRecipe, imported
from .target import Target, parse

PREFIX = "ptxkit"                            # begins the names of the symbols in a host object
TVM_FFI = "--enable-tvm-ffi"
FILE_NAME = 200                              # bytes of a file's name, less what the DSL adds: a folder allows 255

_COMPILING = threading.RLock()
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class Compiled:
    """A compiled host function: call it with tensors and numbers, in the order of its parameters."""

    target: Target
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    kernels: dict[str, Kernel]               # every entry of the PTX, by name
    function: Any = field(repr=False)        # what the DSL returned or loaded
    symbol: str                              # the name of the host function in `module`
    module: bytes = field(repr=False)        # the compiled host code, as MLIR bytecode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sink = launch_sink()
        return self.function(*args, **kwargs) if sink is None else sink.call(self, args, kwargs)


def compile(
    host: Any, *args: Any, target: str | Target, options: str = "", key: Any = None, keep_in: store.Store | None = None,
    **kwargs: Any,
) -> Compiled:
    """Compile `host` for `target`, for arguments like `args`: fake tensors, numbers, a fake stream.

    `options` are those of cute.compile.  `key` names what the result depends on beside versions, target and options:
    `store.sources(package)`, the configuration, the shapes and dtypes of the fake tensors.  Without one nothing is
    kept on disk.
    """
    target = parse(target) if isinstance(target, str) else target
    version = load().__version__
    if key is None:
        return _compiled(host, args, kwargs, target, options)[0]
    fresh: list[Compiled] = []

    def build() -> store.Entry:
        compiled, function_object = _compiled(host, args, kwargs, target, options, with_object=True)
        fresh.append(compiled)
        return {"object": function_object, "symbol": compiled.symbol.encode(), "module": compiled.module,
                "ptx": compiled.ptx.encode(), "cubin": compiled.cubin}

    cuda = str(getattr(sys.modules["cutlass"], "CUDA_VERSION", ""))
    name = store.digest("cutedsl 1", version, cuda, platform.machine(), target.spelling, options, key)
    kernel = getattr(host, "__name__", type(host).__name__)
    about = {"kernel": kernel, "arch": target.name, "module": getattr(host, "__module__", None)}
    entry = (keep_in or store.default()).fetch(name, build, about)
    return fresh[0] if fresh else _loaded(entry, target, options)


class Recipe(ConfiguredRecipe):
    """`function` ("kernels.fwd.chain:build") gives Compiled of a config and a target."""

    door = "ptxkit.compile.cutedsl"
    compiler, form = "cutedsl", "cutedsl kernel 2"

    @property
    def name(self) -> str:
        """Return the name of the kernel's file."""
        return self.module.rpartition(".")[2]

    def build(self) -> store.Entry:
        with uncollected():                  # to look through all that torch made, too, is a tenth of a build
            load()
            (kernel,) = imported(self.function)(self.config, self.target).kernels.values()
        return {"name": kernel.name.encode(), "ptx": kernel.ptx.encode(), "cubin": kernel.cubin}


def fake_stream() -> Any:
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream()


def _compiled(
    host: Any, args: tuple, kwargs: dict, target: Target, options: str, with_object: bool = False
) -> tuple[Compiled, bytes]:
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory(prefix="ptxkit") as folder:
        all_options = f"--generate-line-info --keep-ptx --keep-cubin --dump-dir {shlex.quote(folder)} {options}"
        with compiling_for(target.spelling) as sites, _lines_kept():
            try:
                function = cute.compile(host, *args, options=all_options, **kwargs)
            except Exception as error:
                name = getattr(host, "__name__", type(host).__name__)
                said = _COLOURS.sub("", str(error)).strip()
                raise BuildError(f"the CuTe DSL cannot compile {name} for {target.spelling}: {said}") from error
        ptx, cubin = function.__ptx__, function.__cubin__
        if not ptx or not cubin or not entries(ptx):
            raise BuildError(f"{function.function_name} launches no kernel for {target.spelling}: there is no PTX.")
        ptx = sites.told_in(ptx)
        module = io.BytesIO()
        function.ir_module.operation.write_bytecode(module)
        host_object = b""
        if with_object and TVM_FFI in options:
            function.export_to_c(f"{folder}/host.o", PREFIX)
            host_object = Path(folder, "host.o").read_bytes()
        elif with_object:
            host_object = function.dump_to_object(PREFIX)
    return _made(target, ptx, cubin, function, function.function_name, module.getvalue()), host_object


def _loaded(entry: store.Entry, target: Target, options: str) -> Compiled:
    """Return a host function from its object."""
    from cutlass.cute.runtime import load_module

    with tempfile.TemporaryDirectory(prefix="ptxkit") as folder:
        path = Path(folder, "host.o")
        path.write_bytes(entry["object"])
        module = load_module(str(path), **({"enable_tvm_ffi": True} if TVM_FFI in options else {}))
    symbol = entry["symbol"].decode()
    return _made(target, entry["ptx"].decode(), entry["cubin"], getattr(module, PREFIX), symbol, entry["module"])


def _made(target: Target, ptx: str, cubin: bytes, function: Any, symbol: str, module: bytes) -> Compiled:
    kernels = {name: Kernel.of(name, ptx, cubin, target) for name in entries(ptx)}
    return Compiled(target, ptx, cubin, kernels, function, symbol, module)


@contextlib.contextmanager
def compiling_for(arch: str, **settings: Any) -> Iterator[call_sites.CallSites]:
    """The DSL compiles for `arch` ("sm_100a") inside the block, with more of its settings changed alike."""
    with _COMPILING, _short_file_names(), call_sites.numbering() as sites, contextlib.ExitStack() as undo:
        for dsl in _dsls():
            for name, value in {"arch": arch, **settings}.items():
                undo.callback(setattr, dsl.envar, name, getattr(dsl.envar, name))
                setattr(dsl.envar, name, value)
        forget_options()
        undo.callback(forget_options)
        yield sites


def forget_options() -> None:
    """The DSL drops the options of a compilation once it has traced: those of one that failed before that, such as
    where to keep PTX, would otherwise be those of the next."""
    for dsl in _dsls():
        if hasattr(dsl, "compile_options"):
            dsl.compile_options = type(dsl.compile_options)()


@contextlib.contextmanager
def _short_file_names() -> Iterator[None]:
    """The DSL keeps PTX and cubin in files named after a function, and finds none again whose name no file can have."""
    compiler = sys.modules.get("cutlass.base_dsl.compiler")
    options = getattr(compiler, "CompileOptions", None)
    name_files = getattr(options, "_set_artifact_dump_paths", None)
    if name_files is None:                                                   # another version of the DSL
        yield
        return

    def named(option: Any, folder: str, name: str, *more: Any) -> None:
        short = name if len(name.encode()) <= FILE_NAME else hashlib.sha256(name.encode()).hexdigest()
        name_files(option, folder, short, *more)

    with replaced(options, _set_artifact_dump_paths=staticmethod(named)):
        yield


@contextlib.contextmanager
def _lines_kept() -> Iterator[None]:
    """The DSL looks up the source line of every operation that it traces: it judges frame after frame, walks all of the
    function and makes a location, half of a build. Inside the block it does so once for each function and place."""
    op = sys.modules.get("cutlass._mlir_helpers.op")
    names = "_is_framework_stack_frame", "_fast_frameinfo", "_get_location_from_frame_info"
    looked_up: list[Any] = [getattr(op, name, None) for name in names]
    if None in looked_up:                                                    # another version of the DSL
        yield
        return
    is_foreign, info_of, location_of = looked_up
    # by ids, which are quicker than hashes of code; each entry holds what its key is the id of
    foreign: dict[int, tuple[bool, Any]] = {}
    infos: dict[tuple[int, int], tuple[Any, Any]] = {}
    locations: dict[int, tuple[Any, Any]] = {}

    def kept_is_foreign(frame: Any) -> bool:
        code = frame.f_code
        if id(code) not in foreign:
            foreign[id(code)] = is_foreign(frame), code
        return foreign[id(code)][0]

    def kept_info_of(frame: Any) -> Any:
        code = frame.f_code
        place = id(code), frame.f_lasti
        if place not in infos:
            infos[place] = info_of(frame), code
        return infos[place][0]

    def kept_location_of(info: Any) -> Any:
        if id(info) not in locations:
            locations[id(info)] = location_of(info), info
        return locations[id(info)][0]

    with replaced(op, **dict(zip(names, (kept_is_foreign, kept_info_of, kept_location_of)))):
        yield


def _dsls() -> list[Any]:
    """Return the singletons that hold the settings; the experimental one exists in newer versions."""
    from cutlass import cutlass_dsl

    classes = (getattr(cutlass_dsl, name, None) for name in ("CuTeDSL", "CuteExperimentalDSL"))
    return [dsl._get_dsl() for dsl in classes if dsl is not None]


def load() -> Any:
    """Return the cutlass module."""
    try:
        import cutlass
        import cutlass.cute
    except ImportError as error:
        get = "pip install 'nvidia-cutlass-dsl[cu13]'"
        raise MissingCompilerError("compiling a CuTe DSL kernel", "nvidia-cutlass-dsl", get) from error
    return cutlass
