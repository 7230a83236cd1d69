"""Branches, exits, and instructions without an effect here."""

from ptxkit.isa.common import Op, operands
from ptxkit.isa.fields import BRA, BRX


def lower_bra(b, ins):
    return Op("bra", mods=BRA(target=b.kernel.labels[ins.operands[0].name]))


def lower_brx(b, ins):
    index, targets = ins.operands[0], ins.operands[1:]
    labels = [b.kernel.labels[t.name] for target in targets for t in getattr(target, "items", (target,))]
    return Op("brx", [b.value(index, "u32")], [*BRX(count=len(labels)), *labels])


def lower_ret(b, ins):
    return Op("return" if b.in_function else "exit")


def lower_nanosleep(b, ins):
    (time,) = operands(b, ins, "t")
    b.value(time, "u32")
    return Op("nanosleep")


NOTHING = ("brkpt", "pmevent", "discard", "applypriority", "prefetch", "prefetchu")
LOWERINGS = {
    "bra": lower_bra,
    "brx": lower_brx,
    "ret": lower_ret,
    "exit": lambda b, ins: Op("exit"),
    "nanosleep": lower_nanosleep,
    "trap": lambda b, ins: Op("trap"),
    **dict.fromkeys(NOTHING, lambda b, ins: Op("nop")),
}
