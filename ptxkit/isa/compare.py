"""setp and set: all comparisons, from a few that C computes."""

from ptxkit.isa.common import Op
from ptxkit.isa.fields import COMPARE, SET
from ptxkit.isa.registers import predicate_target, source, target
from ptxkit.isa.rows import FLAGS
from ptxkit.ptx.syntax import Pair

INTEGERS = {**{f"{s}{n}": f"{s}{n}" for s in "us" for n in (16, 32, 64)}, **{f"b{n}": f"u{n}" for n in (16, 32, 64)}}
FLOATS = {"f16": "f16", "bf16": "bf16", "f32": "f32", "f64": "f64", "f16x2": "f16", "bf16x2": "bf16"}
PACKED = ("f16x2", "bf16x2")
# A NaN makes each of these false.
IN_C = {"eq": "a == b", "lt": "a < b", "le": "a <= b", "lg": "a < b || a > b", "num": "a == a && b == b"}
# handler -> (what a and b are read as, C)
HANDLERS = {
    **{f"eq_u{n}": (f"u{n}", IN_C["eq"]) for n in (16, 32, 64)},
    **{f"lt_{s}{n}": (f"{s}{n}", IN_C["lt"]) for s in "us" for n in (16, 32, 64)},
    **{f"{name}_{kind}": (kind, value) for kind in ("f16", "bf16", "f32", "f64") for name, value in IN_C.items()},
}
# comparison -> (what C computes, with a and b exchanged, negated)
OF_INTEGERS = {
    "eq": ("eq", False, False), "ne": ("eq", False, True),
    "lt": ("lt", False, False), "gt": ("lt", True, False), "le": ("lt", True, True), "ge": ("lt", False, True),
}
OF_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
OF_FLOATS = {
    "eq": ("eq", False, False), "ne": ("lg", False, False),
    "lt": ("lt", False, False), "gt": ("lt", True, False), "le": ("le", False, False), "ge": ("le", True, False),
    "equ": ("lg", False, True), "neu": ("eq", False, True),
    "ltu": ("le", True, True), "gtu": ("le", False, True), "leu": ("lt", True, True), "geu": ("lt", False, True),
    "num": ("num", False, False), "nan": ("num", False, True),
}
COMBINE = {"and": 1, "or": 2, "xor": 3}
# (type of the result, of a packed type) -> what true looks like, in each element
TRUE = {
    **{(t, False): 0xFFFFFFFF for t in ("u32", "s32")}, **{(t, False): 0xFFFF for t in ("u16", "s16")},
    ("f32", False): 0x3F800000, ("f16", False): 0x3C00, ("bf16", False): 0x3F80,
    **{(t, True): 0xFFFF for t in ("u32", "s32")}, ("f16x2", True): 0x3C00, ("bf16x2", True): 0x3F80,
}


def _comparison(b, ins, type_):
    """Return (what C computes, exchanged, negated) for the instruction's comparison of that type."""
    comparison = ins.parts[1]
    if type_ in FLOATS:
        known = OF_FLOATS
    else:
        unsigned = {spelled: OF_INTEGERS[name] for spelled, name in OF_UNSIGNED.items()}
        bits = {name: OF_INTEGERS[name] for name in ("eq", "ne")}
        known = {"u": OF_INTEGERS | unsigned, "s": OF_INTEGERS, "b": bits}[type_[0]]
    if comparison not in known:
        b.fail(f"comparison .{comparison} of .{type_}", ", ".join(known))
    return known[comparison]


def _compare(b, ins, types):
    """Return (C comparison, offsets of a, b, c, numbers for the engine) of an opcode that ends in that many types."""
    type_ = ins.parts[-1]
    kind = FLOATS.get(type_) or INTEGERS.get(type_)
    words = ins.parts[2 : len(ins.parts) - types]
    if kind is None or len(ins.parts) < types + 2:
        b.fail(f"a comparison of .{type_}", ", ".join((*INTEGERS, *FLOATS)))
    name, exchanged, negated = _comparison(b, ins, type_)
    extra = [w for w in words if w not in COMBINE and not (w == "ftz" and type_ in ("f32", "f16", "f16x2"))]
    combined = [w for w in words if w in COMBINE]
    if extra or len(combined) > 1:
        b.fail(f"modifiers {'.'.join(words)}", "one of .and, .or, .xor; .ftz with f32, f16 and f16x2")
    if len(ins.operands) != 3 + len(combined):
        b.fail(f"{len(ins.operands)} operands", "d, a, b, and with .and, .or or .xor a predicate c")
    x, y = (source(b, o, type_) for o in ins.operands[1:3])
    c, c_negated = b.predicate(ins.operands[3]) if combined else (-1, False)
    args = [y, x, c] if exchanged else [x, y, c]
    mods = COMPARE(
        flags=FLAGS["ftz"] if "ftz" in words else 0, negate=negated, combine=COMBINE[combined[0]] if combined else 0,
        negate_c=c_negated, packed=type_ in PACKED,
    )
    return f"{name}_{kind if kind in FLOATS or name != 'eq' else 'u' + kind[1:]}", args, mods


def lower_setp(b, ins):
    """setp.CmpOp{.BoolOp}{.ftz}.type p[|q], a, b{, {!}c}"""
    handler, args, mods = _compare(b, ins, types=1)
    result = ins.operands[0]
    p, q = (result.first, result.second) if isinstance(result, Pair) else (result, None)
    return Op(f"setp_{handler}", [predicate_target(b, p), predicate_target(b, q), *args], mods)


def lower_set(b, ins):
    """set.CmpOp{.BoolOp}{.ftz}.dtype.stype d, a, b{, {!}c}"""
    handler, args, mods = _compare(b, ins, types=2)
    type_, source_type = ins.parts[-2:]
    if (true := TRUE.get((type_, source_type in PACKED))) is None:
        known = sorted(t for t, packed in TRUE if packed == (source_type in PACKED))
        b.fail(f"results of .{type_} from .{source_type}", ", ".join(known))
    return Op(f"set_{handler}", [target(b, ins.operands[0], "b32"), *args], SET(compare=mods, true=true))


LOWERINGS = {"setp": lower_setp, "set": lower_set}
