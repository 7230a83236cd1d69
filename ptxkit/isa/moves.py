"""What moves values: mov with vectors, clocks and predicates, cvta, createpolicy; and the logic of predicates."""

from ptxkit.isa.common import Op, operands
from ptxkit.isa.fields import CLOCK, LOP3, PACK, PREDICATES
from ptxkit.isa.registers import predicate_target, source, target
from ptxkit.isa.rows import KINDS
from ptxkit.ptx.syntax import Pair, Sink, Special, Vector

COMBINE = {"mov": 0, "not": 0, "and": 1, "or": 2, "xor": 3}
# special registers that tell the time, in instructions that the machine has run: how far to shift it
CLOCKS = {"%clock": 0, "%clock64": 0, "%clock_hi": 32, "%globaltimer": 0, "%globaltimer_lo": 0, "%globaltimer_hi": 32}
BITS = {"b16": 16, "b32": 32, "b64": 64, "b128": 128}
MOV_B64 = "mov_b64_1"
PACKS = {(16, 2): "b16", (32, 2): "b32"}  # (bits of an item, items) with a handler of their own


def lower_mov(b, ins):
    """Lower mov of anything but a plain register; return None for that."""
    if len(ins.parts) != 2 or len(ins.operands) != 2:
        return None
    type_, (d, a) = ins.parts[1], ins.operands
    if predicate := lower_predicate_logic(b, ins):
        return predicate
    if isinstance(d, Vector) or isinstance(a, Vector):
        return _pack(b, type_, d, a)
    if type_ == "b128":
        return Op("mov_b128", [target(b, d, type_), source(b, a, type_)])
    if isinstance(a, Special) and a.name in CLOCKS and type_ in KINDS:
        mods = CLOCK(wide=KINDS[type_].word == "u64", shift=CLOCKS[a.name], nanoseconds="globaltimer" in a.name)
        return Op("read_clock", [target(b, d, type_)], mods)
    return None


def _pack(b, type_, d, a):
    """Lower a mov from {a, b} to one register, or back."""
    vector, whole = (d, a) if isinstance(d, Vector) else (a, d)
    count = len(vector.items)
    fits = count in (2, 4) and BITS.get(type_, 0) // count in (8, 16, 32, 64)
    if not fits or isinstance(whole, Vector):
        b.fail(f"a vector of {count} and .{type_}", ".b16, .b32, .b64 or .b128 with two or four items of 8 to 64 bits")
    bits = BITS[type_] // count
    item = f"b{bits}"
    handler = PACKS.get((bits, count), "any")
    mods = PACK(bytes=bits // 8, count=count) if handler == "any" else []
    if vector is d:
        items = [-1 if isinstance(v, Sink) else target(b, v, item) for v in vector.items]
        return Op(f"unpack_{handler}", [source(b, whole, type_), *items], mods)
    return Op(f"pack_{handler}", [target(b, whole, type_), *(source(b, v, item) for v in vector.items)], mods)


def lower_predicate_logic(b, ins):
    """Lower and, or, xor, not and mov of .pred; return None for other types."""
    if ins.parts[1:] != ("pred",):
        return None
    how = ins.parts[0]
    d, x, *rest = operands(b, ins, "d", "a", *(["b"] if COMBINE[how] else []))
    first, negate_a = b.predicate(x)
    second, negate_b = b.predicate(rest[0]) if rest else (-1, False)
    mods = PREDICATES(combine=COMBINE[how], negate_a=negate_a, negate_b=negate_b, negate=how == "not")
    return Op("predicate_logic", [target(b, d, "pred"), first, second], mods)


def lower_lop3(b, ins):
    """lop3.or and lop3.and, which also give a predicate; None for lop3.b32."""
    how = [w for w in ins.parts[1:-1] if w in ("and", "or")]
    if not how or ins.parts[-1] != "b32":
        return None
    d, x, y, z, table, q = operands(b, ins, "d|p", "a", "b", "c", "immLut", "{!}q")
    if not isinstance(d, Pair):
        b.fail("one result", "d|p")
    result = -1 if isinstance(d.first, Sink) else target(b, d.first, "b32")
    last, negated = b.predicate(q)
    sources = [source(b, o, "b32") for o in (x, y, z, table)]
    mods = LOP3(combine=COMBINE[how[0]], negated=negated)
    return Op("lop3_test", [result, predicate_target(b, d.second), *sources, last], mods)


# ---- addresses: the top byte of a generic address names its space (engine/memory.h)

WINDOWS = {"global": 0, "const": 0, "local": 3, "param": 4, "param::entry": 4}
WINDOWS |= dict.fromkeys(("shared", "shared::cta", "shared::cluster"), 2)


def lower_cvta(b, ins):
    """cvta{.to}.space.u64 d, a"""
    to = "to" in ins.parts[1:2]
    space, *size = ins.parts[1 + to :] or ("",)
    if space not in WINDOWS or size != ["u64"]:
        b.fail(".".join(ins.parts), f"cvta{{.to}}.space.u64 with space one of {', '.join(WINDOWS)}")
    d, a = operands(b, ins, "d", "a")
    mask = (1 << 32) - 1 if WINDOWS[space] == WINDOWS["shared"] else (1 << 56) - 1
    window = 0 if to else WINDOWS[space] << 56
    args = [target(b, d, "u64"), source(b, a, "u64")]
    if not WINDOWS[space]:
        return Op(MOV_B64, args)
    return Op("cvta_b64_3", [*args, b.constant(mask, 8), b.constant(window, 8)])


def lower_createpolicy(b, ins):
    """Cache policies have no effect here: the policy is 0."""
    if ins.parts[1:2] not in (("fractional",), ("range",), ("cvt",)) or ins.parts[-1] != "b64":
        b.fail(ins.opcode, "createpolicy with .fractional, .range or .cvt, ending in .b64")
    policy, *_ = operands(b, ins, "d", optional=["a", "b", "c"])
    return Op(MOV_B64, [target(b, policy, "b64"), b.constant(0, 8)])
