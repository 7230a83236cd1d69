"""Integers, bits, comparisons, moves: each instruction against whole-number arithmetic of its own."""

import operator

import pytest
import torch
from assembly import kernel, refused
from lanes import apply, check, register, values

from ptxkit.launches import launch

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("draws")]


def bits_of(kind):
    return int(kind[1:])


def signed(x, bits):
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> bits - 1 else x


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


KINDS = ("u16", "s16", "u32", "s32", "u64", "s64")
BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "div": divided,
    "rem": remainder,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("kind", KINDS)
def test_arithmetic_wraps_at_the_width_of_its_type(kind):
    bits = bits_of(kind)
    two, three = values(kind, kind), values(kind, kind, kind)
    models = [of_kind(kind, f) for f in BINARY.values()] + [of_kind(kind, lambda a, b: a * b >> bits)]
    check([f"{op}.{kind}" for op in (*BINARY, "mul.hi")], register(kind), (kind,) * 2, two, models)
    ternary = {
        "mad.lo": lambda a, b, c: a * b + c,
        "mad.hi": lambda a, b, c: (a * b >> bits) + c,
        "sad": lambda a, b, c: c + abs(a - b),
    }
    check(
        [f"{op}.{kind}" for op in ternary],
        register(kind),
        (kind,) * 3,
        three,
        [of_kind(kind, f) for f in ternary.values()],
    )


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products_have_twice_the_bits(kind):
    bits, wide = bits_of(kind), f"b{2 * bits_of(kind)}"
    check([f"mul.wide.{kind}"], wide, (kind, kind), values(kind, kind), [of_kind(kind, operator.mul, 2 * bits)])

    def mad(a, b, c):
        return (of_kind(kind, operator.mul, 2 * bits)(a, b) + c) & (1 << 2 * bits) - 1

    check(
        [f"mad.wide.{kind}"],
        wide,
        (kind, kind, f"{kind[0]}{2 * bits}"),
        values(kind, kind, f"{kind[0]}{2 * bits}"),
        [mad],
    )


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_abs_and_neg_leave_the_least_number_as_it_is(kind):
    check(
        [f"abs.{kind}", f"neg.{kind}"],
        register(kind),
        (kind,),
        values(kind),
        [of_kind(kind, abs), of_kind(kind, operator.neg)],
    )


def test_saturation_stops_at_the_ends_of_s32():
    two, three = values("s32", "s32"), values("s32", "s32", "s32")
    models = [of_kind("s32", lambda a, b: clamp(a + b, 32)), of_kind("s32", lambda a, b: clamp(a - b, 32))]
    check(["add.sat.s32", "sub.sat.s32"], "b32", ("s32",) * 2, two, models)
    low = lambda x: signed(x, 24)  # noqa: E731
    models = [
        of_kind("s32", lambda a, b, c: clamp((a * b >> 32) + c, 32)),
        of_kind("s32", lambda a, b, c: clamp((low(a) * low(b) >> 16) + c, 32)),
    ]
    check(["mad.hi.sat.s32", "mad24.hi.sat.s32"], "b32", ("s32",) * 3, three, models)


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_24_bit_products_ignore_the_upper_byte(kind):
    low = (lambda x: signed(x, 24)) if kind == "s32" else (lambda x: x & 0xFFFFFF)
    two = {"mul24.lo": lambda a, b: low(a) * low(b), "mul24.hi": lambda a, b: low(a) * low(b) >> 16}
    three = {"mad24.lo": lambda a, b, c: low(a) * low(b) + c, "mad24.hi": lambda a, b, c: (low(a) * low(b) >> 16) + c}
    for arity, table in ((2, two), (3, three)):
        kinds = (kind,) * arity
        check(
            [f"{op}.{kind}" for op in table],
            "b32",
            kinds,
            values(*kinds, count=3000),
            [of_kind(kind, f) for f in table.values()],
        )


def halves(model):
    return lambda *x: model(*(v & 0xFFFF for v in x)) | model(*(v >> 16 for v in x)) << 16


def test_packed_integers_do_not_carry_from_one_half_to_the_other():
    columns = values("u16x2", "u16x2")
    texts = [
        "add.u16x2",
        "add.s16x2",
        "min.u16x2",
        "max.u16x2",
        "min.s16x2",
        "max.s16x2",
        "min.relu.s16x2",
        "max.relu.s16x2",
    ]
    functions = [
        ("u16", operator.add), ("s16", operator.add), ("u16", min), ("u16", max), ("s16", min), ("s16", max),
        ("s16", lambda a, b: max(0, min(a, b))), ("s16", lambda a, b: max(0, a, b)),
    ]
    check(texts, "b32", ("u16x2", "u16x2"), columns, [halves(of_kind(k, f)) for k, f in functions])
    relu = [of_kind("s32", lambda a, b: max(0, min(a, b))), of_kind("s32", lambda a, b: max(0, a, b))]
    check(["min.relu.s32", "max.relu.s32"], "b32", ("s32", "s32"), values("s32", "s32"), relu)


def test_dot_products_extend_each_byte_as_its_type_says():
    def parts(x, size, is_signed):
        items = [x >> n & (1 << size) - 1 for n in range(0, 32, size)]
        return [signed(i, size) for i in items] if is_signed else items

    def dp4a(s, t):
        return lambda a, b, c: (c + sum(x * y for x, y in zip(parts(a, 8, s), parts(b, 8, t)))) & 0xFFFFFFFF

    def dp2a(s, t, first):
        return lambda a, b, c: (c + sum(x * y for x, y in zip(parts(a, 16, s), parts(b, 8, t)[first:]))) & 0xFFFFFFFF

    texts, models = [], []
    for s in "us":
        for t in "us":
            texts += [f"dp4a.{s}32.{t}32", f"dp2a.lo.{s}32.{t}32", f"dp2a.hi.{s}32.{t}32"]
            models += [dp4a(s == "s", t == "s"), dp2a(s == "s", t == "s", 0), dp2a(s == "s", t == "s", 2)]
    check(texts, "b32", ("u32",) * 3, values("u32", "u32", "u32"), models)


# ---- the carry flag


@pytest.mark.parametrize("bits", [32, 64])
def test_the_carry_flag_joins_words_into_longer_numbers(bits):
    kind, mask = f"u{bits}", (1 << bits) - 1
    columns = values(kind, kind, kind, kind)
    low, high = (f"%{'r' if bits == 32 else 'x'}{n}" for n in (1, 2))
    third = f"%{'r' if bits == 32 else 'x'}3"

    def chain(op, mid="", word=2):
        """{b, a} op {e, c}: which word comes back."""
        return (
            f"{op}{mid}.cc.u{bits} {low}, %a, %c; {op}c.cc.u{bits} {high}, %b, %e; {op}c.u{bits} {third}, 0, 0; "
            f"mov.b{bits} %d, {(low, high, third)[word]};"
        )

    def number(a, b):
        return b << bits | a

    texts, models = [], []
    for op, function in (("add", operator.add), ("sub", operator.sub)):
        for word in range(3):
            texts.append(chain(op, word=word))
            models.append(lambda a, b, c, e, f=function, w=word: f(number(a, b), number(c, e)) >> w * bits & mask)
    check(texts, f"b{bits}", (kind,) * 4, columns, models)


def test_a_carry_belongs_to_its_lane_and_outlives_what_does_not_write_it():
    text = """add.cc.u32 %r1, %a, %b; add.u32 %r2, %a, %b; addc.u32 %r3, 0, 0;
              setp.eq.u32 %p, %a, 0; @%p add.cc.u32 %r1, 1, 1; addc.u32 %r4, 0, 0;
              shl.b32 %r4, %r4, 4; or.b32 %d, %r3, %r4;"""
    model = lambda a, b: (a + b >> 32) | (0 if a == 0 else a + b >> 32) << 4  # noqa: E731
    check([text], "b32", ("u32", "u32"), values("u32", "u32", count=500), [model])


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_mad_with_carry_multiplies_longer_numbers(kind):
    bits = bits_of(kind)
    mask, r = (1 << bits) - 1, "%r1" if bits == 32 else "%x1"
    product = of_kind(kind, operator.mul, 2 * bits)
    halves_ = {"lo": lambda a, b: product(a, b) & mask, "hi": lambda a, b: product(a, b) >> bits}
    texts, models = [], []
    for half, function in halves_.items():
        texts.append(f"mad.{half}.cc.{kind} {r}, %a, %b, %c; madc.{half}.{kind} %d, %a, %c, %b;")
        models.append(lambda a, b, c, f=function: f(a, c) + b + (f(a, b) + c >> bits) & mask)
    check(texts, f"b{bits}", (kind,) * 3, values(*(kind,) * 3), models)


# ---- bits


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_and_reversing_bits(bits):
    kind, mask = f"b{bits}", (1 << bits) - 1
    columns = values(kind)

    def bfind(shift, is_signed):
        def model(a):
            x = ~a & mask if is_signed and a >> bits - 1 else a
            return 0xFFFFFFFF if not x else bits - x.bit_length() if shift else x.bit_length() - 1

        return model

    texts = [f"popc.b{bits}", f"clz.b{bits}"] + [f"bfind{s}.{t}{bits}" for s in ("", ".shiftamt") for t in "us"]
    models = [lambda a: a.bit_count(), lambda a: bits - a.bit_length()] + [
        bfind(s, t) for s in (False, True) for t in (False, True)
    ]
    check(texts, "b32", (kind,), columns, models)
    check([f"brev.b{bits}"], kind, (kind,), columns, [lambda a: int(f"{a:0{bits}b}"[::-1], 2)])


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields_are_extracted_as_the_manuals_loop_does_it(kind):
    bits = bits_of(kind)

    def model(a, pos, length):
        sign = a >> min(pos + length - 1, bits - 1) & 1 if kind[0] == "s" and length else 0
        return sum((a >> pos + i & 1 if i < length and pos + i < bits else sign) << i for i in range(bits))

    check([f"bfe.{kind}"], register(kind), (kind, "small", "small"), values(kind, "small", "small"), [model])


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields_are_inserted_as_the_manuals_loop_does_it(bits):
    def model(a, b, pos, length):
        for i in range(min(length, max(bits - pos, 0))):
            b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
        return b

    kinds = (f"b{bits}", f"b{bits}", "small", "small")
    check([f"bfi.b{bits}"], f"b{bits}", kinds, values(*kinds), [model])


def test_masks_extensions_and_the_nth_set_bit():
    def bmsk(clamp):
        def model(a, b):
            if clamp and a >= 32:
                return 0
            width = min(b, 32) if clamp else b & 31
            return ((1 << width) - 1 << (a & 31)) & 0xFFFFFFFF

        return model

    check(
        ["bmsk.clamp.b32", "bmsk.wrap.b32"],
        "b32",
        ("small", "small"),
        values("small", "small"),
        [bmsk(True), bmsk(False)],
    )

    def szext(clamp, is_signed):
        def model(a, n):
            if n >= 32 and clamp:
                return a
            n &= 31
            x = a & (1 << n) - 1
            return (signed(x, n) if is_signed and n else x) & 0xFFFFFFFF

        return model

    texts = [f"szext.{m}.{t}32" for m in ("clamp", "wrap") for t in "us"]
    models = [szext(m == "clamp", t == "s") for m in ("clamp", "wrap") for t in "us"]
    check(texts, "b32", ("b32", "small"), values("b32", "small"), models)

    def fns(mask, base, offset):
        offset = signed(offset, 32)
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        order = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [n for n in order if mask >> n & 1]
        return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF

    masks, bases, offsets = values("b32", "small", "small", count=3000)
    columns = [masks, [b & 31 for b in bases], [(o - 60) & 0xFFFFFFFF for o in offsets]]
    check(["fns.b32"], "b32", ("b32",) * 3, columns, [fns])


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits):
    kind, mask = f"b{bits}", (1 << bits) - 1
    two, shifts = values(kind, kind), values(kind, "small")
    check(
        [f"{op}.{kind}" for op in ("and", "or", "xor")],
        kind,
        (kind, kind),
        two,
        [operator.and_, operator.or_, operator.xor],
    )
    check([f"not.{kind}", f"cnot.{kind}"], kind, (kind,), values(kind), [lambda a: ~a & mask, lambda a: int(a == 0)])
    models = [
        lambda a, n: a << min(n, bits) & mask,
        lambda a, n: a >> min(n, bits),
        lambda a, n: signed(a, bits) >> min(n, bits) & mask,
    ]
    check([f"shl.{kind}", f"shr.u{bits}", f"shr.s{bits}"], kind, (kind, "small"), shifts, models)


def test_shifts_by_huge_amounts_are_clamped_too():
    columns = [[0x80000001] * 3, [0x80000000, 0xFFFFFFFF, 256]]
    assert apply(["shl.b32", "shr.u32", "shr.s32"], "b32", ("b32", "b32"), columns) == [
        [0] * 3,
        [0] * 3,
        [0xFFFFFFFF] * 3,
    ]


def test_funnel_shifts():
    def shf(left, clamp):
        def model(a, b, c):
            n = min(c, 32) if clamp else c & 31
            return ((b << 32 | a) << n >> 32 if left else (b << 32 | a) >> n) & 0xFFFFFFFF

        return model

    texts = [f"shf.{d}.{m}.b32" for d in "lr" for m in ("clamp", "wrap")]
    models = [shf(d == "l", m == "clamp") for d in "lr" for m in ("clamp", "wrap")]
    check(texts, "b32", ("b32", "b32", "small"), values("b32", "b32", "small"), models)


def test_lop3_looks_every_bit_up_in_its_table():
    def model(table):
        return lambda a, b, c: sum(
            (table >> (a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1) & 1) << n for n in range(32)
        )

    tables = [0x00, 0x1A, 0x40, 0x80, 0x96, 0xE8, 0xFE, 0xFF]
    texts = [f"lop3.b32 %d, %a, %b, %c, {t:#x};" for t in tables]
    check(texts, "b32", ("b32",) * 3, values("b32", "b32", "b32", count=2000), [model(t) for t in tables])


def test_lop3_also_tells_whether_anything_is_left():
    columns = values("b32", "b32", "pred", count=300)
    texts = [
        "lop3.or.b32 %r1|%d, %a, %b, %b, 0xc0, %c;",
        "lop3.and.b32 _|%d, %a, %b, %b, 0xc0, !%c;",
        "lop3.or.b32 %r1|%p, %a, %b, %b, 0xc0, %c; setp.eq.u32 %d, %r1, %a;",
    ]
    models = [
        lambda a, b, c: int(a & b != 0 or c),
        lambda a, b, c: int(a & b != 0 and not c),
        lambda a, b, c: int(a & b == a),
    ]
    check(texts, "pred", ("b32", "b32", "pred"), columns, models)


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

    texts = ["prmt.b32", *(f"prmt.b32.{m}" for m in MODES)]
    check(texts, "b32", ("b32",) * 3, values("b32", "b32", "b32"), [generic, *map(mode, MODES.values())])


def test_the_reference_cases_of_permutes_fields_tables_and_funnels():
    a, b = 0x83828180, 0x07060504
    got = apply([f"prmt.b32 %d, %a, %b, {c:#x};" for c in (0x5410, 0x7632, 0x4B09)], "b32", ("b32", "b32"), [[a], [b]])
    assert got == [[0x05048180], [0x07068382], [0x04FF80FF]]
    texts = ["bfe.s32 %d, 0xF0F0F0F0, 28, 8;", "bfe.u32 %d, 0xF0F0F0F0, 28, 8;", "bfe.s32 %d, 0x80, 4, 4;"]
    texts.append("lop3.b32 %d, 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA, 0x1a;")
    texts += ["shf.l.wrap.b32 %d, 0x89ABCDEF, 0x01234567, 36;", "shf.r.clamp.b32 %d, 0x89ABCDEF, 0x01234567, 40;"]
    got = apply(texts, "b32", ("b32",), [[0]])
    assert [g for (g,) in got] == [0xFFFFFFFF, 0x0000000F, 0xFFFFFFF8, 0x1A1A1A1A, 0x12345678, 0x01234567]


# ---- comparisons and selections

OF_INTEGERS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


@pytest.mark.parametrize("kind", [*KINDS, "b16", "b32", "b64"])
def test_integers_compare_by_sign_and_width(kind):
    table = OF_INTEGERS | (UNSIGNED if kind[0] == "u" else {})
    table = {n: f for n, f in table.items() if kind[0] != "b" or n in ("eq", "ne")}
    models = [of_kind(kind, f, 1) for f in table.values()]
    columns = values(kind, kind)
    check([f"setp.{n}.{kind}" for n in table], "pred", (kind, kind), columns, models)
    ones = [lambda a, b, m=m: 0xFFFFFFFF * m(a, b) for m in models]
    check([f"set.{n}.u32.{kind}" for n in table], "b32", (kind, kind), columns, ones)
    floats = [lambda a, b, m=m: 0x3F800000 * m(a, b) for m in models]
    check([f"set.{n}.f32.{kind}" for n in table], "b32", (kind, kind), columns, floats)


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

    table = {n: model(f, False) for n, f in OF_INTEGERS.items()} | {
        f"{n}u": model(f, True) for n, f in OF_INTEGERS.items()
    }
    return table | {"num": model(lambda x, y: True, False), "nan": model(lambda x, y: False, True)}


@pytest.mark.parametrize("kind", FLOAT_FIELDS)
def test_floats_compare_ordered_and_unordered(kind):
    columns = values(kind, kind)
    table = float_comparisons(kind)
    check([f"setp.{n}.{kind}" for n in table], "pred", (kind, kind), columns, list(table.values()))
    check(
        [f"set.{n}.u32.{kind}" for n in table],
        "b32",
        (kind, kind),
        columns,
        [lambda a, b, m=m: 0xFFFFFFFF * m(a, b) for m in table.values()],
    )
    if kind in ("f16", "f32"):
        flushed = float_comparisons(kind, ftz=True)
        check([f"setp.{n}.ftz.{kind}" for n in flushed], "pred", (kind, kind), columns, list(flushed.values()))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_floats_compare_half_by_half(kind):
    columns = values(f"{kind}x2", f"{kind}x2", count=2000)
    table = float_comparisons(kind)
    one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    for dtype, true in ((f"{kind}x2", one), ("u32", 0xFFFF)):
        models = [
            lambda a, b, m=m, true=true: true * m(a & 0xFFFF, b & 0xFFFF) | (true * m(a >> 16, b >> 16)) << 16
            for m in table.values()
        ]
        check([f"set.{n}.{dtype}.{kind}x2" for n in table], "b32", (f"{kind}x2",) * 2, columns, models)
    low, high = (f"setp.lt.{kind}x2 %p|%q, %a, %b; mov.pred %d, {p};" for p in ("%p", "%q"))
    less = table["lt"]
    models = [lambda a, b: less(a & 0xFFFF, b & 0xFFFF), lambda a, b: less(a >> 16, b >> 16)]
    check([low, high], "pred", (f"{kind}x2",) * 2, columns, models)


def test_a_comparison_combines_with_a_predicate_and_gives_its_opposite():
    columns = values("s32", "s32", "pred", count=2000)
    texts, models = [], []
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        for negated in (0, 1):
            for opposite in (0, 1):
                pair = "%p|%d" if opposite else "%d|%p"
                texts.append(f"setp.lt.{name}.s32 {pair}, %a, %b, {'!' * negated}%c;")
                models.append(
                    lambda a, b, c, f=function, n=negated, o=opposite: f((signed(a, 32) < signed(b, 32)) ^ o, c ^ n)
                )
    texts.append("setp.lt.s32 _|%d, %a, %b;")
    models.append(lambda a, b, c: int(signed(a, 32) >= signed(b, 32)))
    texts.append("set.lt.and.u32.s32 %r1, %a, %b, %c; setp.ne.u32 %d, %r1, 0;")
    models.append(lambda a, b, c: int(signed(a, 32) < signed(b, 32) and c))
    check(texts, "pred", ("s32", "s32", "pred"), columns, models)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "f32", "f64"])
def test_selections_leave_values_as_they_are(kind):
    columns = values(kind, kind, "pred", count=1000)
    texts, models = (
        [f"selp.{kind}", f"selp.{kind} %d, %a, %b, !%c;"],
        [lambda a, b, c: a if c else b, lambda a, b, c: b if c else a],
    )
    check(texts, register(kind), (kind, kind, "pred"), columns, models)
    columns = values(kind, kind, "s32", count=1000)
    check([f"slct.{kind}.s32"], register(kind), (kind, kind, "s32"), columns, [lambda a, b, c: b if c >> 31 else a])
    columns = values(kind, kind, "f32", count=1000)

    def at_least_zero(c, ftz):
        negative, magnitude = c >> 31, c & 0x7FFFFFFF
        return magnitude <= 0x7F800000 and (not negative or not magnitude or (ftz and magnitude < 0x800000))

    texts = [f"slct.{kind}.f32", f"slct.ftz.{kind}.f32"]
    models = [lambda a, b, c, z=ftz: a if at_least_zero(c, z) else b for ftz in (False, True)]
    check(texts, register(kind), (kind, kind, "f32"), columns, models)


def test_predicates_have_a_logic_of_their_own():
    columns = [[0, 0, 1, 1], [0, 1, 0, 1]]
    texts = [
        "and.pred",
        "or.pred",
        "xor.pred",
        "not.pred %d, %a;",
        "mov.pred %d, %b;",
        "mov.pred %d, 1;",
        "and.pred %d, %a, 0;",
    ]
    got = apply(texts, "pred", ("pred", "pred"), columns)
    assert got == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, 1, 0, 1], [1] * 4, [0] * 4]


# ---- moves


def test_vectors_pack_from_the_lowest_item():
    columns = values("b16", "b16", "b16", "b16", count=500)
    check(
        ["mov.b64 %d, {%a, %b, %c, %e};", "mov.b32 %r1, {%a, %b}; mov.b32 %r2, {%c, %e}; mov.b64 %d, {%r1, %r2};"],
        "b64", ("b16",) * 4, columns, [lambda a, b, c, e: a | b << 16 | c << 32 | e << 48] * 2,
    )
    check(["mov.b32 %d, {%a, 5};"], "b32", ("b16",), values("b16", count=10), [lambda a: a | 5 << 16])


def test_registers_unpack_to_the_lowest_item_first_and_underscores_take_nothing():
    columns = values("b64", count=500)
    texts = [
        "mov.b64 {%d, %r1}, %a;", "mov.b64 {_, %d}, %a;", "mov.b64 {%h0, %h1, %h2, %h3}, %a; mov.b32 %d, {%h3, %h1};",
        "mov.b64 {%r1, %r2}, %a; mov.b32 {%h1, _}, %r2; cvt.u32.u16 %d, %h1;",
    ]
    models = [
        lambda a: a & 0xFFFFFFFF,
        lambda a: a >> 32,
        lambda a: a >> 48 | (a >> 16 & 0xFFFF) << 16,
        lambda a: a >> 32 & 0xFFFF,
    ]
    check(texts, "b32", ("b64",), columns, models)


def test_128_bits_move_and_unpack():
    text = """{{ .reg .b128 %w, %v; mov.b128 %w, {{%a, %b}}; mov.b128 %v, %w; mov.b128 {{%x1, %x2}}, %v;
                 mov.b64 %d, {}; }}"""
    columns = values("b64", "b64", count=100)
    check([text.format("%x1"), text.format("%x2")], "b64", ("b64", "b64"), columns, [lambda a, b: a, lambda a, b: b])
    text = "{ .reg .b128 %w; mov.b128 %w, {%a, %b}; mov.b128 {%r1, %r2, %r3, %r4}, %w; mov.b64 %d, {%r2, %r3}; }"
    check([text], "b64", ("b64", "b64"), columns, [lambda a, b: a >> 32 | (b & 0xFFFFFFFF) << 32])


def test_bytes_pack_into_words():
    text = """{ .reg .b8 %y<4>; cvt.u8.u32 %y0, %a; cvt.u8.u32 %y1, %b;
                mov.b16 %h0, {%y0, %y1}; mov.b16 {%y2, %y3}, %h0;
                mov.b32 %r1, {%y3, %y2, %y1, %y0}; mov.b32 %d, %r1; }"""
    model = lambda a, b: (b & 255) | (a & 255) << 8 | (b & 255) << 16 | (a & 255) << 24  # noqa: E731
    check([text], "b32", ("b32", "b32"), values("b32", "b32", count=200), [model])


def test_immediates_are_read_as_their_type():
    texts = ["mov.b64 %d, -1;", "mov.f64 %d, 0d3FF8000000000000;", "mov.b64 %d, 0x123456789ABCDEF0;"]
    texts += ["add.s64 %d, %a, -2;", "mov.b64 %d, 1.5;", "selp.f64 %d, 1.5, 2.0, 0;"]
    got = apply(texts, "b64", ("b64",), [[1]])
    assert [g for (g,) in got] == [
        (1 << 64) - 1,
        0x3FF8000000000000,
        0x123456789ABCDEF0,
        (1 << 64) - 1,
        0x3FF8000000000000,
        2 << 61,
    ]
    texts = [
        "mov.f32 %d, 0f7FC12345;",
        "mov.b32 %d, 0f3F800000;",
        "add.f32 %d, %a, 0fC0000000;",
        "add.s32 %d, %a, -5;",
        "mov.u16 %h0, -1; cvt.u32.u16 %d, %h0;",
    ]
    got = apply(texts, "b32", ("b32",), [[0x3F800000]])
    assert [g for (g,) in got] == [0x7FC12345, 0x3F800000, 0xBF800000, 0x3F7FFFFB, 0xFFFF]


def test_a_guard_keeps_the_other_lanes_registers():
    texts = [
        "mov.b32 %d, 7; @%b add.u32 %d, %a, 1;",
        "mov.b32 %d, 7; @!%b mad.lo.u32 %d, 3, 5, %a;",
        "mov.b32 %d, 7; @%b bfe.u32 %d, %a, 3, 5;",
    ]
    models = [
        lambda a, b: a + 1 & 0xFFFFFFFF if b else 7,
        lambda a, b: 7 if b else a + 15 & 0xFFFFFFFF,
        lambda a, b: a >> 3 & 31 if b else 7,
    ]
    check(texts, "b32", ("b32", "pred"), values("b32", "pred", count=300), models)
    texts = ["mov.b64 %d, 7; @%b mov.b64 %d, {%r1, %r1};", "mov.b64 %d, 7; @!%b add.s64 %d, %a, %a;"]
    texts[0] = "mov.b32 %r1, 1; " + texts[0]
    models = [lambda a, b: 1 << 32 | 1 if b else 7, lambda a, b: 7 if b else 2 * a & (1 << 64) - 1]
    check(texts, "b64", ("b64", "pred"), values("b64", "pred", count=300), models)
    text = "setp.eq.u32 %d, %a, %a; @%b setp.ne.u32 %d, %a, %a;"
    check([text], "pred", ("b32", "pred"), values("b32", "pred", count=300), [lambda a, b: 1 - b])


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
    columns = values("b32", "b32", count=500)
    texts = [
        "mov.b32 %d, %a; add.u32 %d, %d, %d;",
        "mov.b32 %d, %a; mad.lo.u32 %d, %d, %b, %d;",
        "mov.b32 %d, %a; shf.l.wrap.b32 %d, %d, %d, 16;",
    ]
    models = [
        lambda a, b: 2 * a & 0xFFFFFFFF,
        lambda a, b: a * b + a & 0xFFFFFFFF,
        lambda a, b: a >> 16 | (a & 0xFFFF) << 16,
    ]
    check(texts, "b32", ("b32", "b32"), columns, models)


# ---- refusals


@pytest.mark.parametrize(
    ("text", "says"),
    [
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
    ],
)
def test_what_is_not_ptx_is_refused_with_the_line_and_what_would_do(text, says):
    message = refused(text)
    assert says in message and text.rstrip(";") in message
