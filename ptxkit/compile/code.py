"""What was built of one kernel, and how the arguments of a launch become the bytes that it reads.

The .param list of a PTX entry fixes the buffer: each parameter follows the one before at its own alignment. All three
compilers' kernels are packed by it, so a launch through the driver and one in the simulator see the same bytes.
"""

from __future__ import annotations

import functools
import operator
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .elf import resources
from .errors import BuildError
from .target import Target

Dim3 = tuple[int, int, int]

_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*\(([^)]*)\)")
_ENTRY_WITHOUT_PARAMETERS = re.compile(r"\.entry\s+([\w$%]+)\s*(?=[{.\n])")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?[\w$%]+(?:\[(\d+)\])?"
)
_FORMATS = {"f16": "e", "f32": "f", "f64": "d"}
_INTEGERS = {8: "q", 4: "i", 2: "h", 1: "b"}  # bytes -> format
_TENSORS: set[type] = set()                  # types with a data_ptr(), cached because hasattr is slow


class Param(NamedTuple):
    """One parameter in the buffer."""

    offset: int
    size: int
    type: str                                # PTX's name for it: "u64", "f32", "b8" for bytes

    @property
    def form(self) -> str:
        """The format of this parameter for `struct`."""
        number = _INTEGERS.get(self.size) if self.type != "b8" or self.size == 1 else None
        return _FORMATS.get(self.type) or number or f"{self.size}s"


def entries(ptx: str) -> dict[str, tuple[Param, ...]]:
    """Kernel name -> its parameters, for every entry of a PTX text."""
    params_of: dict[str, tuple[Param, ...]] = {match[1]: () for match in _ENTRY_WITHOUT_PARAMETERS.finditer(ptx)}
    for match in _ENTRY.finditer(ptx):
        params, offset = [], 0
        for align, kind, count in _PARAM.findall(match[2]):
            one = int(re.sub(r"\D", "", kind)) // 8
            size = one * int(count or 1)
            offset += -offset % int(align or one)
            params.append(Param(offset, size, kind))
            offset += size
        params_of[match[1]] = tuple(params)
    return params_of


def pack(kernel: str, params: Sequence[Param], args: Sequence[Any]) -> bytes:
    """The flat parameter buffer.

    An argument is a tensor (its address), an int, a float, None (a null pointer), or bytes of the parameter's own size.
    """
    if len(args) != len(params):
        raise BuildError(f"{kernel} needs {len(params)} arguments; found {len(args)}. Pass them in its source's order.")
    buffer = bytearray(params[-1].offset + params[-1].size if params else 0)
    for position, (param, arg) in enumerate(zip(params, args)):
        raw = _bytes(param, arg)
        if raw is None:
            raise BuildError(
                f"{kernel}: argument {position} must fit a parameter of {param.size} bytes (.{param.type}); found "
                f"{_describe(arg)}. Pass a tensor, an int, a float, None or bytes of that size."
            )
        buffer[param.offset : param.offset + param.size] = raw
    return bytes(buffer)


def _bytes(param: Param, arg: Any) -> bytes | None:
    """Return the bytes of an argument; None if it does not fit the parameter."""
    if hasattr(arg, "data_ptr"):
        arg = arg.data_ptr()
    if arg is None:
        arg = 0
    if isinstance(arg, bytes | bytearray | memoryview):
        return bytes(arg) if len(arg) == param.size else None
    if param.type in _FORMATS:
        return struct.pack("<" + _FORMATS[param.type], arg) if hasattr(arg, "__float__") else None
    try:
        number = operator.index(arg)
    except TypeError:
        return None
    bits = 8 * param.size
    if (param.type == "b8" and bits > 8) or not -(1 << bits - 1) <= number < 1 << bits:
        return None                                                          # bytes of a struct, or too large
    return (number % (1 << bits)).to_bytes(param.size, "little")


def _describe(arg: Any) -> str:
    return f"{len(arg)} bytes" if isinstance(arg, bytes | bytearray) else f"{type(arg).__name__} {arg!r:.60}"


class Place:
    """A part of a tensor's memory as an argument of a launch: cheaper to make than a tensor, and it holds the memory as
    a tensor would, for as long as somebody may launch a kernel with it."""

    __slots__ = ("address", "memory", "size")

    def __init__(self, memory: Any, address: int, size: int):
        self.memory, self.address, self.size = memory, address, size           # a tensor of bytes; where, how many

    def data_ptr(self) -> int:
        return self.address

    def tensor(self) -> Any:
        """The same as a tensor, for whoever wants to know its bounds."""
        return self.memory.narrow(0, self.address - self.memory.data_ptr(), self.size)


@dataclass(frozen=True)
class Code:
    """One entry of a PTX text, for one target."""

    name: str
    ptx: str = field(repr=False)
    cubin: bytes | None = field(repr=False)
    target: Target
    params: tuple[Param, ...]
    registers: int | None = None             # per thread; None where there is no cubin to read it from
    spills: int | None = None                # bytes of a thread's stack: spilled registers and local arrays
    shared: int | None = None                # static bytes of a CTA

    @classmethod
    def of(cls, name: str, ptx: str, cubin: bytes | None, target: Target, **more: Any):
        """The kernel called `name` in what a compiler returned."""
        kernels = entries(ptx)
        if name not in kernels:
            raise BuildError(f"the PTX has no kernel {name!r}; it has {', '.join(kernels) or 'none'}.")
        taken = resources(cubin or b"").get(name)
        system = 1024 if target.cc >= (9, 0) else 0                          # counted in the cubin, not by the driver
        known = taken and {
            "registers": taken.registers,
            "spills": taken.spills,
            "shared": max(taken.shared - system, 0),
        }
        return cls(name=name, ptx=ptx, cubin=cubin, target=target, params=kernels[name], **(known or {}), **more)

    def write(self, buffer: Any, values: Sequence[Any], args: Sequence[Any]) -> None:
        """Write arguments like `pack`, by one struct for the usual ones; what that refuses is looked at one by one."""
        try:
            for i, size in self._sized:                                      # a struct would cut or fill them
                if len(values[i]) != size:
                    raise TypeError
            self.layout.pack_into(buffer, 0, *values)
        except (struct.error, TypeError, IndexError):
            memoryview(buffer).cast("B")[:] = pack(self.name, self.params, args)

    @functools.cached_property
    def layout(self) -> struct.Struct:
        """The parameter buffer as a struct: one value for each parameter, gaps left out."""
        form, offset = ["<"], 0
        for param in self.params:
            form.append(f"{param.offset - offset}x{param.form}")
            offset = param.offset + param.size
        return struct.Struct("".join(form))

    @functools.cached_property
    def _sized(self) -> tuple[tuple[int, int], ...]:
        """(position, bytes) of the parameters that are given as bytes."""
        return tuple((i, param.size) for i, param in enumerate(self.params) if param.form.endswith("s"))


def addresses(args: Sequence[Any]) -> list[Any]:
    """Arguments for a struct: tensors as addresses, None as a null pointer."""
    return [
        arg if (kind := type(arg)) is int else arg.data_ptr() if kind in _TENSORS else _address(arg) for arg in args
    ]


def _address(arg: Any) -> Any:
    if hasattr(arg, "data_ptr"):
        _TENSORS.add(type(arg))
        return arg.data_ptr()
    return 0 if arg is None else arg


def dim3(size: Sequence[int] | int) -> Dim3:
    """Return 1 to 3 sizes as three."""
    sizes = (size,) if type(size) is int else size
    if type(sizes) is tuple and 0 < len(sizes) < 4:                          # true for all but a few launches
        x, y, z = (*sizes, 1, 1)[:3]
        if type(x) is type(y) is type(z) is int and x > 0 and y > 0 and z > 0:
            return x, y, z
    sizes = (size,) if isinstance(size, int) else tuple(operator.index(s) for s in size)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise BuildError(f"a grid, block or cluster has 1 to 3 sizes, each at least 1; found {size!r}.")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
