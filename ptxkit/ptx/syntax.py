"""The syntax tree of a PTX module: what the parser promises to everyone after it.

Scopes are gone from the tree. A register, label or variable that an inner `{ ... }` declares again is called `name@2`,
`name@3`, ... and every operand already carries the name that its scope gives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "TYPE_SIZES", "Address", "Guard", "Immediate", "Instruction", "Label", "Loc", "Module", "Negated", "Operand",
    "Pair", "PtxError", "PtxFunction", "PtxKernel", "PtxParam", "Register", "Sink", "Special", "Symbol", "Variable",
    "Vector",
]
TYPE_SIZES = {  # bytes of one element in memory; a predicate lives in registers only
    "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8,
    "b128": 16,
}
FLOAT_FORMATS = {"f16": "<e", "f32": "<f", "f64": "<d"}  # as struct packs them


class PtxError(ValueError):
    """PTX that is not taken: the line (from 1), what was found and what is supported, and the text of the line."""

    def __init__(self, line: int, message: str, source: str = ""):
        super().__init__(line, message, source)
        self.line, self.message, self.source = line, message, source

    def __str__(self) -> str:
        return f"PTX line {self.line}: {self.message}" + (f"\n  {self.line} | {self.source}" if self.source else "")


@dataclass(frozen=True, slots=True)
class Loc:
    """A line of the program that the PTX came from; `inlined_at` is the call that put it there."""

    file: str
    line: int
    column: int
    inlined_at: Loc | None = None
    function: str | None = None


# Operands


@dataclass(frozen=True, slots=True)
class Register:
    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """`bits` are the raw bits of a 0f or 0d literal, so that the payload of a NaN survives."""

    value: int | float
    bits: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, kernel parameter or function, as a value: its address plus `offset` bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    """`%tid.x`, `%laneid`, `%clock64`, ...; the name keeps its `%`."""

    name: str


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: the result goes nowhere."""


@dataclass(frozen=True, slots=True)
class Negated:
    """`!p` as a source operand."""

    register: Register


@dataclass(frozen=True, slots=True)
class Pair:
    """`p|q`: two results of one instruction."""

    first: Register | Sink
    second: Register | Sink


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`; also the results and the arguments of a `call`, and the labels that a `brx.idx` chooses from."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]`, or `[map, {c0, c1, ...}]` with a coordinate for each dimension of the tensor map."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Immediate | Symbol | Special | Label | Sink | Negated | Pair | Vector | Address


# Statements


@dataclass(frozen=True, slots=True)
class Guard:
    """`@p` or `@!p`."""

    register: str
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """`parts` is the opcode split at its dots; `::` stays inside a part. `text` is the statement on one line.

    `call` always has three operands: Vector of results, the callee (a Symbol, or a Register that holds its address),
    Vector of arguments.
    `brx.idx` has two: the index and the Vector of its labels.
    """

    opcode: str
    parts: tuple[str, ...]
    guard: Guard | None
    operands: tuple[Operand, ...]
    line: int
    loc: Loc | None
    text: str


@dataclass(frozen=True, slots=True)
class PtxParam:
    """One parameter; `offset` is its place in the flat parameter buffer, `count` its elements (1 for a scalar)."""

    name: str
    type: str
    size: int
    align: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class Variable:
    """Memory with a name. `size` is bytes in all, 0 where an extern array leaves it open; `init` fills all of it."""

    name: str
    space: str  # global, const, shared, local; param for the arguments of a call
    type: str
    align: int
    size: int
    count: int
    init: bytes | None
    extern: bool
    line: int
    addresses: tuple[tuple[int, str, int], ...] = ()  # in `init`: (place, symbol, what is added to its address)


@dataclass(frozen=True, slots=True)
class PtxKernel:
    name: str
    params: tuple[PtxParam, ...]
    directives: dict[str, tuple[int, ...]]  # "maxntid": (128, 1, 1); a directive without numbers: ()
    registers: dict[str, str]  # unique name -> type; of a range `%r<120>` only the registers in use
    variables: tuple[Variable, ...]
    body: tuple[Instruction, ...]
    labels: dict[str, int]  # unique name -> index into body, which may be len(body)
    line: int


@dataclass(frozen=True, slots=True)
class PtxFunction(PtxKernel):
    """A device function; `defined` is False for a bare declaration such as that of `vprintf`."""

    results: tuple[PtxParam, ...] = ()
    defined: bool = True


@dataclass(frozen=True, slots=True)
class Module:
    version: str
    target: str  # sm_90a; without the options that may follow it
    address_size: int
    files: dict[int, str]
    kernels: dict[str, PtxKernel]
    variables: tuple[Variable, ...]
    functions: dict[str, PtxFunction] = field(default_factory=dict)
