"""Tensors of a GPU that is not there: they lie in the CPU's memory and say that they lie on the GPU.

A torch function mode does it. It is per thread, it ends with its block, it sees properties such as `x.is_cuda` and
functions that a module imported by name before, and torch switches it off inside its own functions: these compute on
the CPU as always. Replaced functions and classes would reach other threads and torch itself; a dispatch mode does not
see `x.device`, and a function that a CPU build of torch refuses never arrives there.

Where a tensor lies is what the program said: `device="cuda"` and `.cuda()`, or `device="cpu"` and `.cpu()`, and what
is computed from such a tensor lies where it does. A tensor of which nothing was said is on the GPU for everybody who
asks, since a capture has always accepted CPU tensors; `.cuda()` copies it, as it would be copied on a real machine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from ..dlpack import Disguised, unmasked
from .operators import Operators
from .patching import Patches, current, knows
from .state import CUDA, Gpu, only

Answer = Callable[["Tensors", Callable, tuple, dict], Any]
BUILTIN = ("aten", "prim", "prims")          # torch's own operators: they run on the CPU
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Tensors(TorchFunctionMode):
    """The mode of one capture."""

    def __init__(self, gpu: Gpu):
        super().__init__()
        self.gpu, self.places, self.operators = gpu, gpu.places, Operators(self)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if current() is not self.gpu:
            return func(*args, **kwargs)
        if knows(caller := sys._getframe(1)):  # it has no GPU to name: the program has named this one to it
            wanted = kwargs.get("device")
            named = wanted is not None and func in _device_constructors() and _kind(wanted) == "cuda"
            return self.computed(func, args, kwargs) if named else func(*args, **kwargs)
        if func in READ_BY_THE_HOST:
            self.gpu.order.host_waits()
        if func in SEEN_BY_THE_HOST:
            storage = args[0].untyped_storage()
            self.gpu.arena.wrote(storage.data_ptr(), storage.nbytes())
        if (answer := ANSWERS.get(func)) is not None:
            return answer(self, func, args, kwargs)
        if caller.f_globals.get("__name__") == "torch._ops" and (operator := _operator(func, caller)) is not None:
            return self.operators.call(operator, args, kwargs)
        return self.computed(func, args, kwargs)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside the block the mode is on: for code of the program that torch calls."""
        if current() is not self.gpu or self in _get_current_function_mode_stack():
            yield
        else:
            with self:
                yield

    def computed(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return what torch computes on the CPU, and note where that lies for the program."""
        wanted = kwargs.get("device")
        if wanted is None and self.gpu.default_device is not None and func in _device_constructors():
            wanted = self.gpu.default_device
        place = _kind(wanted)
        if place == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self.placed(result, self._of_arguments(args) if place is None else place)
        elif isinstance(result, tuple | list) and self.places and (place := self._of_arguments(args)):
            for each in result:
                if isinstance(each, torch.Tensor):
                    self.placed(each, place)
        return result

    def placed(self, x: torch.Tensor, place: str | None) -> torch.Tensor:
        if place in ("cuda", "cpu") and x.device.type == "cpu":
            self.places[x] = place
        return x

    def place(self, x: torch.Tensor) -> str:
        """Return where a tensor lies, for the program."""
        return self.places.get(x) or ("cuda" if x.device.type == "cpu" else x.device.type)

    def moved(self, x: torch.Tensor, place: str | None, dtype: Any = None, copy: bool = False, **form: Any) -> Any:
        """`x.to(place, dtype)`: a copy, unless it lies there and has that dtype."""
        dtype = dtype or x.dtype
        if place not in ("cuda", "cpu", None):
            return x.to(place, dtype, copy=copy, **form)
        moved = self.places.get(x)
        if place == "cpu":
            self.gpu.order.host_waits()
        if place in (None, moved) or (moved is None and place == "cuda" and type(x) not in PLAIN):
            return self.placed(x.to(dtype=dtype, copy=copy, **form), moved)
        result = torch.empty_like(x, dtype=dtype, requires_grad=False, **form)
        return self.placed(result.copy_(x), place)

    def _of_arguments(self, args: tuple) -> str | None:
        """Return where a result lies: on the GPU if one of the tensors does, on the CPU if all that are known do."""
        if not self.places:
            return None
        place, nested = None, (x for arg in args if isinstance(arg, tuple | list) for x in arg)
        for x in (*args, *nested):
            if isinstance(x, torch.Tensor) and (moved := self.places.get(x)):
                if moved == "cuda":
                    return moved
                place = moved
            elif isinstance(x, torch.Tensor) and x.dim():
                return None
        return place


def _kind(device: Any) -> str | None:
    """Return the type of a device in any spelling; a number is a GPU's."""
    if device is None:
        return None
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    if kind == "cuda":
        only(device)
    return kind


def _device(value: Any) -> Any:
    """Return a number as the GPU that it means: a CPU build knows no such."""
    return torch.device("cuda", value) if isinstance(value, int) else value


def _operator(func: Any, caller: Any) -> OpOverload | None:
    """Return the custom operator that is called: torch says only which C function."""
    operator = func if isinstance(func, OpOverload) else caller.f_locals.get("self")
    if isinstance(operator, OpOverloadPacket):
        names = operator.overloads()
        operator = getattr(operator, names[0]) if len(names) == 1 else None
    return operator if isinstance(operator, OpOverload) and operator.namespace not in BUILTIN else None


# ---- properties and methods with a device in them: answer(mode, function, its arguments)


def _on_the_gpu(says: Callable[[torch.Tensor], Any]) -> Answer:
    """Return what tensors of the GPU answer; others answer for themselves."""

    def answer(mode: Tensors, func: Any, args: tuple, kwargs: dict) -> Any:
        return says(args[0]) if mode.place(args[0]) == "cuda" else func(*args, **kwargs)

    return answer


def _moved_to(place: str) -> Answer:
    def moved(mode: Tensors, func: Any, args: tuple, kwargs: dict) -> Any:
        form = kwargs.get("memory_format")
        return mode.moved(args[0], place, **({} if form is None else {"memory_format": form}))

    return moved


def _to(mode: Tensors, func: Any, args: tuple, kwargs: dict) -> Any:
    x, *rest = args
    rest += [kwargs.pop("other")] if "other" in kwargs else []
    copy = kwargs.pop("copy", False)
    if rest and isinstance(rest[0], torch.Tensor):
        place: str | None = mode.place(rest[0])
        dtype, form = rest[0].dtype, kwargs.get("memory_format")
    else:
        # .to(device, dtype, non_blocking, copy): the parser of nn.Module.to knows no `copy`
        given = [_device(value) for value in rest if not isinstance(value, bool)]
        kwargs |= {"device": _device(kwargs["device"])} if "device" in kwargs else {}
        copy = copy or [value for value in rest if isinstance(value, bool)][1:2] == [True]
        device, dtype, _, form = torch._C._nn._parse_to(*given, **kwargs)
        place = _kind(device)
    return mode.moved(x, place, dtype, copy, **({} if form is None else {"memory_format": form}))


def _type(mode: Tensors, func: Any, args: tuple, kwargs: dict) -> Any:
    name = func(*(x.replace("torch.cuda.", "torch.") if isinstance(x, str) else x for x in args), **kwargs)
    on_gpu = isinstance(name, str) and mode.place(args[0]) == "cuda"
    return name.replace("torch.", "torch.cuda.") if on_gpu else name


_T: Any = torch.Tensor
READ_BY_THE_HOST = {
    _T.item, _T.tolist, _T.numpy, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__repr__,
    _T.__format__, _T.nonzero, torch.nonzero, torch.equal, _T.equal, torch.allclose, _T.allclose,
}
SEEN_BY_THE_HOST = {_T.numpy, _T.__array__, _T.untyped_storage}  # it may write what it gets, and torch does not notice
ANSWERS: dict[Any, Answer] = {
    _T.device.__get__: _on_the_gpu(lambda x: CUDA),
    _T.is_cuda.__get__: lambda mode, func, args, kwargs: mode.place(args[0]) == "cuda",
    _T.is_cpu.__get__: lambda mode, func, args, kwargs: mode.place(args[0]) == "cpu",
    _T.get_device: _on_the_gpu(lambda x: 0),
    _T.cuda: _moved_to("cuda"),
    _T.cpu: _moved_to("cpu"),
    _T.to: _to,
    _T.type: _type,
    _T.pin_memory: lambda mode, func, args, kwargs: mode.placed(args[0], "cpu"),
    _T.is_pinned: lambda mode, func, args, kwargs: mode.places.get(args[0]) == "cpu",
    _T.__dlpack__: _on_the_gpu(lambda x: Disguised(x).__dlpack__()),
    _T.__dlpack_device__: _on_the_gpu(lambda x: Disguised(x).__dlpack_device__()),
}


@contextlib.contextmanager
def standing_in(gpu: Gpu, patches: Patches) -> Iterator[None]:
    """Inside the block the mode is on."""
    mode = gpu.mode = Tensors(gpu)
    _reach(mode, patches)
    with mode, mode.operators:
        yield


def _reach(mode: Tensors, patches: Patches) -> None:
    """Patch what a function mode does not see: the program's code that autograd calls, classes, DLPack's way back."""
    from torch.autograd.function import BackwardCFunction

    for name in ("apply", "apply_boxed"):
        if hasattr(BackwardCFunction, name):
            patches.put(BackwardCFunction, name, _with_mode(mode, getattr(BackwardCFunction, name)))

    hooks = torch.autograd.graph.saved_tensors_hooks
    begin = hooks.__init__

    def with_the_mode(self: Any, pack_hook: Callable, unpack_hook: Callable) -> None:
        begin(self, _with_mode(mode, pack_hook), _with_mode(mode, unpack_hook))

    patches.put(hooks, "__init__", with_the_mode)

    class PlacedType(type(torch._C.Generator)):    # type: ignore[misc]
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, torch._C.Generator)

    class Generator(torch._C.Generator, metaclass=PlacedType):
        def __new__(cls, device: Any = "cpu") -> Any:
            return torch._C.Generator.__new__(  # type: ignore[call-arg]
                cls, device="cpu" if current() and _kind(device) == "cuda" else device
            )

    patches.put(torch, "Generator", Generator)
    from_dlpack = torch.from_dlpack

    def from_a_disguise(gpu: Gpu, given: Any, **options: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return given.detach().view_as(given)
        if options or not hasattr(given, "__dlpack__"):
            return from_dlpack(given, **options)
        return from_dlpack(unmasked(given.__dlpack__()))

    for owner in (torch, torch.utils.dlpack):
        patches.answer(owner, {"from_dlpack": from_a_disguise})
    patches.put(torch.Tensor, "record_stream", _record_stream)                 # refused before a mode sees it
    default = {"get_default_device": lambda gpu: gpu.default_device or torch.device("cpu")}
    patches.answer(torch, {"set_default_device": _set_default, "load": _load, **default})


def _record_stream(x: torch.Tensor, stream: Any) -> None:
    """The allocator waits for the stream before it gives the memory away; packages with kernels ask for it, too."""
    if (gpu := current()) is None:
        return _RECORD_STREAM(x, stream)
    if (block := gpu.arena.block_at(x.untyped_storage().data_ptr())) is not None:
        block.recorded.add(stream.cuda_stream)


_RECORD_STREAM, _LOAD = torch.Tensor.record_stream, torch.load


def _load(gpu: Gpu, file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
    """torch's own asks the GPU for memory, without a call that a mode sees."""
    said = map_location.values() if isinstance(map_location, dict) else [map_location]
    kinds = {_kind(each) for each in said if isinstance(each, str | int | torch.device)}
    place = "cuda" if "cuda" in kinds else "cpu" if "cpu" in kinds else None
    loaded = _LOAD(file, "cpu" if place == "cuda" else map_location, *args, **options)
    for x in tree_leaves(loaded) if place in ("cuda", "cpu") else ():
        if isinstance(x, torch.Tensor):
            gpu.places[x] = place
    return loaded


def _set_default(gpu: Gpu, device: Any) -> None:
    """torch's own would be a mode below ours, and reach what we compute on the CPU."""
    gpu.default_device = None if device is None else torch.device(device)


def _with_mode(mode: Tensors, function: Callable) -> Callable:
    def called(*args: Any) -> Any:
        with mode.again():
            return function(*args)

    return called
