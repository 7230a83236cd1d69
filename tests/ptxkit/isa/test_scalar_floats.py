"""Floating-point arithmetic: bit for bit what exact arithmetic and one rounding give; approximations within bounds."""

import itertools
import math
import struct

import pytest
import softfloat as sf
from lanes import apply, check, values
from softfloat import FORMATS

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("draws")]
MODES = ("rn", "rz", "rm", "rp")
NEWEST = "sm_100a"  # for what came with it


def binary(format_, operation, mode="rn", ftz=False, **finish):
    """Return the model of an operation: reads each operand's bits, computes exactly, rounds once."""

    def model(*bits):
        x = operation(*(format_.decode(b, ftz) for b in bits))
        return format_.encode(x, mode, ftz, **finish)

    return model


def subtract(x, y, mode="rn"):
    return sf.add(x, sf.negated(y), mode)


ARITHMETIC = {"add": sf.add, "sub": subtract, "mul": sf.multiply, "fma": sf.fma}


def spelled(op, *words):
    return ".".join((op, *(w for w in words if w)))


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("op", ARITHMETIC)
def test_single_precision_rounds_once_in_every_direction_with_and_without_ftz_and_sat(op):
    table = {
        spelled(op, mode, "ftz" * ftz, "sat" * sat, "f32"):
            binary(sf.F32, mode_aware(ARITHMETIC[op], mode), mode, ftz, sat=sat)
        for mode, ftz, sat in itertools.product(MODES, (False, True), (False, True))
    }
    check(table, "b32", ("f32",) * (3 if op == "fma" else 2))


def mode_aware(operation, mode):
    """Sums need the direction for the sign of a zero."""
    return operation if operation is sf.multiply else lambda *x: operation(*x, mode=mode)


def test_an_operation_without_a_direction_rounds_to_nearest():
    table = {f"{op}.f32": binary(sf.F32, ARITHMETIC[op]) for op in ("add", "sub", "mul")}
    check(table, "b32", ("f32", "f32"), count=1000)


def test_ftz_looks_at_the_result_as_if_exponents_had_no_limit():
    """(1 - 2^-24) 2^-126 needs no rounding to 24 bits and is flushed; (1 - 2^-26) 2^-126 rounds to a normal first."""
    columns = [[0x0D800800, 0x0D800400], [0x327FF000, 0x327FF800]]  # (1 + 2^-k) 2^-100, (1 - 2^-k) 2^-26 for k = 12, 13
    kept, flushed = apply(["mul.f32", "mul.ftz.f32"], "b32", ("f32", "f32"), columns)
    assert kept == [0x00800000, 0x00800000]
    assert flushed == [0, 0x00800000]


@pytest.mark.parametrize("op", ARITHMETIC)
def test_double_precision_rounds_once_in_every_direction(op):
    kinds = ("f64",) * (3 if op == "fma" else 2)
    compare_doubles({f"{op}.{m}.f64": binary(sf.F64, mode_aware(ARITHMETIC[op], m), m) for m in MODES}, kinds)


def compare_doubles(table, kinds):
    """Compare as `check` does, but for the payloads of NaN."""
    columns = values(*kinds)
    for row, model in zip(apply(list(table), "b64", kinds, columns), table.values()):
        for values_, g in zip(zip(*columns), row):
            g = sf.F64.nan if sf.F64.decode(g).kind == "nan" else g
            assert g == model(*values_), [hex(v) for v in (*values_, g, model(*values_))]


def test_a_double_nan_keeps_the_payload_of_the_operand_that_an_h200_prefers():
    """The second operand's, then the third's of fma, then the first's; div prefers its first. All come out quiet."""
    a, b, c, one = 0x7FF00000000000A1, 0xFFF80000000000B2, 0x7FF80000000000C3, 0x3FF0000000000000
    quiet_a, new_nan = 0x7FF80000000000A1, 0xFFF8000000000000
    two = apply(["add.rz.f64", "div.rn.f64", "min.f64"], "b64", ("f64", "f64"), [[a, a, one], [b, one, b]])
    assert two == [[b, quiet_a, b], [quiet_a, quiet_a, b], [b, one, one]]
    assert apply(["fma.rn.f64"], "b64", ("f64",) * 3, [[a, a, a], [b, one, one], [c, c, one]]) == [[b, c, quiet_a]]
    assert apply(["sqrt.rn.f64"], "b64", ("f64",), [[0xBFF0000000000000]]) == [[new_nan]]


HALF = {"f16": sf.F16, "bf16": sf.BF16}


@pytest.mark.parametrize("kind", HALF)
def test_halves_round_once(kind):
    format_ = HALF[kind]
    check({f"{op}.{kind}": binary(format_, ARITHMETIC[op]) for op in ("add", "sub", "mul")}, kind, (kind,) * 2)
    table = {f"fma.rn{'.relu' * relu}.{kind}": binary(format_, sf.fma, relu=relu) for relu in (False, True)}
    check(table, kind, (kind,) * 3)


def test_half_precision_takes_ftz_and_sat():
    for ops, operands in ((("add", "mul"), 2), (("fma.rn",), 3)):
        table = {
            spelled(op, "ftz" * ftz, "sat" * sat, "f16"): binary(sf.F16, ARITHMETIC[op[:3]], ftz=ftz, sat=sat)
            for op in ops for ftz, sat in ((True, False), (False, True), (True, True))
        }
        check(table, "f16", ("f16",) * operands, count=2000)


PAIRS = {"f16x2": ("f16", 16), "bf16x2": ("bf16", 16), "f32x2": ("f32", 32)}


def paired(model, bits):
    """Return a model for both elements of packed operands."""
    low = (1 << bits) - 1
    return lambda *x: model(*(v & low for v in x)) | model(*(v >> bits for v in x)) << bits


@pytest.mark.parametrize("kind", PAIRS)
def test_packed_types_are_two_separate_operations(kind):
    element, bits = PAIRS[kind]
    target = NEWEST if kind == "f32x2" else "sm_90a"
    for op, arity in (("add", 2), ("mul", 2), ("fma.rn", 3)):
        table = {f"{op}.{kind}": paired(binary(FORMATS[element], ARITHMETIC[op[:3]]), bits)}
        check(table, kind, (kind,) * arity, count=2000, target=target)


def test_packed_single_precision_takes_directions_and_ftz():
    table = {f"add.{m}.ftz.f32x2": paired(binary(sf.F32, mode_aware(sf.add, m), m, ftz=True), 32) for m in MODES}
    check(table, "b64", ("f32x2",) * 2, count=2000, target=NEWEST)


@pytest.mark.parametrize("kind", HALF)
def test_mixed_precision_widens_exactly_and_rounds_once(kind):
    half = HALF[kind]

    def mixed(operation, mode, sat):
        return lambda *bits: sf.F32.encode(
            operation(*map(half.decode, bits[:-1]), sf.F32.decode(bits[-1]), mode=mode), mode, sat=sat
        )

    for op, kinds in (("add", (kind, "f32")), ("sub", (kind, "f32")), ("fma", (kind, kind, "f32"))):
        table = {
            spelled(op, mode, "sat" * sat, "f32", kind): mixed(ARITHMETIC[op], mode, sat)
            for mode, sat in itertools.product(MODES, (False, True))
        }
        check(table, "b32", kinds, count=2000, target=NEWEST)


@pytest.mark.parametrize("op", ["div", "rcp", "sqrt"])
def test_division_and_roots_round_once_in_every_direction(op):
    arity, operation = {
        "div": (2, sf.divide), "rcp": (1, lambda x: sf.divide(sf.whole(1), x)), "sqrt": (1, sf.square_root),
    }[op]
    for ftz in (False, True):
        table = {spelled(op, m, "ftz" * ftz, "f32"): binary(sf.F32, operation, m, ftz) for m in MODES}
        check(table, "b32", ("f32",) * arity)
    compare_doubles({f"{op}.{m}.f64": binary(sf.F64, operation, m) for m in MODES}, ("f64",) * arity)


# ---- minimum, maximum, signs


def chosen(format_, largest, nan_wins=False, xorsign=False, abs_=False, ftz=False):
    """Return min or max of any number of operands, as the manual's pseudocode has it; -0 is below +0."""

    def of_two(x, y):
        if "nan" in (x.kind, y.kind):
            return sf.NAN if nan_wins or x.kind == y.kind else y if x.kind == "nan" else x
        first = sf.less(x, y) or (x.negative and not sf.less(y, x))
        return x if first != largest else y

    def model(*bits):
        numbers = [format_.decode(b, ftz) for b in bits]
        flip = xorsign and (bits[0] ^ bits[1]) >> format_.bits - 1
        if abs_:
            numbers = [sf.absolute(x) if x.kind != "nan" else x for x in numbers]
        r = numbers[0]
        for x in numbers[1:]:
            r = of_two(r, x)
        if flip and r.kind != "nan":
            r = sf.negated(r)
        return format_.encode(r, ftz=ftz)

    return model


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_order_zeros_and_treat_nan_as_their_modifiers_say(op, kind):
    table = {
        spelled(op, "ftz" * ftz, "NaN" * nan, "xorsign.abs" * xorsign, kind):
            chosen(FORMATS[kind], op == "max", nan, xorsign, xorsign, ftz)
        for ftz, nan, xorsign in itertools.product((False, True), repeat=3) if not (ftz and kind == "bf16")
    }
    check(table, kind, (kind,) * 2)
    if kind != "f32":
        table = {f"{op}.{kind}x2": paired(chosen(FORMATS[kind], op == "max"), 16)}
        check(table, "b32", (f"{kind}x2",) * 2, count=1000)


def test_min_and_max_of_three():
    check({
        "min.f32": chosen(sf.F32, False),
        "max.NaN.f32": chosen(sf.F32, True, True),
        "min.ftz.abs.f32": chosen(sf.F32, False, abs_=True, ftz=True),
        "max.NaN.abs.f32": chosen(sf.F32, True, True, abs_=True),
    }, "b32", ("f32",) * 3, target=NEWEST)


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_of_doubles(op):
    compare_doubles({f"{op}.f64": chosen(sf.F64, op == "max")}, ("f64", "f64"))


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_abs_and_neg_change_the_sign_alone_and_make_a_nan_canonical(kind):
    columns = [list(range(65536))] if kind != "f32" else values(kind)
    for ftz in (False, True)[: 1 + (kind != "bf16")]:
        functions = {"abs": sf.absolute, "neg": sf.negated}
        table = {spelled(op, "ftz" * ftz, kind): binary(FORMATS[kind], f, ftz=ftz) for op, f in functions.items()}
        check(table, kind, (kind,), columns)


def test_copysign_puts_the_sign_of_the_first_on_the_second():
    for kind, top in (("f32", 1 << 31), ("f64", 1 << 63)):
        table = {f"copysign.{kind}": lambda a, b, top=top: a & top | b & (top - 1)}
        check(table, kind, (kind, kind), count=1000)


TESTS = {  # a function of the exponent, the mantissa and the top exponent
    "finite": lambda e, m, top: e < top,
    "infinite": lambda e, m, top: e == top and not m,
    "number": lambda e, m, top: e < top or not m,
    "notanumber": lambda e, m, top: e == top and m > 0,
    "normal": lambda e, m, top: 0 < e < top or (not e and not m),
    "subnormal": lambda e, m, top: not e and m > 0,
}


def test_testp_names_what_kind_of_number_it_is():
    def model(test, f):
        top = (1 << f.exponent) - 1
        return lambda bits: int(test(bits >> f.mantissa & top, bits & (1 << f.mantissa) - 1, top))

    for kind in ("f32", "f64"):
        table = {f"testp.{name}.{kind}": model(test, FORMATS[kind]) for name, test in TESTS.items()}
        check(table, "pred", (kind,), count=2000)


def test_fma_oob_gives_zero_for_the_special_nan_of_its_factors():
    """0x7ff7 is what an H200 takes for it, in either sign, for f16 and bf16; in the addend it is a NaN as any."""
    for kind in HALF:
        special, one = [0x7FF7, 0xFFF7, 0x7FF6, 0x3C00], [0x3F80] * 4
        columns = [special + one + one, one + special + one, one + one + special]
        (got,) = apply([f"fma.rn.oob.{kind}"], "b16", (kind,) * 3, columns)
        assert got[:2] == got[4:6] == [0, 0]
        assert got[2] == got[6] == 0x7FFF
        assert got[8:11] == [0x7FFF] * 3


# ---- approximations


F32_NUMBERS = values("f32", count=5000)[0]


def float_of(bits):
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]


FUNCTIONS = {
    "ex2.approx": lambda x: 2.0**x, "rcp.approx": lambda x: 1 / x, "rsqrt.approx": lambda x: 1 / math.sqrt(x),
    "sqrt.approx": math.sqrt, "tanh.approx": math.tanh,
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_approximations_are_the_nearest_float(op):
    """PTX allows one to two units in the last place, tanh many more; half a unit is what a double leaves."""
    function = FUNCTIONS[op]
    (got,) = apply([f"{op}.f32"], "b32", ("f32",), [F32_NUMBERS])
    seen = 0
    for bits, g in zip(F32_NUMBERS, got):
        x = float_of(bits)
        try:
            wanted = function(x)
        except (ValueError, ZeroDivisionError, OverflowError):
            continue
        if math.isfinite(x) and 2.0**-149 < abs(wanted) < 3.4e38:
            ulp = 2.0 ** max(math.frexp(wanted)[1] - 24, -149)
            assert abs(float_of(g) - wanted) <= 0.50001 * ulp, hex(bits)
            seen += 1
    assert seen > 1000


def test_logarithm_sine_and_cosine_are_within_their_bounds():
    (logs,) = apply(["lg2.approx.f32"], "b32", ("f32",), [F32_NUMBERS])
    near = [x for x in F32_NUMBERS if abs(float_of(x)) <= 2 * math.pi]
    sines, cosines = apply(["sin.approx.f32", "cos.approx.f32"], "b32", ("f32",), [near])
    for bits, g in zip(F32_NUMBERS, logs):
        x = float_of(bits)
        if 0 < x < math.inf:
            bound = 2.0**-22 * (1 if 0.5 < x < 2 else abs(math.log2(x)))
            assert abs(float_of(g) - math.log2(x)) <= bound, hex(bits)
    for bits, s, c in zip(near, sines, cosines):
        assert abs(float_of(s) - math.sin(float_of(bits))) <= 2.0**-20.5
        assert abs(float_of(c) - math.cos(float_of(bits))) <= 2.0**-20.5


ZERO, ONE, INF, NAN_ = 0, 0x3F800000, 0x7F800000, 0x7FFFFFFF
MINUS_ZERO, MINUS_ONE, MINUS_INF = 1 << 31, 0xBF800000, 0xFF800000
SPECIAL = {  # opcode -> results for -inf, -1, -0, +0, +inf, NaN; None: any number
    "rcp.approx.f32": (MINUS_ZERO, MINUS_ONE, MINUS_INF, INF, ZERO, NAN_),
    "sqrt.approx.f32": (NAN_, NAN_, MINUS_ZERO, ZERO, INF, NAN_),
    "rsqrt.approx.f32": (NAN_, NAN_, MINUS_INF, INF, ZERO, NAN_),
    "sin.approx.f32": (NAN_, None, MINUS_ZERO, ZERO, NAN_, NAN_),
    "cos.approx.f32": (NAN_, None, ONE, ONE, NAN_, NAN_),
    "lg2.approx.f32": (NAN_, NAN_, MINUS_INF, MINUS_INF, INF, NAN_),
    "ex2.approx.f32": (ZERO, 0x3F000000, ONE, ONE, INF, NAN_),
    "tanh.approx.f32": (MINUS_ONE, None, MINUS_ZERO, ZERO, ONE, NAN_),
}


@pytest.mark.parametrize("op", SPECIAL)
def test_approximations_take_special_values_as_the_manual_lists_them(op):
    (got,) = apply([op], "b32", ("f32",), [[MINUS_INF, MINUS_ONE, MINUS_ZERO, ZERO, INF, 0x7FC12345]])
    assert [g for g, w in zip(got, SPECIAL[op]) if w is not None] == [w for w in SPECIAL[op] if w is not None]


def test_ftz_approximations_take_a_subnormal_for_zero():
    ops = {"rcp": INF, "rsqrt": INF, "lg2": MINUS_INF, "ex2": ONE, "sin": ZERO, "sqrt": ZERO}
    got = apply([f"{op}.approx.ftz.f32" for op in ops], "b32", ("f32",), [[1, 0x7FFFFF]])
    assert got == [[w, w] for w in ops.values()]


def test_ftz_approximations_flush_their_results():
    assert apply(["rcp.approx.ftz.f32", "rcp.approx.f32"], "b32", ("f32",), [[0x7F000000]]) == [[0], [0x00400000]]
    assert apply(["ex2.approx.ftz.f32", "ex2.approx.f32"], "b32", ("f32",), [[0xC2FE0000]]) == [[0], [0x00400000]]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_exponentials_and_tangents_of_halves_are_rounded_from_the_exact_value(kind):
    """Closer than the bounds that PTX gives: half a unit in the last place, and what a double misses."""
    format_, every = HALF[kind], list(range(65536))
    ex2 = "ex2.approx.ftz.bf16" if kind == "bf16" else "ex2.approx.f16"
    for op, function, ftz in ((ex2, lambda x: 2.0**x, kind == "bf16"), (f"tanh.approx.{kind}", math.tanh, False)):
        (got,) = apply([op], "b16", (kind,), [every])
        for bits, g in zip(every, got):
            x = format_.decode(bits, ftz)
            if x.kind == "finite" and abs(value := math.ldexp(x.n, x.e)) < 120:
                n, d = function(value).as_integer_ratio()
                nearest = format_.encode(sf.Number(n, 1 - d.bit_length(), x.negative and op[0] == "t"), ftz=ftz)
                assert abs(g - nearest) <= 1, (op, hex(bits), hex(g), hex(nearest))


def test_division_by_a_large_number_is_zero_where_it_is_approximate():
    """Above 2^126 the reciprocal that div.approx multiplies by is 0: infinity over it is no number."""
    columns = [[INF, ONE, MINUS_ONE, INF, 0x40400000], [0x7F000000] * 3 + [0x40000000] * 2]
    approx, full = apply(["div.approx.f32", "div.full.f32"], "b32", ("f32", "f32"), columns)
    assert approx == [NAN_, ZERO, MINUS_ZERO, INF, 0x3FC00000]
    assert full == [INF, 0x00400000, 0x80400000, INF, 0x3FC00000]


def test_the_coarse_approximations_of_doubles_fill_the_upper_half_alone():
    rows = [  # a number, its reciprocal, that of its root
        (0x4000000000000000, 0x3FE0000000000000, 0x3FE6A09E00000000),
        (0x4010000012345678, 0x3FD0000000000000, 0x3FE0000000000000),
        (0x0000000000000001, 0x7FF0000000000000, 0x7FF0000000000000),
        (0x8000000000000000, 0xFFF0000000000000, 0xFFF0000000000000),
        (0x7FF0000000000000, 0x0000000000000000, 0x0000000000000000),
        (0x7FF8000000000001, 0x7FFFFFFF00000000, 0x7FFFFFFF00000000),
    ]
    numbers, *expected = map(list, zip(*rows))
    assert apply(["rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64"], "b64", ("f64",), [numbers]) == expected
