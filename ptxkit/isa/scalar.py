"""Instructions on a lane's own registers: an opcode's row of the tables, and what takes more than a row."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict

from ptxkit.isa import compare, generate, moves
from ptxkit.isa.common import Op
from ptxkit.isa.fields import MASKED_ROW, ROW, THROUGH_WIDE
from ptxkit.isa.registers import hidden, is_wide, source, target
from ptxkit.isa.rows import TYPES
from ptxkit.ptx.syntax import Negated

CARRY = "the carry flag"  # a hidden predicate
STAND_INS = ("a wide destination's stand-in", "a wide source's stand-in")
FULL = 0xFFFFFFFF
PLACES = (target, source, source, source, source)
MASKS = {"8": 0xFF, "16": 0xFFFF}  # the digits of a register's type -> what its word holds


@functools.cache
def _index():
    """Return (opcode, types) -> its rows."""
    table = defaultdict(list)
    for row in generate.ROWS:
        for spelled in row.types:
            table[row.opcode, tuple(spelled.split("."))].append(row)
    return table


@functools.lru_cache(maxsize=4096)
def _find(parts, count):
    """Return (row, its kinds, handler, its numbers, does it carry, is it masked) of an opcode with so many operands."""
    types = tuple(p for p in parts[1:] if p in TYPES)
    words = frozenset(parts[1:]) - TYPES
    for row in _index().get((parts[0], types), ()):
        if len(row.sources) == count - 1 and (variant := row.match(words)):
            exact = generate.handlers()[0].get((row, variant))
            handler = exact or generate.handlers()[0][row, None]
            mods = [] if exact and not row.masked else ROW(rounding=variant[0], flags=variant[1])
            return row, (row.target, *row.sources), handler, mods, row.carries, row.masked
    return None


def lower_row(b, ins):
    """Lower an instruction that a row describes."""
    if not (match := _find(ins.parts, len(ins.operands))):
        spellings = dict.fromkeys(row.spelling for row in generate.ROWS if row.opcode == ins.parts[0])
        b.fail(f"{ins.opcode} with {len(ins.operands)} operands", ", ".join(spellings))
    row, kinds, handler, mods, carries, masked = match
    wider = ins.parts[0] == "cvt"
    if wider and len(kinds) == 2:  # conversions between other types may share the handler: these are the instruction's
        kinds = [p for p in ins.parts[1:] if p in TYPES]
        if any(is_wide(b, o, k) for o, k in zip(ins.operands, kinds)):
            return _through_wide_registers(b, ins, row, kinds, handler, mods)
    args = [place(b, operand, kind, wider) for place, operand, kind in zip(PLACES, ins.operands, kinds)]
    if carries:
        args.append(hidden(b, CARRY, 0))
    if masked:
        mods = MASKED_ROW(row=mods, mask=MASKS.get(b.type_of(ins.operands[0])[1:], FULL))
    return Op(handler, args, list(mods))


def _through_wide_registers(b, ins, row, types, handler, mods):
    """Lower a cvt with a register of 64 bits where its type has fewer: a stand-in of 32 takes its place."""
    outer, inner = [], []
    for operand, kind, place, name in zip(ins.operands, types, PLACES, STAND_INS):
        wide = is_wide(b, operand, kind)
        inner.append(hidden(b, name, 4) if wide else place(b, operand, kind, True))
        outer += [b.register(operand.name), inner[-1]] if wide else [-1, -1]
    head = THROUGH_WIDE(handler=generate.order().index(handler), signed=types[0][0] == "s")
    return Op("through_wide_registers", outer + inner, head + (MASKED_ROW(row=mods, mask=FULL) if row.masked else mods))


def lower_selp(b, ins):
    """`selp d, a, b, !p` is `selp d, b, a, p`."""
    if len(ins.operands) == 4 and isinstance(ins.operands[3], Negated):
        d, x, y, p = ins.operands
        ins = dataclasses.replace(ins, operands=(d, y, x, p.register))
    return lower_row(b, ins)


def _or_row(lower):
    """Return a lowering for what a row describes unless `lower` takes it."""
    return lambda b, ins: lower(b, ins) or lower_row(b, ins)


LOWERINGS = {
    **dict.fromkeys({row.opcode for row in generate.ROWS}, lower_row),
    **compare.LOWERINGS,
    **dict.fromkeys(("and", "or", "xor", "not"), _or_row(moves.lower_predicate_logic)),
    "selp": lower_selp,
    "mov": _or_row(moves.lower_mov),
    "lop3": _or_row(moves.lower_lop3),
    "cvta": moves.lower_cvta,
    "createpolicy": moves.lower_createpolicy,
}
