"""Integers, bits, comparisons, moves: each instruction against whole-number arithmetic of its own."""

import operator

import pytest
import torch
from assembly import kernel, refused
from lanes import apply, bits_of, check, signed, values

from ptxkit.launches import launch

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("draws")]


def of_kind(kind, function, result=None):
    """Return a model from a function of integers: operands read as the kind says, the result cut to its width."""
    bits = bits_of(kind)
    read = (lambda x: signed(x, bits)) if kind[0] == "s" else (lambda x: x)
    mask = (1 << (result or bits)) - 1
    return lambda *x: function(*map(read, x)) & mask


def clamp(x, bits):
    return max(-(1 << bits - 1), min((1 << bits - 1) - 1, x))


def divided(a, b):
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a, b):
    return -1 if b == 0 else abs(a) % abs(b) * (-1 if a < 0 else 1)


def of_type(kind, table):
    """Return opcode.kind -> model for a table of opcode -> function of integers."""
    return {f"{op}.{kind}": of_kind(kind, function) for op, function in table.items()}


KINDS = ("u16", "s16", "u32", "s32", "u64", "s64")
BINARY = {
    "add": operator.add, "sub": operator.sub, "mul.lo": operator.mul, "div": divided, "rem": remainder,
    "min": min, "max": max,
}


@pytest.mark.parametrize("kind", KINDS)
def test_arithmetic_wraps_at_the_width_of_its_type(kind):
    bits = bits_of(kind)
    check(of_type(kind, BINARY | {"mul.hi": lambda a, b: a * b >> bits}), kind, (kind,) * 2)
    ternary = {
        "mad.lo": lambda a, b, c: a * b + c,
        "mad.hi": lambda a, b, c: (a * b >> bits) + c,
        "sad": lambda a, b, c: c + abs(a - b),
    }
    check(of_type(kind, ternary), kind, (kind,) * 3)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products_have_twice_the_bits(kind):
    wide = 2 * bits_of(kind)
    product = of_kind(kind, operator.mul, wide)
    check({f"mul.wide.{kind}": product}, f"b{wide}", (kind, kind))
    sums = {f"mad.wide.{kind}": lambda a, b, c: (product(a, b) + c) & (1 << wide) - 1}
    check(sums, f"b{wide}", (kind, kind, f"{kind[0]}{wide}"))


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_abs_and_neg_leave_the_least_number_as_it_is(kind):
    check(of_type(kind, {"abs": abs, "neg": operator.neg}), kind, (kind,))


def test_saturation_stops_at_the_ends_of_s32():
    low = lambda x: signed(x, 24)  # noqa: E731
    two = {"add.sat": lambda a, b: clamp(a + b, 32), "sub.sat": lambda a, b: clamp(a - b, 32)}
    three = {
        "mad.hi.sat": lambda a, b, c: clamp((a * b >> 32) + c, 32),
        "mad24.hi.sat": lambda a, b, c: clamp((low(a) * low(b) >> 16) + c, 32),
    }
    check(of_type("s32", two), "b32", ("s32",) * 2)
    check(of_type("s32", three), "b32", ("s32",) * 3)


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_24_bit_products_ignore_the_upper_byte(kind):
    low = (lambda x: signed(x, 24)) if kind == "s32" else (lambda x: x & 0xFFFFFF)
    two = {"mul24.lo": lambda a, b: low(a) * low(b), "mul24.hi": lambda a, b: low(a) * low(b) >> 16}
    three = {"mad24.lo": lambda a, b, c: low(a) * low(b) + c, "mad24.hi": lambda a, b, c: (low(a) * low(b) >> 16) + c}
    for arity, table in ((2, two), (3, three)):
        check(of_type(kind, table), "b32", (kind,) * arity, count=3000)


def halves(model):
    return lambda *x: model(*(v & 0xFFFF for v in x)) | model(*(v >> 16 for v in x)) << 16


RELU = {"min.relu": lambda a, b: max(0, min(a, b)), "max.relu": lambda a, b: max(0, a, b)}


def test_packed_integers_do_not_carry_from_one_half_to_the_other():
    plain = {"add": operator.add, "min": min, "max": max}
    table = of_type("u16", plain) | of_type("s16", plain | RELU)
    check({f"{text}x2": halves(model) for text, model in table.items()}, "b32", ("u16x2", "u16x2"))
    check(of_type("s32", RELU), "b32", ("s32", "s32"))


def test_dot_products_extend_each_byte_as_its_type_says():
    def parts(x, size, is_signed):
        items = [x >> n & (1 << size) - 1 for n in range(0, 32, size)]
        return [signed(i, size) for i in items] if is_signed else items

    def dp(size, s, t, first):
        return lambda a, b, c: (c + sum(x * y for x, y in zip(parts(a, size, s), parts(b, 8, t)[first:]))) & 0xFFFFFFFF

    forms = {"dp4a": (8, 0), "dp2a.lo": (16, 0), "dp2a.hi": (16, 2)}
    table = {
        f"{op}.{s}32.{t}32": dp(size, s == "s", t == "s", first)
        for s in "us" for t in "us" for op, (size, first) in forms.items()
    }
    check(table, "b32", ("u32",) * 3)


# ---- the carry flag


@pytest.mark.parametrize("bits", [32, 64])
def test_the_carry_flag_joins_words_into_longer_numbers(bits):
    mask, words = (1 << bits) - 1, [f"%{'r' if bits == 32 else 'x'}{n}" for n in (1, 2, 3)]
    low, high, third = words
    table = {}
    for op, function in (("add", operator.add), ("sub", operator.sub)):
        for n, word in enumerate(words):
            text = f"""{op}.cc.u{bits} {low}, %a, %c; {op}c.cc.u{bits} {high}, %b, %e; {op}c.u{bits} {third}, 0, 0;
                       mov.b{bits} %d, {word};"""
            table[text] = lambda a, b, c, e, f=function, n=n: f(b << bits | a, e << bits | c) >> n * bits & mask
    check(table, f"b{bits}", (f"u{bits}",) * 4)


def test_a_carry_belongs_to_its_lane_and_outlives_what_does_not_write_it():
    text = """add.cc.u32 %r1, %a, %b; add.u32 %r2, %a, %b; addc.u32 %r3, 0, 0;
              setp.eq.u32 %p, %a, 0; @%p add.cc.u32 %r1, 1, 1; addc.u32 %r4, 0, 0;
              shl.b32 %r4, %r4, 4; or.b32 %d, %r3, %r4;"""
    table = {text: lambda a, b: (a + b >> 32) | (0 if a == 0 else a + b >> 32) << 4}
    check(table, "b32", ("u32", "u32"), count=500)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_mad_with_carry_multiplies_longer_numbers(kind):
    bits = bits_of(kind)
    mask, r = (1 << bits) - 1, "%r1" if bits == 32 else "%x1"
    product = of_kind(kind, operator.mul, 2 * bits)
    table = {}
    for half, f in (("lo", lambda a, b: product(a, b) & mask), ("hi", lambda a, b: product(a, b) >> bits)):
        text = f"mad.{half}.cc.{kind} {r}, %a, %b, %c; madc.{half}.{kind} %d, %a, %c, %b;"
        table[text] = lambda a, b, c, f=f: f(a, c) + b + (f(a, b) + c >> bits) & mask
    check(table, f"b{bits}", (kind,) * 3)


# ---- bits


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_and_reversing_bits(bits):
    kind, mask = f"b{bits}", (1 << bits) - 1

    def bfind(shift, is_signed):
        def model(a):
            x = ~a & mask if is_signed and a >> bits - 1 else a
            return 0xFFFFFFFF if not x else bits - x.bit_length() if shift else x.bit_length() - 1

        return model

    table = {f"popc.b{bits}": lambda a: a.bit_count(), f"clz.b{bits}": lambda a: bits - a.bit_length()}
    table |= {f"bfind{s}.{t}{bits}": bfind(bool(s), t == "s") for s in ("", ".shiftamt") for t in "us"}
    check(table, "b32", (kind,))
    check({f"brev.b{bits}": lambda a: int(f"{a:0{bits}b}"[::-1], 2)}, kind, (kind,))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields_are_extracted_as_the_manuals_loop_does_it(kind):
    bits = bits_of(kind)

    def model(a, pos, length):
        sign = a >> min(pos + length - 1, bits - 1) & 1 if kind[0] == "s" and length else 0
        return sum((a >> pos + i & 1 if i < length and pos + i < bits else sign) << i for i in range(bits))

    check({f"bfe.{kind}": model}, kind, (kind, "small", "small"))


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields_are_inserted_as_the_manuals_loop_does_it(bits):
    def model(a, b, pos, length):
        for i in range(min(length, max(bits - pos, 0))):
            b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
        return b

    check({f"bfi.b{bits}": model}, f"b{bits}", (f"b{bits}", f"b{bits}", "small", "small"))


def test_masks_extensions_and_the_nth_set_bit():
    def bmsk(clamp):
        def model(a, b):
            if clamp and a >= 32:
                return 0
            width = min(b, 32) if clamp else b & 31
            return ((1 << width) - 1 << (a & 31)) & 0xFFFFFFFF

        return model

    check({f"bmsk.{mode}.b32": bmsk(mode == "clamp") for mode in ("clamp", "wrap")}, "b32", ("small", "small"))

    def szext(clamp, is_signed):
        def model(a, n):
            if n >= 32 and clamp:
                return a
            n &= 31
            x = a & (1 << n) - 1
            return (signed(x, n) if is_signed and n else x) & 0xFFFFFFFF

        return model

    table = {f"szext.{mode}.{t}32": szext(mode == "clamp", t == "s") for mode in ("clamp", "wrap") for t in "us"}
    check(table, "b32", ("b32", "small"))

    def fns(mask, base, offset):
        offset = signed(offset, 32)
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        order = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [n for n in order if mask >> n & 1]
        return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF

    masks, bases, offsets = values("b32", "small", "small", count=3000)
    columns = [masks, [b & 31 for b in bases], [(o - 60) & 0xFFFFFFFF for o in offsets]]
    check({"fns.b32": fns}, "b32", ("b32",) * 3, columns)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits):
    kind, mask = f"b{bits}", (1 << bits) - 1
    check(of_type(kind, {"and": operator.and_, "or": operator.or_, "xor": operator.xor}), kind, (kind, kind))
    check(of_type(kind, {"not": operator.invert, "cnot": lambda a: int(a == 0)}), kind, (kind,))
    shifts = {
        f"shl.{kind}": lambda a, n: a << min(n, bits) & mask,
        f"shr.u{bits}": lambda a, n: a >> min(n, bits),
        f"shr.s{bits}": lambda a, n: signed(a, bits) >> min(n, bits) & mask,
    }
    check(shifts, kind, (kind, "small"))


def test_shifts_by_huge_amounts_are_clamped_too():
    columns = [[0x80000001] * 3, [0x80000000, 0xFFFFFFFF, 256]]
    got = apply(["shl.b32", "shr.u32", "shr.s32"], "b32", ("b32", "b32"), columns)
    assert got == [[0] * 3, [0] * 3, [0xFFFFFFFF] * 3]


def test_funnel_shifts():
    def shf(left, clamp):
        def model(a, b, c):
            n = min(c, 32) if clamp else c & 31
            return ((b << 32 | a) << n >> 32 if left else (b << 32 | a) >> n) & 0xFFFFFFFF

        return model

    table = {f"shf.{d}.{mode}.b32": shf(d == "l", mode == "clamp") for d in "lr" for mode in ("clamp", "wrap")}
    check(table, "b32", ("b32", "b32", "small"))


def test_lop3_looks_every_bit_up_in_its_table():
    def model(table):
        return lambda a, b, c: sum(
            (table >> (a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1) & 1) << n for n in range(32)
        )

    tables = (0x00, 0x1A, 0x40, 0x80, 0x96, 0xE8, 0xFE, 0xFF)
    check({f"lop3.b32 %d, %a, %b, %c, {t:#x};": model(t) for t in tables}, "b32", ("b32",) * 3, count=2000)


def test_lop3_also_tells_whether_anything_is_left():
    check({
        "lop3.or.b32 %r1|%d, %a, %b, %b, 0xc0, %c;": lambda a, b, c: int(a & b != 0 or c),
        "lop3.and.b32 _|%d, %a, %b, %b, 0xc0, !%c;": lambda a, b, c: int(a & b != 0 and not c),
        "lop3.or.b32 %r1|%p, %a, %b, %b, 0xc0, %c; setp.eq.u32 %d, %r1, %a;": lambda a, b, c: int(a & b == a),
    }, "pred", ("b32", "b32", "pred"), count=300)


MODES = {  # the manual's table: rows for c = 0..3, bytes from the highest
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def test_prmt_picks_bytes_in_every_mode():
    def byte(a, b, n):
        return (b << 32 | a) >> 8 * n & 255

    def generic(a, b, c):
        chosen = [(byte(a, b, c >> 4 * k & 7), c >> 4 * k & 8) for k in range(4)]
        return sum(((255 if x >> 7 else 0) if sign else x) << 8 * k for k, (x, sign) in enumerate(chosen))

    def mode(rows):
        return lambda a, b, c: sum(byte(a, b, int(rows[c & 3][3 - k])) << 8 * k for k in range(4))

    table = {"prmt.b32": generic} | {f"prmt.b32.{name}": mode(rows) for name, rows in MODES.items()}
    check(table, "b32", ("b32",) * 3)


def test_the_reference_cases_of_permutes_fields_tables_and_funnels():
    a, b = 0x83828180, 0x07060504
    got = apply([f"prmt.b32 %d, %a, %b, {c:#x};" for c in (0x5410, 0x7632, 0x4B09)], "b32", ("b32", "b32"), [[a], [b]])
    assert got == [[0x05048180], [0x07068382], [0x04FF80FF]]
    check({
        "bfe.s32 %d, 0xF0F0F0F0, 28, 8;": lambda a: 0xFFFFFFFF,
        "bfe.u32 %d, 0xF0F0F0F0, 28, 8;": lambda a: 0x0000000F,
        "bfe.s32 %d, 0x80, 4, 4;": lambda a: 0xFFFFFFF8,
        "lop3.b32 %d, 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA, 0x1a;": lambda a: 0x1A1A1A1A,
        "shf.l.wrap.b32 %d, 0x89ABCDEF, 0x01234567, 36;": lambda a: 0x12345678,
        "shf.r.clamp.b32 %d, 0x89ABCDEF, 0x01234567, 40;": lambda a: 0x01234567,
    }, "b32", ("b32",), [[0]])


# ---- comparisons and selections

ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
OF_INTEGERS = {name: getattr(operator, name) for name in ORDERED}
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


def compared(table, kind):
    """Return setp, and set that gives ones or a number, for a table of comparison -> model."""
    return [
        ({f"{form}.{kind}".format(name): lambda a, b, m=m, one=one: one * m(a, b) for name, m in table.items()}, result)
        for form, result, one in (("setp.{}", "pred", 1), ("set.{}.u32", "b32", 0xFFFFFFFF),
                                  ("set.{}.f32", "b32", 0x3F800000))
    ]


@pytest.mark.parametrize("kind", [*KINDS, "b16", "b32", "b64"])
def test_integers_compare_by_sign_and_width(kind):
    names = OF_INTEGERS | (UNSIGNED if kind[0] == "u" else {})
    models = {n: of_kind(kind, f, 1) for n, f in names.items() if kind[0] != "b" or n in ("eq", "ne")}
    for table, result in compared(models, kind):
        check(table, result, (kind, kind))


FLOAT_FIELDS = {"f16": (16, 10), "bf16": (16, 7), "f32": (32, 23), "f64": (64, 52)}


def float_comparisons(kind, ftz=False):
    """name -> model; numbers are compared as signed magnitudes, which needs no arithmetic."""
    bits, mantissa = FLOAT_FIELDS[kind]
    infinity = (1 << bits - 1) - (1 << mantissa)

    def place(x):
        magnitude = x & (1 << bits - 1) - 1
        if ftz and magnitude < 1 << mantissa:
            magnitude = 0
        return None if magnitude > infinity else -magnitude if x >> bits - 1 else magnitude

    def model(function, of_nan):
        def compare(a, b):
            x, y = place(a), place(b)
            return int(of_nan if x is None or y is None else function(x, y))

        return compare

    table = {f"{n}{'u' * of_nan}": model(f, of_nan) for of_nan in (False, True) for n, f in OF_INTEGERS.items()}
    return table | {"num": model(lambda x, y: True, False), "nan": model(lambda x, y: False, True)}


@pytest.mark.parametrize("kind", FLOAT_FIELDS)
def test_floats_compare_ordered_and_unordered(kind):
    for table, result in compared(float_comparisons(kind), kind)[:2]:
        check(table, result, (kind, kind))
    if kind in ("f16", "f32"):
        flushed = float_comparisons(kind, ftz=True)
        check({f"setp.{n}.ftz.{kind}": model for n, model in flushed.items()}, "pred", (kind, kind))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_floats_compare_half_by_half(kind):
    kinds, table = (f"{kind}x2",) * 2, float_comparisons(kind)
    one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    for dtype, true in ((f"{kind}x2", one), ("u32", 0xFFFF)):
        scaled = {n: lambda a, b, m=m, true=true: true * m(a, b) for n, m in table.items()}
        check({f"set.{n}.{dtype}.{kind}x2": halves(m) for n, m in scaled.items()}, "b32", kinds, count=2000)
    less = table["lt"]
    check({
        f"setp.lt.{kind}x2 %p|%q, %a, %b; mov.pred %d, %p;": lambda a, b: less(a & 0xFFFF, b & 0xFFFF),
        f"setp.lt.{kind}x2 %p|%q, %a, %b; mov.pred %d, %q;": lambda a, b: less(a >> 16, b >> 16),
    }, "pred", kinds, count=2000)


def test_a_comparison_combines_with_a_predicate_and_gives_its_opposite():
    table = {
        "setp.lt.s32 _|%d, %a, %b;": lambda a, b, c: int(signed(a, 32) >= signed(b, 32)),
        "set.lt.and.u32.s32 %r1, %a, %b, %c; setp.ne.u32 %d, %r1, 0;":
            lambda a, b, c: int(signed(a, 32) < signed(b, 32) and c),
    }
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        for negated in (0, 1):
            for opposite in (0, 1):
                text = f"setp.lt.{name}.s32 {'%p|%d' if opposite else '%d|%p'}, %a, %b, {'!' * negated}%c;"
                table[text] = lambda a, b, c, f=function, n=negated, o=opposite: f(
                    (signed(a, 32) < signed(b, 32)) ^ o, c ^ n
                )
    check(table, "pred", ("s32", "s32", "pred"), count=2000)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "f32", "f64"])
def test_selections_leave_values_as_they_are(kind):
    def at_least_zero(c, ftz):
        negative, magnitude = c >> 31, c & 0x7FFFFFFF
        return magnitude <= 0x7F800000 and (not negative or not magnitude or (ftz and magnitude < 0x800000))

    for chooser, table in (
        ("pred", {f"selp.{kind}": lambda a, b, c: a if c else b,
                  f"selp.{kind} %d, %a, %b, !%c;": lambda a, b, c: b if c else a}),
        ("s32", {f"slct.{kind}.s32": lambda a, b, c: b if c >> 31 else a}),
        ("f32", {f"slct{'.ftz' * ftz}.{kind}.f32": lambda a, b, c, z=ftz: a if at_least_zero(c, z) else b
                 for ftz in (False, True)}),
    ):
        check(table, kind, (kind, kind, chooser), count=1000)


def test_predicates_have_a_logic_of_their_own():
    table = {
        "and.pred": [0, 0, 0, 1], "or.pred": [0, 1, 1, 1], "xor.pred": [0, 1, 1, 0], "not.pred %d, %a;": [1, 1, 0, 0],
        "mov.pred %d, %b;": [0, 1, 0, 1], "mov.pred %d, 1;": [1] * 4, "and.pred %d, %a, 0;": [0] * 4,
    }
    assert apply(list(table), "pred", ("pred", "pred"), [[0, 0, 1, 1], [0, 1, 0, 1]]) == list(table.values())


# ---- moves


def test_vectors_pack_from_the_lowest_item():
    def model(a, b, c, e):
        return a | b << 16 | c << 32 | e << 48

    check({
        "mov.b64 %d, {%a, %b, %c, %e};": model,
        "mov.b32 %r1, {%a, %b}; mov.b32 %r2, {%c, %e}; mov.b64 %d, {%r1, %r2};": model,
    }, "b64", ("b16",) * 4, count=500)
    check({"mov.b32 %d, {%a, 5};": lambda a: a | 5 << 16}, "b32", ("b16",), count=10)


def test_registers_unpack_to_the_lowest_item_first_and_underscores_take_nothing():
    check({
        "mov.b64 {%d, %r1}, %a;": lambda a: a & 0xFFFFFFFF,
        "mov.b64 {_, %d}, %a;": lambda a: a >> 32,
        "mov.b64 {%h0, %h1, %h2, %h3}, %a; mov.b32 %d, {%h3, %h1};": lambda a: a >> 48 | (a >> 16 & 0xFFFF) << 16,
        "mov.b64 {%r1, %r2}, %a; mov.b32 {%h1, _}, %r2; cvt.u32.u16 %d, %h1;": lambda a: a >> 32 & 0xFFFF,
    }, "b32", ("b64",), count=500)


def test_128_bits_move_and_unpack():
    text = """{{ .reg .b128 %w, %v; mov.b128 %w, {{%a, %b}}; mov.b128 %v, %w; mov.b128 {{%x1, %x2}}, %v;
                 mov.b64 %d, {}; }}"""
    middle = "{ .reg .b128 %w; mov.b128 %w, {%a, %b}; mov.b128 {%r1, %r2, %r3, %r4}, %w; mov.b64 %d, {%r2, %r3}; }"
    check({
        text.format("%x1"): lambda a, b: a,
        text.format("%x2"): lambda a, b: b,
        middle: lambda a, b: a >> 32 | (b & 0xFFFFFFFF) << 32,
    }, "b64", ("b64", "b64"), count=100)


def test_bytes_pack_into_words():
    text = """{ .reg .b8 %y<4>; cvt.u8.u32 %y0, %a; cvt.u8.u32 %y1, %b;
                mov.b16 %h0, {%y0, %y1}; mov.b16 {%y2, %y3}, %h0;
                mov.b32 %r1, {%y3, %y2, %y1, %y0}; mov.b32 %d, %r1; }"""
    model = lambda a, b: (b & 255) | (a & 255) << 8 | (b & 255) << 16 | (a & 255) << 24  # noqa: E731
    check({text: model}, "b32", ("b32", "b32"), count=200)


@pytest.mark.parametrize(("kind", "given", "table"), [
    ("b64", 1, {
        "mov.b64 %d, -1;": (1 << 64) - 1, "mov.f64 %d, 0d3FF8000000000000;": 0x3FF8000000000000,
        "mov.b64 %d, 0x123456789ABCDEF0;": 0x123456789ABCDEF0, "add.s64 %d, %a, -2;": (1 << 64) - 1,
        "mov.b64 %d, 1.5;": 0x3FF8000000000000, "selp.f64 %d, 1.5, 2.0, 0;": 2 << 61,
    }),
    ("b32", 0x3F800000, {
        "mov.f32 %d, 0f7FC12345;": 0x7FC12345, "mov.b32 %d, 0f3F800000;": 0x3F800000,
        "add.f32 %d, %a, 0fC0000000;": 0xBF800000, "add.s32 %d, %a, -5;": 0x3F7FFFFB,
        "mov.u16 %h0, -1; cvt.u32.u16 %d, %h0;": 0xFFFF,
    }),
], ids=["b64", "b32"])
def test_immediates_are_read_as_their_type(kind, given, table):
    assert [got for (got,) in apply(list(table), kind, (kind,), [[given]])] == list(table.values())


def test_a_guard_keeps_the_other_lanes_registers():
    check({
        "mov.b32 %d, 7; @%b add.u32 %d, %a, 1;": lambda a, b: a + 1 & 0xFFFFFFFF if b else 7,
        "mov.b32 %d, 7; @!%b mad.lo.u32 %d, 3, 5, %a;": lambda a, b: 7 if b else a + 15 & 0xFFFFFFFF,
        "mov.b32 %d, 7; @%b bfe.u32 %d, %a, 3, 5;": lambda a, b: a >> 3 & 31 if b else 7,
    }, "b32", ("b32", "pred"), count=300)
    check({
        "mov.b32 %r1, 1; mov.b64 %d, 7; @%b mov.b64 %d, {%r1, %r1};": lambda a, b: 1 << 32 | 1 if b else 7,
        "mov.b64 %d, 7; @!%b add.s64 %d, %a, %a;": lambda a, b: 7 if b else 2 * a & (1 << 64) - 1,
    }, "b64", ("b64", "pred"), count=300)
    table = {"setp.eq.u32 %d, %a, %a; @%b setp.ne.u32 %d, %a, %a;": lambda a, b: 1 - b}
    check(table, "pred", ("b32", "pred"), count=300)


def test_clocks_go_forwards():
    texts = [
        f"mov.u64 %x1, {c}; add.u64 %x3, %a, 1; mov.u64 %x2, {c}; setp.lt.u64 %d, %x1, %x2;"
        for c in ("%clock64", "%globaltimer")
    ]
    texts.append("mov.u32 %r1, %clock; add.u64 %x3, %a, 1; mov.u32 %r2, %clock; setp.lt.u32 %d, %r1, %r2;")
    assert apply(texts, "pred", ("b64",), [[1, 2]]) == [[1, 1]] * 3


def test_addresses_change_space_and_back():
    body = """
    mov.u64 %rd3, smem;
    cvta.shared.u64 %rd4, %rd3;
    st.u32 [%rd4], 41;
    bar.sync 0;
    cvta.to.shared.u64 %rd5, %rd4;
    cvt.u32.u64 %r2, %rd5;
    ld.shared.u32 %r3, [%r2];
    cvta.to.global.u64 %rd6, %rd1;
    cvta.global.u64 %rd7, %rd6;
    createpolicy.fractional.L2::evict_first.b64 %rd8, 1.0;
    cvt.u32.u64 %r4, %rd8;
    add.u32 %r3, %r3, %r4;
    add.u32 %r3, %r3, 1;
    st.global.u32 [%rd7], %r3;
    """
    out = torch.zeros(1, dtype=torch.int32)
    run = launch(kernel(body), grid=1, block=1, args=[out])
    assert not run.findings
    assert out.item() == 42


def test_registers_of_one_instruction_may_be_the_same():
    check({
        "mov.b32 %d, %a; add.u32 %d, %d, %d;": lambda a, b: 2 * a & 0xFFFFFFFF,
        "mov.b32 %d, %a; mad.lo.u32 %d, %d, %b, %d;": lambda a, b: a * b + a & 0xFFFFFFFF,
        "mov.b32 %d, %a; shf.l.wrap.b32 %d, %d, %d, 16;": lambda a, b: a >> 16 | (a & 0xFFFF) << 16,
    }, "b32", ("b32", "b32"), count=500)


# ---- refusals


@pytest.mark.parametrize(("text", "says"), [
    ("add.u8 %r2, %r0, %r0;", "add.u8 with 3 operands"),
    ("add.sat.u32 %r2, %r0, %r0;", "supported: "),
    ("add.u32 %r2, %r0;", "add.u32 with 2 operands"),
    ("add.u32 %rd2, %r0, %r0;", "%rd2 is declared .b64"),
    ("add.u32 %r2, %rd1, %r0;", "%rd1 is declared .b64"),
    ("mul.u32 %r2, %r0, %r0;", "mul{"),
    ("setp.lo.s32 %p1, %r0, %r0;", "comparison .lo of .s32"),
    ("setp.lt.b32 %p1, %r0, %r0;", "eq, ne"),
    ("setp.lt.and.s32 %p1, %r0, %r0;", "3 operands"),
    ("setp.lt.s32 %r1, %r0, %r0;", "%r1 is declared .b32"),
    ("cvt.s32.f32 %r2, %f1;", "cvt.s32.f32 with 2 operands"),
    ("cvt.rn.s32.f32 %r2, %f1;", "cvt"),
    ("mov.b64 %rd2, {%r0, %r0, %r0};", "a vector of 3"),
    ("cvta.tex.u64 %rd2, %rd1;", "shared::cluster"),
    ("fma.f32 %f1, %f1, %f1, %f1;", "fma.rnd"),
    ("frobnicate.b32 %r2, %r0;", "opcode frobnicate is unknown"),
])
def test_what_is_not_ptx_is_refused_with_the_line_and_what_would_do(text, says):
    message = refused(text)
    assert says in message and text.rstrip(";") in message
