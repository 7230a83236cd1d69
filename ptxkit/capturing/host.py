"""`library`: a file in CUDA C++ with its host code, whose functions are called as they are.

nvcc compiles the file; what its host code calls of the CUDA runtime is linked to functions of ours instead of NVIDIA's,
so `kernel<<<grid, block>>>(...)` launches in the capture that is open. A function of CUDA that has no answer below
refuses by its name.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from ptxkit.compile import c_compiler, nvrtc, store
from ptxkit.compile.code import entries
from ptxkit.compile.driver import COOPERATIVE
from ptxkit.compile.errors import BuildError
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.target import Target, parse

from .. import cuda
from ..engine.build import compiler
from .gpu import driver as d
from .gpu import images
from .gpu.bindings import RUNTIME
from .gpu.patching import current
from .gpu.state import Gpu
from .runtime import ENCODED, Callbacks, RuntimeLaunchConfig, attributes_of
from .session import CaptureError

_OF_CUDA = re.compile(r"^(?:__)?(?:cuda|cu)[A-Z]\w*$")
_LONGS = 12                                  # a function of CUDA has no more parameters, each in a register's width
DEVICE_MEMORY = 2                            # cudaMemoryTypeDevice
CUDA_VERSION = 13000                         # what the absent driver and runtime claim to be


def library(
    source: str | os.PathLike[str], *, arch: str, defines: Mapping[str, Any] | None = None,
    include: Sequence[str | os.PathLike[str]] = (), options: Sequence[str] = (),
) -> Library:
    """Return the functions of a file in CUDA C++, host code included, for calls inside a capture of that arch.

        lib = ptxkit.library("gemm.cu", arch="sm_90a")
        with ptxkit.capture(arch="sm_90a") as session:
            lib.gemm(a, b, c, 128)           # void gemm(half *a, half *b, half *c, size_t n), which launches kernels

    source: the path of a file, or the text itself; defines, include and options are those of `run`. It needs nvcc.
    """
    text, file = cuda.text_of(source)
    target = parse(arch.replace("compute", "sm"))
    folders = cuda.folders_of(file, include)
    flags = [*nvrtc.macros(defines), *(f"-I{folder}" for folder in folders), *options]
    built = _built(text, file or "program.cu", target, flags, cuda.included_by(text, folders))
    return Library(built["library.so"], built["ptx"].decode(), target)


class Library:
    """Host functions, by their plain names. Tensors are passed as addresses, integers in a register's width, numbers
    with a point as `float`; ctypes values, such as `ctypes.c_double(2)`, as what they are. A call returns an int."""

    def __init__(self, code: bytes, ptx: str, target: Target):
        self._kernels = {name: Kernel.of(name, ptx, None, target) for name in entries(ptx)}
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(code)
            file.flush()
            self._library = ctypes.CDLL(file.name)
        names = self._strings("ptxkit_names")
        self._functions = self._strings("ptxkit_functions")
        self._answers = _Answers(self)
        table = (c_void_p * len(names)).in_dll(self._library, "ptxkit_table")
        for i, name in enumerate(names):
            table[i] = self._answers.address(name)

    def _strings(self, name: str) -> list[str]:
        return (c_char_p.in_dll(self._library, name).value or b"").decode().split()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        mangled = re.compile(rf"_Z{len(name)}{re.escape(name)}(?!\w*\.)")
        matching = [f for f in self._functions if f == name] or [f for f in self._functions if mangled.match(f)]
        if len(matching) != 1:
            known = ", ".join(self._functions)
            raise AttributeError(f"{len(matching) or 'no'} functions called {name}; there are {known}")
        function = getattr(self._library, matching[0])

        def call(*args: Any) -> int:
            if current() is None:
                raise CaptureError(f"{name} was called outside a capture. Call it inside ptxkit.capture(...).")
            if self._answers.refused:
                raise CaptureError(
                    f"{name} was called after the host code had called {self._answers.refused}, which a capture does "
                    "not replace: host code may have kept what that call left. Leave that call out, or open the "
                    "library again with ptxkit.library(...) and call what works without it."
                )
            result = function(*map(_passed, args))
            if error := self._answers.raised():
                raise error
            return result

        return call

    def kernel_of(self, function: int) -> Kernel:
        """Return the kernel at the address that a launch names."""
        count = c_int.in_dll(self._library, "ptxkit_registered").value
        hosts = (c_void_p * count).in_dll(self._library, "ptxkit_hosts")
        kernels = (c_char_p * count).in_dll(self._library, "ptxkit_kernels")
        return next(self._kernels[name.decode()] for host, name in zip(hosts, kernels) if host == function)


def _passed(value: Any) -> Any:
    if hasattr(value, "data_ptr"):
        return c_void_p(value.data_ptr())
    if isinstance(value, float):
        return c_float(value)
    return ctypes.c_long(value) if isinstance(value, int) else value


class _Answers(Callbacks):
    """The functions that host code calls, answered by the GPU of the capture that is open."""

    def __init__(self, library: Library):
        super().__init__()
        self.library = library
        self.refused = ""                    # the first function of CUDA that has no answer and was called

    def address(self, name: str) -> int:
        types, answer = FUNCTIONS.get(name, ((), None))
        if answer is None:
            return self.callback(name, lambda: self._refuse(name), ())
        returns = c_void_p if name in _RETURN_ADDRESSES else c_int
        return self.callback(name, lambda *args: answer(self, current(), *args), types, returns)

    def _refuse(self, name: str) -> None:
        self.refused = self.refused or name
        error = CaptureError(f"the host code called {name}, which a capture does not replace. Leave the call out.")
        print(f"ptxkit: {error}", file=sys.stderr, flush=True)        # the program may abort before it is raised
        raise error

    def launch(self, gpu: Gpu, function: int, grid: Any, block: Any, shared: int, params: Any, attributes: Any,
               stream: int | None) -> None:
        kernel = self.library.kernel_of(function)
        handle = images.keep(gpu, images.LoadedFunction(kernel.name, kernel))
        images.launch(gpu, handle, grid, block, shared, params, None, attributes, stream or 0)


# ---- the answers: (whose, gpu, arguments) -> None


def _three(low: int, high: int) -> tuple[int, int, int]:
    """Return a dim3 as a function gets it in two registers."""
    return low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF


def _launch(a: _Answers, gpu: Gpu, function: int, g: int, g2: int, b: int, b2: int, params: int, shared: int,
            stream: Any, together: bool = False) -> None:
    attributes = {COOPERATIVE: True} if together else {}
    a.launch(gpu, function, _three(g, g2), _three(b, b2), shared, params, attributes, stream)


def _launch_ex(a: _Answers, gpu: Gpu, config: Any, function: int, params: int) -> None:
    c = config[0]
    a.launch(gpu, function, tuple(c.grid), tuple(c.block), c.dynamic_shared, params, attributes_of(c), c.stream)


def _entry_point(a: _Answers, gpu: Gpu, symbol: bytes, to: Any, *more: Any) -> None:
    to[0] = a.address(symbol.decode())
    if status := more[-1]:
        status[0] = 0                        # found


def _pointer(a: _Answers, gpu: Gpu, to: Any, address: int) -> None:
    to[0], to[1], to[2] = DEVICE_MEMORY, address, address


class _Attributes(ctypes.Structure):
    """cudaFuncAttributes; what is not named here is zero."""

    _fields_ = (
        *((name, c_size_t) for name in ("shared", "constant", "local")),
        *((name, c_int) for name in ("threads", "registers", "ptx", "binary", "cached", "most_dynamic")),
        ("more", c_int * 23),
    )


def _attributes(a: _Answers, gpu: Gpu, to: Any, function: int) -> None:
    kernel = a.library.kernel_of(function)
    handle = images.keep(gpu, images.LoadedFunction(kernel.name, kernel))
    shared, threads, registers, most_dynamic = (
        d.function_attribute(gpu, which, handle) for which in (d.SHARED_SIZE, d.MAX_THREADS, d.REGISTERS, d.MAX_DYNAMIC)
    )
    code = kernel.target.number
    to[0] = _Attributes(shared, 0, kernel.spills or 0, threads, registers, code, code, 0, most_dynamic)


def _occupancy(a: _Answers, gpu: Gpu, to: Any, function: int, threads: int, shared: int, *flags: int) -> None:
    kernel = a.library.kernel_of(function)
    to[0] = d.resident(gpu.chip, kernel.registers, kernel.shared, threads, shared)


def _worded_to(a: _Answers, gpu: Gpu, error: int, to: Any) -> None:
    to[0] = ctypes.addressof(_NO_ERROR)


def _to(answer: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that puts what the GPU answers where its first argument points."""

    def put(a: _Answers, gpu: Gpu, to: Any, *args: Any) -> None:
        to[0] = answer(gpu, *args)

    return put


def _as_in_python(name: str, types: tuple) -> Callable[..., Any]:
    """Return the answer that cuda-python's function of this name gives: where the first argument is a typed pointer, it
    goes there."""
    answer = getattr(RUNTIME[name], "answer", RUNTIME[name])
    return _to(answer) if types and issubclass(types[0], ctypes._Pointer) else lambda a, gpu, *args: answer(gpu, *args)


_NO_ERROR = ctypes.create_string_buffer(b"no error")
_P, _INT, _HANDLE = c_void_p, POINTER(c_int), POINTER(c_void_p)
_RETURN_ADDRESSES = {"cudaGetErrorString", "cudaGetErrorName"}
_DIM3 = (c_uint64,) * 2
_LAUNCHED = (_P, *_DIM3, *_DIM3, _P, c_size_t, _P)
# what cuda-python answers as well -> its parameters
TYPES: dict[str, tuple] = {
    **dict.fromkeys((
        "cudaGetLastError", "cudaPeekAtLastError", "cudaStreamDestroy", "cudaEventDestroy", "cudaSetDevice",
        "cudaDeviceReset", "cudaFuncSetAttribute", "cudaFuncSetCacheConfig", "cudaProfilerStart", "cudaProfilerStop",
        "cudaDeviceSetLimit", "cudaDeviceSynchronize",
    ), ()),
    **dict.fromkeys(("cudaMalloc", "cudaMallocHost"), (_HANDLE, c_size_t)),
    **dict.fromkeys(("cudaMallocManaged", "cudaHostAlloc"), (_HANDLE, c_size_t, c_uint)),
    "cudaMallocAsync": (_HANDLE, c_size_t, _P),
    **dict.fromkeys(("cudaFree", "cudaFreeHost", "cudaStreamSynchronize", "cudaEventSynchronize"), (_P,)),
    **dict.fromkeys(("cudaFreeAsync", "cudaEventRecord"), (_P, _P)),
    "cudaStreamWaitEvent": (_P, _P, c_uint),
    "cudaMemcpy": (_P, _P, c_size_t, c_int),
    "cudaMemcpyAsync": (_P, _P, c_size_t, c_int, _P),
    "cudaMemset": (_P, c_int, c_size_t),
    "cudaMemsetAsync": (_P, c_int, c_size_t, _P),
    **dict.fromkeys(("cudaGetDevice", "cudaGetDeviceCount"), (_INT,)),
    "cudaDeviceGetAttribute": (_INT, c_int, c_int),
    **dict.fromkeys(("cudaStreamCreate", "cudaEventCreate"), (_HANDLE,)),
    **dict.fromkeys(("cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"), (_HANDLE, c_uint)),
    "cudaEventElapsedTime": (POINTER(c_float), _P, _P),
}
FUNCTIONS: dict[str, tuple[tuple, Callable[..., Any] | None]] = {
    **{name: (types, _as_in_python(name, types)) for name, types in TYPES.items()},
    **dict.fromkeys(("cudaLaunchKernel", "__cudaLaunchKernel"), (_LAUNCHED, _launch)),
    "cudaLaunchCooperativeKernel": (_LAUNCHED, functools.partial(_launch, together=True)),
    "cudaLaunchKernelExC": ((POINTER(RuntimeLaunchConfig), _P, _P), _launch_ex),
    "__cudaGetKernel": ((_HANDLE, _P), _to(lambda gpu, function: function)),
    "cuTensorMapEncodeTiled": (ENCODED, lambda a, gpu, *args: a.tensor_map(*args)),
    "cudaGetDriverEntryPoint": ((c_char_p, _HANDLE, c_uint64, _INT), _entry_point),
    "cudaGetDriverEntryPointByVersion": ((c_char_p, _HANDLE, c_uint, c_uint64, _INT), _entry_point),
    "cudaPointerGetAttributes": ((_HANDLE, _P), _pointer),
    **dict.fromkeys(("cudaDriverGetVersion", "cudaRuntimeGetVersion"), ((_INT,), _to(lambda gpu: CUDA_VERSION))),
    "cudaFuncGetAttributes": ((POINTER(_Attributes), _P), _attributes),
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor": ((_INT, _P, c_int, c_size_t), _occupancy),
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": ((_INT, _P, c_int, c_size_t, c_uint), _occupancy),
    **dict.fromkeys(_RETURN_ADDRESSES, ((c_int,), lambda a, gpu, error: ctypes.addressof(_NO_ERROR))),
    "cuGetErrorString": ((c_int, _HANDLE), _worded_to),
}


# ---- the build

REGISTRATION = pathlib.Path(__file__).with_name("registration.c").read_text()


def _built(text: str, file: str, target: Target, flags: list[str], included: dict[str, str]) -> store.Entry:
    nvcc, version = cuda.nvcc_for("ptxkit.library", "A CUDA toolkit has it.")
    virtual = target.spelling.replace("sm", "compute")

    def build() -> store.Entry:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "given.cu").write_text(f'#line 1 "{os.path.abspath(file)}"\n{text}')
            command = [nvcc, "-c", "-lineinfo", "--keep", "-Xcompiler=-fPIC", f"-gencode=arch={virtual},code={virtual}"]
            _run([*command, *flags, "given.cu", "-o", "given.o"], folder, file)
            wanted = _symbols("given.o", folder, "--undefined-only")
            defined = set(re.findall(r"(__cuda\w+)\(", REGISTRATION))
            names = [each for each in wanted if _OF_CUDA.match(each) and each not in defined]
            functions = _symbols("given.o", folder, "--defined-only", "--extern-only")
            (folder / "answers.c").write_text(REGISTRATION + _trampolines(names, functions))
            _run([compiler(), "-c", "-O1", "-fPIC", "-w", "answers.c", "-o", "answers.o"], folder, file)
            symbolic = "-Wl,-Bsymbolic"      # it calls its own answers, also where torch has loaded the CUDA runtime
            _run(["g++", "-shared", symbolic, "given.o", "answers.o", "-o", "library.so"], folder, file)
            ptx = next(folder.glob("given*.ptx")).read_bytes()
            return {"ptx": ptx, "library.so": (folder / "library.so").read_bytes()}

    answers = REGISTRATION + _trampolines(["called"], ["defined"])             # a change of ours is another library
    key = store.digest("nvcc library 3", version, text, flags, included, file, target.name, answers)
    return store.default().fetch(key, build, {"kernel": os.path.basename(file), "arch": target.name, "file": file})


def _trampolines(names: Sequence[str], functions: Sequence[str]) -> str:
    """Return a C function for each name, which hands its parameters on to an address in a table."""
    longs, values = (", ".join(f"{kind}a{n}" for n in range(_LONGS)) for kind in ("long ", ""))
    lines = [
        f"long {name}({longs}) {{ return ptxkit_table[{i}] ? ((long (*)({longs}))ptxkit_table[{i}])({values}) : 0; }}"
        for i, name in enumerate(names)
    ]
    return "\n".join([
        f"void *ptxkit_table[{max(len(names), 1)}];", f'const char *ptxkit_names = "{" ".join(names)}";',
        f'const char *ptxkit_functions = "{" ".join(functions)}";', *lines,
    ]) + "\n"


def _symbols(file: str, folder: pathlib.Path, *which: str) -> list[str]:
    listed = _run(["nm", "--format=posix", *which, file], folder, file)
    return [line.split()[0] for line in listed.splitlines() if line.split()[1:2] in (["U"], ["T"], ["W"])]


def _run(command: Sequence[str], folder: pathlib.Path, file: str) -> str:
    return c_compiler.run(command, folder, BuildError, f"{' '.join(command)} cannot build {file}").stdout
