"""call: functions of the CUDA runtime, vprintf and __assertfail."""

from kda.simulator.isa.common import Op

# callee -> (handler, how many of its arguments that takes)
CALLEES = {"vprintf": ("printf", 2), "__assertfail": ("assertfail", 3)}


def lower_call(b, ins):
    _, callee, arguments = ins.operands
    if callee.name not in CALLEES:
        b.fail(f"a call of {callee.name}", f"inlined code, and calls of {', '.join(CALLEES)}")
    handler, taken = CALLEES[callee.name]
    return Op(handler, mods=[b.symbol(argument.name)[1] for argument in arguments.items[:taken]])


LOWERINGS = {"call": lower_call}
