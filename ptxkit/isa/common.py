"""What the families share: an Op, the types, and how to read the modifiers of an opcode."""

from __future__ import annotations

from dataclasses import dataclass, field

from ptxkit.isa.fields import ADDRESS, PLACE
from ptxkit.isa.rows import KINDS
from ptxkit.ptx.syntax import TYPE_SIZES

# type -> bits of its values, and of a register that is declared with it
BITS = {**{name: kind.bits for name, kind in KINDS.items()}, "e4m3x4": 32, "e5m2x4": 32, "b128": 128}
# type -> bytes a lane takes in a register; 0: a predicate, one mask for the warp
WIDTHS = {name: 0 if name == "pred" else max(bits, 32) // 8 for name, bits in BITS.items()}
SIZES = TYPE_SIZES
# type of a matrix's elements -> bits
ELEMENT_BITS = {
    **dict.fromkeys(("f64", "b64"), 64), **dict.fromkeys(("tf32", "f32", "s32"), 32),
    **dict.fromkeys(("f16", "bf16"), 16), **dict.fromkeys(("e4m3", "e5m2", "s8", "u8"), 8),
    **dict.fromkeys(("s4", "u4"), 4), "b1": 1,
}
# type of a matrix's elements -> the engine's MatrixType
MATRIX_TYPES = {
    t: n
    for n, t in enumerate((
        *("f16", "bf16", "tf32", "f32", "f64", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "u8", "s8", "s32"),
        *("u4", "s4", "b1", "ue8m0", "ue4m3"),
    ))
}
ATOMICS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5, "exch": 6, "cas": 7, "inc": 8, "dec": 9}
ATOMIC_TYPES = {
    "u32": 0, "s32": 1, "u64": 2, "s64": 3, "f32": 4, "f64": 5, "f16": 6, "bf16": 7, "b16": 8, "b128": 9,
    "f16x2": 10, "bf16x2": 11, "b32": 0, "b64": 2,
}
SCOPES = {"cta": 1, "cluster": 2, "gpu": 3, "sys": 4}
SEMANTICS = {"weak": 0, "relaxed": 1, "acquire": 2, "release": 3, "acq_rel": 4}
NOT_GATHERED, ALIGNED, SYNC = 0, 1, 2  # Ins.gather


@dataclass
class Op:
    """One instruction as the engine takes it: a handler's name, register-file offsets, numbers (fields.py)."""

    handler: str
    args: list[int] = field(default_factory=list)
    mods: list[int] = field(default_factory=list)
    gather: int = NOT_GATHERED


@dataclass
class AddressOperand:
    """An address operand: the register (its offset) that holds the base, whether that is 64 bits, what to add."""

    register: int
    wide: bool
    offset: int

    @property
    def address(self):
        return ADDRESS(offset=self.offset, wide=self.wide)

    def place(self, generic):
        return PLACE(address=self.address, generic=generic)


def one_of(parts, table, default=None):
    """Return the value of the first modifier that the table knows."""
    return next((table[p] for p in parts if p in table), default)


def exists_from(b, arch, what, needed=None):
    """Refuse what only later archs have; `needed`: their name, if it is not the arch's."""
    if b.arch < arch:
        b.fail(f"{what} does not exist on sm_{b.arch}", f"{needed or f'sm_{arch}'} and later")


def only_on(b, what, *archs):
    """Refuse what these archs alone have, which later ones need not have."""
    if b.arch not in archs:
        b.fail(f"{what} on sm_{b.arch}", ", ".join(f"sm_{arch}a" for arch in archs))


def operands(b, ins, *names, optional=()):
    """Return the operands of an instruction, which must be as many as their names; `optional` ones may be missing."""
    if not len(names) <= len(ins.operands) <= len(names) + len(optional):
        b.fail(f"{len(ins.operands)} operands", ", ".join((*names, *(f"{{{name}}}" for name in optional))))
    return ins.operands


def registers(b, ins, **types):
    """Return the registers of an instruction's operands: each name with its type, that of a result behind "="."""
    pairs = zip(operands(b, ins, *types), types.values())
    return [b.target(each, type_[1:]) if type_[0] == "=" else b.value(each, type_) for each, type_ in pairs]


def shared_place(b, ins, operand, *spaces):
    """Return (register, the fields of PLACE) of an address in shared memory.  It is a generic one if none of the
    modifiers `spaces`, and no symbol, says that it is not."""
    place = b.place(operand)
    generic = not {*spaces} & {*ins.parts} and b.space_of(operand) != "shared"
    return place.register, place.place(generic)
