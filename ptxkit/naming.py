"""Addresses in words: elements of tensors, variables of shared memory, lanes and columns of tensor memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ptxkit.compile.call_sites import functions_in

_OF_A_FUNCTION = re.compile(r"_ZZ.*E(\d+)(\w+)$")      # how C++ mangles a function's variable: _ZZ3sumE4part
SPACES = ("shared", "global", "tensor")
GLOBAL = SPACES.index("global")
RANK_BITS = 24  # bits of an address in shared memory below the rank of its CTA


class ElementLayout(NamedTuple):
    """Where the elements of a tensor lie; strides count elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def index(self, offset):
        """Return the index of the element that has the byte at this offset; None: it lies between elements."""
        rest, index = offset // self.itemsize, [0] * len(self.shape)
        for d in sorted(range(len(self.shape)), key=lambda d: -self.strides[d]):
            if self.shape[d] > 1 and self.strides[d]:
                index[d] = rest // self.strides[d]
                rest -= index[d] * self.strides[d]
                if index[d] >= self.shape[d]:
                    return None
        return None if rest else tuple(index)


class Span(NamedTuple):
    """Memory that a launch may touch; `argument` is the position of the argument that brought it."""

    address: int
    size: int
    name: str
    layout: ElementLayout | None = None
    argument: int | None = None

    @property
    def about(self):
        what = f"{self.layout.dtype} {list(self.layout.shape)}" if self.layout else f"{self.size} bytes"
        named = self.argument is not None and self.name != f"argument {self.argument}"
        return f"({what}{f', argument {self.argument}' if named else ''})"

    def __str__(self):
        return f"{self.name} {self.about}"


def span(what, name=None, argument=None):
    """Return the Span of a tensor, of a TensorMap's tensor, or of an (address, bytes, name)."""
    if isinstance(what, Span):
        return what._replace(name=name or what.name)
    if not isinstance(what, torch.Tensor):
        address, size, *named = what
        return Span(address, size, name or (named[0] if named else "memory"), None, argument)
    dtype = str(what.dtype).removeprefix("torch.")
    layout = ElementLayout(dtype, tuple(what.shape), tuple(what.stride()), what.element_size())
    last = sum((n - 1) * s for n, s in zip(what.shape, what.stride()))
    size = (last + 1) * what.element_size() if what.numel() else 0
    return Span(what.data_ptr(), size, name or "a tensor", layout, argument)


@dataclass(frozen=True)
class MemoryPlace:
    """A place in memory: its tensor or variable with the index or byte in it, as far as they are known."""

    space: str  # one of SPACES
    address: int
    tensor: Span | None = None  # global memory
    index: tuple[int, ...] | None = None  # the element in that tensor
    variable: str | None = None  # shared memory: of the PTX, or a field of the kernel's struct
    offset: int = 0  # bytes into the tensor or variable
    rank: int | None = None  # the CTA of the cluster whose shared memory it is; None: clusters have one

    def __str__(self):
        if self.space == "tensor":
            return f"tensor memory, lane {self.address >> 16}, column {self.address & 0xFFFF}"
        if self.space == "shared":
            text = f"shared memory at {self.address & ((1 << RANK_BITS) - 1):#x}"
            text += "" if self.rank is None else f" of CTA rank {self.rank}"
            return f"{self.variable}{f' + {self.offset}' if self.offset else ''} ({text})" if self.variable else text
        if self.tensor is None:
            return f"global memory at {self.address:#x}"
        if self.index is None:
            return f"byte {self.offset} of {self.tensor}"
        return f"{self.tensor.name}[{', '.join(map(str, self.index))}] {self.tensor.about}"


class Names:
    """The names that a launch gives its memory and its warps."""

    def __init__(self, spans, program, config=None, ctas=1):
        self.spans = sorted((s for s in spans if s.size), key=lambda s: s[:2])
        self.ranked, self.ctas = program.arch >= 90, ctas  # ranked: addresses of shared memory name the CTA
        self.roles = roles_of(config)
        self.variables = sorted(_variables(program, config))

    def memory(self, space, address):
        """Return the MemoryPlace of an address as the engine has it."""
        if SPACES[space] == "global":
            return self._of_a_tensor(address)
        if SPACES[space] == "tensor":
            return MemoryPlace("tensor", address)
        rank = address >> RANK_BITS if self.ranked and self.ctas > 1 else None
        offset = address & ((1 << RANK_BITS) - 1) if self.ranked else address
        around = ((name, offset - first) for first, end, name in self.variables if first <= offset < end)
        variable, inside = next(around, (None, 0))
        return MemoryPlace("shared", address, variable=variable, offset=inside, rank=rank)

    def _of_a_tensor(self, address):
        around = sorted((s for s in self.spans if s.address <= address < s.address + s.size), key=lambda s: s.size)
        if not around:
            return MemoryPlace("global", address)
        indices = [s.layout.index(address - s.address) if s.layout else None for s in around]
        named = next((n for n, index in enumerate(indices) if index is not None), 0)
        return MemoryPlace("global", address, around[named], indices[named], offset=address - around[named].address)

    def nearest(self, address):
        """Return the Span that begins before an address and ends last, or the last tensor in it; None without one."""
        before = [s for s in self.spans if s.address <= address]
        last = max(before, key=lambda s: (s.address + s.size, s.size), default=None)
        if last is None or last.layout:
            return last
        inside = [s for s in before if s.layout and last.address <= s.address]
        return max(inside, key=lambda s: (s.address + s.size, s.size), default=last)


def roles_of(config):
    """Return warp -> role of a kernel's configuration; empty where that names none."""
    return {w: role for role, warps in (getattr(config, "roles", None) or {}).items() for w in warps}


def fields_of(program, config):
    """Yield (first byte, end, name, is it an mbarrier) for the struct of shared memory of a CuTe kernel, if it has one:
    of a field of 64-bit words each word."""
    start = -(-program.builder.dynamic_start // 1024) * 1024
    for name, f in getattr(getattr(config, "struct", None), "fields", {}).items():
        words = f.bytes // 8 if f.dtype == "int64" else 0
        for n in range(words):
            address = start + f.offset + 8 * n
            yield address, address + 8, f"{name}[{n}]" if words > 1 else name, True
        if f.dtype != "int64":
            yield start + f.offset, start + f.offset + f.bytes, name, False


def _variables(program, config):
    """Yield (first byte, end, name) of everything that has a name in shared memory."""
    builder, fields = program.builder, getattr(getattr(config, "struct", None), "fields", {})
    yield from (field[:3] for field in fields_of(program, config))
    for v in (*program.module.variables, *program.kernel.variables):
        space, address = builder.symbols.get(v.name, (None, 0))
        if space == "shared" and not fields:
            in_cpp = _OF_A_FUNCTION.match(v.name)
            name = in_cpp[2][: int(in_cpp[1])] if in_cpp else v.name
            yield address, address + v.size if v.size else 1 << RANK_BITS, name


# ---- source


def function_of(loc):
    """Return the function of the source that the outermost known caller stands in; None where nobody knows."""
    while loc.inlined_at:
        loc = loc.inlined_at
    around = [(first, name) for first, last, name in functions_in(loc.file) if first <= loc.line <= last]
    return loc.function or max(around, default=(0, None))[1]
