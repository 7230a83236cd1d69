"""A kernel and the device functions that it may call, as one body with one set of names.

Every register, label, parameter and variable of a function f is called `f:name`. Its body follows the kernel's, and
ends with a `ret` of its own. Which functions may run is found from the kernel: those that it calls, those whose
address it takes or finds in a variable, and so on through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ptxkit.ptx import syntax


@dataclass(frozen=True)
class Linked:
    """A function's place in the body, and what its calls need to know."""

    name: str
    first: int  # index of its first instruction
    end: int
    params: tuple[syntax.Variable, ...]
    results: tuple[syntax.Variable, ...]
    registers: tuple[str, ...]
    variables: tuple[syntax.Variable, ...]
    recursive: bool  # it may be called while it runs
    by_address: bool  # its address is taken


def link(module: syntax.Module, kernel: syntax.PtxKernel) -> tuple[syntax.PtxKernel, dict[str, Linked]]:
    """Return the kernel with the bodies of its functions, and these by name; the kernel itself where it calls none."""
    reached, taken = _reachable(module, kernel)
    if not reached:
        return kernel, {}
    calls = {f.name: _called(f, taken) & reached.keys() for f in reached.values()}
    body = [*kernel.body, _return(kernel)]
    registers, labels, variables, placed = dict(kernel.registers), dict(kernel.labels), [*kernel.variables], {}
    for name, f in reached.items():
        first = len(body)
        renamed = _Renamed(f)
        body += [renamed.instruction(i) for i in f.body]
        body.append(_return(f))
        params, results = (tuple(renamed.variable(_as_variable(p, f)) for p in ps) for ps in (f.params, f.results))
        new_variables = (*params, *results, *(renamed.variable(v) for v in f.variables))
        variables += new_variables
        new = {renamed.name(r): type_ for r, type_ in f.registers.items()}
        registers |= new
        labels |= {renamed.name(label): first + index for label, index in f.labels.items()}
        recursive = name in _closure(calls, calls[name])
        placed[name] = Linked(
            name, first, len(body), params, results, tuple(new), new_variables, recursive, name in taken
        )
    return replace(kernel, body=tuple(body), registers=registers, labels=labels, variables=tuple(variables)), placed


def _reachable(module: syntax.Module, kernel: syntax.PtxKernel) -> tuple[dict[str, syntax.PtxFunction], set[str]]:
    """Return (the defined functions that may run, the names of those whose address is taken)."""
    pointers = {v.name: {symbol for _, symbol, _ in v.addresses} for v in module.variables}
    taken, seen = set[str](), set[str]()
    waiting: list[tuple[str, bool]] = list(_mentioned(kernel))
    while waiting:
        name, called = waiting.pop()
        f = module.functions.get(name)
        if f and not called:
            taken.add(name)
        if name not in seen:
            seen.add(name)
            waiting += [(other, False) for other in pointers.get(name, ())]
            waiting += _mentioned(f) if f and f.defined else ()
    return {name: f for name, f in module.functions.items() if name in seen and f.defined}, taken


def _mentioned(kernel: syntax.PtxKernel) -> Iterator[tuple[str, bool]]:
    """Yield each symbol that a body names, and whether it is called there."""
    for ins in kernel.body:
        called = ins.parts[0] == "call"
        for n, operand in enumerate(ins.operands):
            yield from ((s.name, called and n == 1) for s in _symbols(operand))


def _symbols(operand: syntax.Operand) -> Iterator[syntax.Symbol]:
    if isinstance(operand, syntax.Symbol):
        yield operand
    elif isinstance(operand, syntax.Address):
        yield from _symbols(operand.base)
    elif isinstance(operand, syntax.Vector):
        for item in operand.items:
            yield from _symbols(item)


def _called(f: syntax.PtxFunction, taken: set[str]) -> set[str]:
    """Return the functions that it may call itself: through a pointer, each whose address is taken."""
    callees = [ins.operands[1] for ins in f.body if ins.parts[0] == "call"]
    direct = {c.name for c in callees if isinstance(c, syntax.Symbol)}
    return direct | (taken if any(isinstance(c, syntax.Register) for c in callees) else set())


def _closure(calls: dict[str, set[str]], names: set[str]) -> set[str]:
    closure, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name not in closure:
            closure.add(name)
            waiting += calls[name]
    return closure


def _return(kernel: syntax.PtxKernel) -> syntax.Instruction:
    last = kernel.body[-1] if kernel.body else None
    line, loc = (last.line, last.loc) if last else (kernel.line, None)
    return syntax.Instruction("ret", ("ret",), None, (), line, loc, "ret;")


def _as_variable(p: syntax.PtxParam, f: syntax.PtxFunction) -> syntax.Variable:
    return syntax.Variable(p.name, "param", p.type, p.align, p.size, p.count, None, False, f.line)


class _Renamed:
    """The names of a function, made its own."""

    def __init__(self, f: syntax.PtxFunction):
        self.function = f.name
        self.names = {v.name for v in f.variables} | {p.name for p in (*f.params, *f.results)}

    def name(self, name: str) -> str:
        return f"{self.function}:{name}"

    def variable(self, v: syntax.Variable) -> syntax.Variable:
        return replace(v, name=self.name(v.name))

    def instruction(self, ins: syntax.Instruction) -> syntax.Instruction:
        guard = ins.guard and syntax.Guard(self.name(ins.guard.register), ins.guard.negated)
        return replace(ins, guard=guard, operands=tuple(self.operand(o) for o in ins.operands))

    def operand(self, operand: syntax.Operand) -> syntax.Operand:
        match operand:
            case syntax.Register(name=name):
                return syntax.Register(self.name(name))
            case syntax.Label(name=name):
                return syntax.Label(self.name(name))
            case syntax.Symbol(name=name) if name in self.names:
                return replace(operand, name=self.name(name))
            case syntax.Negated(register=register):
                return syntax.Negated(syntax.Register(self.name(register.name)))
            case syntax.Pair(first=first, second=second):
                return syntax.Pair(self.operand(first), self.operand(second))  # type: ignore[arg-type]
            case syntax.Vector(items=items):
                return syntax.Vector(tuple(self.operand(o) for o in items))
            case syntax.Address(base=base, coordinates=coordinates):
                moved = tuple(self.operand(o) for o in coordinates)
                return replace(operand, base=self.operand(base), coordinates=moved)  # type: ignore[arg-type]
        return operand
