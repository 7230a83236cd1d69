"""The memory that a launch may touch."""

from __future__ import annotations

import bisect
import gc
import itertools
import numbers
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ptxkit import application
from ptxkit.compile.code import Place

from ..naming import Span, span

Region = Span

LOWEST_ADDRESS = 1 << 22                     # programs lie there, their memory above; a larger number may be an address
ADDRESSES_END = 1 << 57                      # no address is as large
LIBRARIES = frozenset({"cutlass", "tvm_ffi", "torch", "triton"})
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def regions(tensors: Mapping[str, torch.Tensor]) -> list[Region]:
    """Return the regions that tensors cover, by address."""
    by_place: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            region = span(tensor, name)
            by_place.setdefault(region[:2], region)
    return sorted(by_place.values())


def tensors_among(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return the tensors that a call was given, by name, also those in lists, tuples, dicts and dataclasses; None where
    an argument may carry an address that cannot be seen."""
    tensors: dict[str, torch.Tensor] = {}
    return tensors if all([_collect(name, value, tensors) for name, value in arguments.items()]) else None


def _collect(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> bool:
    """Collect the tensors in `value`, and return whether all of it is understood."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return True
    if isinstance(value, Mapping):
        return all([_collect(f"{name}[{key!r}]", each, tensors) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return all([_collect(f"{name}[{i}]", each, tensors) for i, each in enumerate(value)])
    if is_dataclass(value) and not isinstance(value, type):
        return all([_collect(f"{name}.{f.name}", getattr(value, f.name), tensors) for f in fields(value)])
    if value is None or isinstance(value, bool | float | str | torch.dtype):
        return True
    if isinstance(value, numbers.Number):
        return abs(value) < LOWEST_ADDRESS  # type: ignore[arg-type]
    return type(value).__module__.startswith("cuda.")                        # streams


def behind(given: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """Tensors, Places as tensors; of another object with an address, as Triton takes it, the storage that the address
    lies in."""
    if all(isinstance(thing, torch.Tensor) for thing in given.values()):
        return given
    given = {name: thing.tensor() if isinstance(thing, Place) else thing for name, thing in given.items()}
    others = {name: thing.data_ptr() for name, thing in given.items() if not isinstance(thing, torch.Tensor)}
    tensors = {name: thing for name, thing in given.items() if name not in others}
    storages = _storages() if others else []
    for name, address in others.items():
        whole = [each for each in storages if each.data_ptr() <= address < each.data_ptr() + each.numel()]
        tensors |= {f"memory behind {name}": each for each in whole}
    return tensors


def with_pointees(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors, and the storages that addresses in them point into: a kernel may follow a table of those."""
    all_tensors, storages = dict(tensors), None
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int64, torch.uint64) or tensor.device.type != "cpu":
            continue
        numbers = tensor.detach().reshape(-1).view(torch.int64)
        numbers = numbers[(numbers >= LOWEST_ADDRESS) & (numbers < ADDRESSES_END)]
        if numbers.numel():
            storages = _storages() if storages is None else storages
            for first, storage in ((storage.data_ptr(), storage) for storage in storages):
                if ((numbers >= first) & (numbers < first + storage.numel())).any():
                    all_tensors[f"memory behind {name} at {first:#x}"] = storage
    return all_tensors


def live() -> dict[str, torch.Tensor]:
    """Return every CPU storage that Python can reach: what remains where the arguments do not tell."""
    return {f"storage {i}": whole for i, whole in enumerate(_storages())}


def with_tensors(storages: Mapping[str, torch.Tensor]) -> list[Region]:
    """Return what storages cover, and the largest tensors there, by the names that the program's variables have."""
    wholes = sorted(Span(whole.data_ptr(), whole.numel(), name) for name, whole in storages.items())
    starts = [whole.address for whole in wholes]
    with torch._C.DisableTorchFunction():
        tensors = {id(tensor): tensor for tensor, _ in _with_memory() if tensor.numel()}
        spans = {number: span(tensor, "a tensor") for number, tensor in tensors.items()}
    names, within = _names_of_variables(tensors), dict[int, list[Region]]()
    for number, each in sorted(spans.items(), key=lambda x: (x[0] not in names, -x[1].size)):
        inside = within.setdefault(bisect.bisect_right(starts, each.address), [])
        if all(each.address >= s.address + s.size or s.address >= each.address + each.size for s in inside):
            inside.append(each._replace(name=names.get(number, each.name)))
    return [*itertools.chain(*within.values()), *wholes]


def _names_of_variables(tensors: Mapping[int, torch.Tensor]) -> dict[int, str]:
    """Return names of variables by the tensor's id: the name in the innermost function that is not a library's."""
    names: dict[int, str] = {}
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES | application.current().packages:
            for name, value in [*frame.f_locals.items()]:
                if type(value) in PLAIN and id(value) in tensors:
                    names.setdefault(id(value), name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def _storages() -> list[torch.Tensor]:
    """Return all storages as tensors of bytes."""
    storages: dict[int, torch.Tensor] = {}
    with torch._C.DisableTorchFunction():    # a capture would be asked where each of them lies
        for _, storage in _with_memory():
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
            storages.setdefault(whole.data_ptr(), whole)
    return list(storages.values())


def _with_memory() -> Iterator[tuple[torch.Tensor, torch.UntypedStorage]]:
    """Yield every tensor on the CPU that Python can reach."""
    objects = gc.get_objects()               # hundreds of thousands: no line of Python for each
    for thing in itertools.compress(objects, map(PLAIN.__contains__, map(type, objects))):
        plain = thing.layout == torch.strided and thing.device.type == "cpu"
        if plain and (storage := _storage_of(thing)) is not None:
            yield thing, storage


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None of a tensor without memory: tensors of a trace or of torch.func may have none, whatever size they say."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() and storage.data_ptr() else None
    except RuntimeError:                     # a NotImplementedError, too
        return None
