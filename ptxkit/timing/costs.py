"""The cost of a PTX instruction on a chip: scheduler slots, units, latency, and what it waits for.

PTX stands for the machine code that ptxas generates: moves and parameters are free, and 64-bit integers take two
instructions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ptxkit.engine.binding import BARS_LOADS, HOISTED, ORDERED, PAST_L1, PIPES, STALLS, STORES, THROUGH_SHARED
from ptxkit.ptx.syntax import Address, Negated, Pair, Register, Special, Vector

SPECIAL = {"ex2", "rcp", "rsqrt", "lg2", "sqrt", "tanh", "sin", "cos"}
SHUFFLES = {"shfl", "vote", "match", "redux", "activemask"}
FREE = {"mov", "cvta", "ret", "pragma"}
WIDE = {"s64", "u64", "b64"}
TWICE = {"add", "sub", "mad", "shl", "shr", "and", "or", "xor", "min", "max", "neg", "abs"}  # twice for 64-bit integers
FLOATS = {"f32", "f16x2", "bf16x2", "f16", "bf16", "f32x2"}
# what begins after everything before it
ORDERING = {
    *("bra", "brx", "exit", "ret", "trap", "nanosleep", "elect", "discard", "setmaxnreg", "griddepcontrol"),
    *("bar", "barrier", "fence", "membar", "mbarrier", "cp", "wgmma", "tcgen05", "clusterlaunchcontrol"),
}
QUIET = ORDERING | {"prefetch", "prefetchu", "tensormap", "call"}  # uses no unit that is counted
NO_RESULT = QUIET - {"elect", "clusterlaunchcontrol", "mbarrier", "tcgen05"} | {"st", "red", "stmatrix", "pragma"}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f64": 64,
        "s4": 4, "u4": 4, "b1": 1, "e2m1": 4, "e2m3": 8, "e3m2": 8}


@dataclass
class Cost:
    issue: float = 1
    busy: dict[str, float] = field(default_factory=dict)
    latency: float = 0
    hold: float = 0
    operands: float = 0
    flags: int = 0
    stall: str = "wait"


def registers_of(ins):
    """Return (names of the registers that an instruction reads, names of those that it writes); a guard is read."""
    op, operands = ins.parts[0], ins.operands
    writes = bool(operands) and op not in NO_RESULT
    if op == "mbarrier":
        writes = writes and not isinstance(operands[0], Address)
    elif op == "tcgen05":
        writes = ins.parts[1] == "ld"
    elif op == "clusterlaunchcontrol":
        writes = "query_cancel" in ins.parts
    results = _names(operands[0]) if writes else []
    sources = [name for operand in operands[writes:] for name in _names(operand)]
    if op == "wgmma" and "mma_async" in ins.parts:  # who uses D waits for its group
        sources = [name for operand in operands[1:] for name in _names(operand)]
    if ins.guard:
        sources += _names(ins.guard.register)
    if "cc" in ins.parts or op in ("addc", "subc", "madc"):
        results, sources = [*results, "%cc"], [*sources, "%cc"]
    return sources, results


def _names(operand):
    match operand:
        case str():
            return [operand]
        case Register():
            return [operand.name]
        case Negated():
            return [operand.register.name]
        case Pair():
            return _names(operand.first) + _names(operand.second)
        case Vector():
            return [name for item in operand.items for name in _names(item)]
        case Address():
            return [name for part in (operand.base, *operand.coordinates) for name in _names(part)]
    return []


def cost_of(ins, chip):
    """Return the Cost of an instruction on a chip."""
    op = ins.parts[0]
    if op in QUIET and op not in _RULES:
        cost = Cost(issue=0 if op in FREE else 1, latency=chip.alu_latency)
    else:
        cost = _RULES.get(op, _arithmetic)(ins, chip)
    if op in ORDERING:
        cost.flags |= ORDERED
    if cost.flags & THROUGH_SHARED:
        cost.busy = {**cost.busy, "mio": chip.mio_busy}
    return cost


def _arithmetic(ins, chip):
    op, parts = ins.parts[0], set(ins.parts[1:])
    if op == "mov" and isinstance(ins.operands[1], Special) and "clock" in ins.operands[1].name:
        return Cost(latency=chip.alu_latency, flags=ORDERED)
    if op in FREE:
        return Cost(issue=0)
    if op in SPECIAL:
        return Cost(busy={"special": chip.special_busy}, latency=chip.special_latency, stall="short")
    if op in SHUFFLES:
        return Cost(latency=chip.shuffle_latency, busy={"mio": chip.mio_busy}, stall="short")
    if op in ("add", "sub", "mul", "fma", "mad") and parts & FLOATS:
        return Cost(busy={"fma": chip.pair_busy if "f32x2" in parts else chip.fma_busy}, latency=chip.fma_latency)
    slots = 2 if op in TWICE and parts & WIDE else 1
    return Cost(slots, {"alu": chip.alu_busy * slots}, chip.alu_latency)


def _load(ins, chip):
    parts = ins.parts
    if "param" in parts or "const" in parts:
        return Cost(issue=0 if "param" in parts else 1, latency=chip.parameter_latency)
    if "local" in parts:
        return Cost(latency=chip.l1_latency, flags=THROUGH_SHARED, stall="long")
    shared = any(p.startswith("shared") for p in parts) or parts[0] == "ldmatrix"
    past_l1 = parts[0] == "atom" or set(parts) & {"volatile", "cg", "cv", "relaxed", "acquire"}
    flags = THROUGH_SHARED | (PAST_L1 if past_l1 else HOISTED if "global" in parts else 0)
    return Cost(latency=chip.shared_latency, flags=flags, stall="short" if shared else "long")


def _store(ins, chip):
    bars = BARS_LOADS * (not any(p.startswith("shared") for p in ins.parts) and ins.parts[0] != "stmatrix")
    return Cost(latency=chip.alu_latency, flags=STORES | THROUGH_SHARED | bars)


def _mma(ins, chip):
    m, n, k = _shape(ins, r"m(\d+)n(\d+)k(\d+)")
    k //= 2 if any(p in ("sp", "sp::ordered_metadata") for p in ins.parts) else 1
    rate = chip.mma_rate * 16 / _bits(ins)
    latency = chip.mma_latency * (0.71 if m * n * k * _bits(ins) < 16 * 16 * 8 * 16 else 1)  # half the depth takes less
    return Cost(busy={"tensor": m * n * k / rate}, latency=latency, stall="tensor")


def _wgmma(ins, chip):
    if "mma_async" not in ins.parts:
        return Cost(latency=chip.alu_latency, stall="tensor")
    _, n, k = _shape(ins, r"m(\d+)n(\d+)k(\d+)")
    k = k // 2 if "sp" in ins.parts else k
    bits = _bits(ins)
    bytes_ = k * bits // 8
    from_shared = 0 if isinstance(ins.operands[1], Vector) else 16 * bytes_  # A's 16 rows of a warp
    steps, chain = k * bits / 256, 0.0  # steps have 32 bytes
    if from_shared:
        least = 16 + n / 4
    else:
        least, chain = 11 + 0.3 * n, chip.wgmma_registers
    clocks = max(16 * n * k / (chip.wgmma_rate * 16 / bits), least * steps * chip.wgmma_rate / 512)
    return Cost(busy={"tensor": clocks}, latency=chain, operands=(n * bytes_ / 4 + from_shared) / 128, stall="tensor")


def _barrier(ins, chip):
    stall = "wait" if "warp" in ins.parts else "cluster" if "cluster" in ins.parts else "barrier"
    return Cost(latency=chip.alu_latency, stall=stall)


def _mbarrier(ins, chip):
    if ins.parts[1].startswith("arrive"):
        return Cost(latency=chip.alu_latency, hold=chip.arrival)
    waits = ins.parts[1] in ("try_wait", "test_wait")
    return Cost(latency=chip.mbarrier_ready if waits else chip.alu_latency, stall="mbarrier")


def _copy(ins, chip):
    waits = any("wait" in p for p in ins.parts)
    small = "async" in ins.parts and not waits and "bulk" not in ins.parts
    return Cost(latency=chip.alu_latency, flags=PAST_L1 | THROUGH_SHARED * small, stall="copies")


def _fence(ins, chip):
    parts = set(ins.parts)
    hold = chip.fence_gpu if parts & {"gpu", "sys", "gl"} else chip.fence_proxy if "proxy" in parts else chip.fence_cta
    return Cost(latency=chip.alu_latency, hold=hold)


_RULES = {
    **dict.fromkeys(("ld", "ldmatrix", "atom", "ldu"), _load),
    **dict.fromkeys(("st", "stmatrix", "red"), _store),
    **dict.fromkeys(("bar", "barrier"), _barrier),
    **dict.fromkeys(("fence", "membar"), _fence),
    "mma": _mma, "wgmma": _wgmma, "mbarrier": _mbarrier, "cp": _copy,
    "wmma": lambda ins, chip: {"mma": _mma, "load": _load}.get(ins.parts[1], _store)(ins, chip),
    "tcgen05": lambda ins, chip: Cost(latency=getattr(chip, "tmem_latency" if ins.parts[1] == "ld" else "alu_latency"),
                                      stall="tensor"),
    "griddepcontrol": lambda ins, chip: Cost(latency=chip.alu_latency, stall="grid"),
}


def _shape(ins, pattern):
    return next(tuple(map(int, match.groups())) for p in ins.parts if (match := re.fullmatch(pattern, p)))


def _bits(ins):
    """Return the bits of an element of A: the last types of an instruction's name are those of D, A, B {and C}."""
    types = [p for p in ins.parts if p in BITS or p in ("f32", "s32")]
    return next((BITS[t] for t in types[1:] if t in BITS), 16)


def _words(registers):
    """Return name -> 32-bit words of it that an instruction reads; predicates have their own file."""
    return {name: 0 if type_ == "pred" else 2 if type_.endswith("64") else 1 for name, type_ in registers.items()}


def fill(table, program, chip):
    """Fill the engine's Timing of each instruction; the registers that they name, one list for all."""
    numbers = {name: n for n, name in enumerate((*program.kernel.registers, "%cc"))}
    listed, words = [], _words(program.kernel.registers)
    staying = set()  # operands of the instruction before: they stay where they are read
    for record, ins in zip(table, program.kernel.body):
        cost, (sources, results) = cost_of(ins, chip), registers_of(ins)
        if cost.busy.keys() & {"fma", "alu"}:
            read = {name for name in sources if words.get(name)}
            cost.busy["registers"] = sum(words[name] for name in read - staying) / chip.operands_read
            staying = read
        sources, results = ([numbers[name] for name in names if name in numbers] for names in (sources, results))
        record.issue, record.latency, record.operands = cost.issue, cost.latency, cost.operands
        record.hold = cost.hold
        for unit, clocks in cost.busy.items():
            record.busy[PIPES.index(unit)] = clocks
        record.first, record.nsources, record.nresults = len(listed), len(sources), len(results)
        record.flags, record.stall = cost.flags, STALLS.index(cost.stall)
        listed += sources + results
    last = table[program.count - 1]  # the exit that every kernel ends with
    last.issue, last.flags = 1, ORDERED
    return listed, len(numbers)
