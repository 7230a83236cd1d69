"""call: the program's own device functions, and those of the CUDA runtime, vprintf and __assertfail."""

from ptxkit.isa.common import WIDTHS, Op
from ptxkit.isa.fields import ASSERTFAIL, CALL, PRINTF, TARGET
from ptxkit.ptx.syntax import Register, Symbol

# callee of the CUDA runtime -> (handler, its fields: where the first arguments lie)
CALLEES = {"vprintf": ("printf", PRINTF), "__assertfail": ("assertfail", ASSERTFAIL)}


def lower_call(b, ins):
    results, callee, arguments = ins.operands
    if isinstance(callee, Symbol) and callee.name in CALLEES:
        handler, fields = CALLEES[callee.name]
        if len(arguments.items) < len(fields.parts):
            b.fail(f"{len(arguments.items)} arguments of {callee.name}", f"{len(fields.parts)} or more")
        places = (b.symbol(argument.name)[1] for argument in arguments.items)
        return Op(handler, mods=fields(**dict(zip(fields.parts, places))))
    if isinstance(callee, Symbol) and callee.name not in b.linked:
        known = f"functions that it defines, and {', '.join(CALLEES)}"
        b.fail(f"a call of {callee.name}, which this module does not define", known)
    passed, returned = ([_passed(b, v) for v in vector.items] for vector in (arguments, results))
    sizes = [v.size for v in passed], [v.size for v in returned]
    if isinstance(callee, Register):
        address = b.value(callee, "b64")
        targets = [f for f in b.linked.values() if f.by_address and _sizes(f) == sizes]
    else:
        address, targets = -1, [b.linked[callee.name]]
        if _sizes(targets[0]) != sizes:
            declared = "{} and {}, as {} declares them".format(*_sizes(targets[0]), callee.name)
            b.fail("arguments of {} bytes and results of {}".format(*sizes), declared)
    op = Op("call", [address, b.stack_end if b.stack_end is not None else -1])
    b.calls.append((op, passed, returned, targets))
    return op


def _passed(b, operand):
    """Return the .param variable that an argument or a result goes through."""
    if (variable := b.param_variables.get(getattr(operand, "name", None))) is None:
        b.fail(f"{operand} as an argument or a result", "variables in .param, as compilers write them")
    return variable


def _sizes(f):
    return [v.size for v in f.params], [v.size for v in f.results]


def finish(b):
    """Complete the calls once every function has its registers: what engine/functions.c reads."""
    for op, passed, returned, targets in b.calls:
        op.mods = CALL(arguments=len(passed), results=len(returned), targets=len(targets), stack_end=b.local_bytes)
        for v in (*passed, *returned):
            op.mods += [v.size, b.symbols[v.name][1]]
        for f in targets:
            op.mods += _target(b, f)


def _target(b, f):
    places = [b.symbols[v.name][1] for v in (*f.params, *f.results)]
    pointers = sorted(b.stack_pointers.get(f.name, {}).items())
    saved, static = [], []
    if f.recursive:
        saved = [(b.registers[r], WIDTHS[b.kernel.registers[r]]) for r in f.registers if r in b.registers]
        saved += [(register, 8) for _, register in pointers]
        static = [(b.symbols[v.name][1], v.size) for v in f.variables if v.space == "param"]
    turned = [(register, offset) for offset, register in pointers]
    tail = [*places, *(n for pair in (*saved, *turned) for n in pair)]
    head = TARGET(
        length=TARGET.size + len(tail), address=b.code_address(f.name), entry=f.first, recursive=f.recursive,
        frame=b.frames.get(f.name, 0), local_from=min((begin for begin, _ in static), default=0),
        local_to=max((begin + size for begin, size in static), default=0), registers=len(saved), pointers=len(pointers),
    )
    return [*head, *tail]


LOWERINGS = {"call": lower_call}
