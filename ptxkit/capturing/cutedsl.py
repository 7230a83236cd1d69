"""Host functions of the CuTe DSL, linked a second time: against the stand-in runtime instead of CUDA's.

A compiled function keeps its host code as MLIR. A capture links that again for itself (0.03 s), so the function that
the caller holds stays as it was, and it does not matter when it was compiled. What does matter is its PTX: functions
from `ptxkit.compile.cutedsl` and those compiled inside the block have it; others only if they were compiled with
`--keep-ptx` (or CUTE_DSL_KEEP=ptx in the environment).
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ptxkit.compile import cutedsl as door
from ptxkit.compile.code import entries
from ptxkit.compile.kernel import Kernel

from ..temporary import replaced
from . import memory
from .aligned import aligned
from .dlpack import Disguised
from .gpu.patching import knows
from .runtime import FUNCTIONS, Runtime
from .session import CaptureError, Session

MISALIGNED = "Misaligned Tensor data"        # what host code by tvm-ffi says
OPTIMISE = 2                                 # the DSL's own level for host code


class HostFunction:
    """One host function, linked for one session."""

    def __init__(self, session: Session, function: Any, module: Any, symbol: str, kernels: dict[str, Kernel]):
        from cutlass._mlir.execution_engine import ExecutionEngine
        from cutlass.cute.runtime import find_runtime_libraries

        self.function = function             # the caller's; kept so that its id stays its own
        self.runtime = Runtime(session, kernels)
        # libraries that the rest of the host code needs, such as error messages
        libraries = find_runtime_libraries(enable_tvm_ffi=importlib.util.find_spec("tvm_ffi") is not None)
        self.engine = ExecutionEngine(module, opt_level=OPTIMISE, shared_libs=libraries)
        for name in _externals(module):
            if name in FUNCTIONS or name.startswith("_cu"):
                self.engine.raw_register_runtime(name, ctypes.c_void_p(self.runtime.address(name)))
        self.call = self._by_tvm_ffi(symbol) if _is_tvm_ffi(function) else self._directly(symbol)

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        self.runtime.tensors = memory.tensors_among(self._named(args) | kwargs)
        return self._checked(lambda: self.call(*args, **kwargs))

    def run(self, packed: list[Any]) -> Any:
        """Arguments that the DSL has packed already: their tensors cannot be seen any more."""
        self.runtime.tensors = None
        return self._checked(lambda: self.executor.run_compiled_program(packed))

    def _named(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return arguments by the host function's own names for them."""
        execution = getattr(self.function, "execution_args", None)
        names = list(execution.signature.parameters) if execution else []
        names += [f"argument {i}" for i in range(len(names), len(args))]
        return dict(zip(names, args))

    def _checked(self, call: Any) -> Any:
        """An exception of a launch, in the place of whatever the host function made of the error code."""
        try:
            result = call()
        except BaseException:
            if (raised := self.runtime.raised()) is not None:
                raise raised from None
            raise
        if (raised := self.runtime.raised()) is not None:
            raise raised
        return result

    def _directly(self, symbol: str) -> Any:
        """Return the DSL's own way to call a function, with our linked code inside."""
        from cutlass.base_dsl.jit_executor import JitExecutor
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitModule

        twin = copy.copy(self.function)
        twin.engine, twin.load_from_binary, twin.num_devices = self.engine, False, 1
        twin.capi_func = self.engine.lookup(symbol)
        twin.capi_func.restype = ctypes.c_int32
        self._checked(twin._load_cuda_library)
        twin.jit_module = CudaDialectJitModule(self.engine, twin.capi_func, twin.execution_args, [])
        self.executor = twin._default_executor = JitExecutor(twin.jit_module, None, False, spec=twin._pyir_spec)
        return lambda *args, **kwargs: _ORIGINAL["__call__"](twin, *args, **kwargs)

    def _by_tvm_ffi(self, symbol: str) -> Any:
        """tvm-ffi calls int(handle, args, count, result); the engine has that function with its arguments packed."""
        import tvm_ffi

        packed = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.engine.raw_lookup(f"__tvm_ffi_{symbol}"))

        def call(handle, args, count, result):
            pointers = [ctypes.c_void_p(p) for p in (handle, args, result)]
            values = (*pointers[:2], ctypes.c_int32(count), pointers[2], ctypes.c_int32())
            packed((ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values)))
            return values[-1].value

        types = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
        self.safe_call = ctypes.CFUNCTYPE(*types)(call)                      # lives as long as this object
        address = ctypes.cast(self.safe_call, ctypes.c_void_p).value
        function = tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=self.engine)

        def checked(*args, **kwargs):
            """Memory is copied where the host code finds it not aligned as it was compiled for, before it launches."""
            values = [*args, *kwargs.values()]
            try:
                return function(*map(_as_cuda, values))
            except ValueError as error:
                if MISALIGNED not in str(error):
                    raise
            with aligned(values) as copies:
                given = self._named(copies[: len(args)]) | dict(zip(kwargs, copies[len(args) :]))
                self.runtime.tensors = memory.tensors_among(given)
                return function(*map(_as_cuda, copies))

        return checked


def call(session: Session, compiled: door.Compiled, args: tuple, kwargs: dict) -> Any:
    """Call what `ptxkit.compile.cutedsl` compiled."""
    function = compiled.function
    if id(function) not in session.hosts:
        from cutlass._mlir import ir

        with ir.Context():  # type: ignore[attr-defined]
            module = ir.Module.parse(compiled.module)  # type: ignore[attr-defined]
        session.hosts[id(function)] = HostFunction(session, function, module, compiled.symbol, compiled.kernels)
    return session.hosts[id(function)](args, kwargs)


def _host(session: Session, function: Any) -> HostFunction:
    """Return the DSL's own compiled function, linked for this session."""
    if (host := session.hosts.get(id(function))) is not None:
        return host
    name = function.function_name
    if function.ir_module is None:
        raise CaptureError(
            f"{name} was loaded from an object file, which contains no PTX. Capture the function that cute.compile "
            "returned, or compile through ptxkit.compile.cutedsl."
        )
    if not function.__ptx__:
        raise CaptureError(
            f"{name} was compiled without keeping its PTX. Compile it inside the block, through ptxkit.compile.cutedsl,"
            " with options='--keep-ptx', or with CUTE_DSL_KEEP=ptx in the environment."
        )
    ptx, cubin = session.call_sites.told_in(function.__ptx__), function.__cubin__
    known = cubin if isinstance(cubin, bytes) else None
    kernels = {entry: Kernel.of(entry, ptx, known, session.device.target) for entry in entries(ptx)}
    if not kernels:                                                            # a path, if the DSL could not write
        raise CaptureError(
            f"{name} was compiled, but what the DSL kept as its PTX has no kernel: {function.__ptx__[:200]!r}. Check "
            "that the temporary folder can be written, and compile it again."
        )
    host = session.hosts[id(function)] = HostFunction(session, function, function.ir_module, name, kernels)
    return host


@contextlib.contextmanager
def taken(session: Session) -> Iterator[None]:
    """Let the DSL compile for the session's arch, keep PTX and call functions as a `HostFunction`, inside the block."""
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="ptxkit"))
        session.call_sites = undo.enter_context(
            door.compiling_for(session.arch, keep_ptx=True, keep_cubin=True, lineinfo=True, dump_dir=folder)
        )
        for owner, name, replacement in _takers(session):
            undo.enter_context(replaced(owner, **{name: replacement}))
        yield


_ORIGINAL: dict[str, Any] = {}


def _takers(session: Session) -> Iterator[tuple[Any, str, Any]]:
    """Yield (class or module, name, what stands in for it) for every way to compile and to call a function."""
    from cutlass.base_dsl.compiler import CompileCallable
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Function

    _ORIGINAL.setdefault("__call__", Function.__call__)
    run, run_function, to = JitExecutor.run_compiled_program, Function.run_compiled_program, Function.to

    def call(self, *args, **kwargs):
        return _host(session, self)(args, kwargs)

    def run_packed(self, packed):
        return _host(session, self).run(packed) if self.has_gpu_module else run_function(self, packed)

    def executor(self, device=None):
        return _host(session, self).executor if self.has_gpu_module else to(self, device)

    def run_made_before(self, packed):
        if getattr(self.jit_module, "cuda_library", None) != []:             # neither ours nor of the host alone
            raise CaptureError("this executor was made before the capture began. Call the compiled function itself.")
        return run(self, packed)

    make_tensor = _Tensor.__init__

    def tensor_of_the_gpu(self, tensor, *args, **kwargs):
        """Host code is compiled for the kind of memory that its arguments lie in."""
        ours = isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
        make_tensor(self, Disguised(tensor) if ours else tensor, *args, **kwargs)
        self._ptxkit_memory = tensor            # an address in a table may be all that leads to it

    compile_with = CompileCallable._compile

    def compile_with_a_copy(self, *args, **kwargs):
        """The DSL writes its settings into the options of cute.compile itself; they must not outlive the block."""
        options, self._compile_options = self._compile_options, copy.deepcopy(self._compile_options)
        try:
            return compile_with(self, *args, **kwargs)
        finally:
            self._compile_options = options
            door.forget_options()

    load = importlib.import_module("cutlass.runtime").load_module

    def load_module(file_path, *args, **kwargs):
        """Caches of compiled objects treat the refusal as a miss, and compile; ptxkit.compile keeps the PTX."""
        if knows(sys._getframe(1)):
            return load(file_path, *args, **kwargs)
        raise CaptureError(
            f"{file_path} is an object file, which contains no PTX. Compile the function inside the block; where a "
            "library keeps such files, turn that cache off."
        )

    warn = BaseDSL.print_warning

    def print_warning(self, message):
        """Leave out the warning that a capture itself causes: it keeps PTX, and so no function."""
        if not message.startswith("Cache is disabled"):
            warn(self, message)

    yield CompileCallable, "_compile", compile_with_a_copy
    yield BaseDSL, "print_warning", print_warning
    for home in ("cutlass.runtime", "cutlass.cute.runtime"):
        if hasattr(importlib.import_module(home), "load_module"):
            yield importlib.import_module(home), "load_module", load_module
    yield Function, "__call__", _unless_of_the_host_alone(call, Function.__call__)
    yield Function, "run_compiled_program", run_packed
    yield Function, "to", executor
    yield JitExecutor, "run_compiled_program", run_made_before
    yield _Tensor, "__init__", tensor_of_the_gpu
    if importlib.util.find_spec("tvm_ffi") is not None:
        from cutlass.cutlass_dsl import tvm_ffi_provider

        for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
            owner = getattr(tvm_ffi_provider, name)
            yield owner, "__call__", _unless_of_the_host_alone(call, owner.__call__)


def _unless_of_the_host_alone(replacement: Any, original: Any) -> Any:
    """Return a function that calls `replacement`, or `original` where no kernel is launched."""

    def call(self, *args, **kwargs):
        return (replacement if self.has_gpu_module else original)(self, *args, **kwargs)

    return call


def _externals(module: Any) -> list[str]:
    """Return the functions that host code calls and does not define."""
    functions = (op for op in module.body.operations if op.operation.name == "llvm.func")
    return [op.attributes["sym_name"].value for op in functions if not op.operation.regions[0].blocks]


def _is_tvm_ffi(function: Any) -> bool:
    bases = type(function).__mro__
    return any(base.__module__.split(".")[0] == "tvm_ffi" or "TVMFFI" in base.__name__ for base in bases)


def _as_cuda(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    import tvm_ffi

    return tvm_ffi.from_dlpack(Disguised(value))
