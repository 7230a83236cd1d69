"""Branches, exits, and instructions without an effect here."""

from ptxkit.isa.common import Op, registers
from ptxkit.isa.fields import BRA, BRX


def lower_bra(b, ins):
    return Op("bra", mods=BRA(target=b.kernel.labels[ins.operands[0].name]))


def lower_brx(b, ins):
    index, targets = ins.operands[0], ins.operands[1:]
    labels = [b.kernel.labels[t.name] for target in targets for t in getattr(target, "items", (target,))]
    return Op("brx", [b.value(index, "u32")], [*BRX(count=len(labels)), *labels])


def lower_nanosleep(b, ins):
    registers(b, ins, t="u32")  # for how long, which has no effect here
    return Op("nanosleep")


NOTHING = ("brkpt", "pmevent", "applypriority", "prefetch", "prefetchu")
LOWERINGS = {
    "bra": lower_bra,
    "brx": lower_brx,
    "ret": lambda b, ins: Op("return" if b.in_function else "exit"),
    "exit": lambda b, ins: Op("exit"),
    "nanosleep": lower_nanosleep,
    "trap": lambda b, ins: Op("trap"),
    **dict.fromkeys(NOTHING, lambda b, ins: Op("nop")),
}
