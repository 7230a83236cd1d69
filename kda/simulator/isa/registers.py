"""Operands of scalar instructions: registers of the width that the instruction works on."""

from kda.simulator.isa.common import WIDTHS
from kda.simulator.isa.rows import KINDS
from kda.simulator.ptx.syntax import Immediate, Register, Sink

WORD_BYTES = {"pred": 0, "u32": 4, "u64": 8}


def bytes_of(kind):
    """Bytes a lane takes in a register of this kind (rows.KINDS, or a PTX type)."""
    return WORD_BYTES[KINDS[kind].word] if kind in KINDS else WIDTHS[kind]


def is_wide(b, operand, kind):
    """Is it a register of 64 bits where the kind takes 32?"""
    return isinstance(operand, Register) and bytes_of(kind) == 4 and WIDTHS[b.type_of(operand)] == 8


def _check(b, operand, kind):
    if isinstance(operand, Register) and WIDTHS[b.type_of(operand)] != bytes_of(kind):
        b.fail(f"{operand.name} is declared .{b.type_of(operand)}", f"a register of .{kind}'s width")


def source(b, operand, kind):
    """Offset of a source operand."""
    _check(b, operand, kind)
    if bytes_of(kind) == 8 and isinstance(operand, Immediate) and isinstance(operand.value, float):
        return b.value(operand, "f64")
    return b.value(operand, kind if kind in WIDTHS else "b64" if bytes_of(kind) == 8 else "b32")


def target(b, operand, kind):
    """Offset of a destination register."""
    _check(b, operand, kind)
    offset = b.target(operand)
    if offset < 0:
        b.fail("`_` as the only result")
    return offset


def predicate_target(b, operand):
    """Offset of a predicate to write; -1 for `_` and for none."""
    return -1 if operand is None or isinstance(operand, Sink) else target(b, operand, "pred")


def hidden(b, name, width):
    """Offset of a register that PTX does not see: the carry flag, or a stand-in."""
    if name not in b.registers:
        b.registers[name] = b.room(width)
    return b.registers[name]
