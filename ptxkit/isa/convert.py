"""cvt between all types. Registers wider than their type are scalar.py's affair.

A signed result of 8 or 16 bits fills its register: `mask` is what the register has of the 32-bit word.
"""

from ptxkit.isa.rows import KINDS, listed, rows

INTEGERS = [f"{s}{n}" for n in (8, 16, 32, 64) for s in "us"]
FLOATS = ["f16", "bf16", "f32", "f64"]
INSIDE = ("u2", "s2", "u4", "s4", "u8", "s8")  # types that cvt.pack packs
SMALL = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2")
# between a float and an integer
MODIFIERS = {"f16": "cvt.{}{{.sat}}", "bf16": "cvt.{}", "f32": "cvt.{}{{.ftz}}{{.sat}}", "f64": "cvt.{}{{.sat}}"}


def _bits(type_):
    return KINDS[type_].bits


def _result(type_, value):
    """Return (value, kind) of an integer result: signed ones below 32 bits fill what `mask` leaves of the word."""
    return (f"(u32)(s32)({type_})({value}) & mask", "u32") if type_ in ("s8", "s16") else (f"({type_})({value})", type_)


def _integer_to_integer(d, s):
    # If the source is cut, only its word matters: such conversions share a handler.
    source = s if _bits(d) > _bits(s) else "u64" if _bits(s) == 64 else "u32"
    value, kind = _result(d, f"({d})a")
    yield "cvt", f"{d}.{s}", value, f"{kind} = {source}"
    if (d[0] == s[0] and _bits(d) >= _bits(s)) or (d[0] == "s" and _bits(d) > _bits(s)):
        return  # nothing to saturate
    if s[0] == "u":
        clamped = f"a > (u64)MAX_{d} ? ({d})MAX_{d} : ({d})a"
    elif d == "u64":
        clamped = "a < 0 ? 0 : (u64)a"
    else:
        clamped = f"(s64)a < (s64)MIN_{d} ? ({d})MIN_{d} : (s64)a > (s64)MAX_{d} ? ({d})MAX_{d} : ({d})a"
    value, kind = _result(d, clamped)
    yield "cvt.sat", f"{d}.{s}", value, f"{kind} = {s}"


def _integer_to_float(d, s):
    value = "(T)a" if d in ("f32", "f64") else "odd_unsigned(a)" if s[0] == "u" else "odd_signed(a)"
    yield MODIFIERS[d].format("rnd"), f"{d}.{s}", value, "T = S"


def _float_to_integer(d, s):
    of_nan = f"1ull << {_bits(d) - 1}" if s == "f64" or _bits(d) == 64 else "0"
    value, kind = _result(d, f"TO_INTEGER({d}, (double)a, rounding, MIN_{d}, MAX_{d}, {of_nan})")
    yield MODIFIERS[s].format("irnd"), f"{d}.{s}", value, f"{kind} = S"


# Two to a register. The first source is the upper element; a value with `;` gives the elements from the lowest.
RANDOMLY = "round_randomly(b, {0}, flags, c & {1}); round_randomly(a, {0}, flags, c >> 16 & {1})"
PACKED = (
    ("cvt.rnd2{.relu}{.satfinite}", "f16x2.f32 bf16x2.f32", "b; a", "T = S, S"),
    ("cvt.rs{.relu}{.satfinite}", "f16x2.f32", RANDOMLY.format("AS_F16", "0x1fff"), "u16x2 = f32, f32, b32"),
    ("cvt.rs{.relu}{.satfinite}", "bf16x2.f32", RANDOMLY.format("AS_BF16", "0xffff"), "u16x2 = f32, f32, b32"),
    ("cvt.rn.satfinite{.relu}", " ".join(f"{t}.f32" for t in SMALL), "b; a", "T = S, S"),
    ("cvt.rn.satfinite{.relu}", " ".join(f"{t}.{s}" for t in SMALL for s in ("f16x2", "bf16x2")), "a", "T = S"),
    ("cvt.rn{.relu}", " ".join(f"f16x2.{t}" for t in SMALL), "a", "T = S"),
    ("cvt.rnd3{.satfinite}", "ue8m0x2.f32", "b; a", "T = S, S"),
    ("cvt.rnd3{.satfinite}", "ue8m0x2.bf16x2", "a", "T = S"),
    ("cvt.rn", "bf16x2.ue8m0x2", "a", "T = S"),
    *(("cvt.pack.sat", f"{t}.s32", f"pack(a, b, 0, 16, MIN_{t}, MAX_{t})", "u32 = s32, s32") for t in ("u16", "s16")),
    *(
        ("cvt.pack.sat", f"{t}.s32.b32", f"pack(a, b, c, {t[1:]}, MIN_{t}, MAX_{t})", "u32 = s32, s32, u32")
        for t in INSIDE
    ),
)

_PAIRS = (
    *(row for d in INTEGERS for s in INTEGERS for row in _integer_to_integer(d, s)),
    *(row for d in FLOATS for s in INTEGERS for row in _integer_to_float(d, s)),
    *(row for d in INTEGERS for s in FLOATS for row in _float_to_integer(d, s)),
)
TABLE = rows(*_PAIRS, *listed("convert"), *PACKED)
