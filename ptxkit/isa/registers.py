"""Operands of scalar instructions: registers of the width that the instruction works on."""

from ptxkit.isa.common import WIDTHS
from ptxkit.ptx.syntax import Immediate, Register, Sink


def is_wide(b, operand, kind):
    """Return whether it is a register of 64 bits where the kind takes 32."""
    return isinstance(operand, Register) and WIDTHS[kind] == 4 and WIDTHS[b.type_of(operand)] == 8


def _check_word(b, operand, kind):
    """Check a row's operand.  Its handler reads and writes words: even a wider register has the word of its kind."""
    if isinstance(operand, Register) and WIDTHS[b.type_of(operand)] > WIDTHS[kind]:
        b.check_width(operand, kind)


def source(b, operand, kind, wider=False):
    """Return the offset of a source operand."""
    _check_word(b, operand, kind)
    if WIDTHS[kind] == 8 and isinstance(operand, Immediate) and isinstance(operand.value, float):
        return b.value(operand, "f64")
    return b.value(operand, kind, wider)


def target(b, operand, kind, wider=False):
    """Return the offset of a destination register."""
    _check_word(b, operand, kind)
    if isinstance(operand, Sink):
        b.fail("`_` as the only result")
    return b.target(operand, kind, wider)


def predicate_target(b, operand):
    """Return the offset of a predicate to write; -1 for `_` and for none."""
    return -1 if operand is None or isinstance(operand, Sink) else target(b, operand, "pred")


def hidden(b, name, width):
    """Return the offset of a register that PTX does not see: the carry flag, or a stand-in."""
    if name not in b.registers:
        b.registers[name] = b.room(width)
    return b.registers[name]
