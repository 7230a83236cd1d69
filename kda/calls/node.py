"""Calls without Python: node.cpp, built in the background and kept in the cache, and what describes a call to it.

Until it is built, and where it cannot be (there is no C++ compiler, or torch has no headers), calls run in Python, with
the same bits.  `why_not` says why.  Compilers and launches are imported where they are needed: `import kda` loads this.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from kda.checks.memo import are_plain, kind_of_call

if TYPE_CHECKING:
    from kda.backends.common.directions import Direction
    from kda.backends.common.routine import Phase

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=gnu++20", "-O1", "-w", "-fvisibility=hidden")
HEADERS = ("include", "include/torch/csrc/api/include")
ALIGNMENT = 16                               # bytes, as in node.cpp
LIBRARIES = ("torch_python", "torch_cpu", "torch", "c10")
STREAM = "aoti_torch_get_current_cuda_stream"  # a function that torch's C interface has

_state: dict[str, Any] = {}                  # "module": the built one; "why": the reason why there is none
_starting = threading.Lock()


def built() -> ModuleType | None:
    """Return the module if it is built."""
    return _state.get("module")


def is_being_built() -> bool:
    """Return whether the module will be there later.  The first time, begin to build it."""
    start()
    return not _state.keys() & {"module", "why"}


def wait() -> ModuleType | None:
    """Return the module once it is built; None if it cannot be."""
    start().join()
    return built()


def why_not() -> str | None:
    """Return why calls run in Python; None if they do not, or if that is not known yet."""
    return _state.get("why")


def start() -> threading.Thread:
    """Begin to build the module, or to read it from the cache, in a thread of its own, unless that has begun."""
    with _starting:
        if "thread" not in _state:
            _state["thread"] = threading.Thread(target=_build, name="kda builds its node", daemon=True)
            _state["thread"].start()
        return _state["thread"]


def _build() -> None:
    from ptxkit.compile.errors import BuildError

    try:
        _state["module"] = _module()
    except (BuildError, OSError, ImportError) as error:
        _state["why"] = str(error)


def _module() -> ModuleType:
    from ptxkit.compile import c_compiler, extension

    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    folders = [f"-I{root / folder}" for folder in HEADERS]
    libraries = [f"-L{root / 'lib'}", *(f"-l{library}" for library in LIBRARIES)]
    program = c_compiler.required("The node in C++", language=c_compiler.CPP)
    return extension.module("kda_node", SOURCE, program, (*FLAGS, abi, *folders, *libraries), torch.__version__)


# ---- calls


def call(
    forward: Callable[[], Direction], backward: Callable[[bool], Direction] | None = None,
    look: Callable[..., Any] | None = None,
) -> Any:
    """Return a call in C++, for the current device; None where Python has to run it.  For autograd, `backward` says
    which backward follows, with gradients of final states or without; node.cpp says what `look` does."""
    from ptxkit.compile import driver, launch_list
    from ptxkit.compile.launching import launch_sink

    if (module := built()) is None:
        return None
    if launch_sink() is not None:            # a simulator takes the driver's place: lists of launches ask for it
        return module.make(0, 0, 0, *_directions(None, forward, backward), look)
    lists, device = launch_list.in_c(), driver.current()[0]
    stream = 0 if device == driver.PRETENDED else _stream_of()
    if lists is None or stream is None:
        return None
    return module.make(lists.RUN, stream, device, *_directions(device, forward, backward), look)


def _directions(device: int | None, forward: Callable, backward: Callable | None) -> tuple:
    """Return the forward, and what describes a backward when that is needed."""
    return described(forward(), device), backward and (lambda dht: described(backward(dht), device))


def described(direction: Direction, device: int | None) -> tuple:
    """Return a direction as node.cpp reads it; its launches are lists in C if there is a device."""
    routine = direction.run
    results = tuple(-1 if slot is None else slot for slot in routine.results)
    return tuple(_phase(phase, device) for phase in routine.phases), results, routine.inputs, direction.saved


def _phase(phase: Phase, device: int | None) -> tuple:
    in_c = None if device is None else phase.launches.in_c_on(device)
    return phase.tensors, phase.launches, in_c, phase.freed


@functools.cache
def _stream_of() -> int | None:
    """Return the address of the function that returns torch's current stream; None if this torch has none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    try:
        return ctypes.cast(getattr(ctypes.CDLL(str(path)), STREAM), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


# ---- keys of calls


def outlines(tensors: tuple) -> Any:
    """Return a key by the shapes, dtypes and devices of inputs, and by whether a gradient is needed; None if they are
    not plain tensors."""
    if (module := built()) is not None:
        return module.outlines(tensors)
    if not _are_plain(tensors):
        return None
    training = torch.is_grad_enabled() and True in [x is not None and x.requires_grad for x in tensors[:8]]
    try:
        return kind_of_call(tensors, training)
    except RuntimeError:                                                       # a nested tensor has no shape
        return None


def layouts(tensors: tuple) -> Any:
    """Return a key by these, strides and alignment; None also if two tensors lie in one storage."""
    if (module := built()) is not None:
        return module.layouts(tensors)
    if not _are_plain(tensors):
        return None
    storages = [x.untyped_storage().data_ptr() for x in tensors if x is not None]
    if len({*filter(None, storages)}) < len([*filter(None, storages)]):
        return None
    lie = [None if x is None else (x.stride(), x.data_ptr() % ALIGNMENT, x.is_neg(), x.requires_grad) for x in tensors]
    return kind_of_call(tensors, torch.is_grad_enabled(), *lie)


def _are_plain(tensors: tuple) -> bool:
    return (
        are_plain(map(type, tensors)) and not (tensors[0] is None or tensors[0].is_meta)
        and all(x is None or x.layout is torch.strided for x in tensors)
    )
