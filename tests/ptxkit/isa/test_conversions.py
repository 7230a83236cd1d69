"""cvt between every pair of types, against whole-number arithmetic and one exact rounding."""

import itertools

import pytest
import softfloat as sf
from lanes import apply, bits_of, check, edges, signed, values
from softfloat import FORMATS

from ptxkit.ptx import PtxError

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("draws")]
INTEGERS = [f"{s}{n}" for n in (8, 16, 32, 64) for s in "us"]
NEWEST = "sm_100a"  # for what came with it
MODES, WHOLE = ("rn", "rz", "rm", "rp"), ("rni", "rzi", "rmi", "rpi")


def read(kind, x):
    return signed(x, bits_of(kind)) if kind[0] == "s" else x & (1 << bits_of(kind)) - 1


def limits(kind):
    bits = bits_of(kind)
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def clamped(kind, x):
    low, high = limits(kind)
    return max(low, min(high, x))


def holder(kind):
    """Return the register that holds a type, in this file's kernels: bytes in 16 bits."""
    return f"b{max(bits_of(kind), 16)}"


def held(kind, x, register_bits):
    """Return what a register of that many bits holds of a result: its sign, or zeros, fill the rest."""
    return read(kind, x) & (1 << register_bits) - 1


@pytest.mark.parametrize("source", INTEGERS)
def test_integers_are_cut_and_extended_by_their_types(source):
    for to in (16, 32, 64):
        fitting = [d for d in INTEGERS if bits_of(d) <= to]
        table = {f"cvt.{d}.{source}": lambda a, d=d, to=to: held(d, read(source, a), to) for d in fitting}
        check(table, f"b{to}", (holder(source),))


@pytest.mark.parametrize("source", INTEGERS)
def test_saturation_clamps_between_integers(source):
    low, high = limits(source)
    for to in (16, 32, 64):
        able = [d for d in INTEGERS if bits_of(d) <= to and not (limits(d)[0] <= low and high <= limits(d)[1])]
        table = {f"cvt.sat.{d}.{source}": lambda a, d=d, to=to: held(d, clamped(d, read(source, a)), to) for d in able}
        if able:
            check(table, f"b{to}", (holder(source),))


def test_a_conversion_that_cannot_saturate_takes_no_sat():
    with pytest.raises(PtxError, match=r"cvt\.sat\.u64\.u32"):
        apply(["cvt.sat.u64.u32"], "b64", ("b32",), [[1]])


@pytest.mark.parametrize("wide", ["b32", "b64"])
def test_a_source_register_may_be_wider_than_its_type(wide):
    table = {}
    for s in [k for k in INTEGERS if bits_of(k) < int(wide[1:])]:
        table |= {f"cvt.{d}.{s} %d, %a;": lambda a, d=d, s=s: held(d, read(s, a), 32) for d in ("u32", "s32")}
        table[f"cvt.rn.f32.{s} %d, %a;"] = lambda a, s=s: sf.F32.encode(sf.whole(read(s, a)))
    check(table, "b32", (wide,))


def conversion(words, to, source):
    """Return a cvt whose bytes lie in .b8 registers where the other side is bf16, which takes no wider ones."""
    opcode = f"cvt.{words}.{to}.{source}"
    if "bf16" not in (to, source) or "8" not in (to[1:], source[1:]):
        return opcode
    if source[1:] == "8":
        return f"{{ .reg .b8 %y; cvt.u8.u16 %y, %a; {opcode} %d, %y; }}"
    return f"{{ .reg .b8 %y; {opcode} %y, %a; cvt.{to[0]}16.{to} %d, %y; }}"


@pytest.mark.parametrize("kind", FORMATS)
def test_integers_become_floats_with_one_rounding(kind):
    encode = FORMATS[kind].encode
    for source in INTEGERS:
        table = {conversion(m, kind, source): lambda a, s=source, m=m: encode(sf.whole(read(s, a)), m) for m in MODES}
        check(table, kind, (holder(source),), count=3000)
    if kind != "bf16":
        table = {f"cvt.{m}.sat.{kind}.s32": lambda a, m=m: encode(sf.whole(read("s32", a)), m, sat=True) for m in MODES}
        check(table, kind, ("b32",), count=500)


def to_integer(kind, format_, float_kind, mode, ftz=False):
    special = 1 << bits_of(kind) - 1 if float_kind == "f64" or bits_of(kind) == 64 else 0

    def model(bits):
        x = format_.decode(bits, ftz)
        if x.kind == "nan":
            return special
        return clamped(kind, limits(kind)[x.n > 0] if x.kind == "inf" else sf.to_whole(x, mode))

    return model


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("kind", FORMATS)
def test_floats_become_integers_that_stop_at_their_limits(kind):
    columns = [[*range(0, 65536, 5), *edges(kind)]] if kind in ("f16", "bf16") else values(kind)
    for d in INTEGERS:
        bits, models = int(holder(d)[1:]), {m: to_integer(d, FORMATS[kind], kind, m) for m in WHOLE}
        table = {conversion(m, d, kind): lambda a, f=f, d=d, n=bits: held(d, f(a), n) for m, f in models.items()}
        check(table, holder(d), (kind,), columns)


def test_ftz_makes_a_subnormal_round_as_zero_does():
    models = {m: to_integer("s32", sf.F32, "f32", m, ftz=True) for m in WHOLE}
    table = {f"cvt.{m}.ftz.s32.f32": lambda a, f=f: f(a) & 0xFFFFFFFF for m, f in models.items()}
    check(table, "b32", ("f32",), count=1000)


@pytest.mark.spread(every=2)
@pytest.mark.parametrize(("to", "source"), [p for p in itertools.product(FORMATS, FORMATS) if p[0] != p[1]])
def test_floats_become_other_floats_with_one_rounding(to, source):
    d, s = FORMATS[to], FORMATS[source]
    columns = [list(range(65536))] if source in ("f16", "bf16") else values(source)
    exact = d.mantissa >= s.mantissa and d.exponent >= s.exponent
    modes = {f"cvt.{to}.{source}": "rn"} if exact else {f"cvt.{m}.{to}.{source}": m for m in MODES}
    # a NaN that comes from or goes to a double, and bf16's in f32, keeps its payload: it is tested on its own
    plain = [x for x in columns[0] if s.decode(x).kind != "nan"]
    table = {text: lambda a, m=m: d.encode(s.decode(a), m) for text, m in modes.items()}
    check(table, to, (source,), [plain])
    if {to, source} == {"f16", "bf16"} or (source == "f32" and to != "f64") or (to, source) == ("f32", "f16"):
        nans = [x for x in columns[0] if s.decode(x).kind == "nan"]
        assert all(set(row) == {d.nan} for row in apply(list(modes), to, (source,), [nans]))


@pytest.mark.parametrize(("text", "to", "source", "given", "expected"), [
    ("cvt.rn.f32.f64", "b32", "f64", 0xFFF4000020000001, 0xFFE00001),
    ("cvt.rn.f16.f64", "b16", "f64", 0xFFF4000020000001, 0xFF00),
    ("cvt.rn.bf16.f64", "b16", "f64", 0xFFF4000020000001, 0xFFE0),
    ("cvt.f64.f32", "b64", "f32", 0x7F800001, 0x7FF8000020000000),
    ("cvt.ftz.f64.f32", "b64", "f32", 0x7F800001, 0x7FFFFFFFE0000000),
    ("cvt.f32.bf16", "b32", "bf16", 0x7F81, 0x7F810000),
    ("cvt.ftz.f32.bf16", "b32", "bf16", 0x7F81, 0x7FFFFFFF),
    ("cvt.f32.f32", "b32", "f32", 0x7F800001, 0x7F800001),
])
def test_payloads_of_nan_survive_where_doubles_are_concerned(text, to, source, given, expected):
    assert apply([text], to, (source,), [[given]]) == [[expected]]


def test_ftz_and_sat_between_floats():
    table = {
        ".".join(w for w in ("cvt", "ftz" * ftz, "sat" * sat, "f32.f32") if w):
            lambda a, f=ftz, s=sat: sf.F32.encode(sf.F32.decode(a, f), ftz=f, sat=s)
        for ftz, sat in ((True, False), (False, True), (True, True))
    }
    check(table, "b32", ("f32",), count=3000)
    check({
        "cvt.rn.ftz.f16.f32": lambda a: sf.F16.encode(sf.F32.decode(a, True)),
        "cvt.rn.sat.f16.f32": lambda a: sf.F16.encode(sf.F32.decode(a), sat=True),
        "cvt.rz.ftz.bf16.f32": lambda a: sf.BF16.encode(sf.F32.decode(a, True), "rz"),
    }, "b16", ("f32",), count=3000)
    table = {
        f"cvt.rn.{finish}.f32.f64": lambda a, f=finish: sf.F32.encode(sf.F64.decode(a), **{f: True})
        for finish in ("ftz", "sat")
    }
    check(table, "b32", ("f64",), [[x for x in values("f64", count=3000)[0] if sf.F64.decode(x).kind != "nan"]])


@pytest.mark.parametrize("kind", FORMATS)
def test_floats_round_to_whole_floats_of_their_own_sign(kind):
    format_ = FORMATS[kind]

    def model(mode):
        def rounded(bits):
            x = format_.decode(bits)
            if x.kind != "finite":
                return format_.encode(x)
            return format_.encode(sf.Number(sf.to_whole(x, mode), 0, x.negative))

        return rounded

    plain = [x for x in values(kind)[0] if format_.decode(x).kind != "nan"]
    check({f"cvt.{m}.{kind}.{kind}": model(m) for m in WHOLE}, kind, (kind,), [plain])


# ---- narrow floats

FLAGS = {
    f"{'.relu' * relu}{'.satfinite' * satfinite}": dict(relu=relu, satfinite=satfinite)
    for satfinite in (False, True) for relu in (False, True)
}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_two_floats_become_a_pair_with_the_first_on_top(kind):
    columns, pairs, singles = values("f32", "f32"), {}, {}
    for mode, (words, finish) in itertools.product(("rn", "rz"), FLAGS.items()):

        def one(a, m=mode, f=finish):
            return FORMATS[kind].encode(sf.F32.decode(a), m, **f)

        pairs[f"cvt.{mode}{words}.{kind}x2.f32"] = lambda a, b, one=one: one(a) << 16 | one(b)
        singles[f"cvt.{mode}{words}.{kind}.f32"] = one
    check(pairs, "b32", ("f32", "f32"), columns)
    check(singles, "b16", ("f32",), columns[:1])


def test_tf32_keeps_ten_bits_of_the_fraction():
    table = {
        f"cvt.{mode}{words}.tf32.f32": lambda a, m=mode, f=finish: sf.TF32.encode(sf.F32.decode(a), m, **f) << 13
        for mode, (words, finish) in itertools.product(("rn", "rz"), FLAGS.items())
    }
    check(table, "b32", ("f32",), target=NEWEST)

    def rna(a):
        magnitude = a & 0x7FFFFFFF
        return (a + 0x1000 if magnitude < 0x7F800000 else a) & 0xFFFFE000

    def satfinite(a):
        x = sf.F32.decode(a)
        return 0x7FFFFFFF if x.kind == "nan" else sf.TF32.encode(x, "rna", satfinite=True) << 13

    check({"cvt.rna.tf32.f32": rna}, "b32", ("f32",))
    check({"cvt.rna.satfinite.tf32.f32": satfinite}, "b32", ("f32",), target=NEWEST)


SMALL = {"e4m3": (sf.E4M3, 8), "e5m2": (sf.E5M2, 8), "e2m3": (sf.E2M3, 8), "e3m2": (sf.E3M2, 8), "e2m1": (sf.E2M1, 4)}


def introduced(kind):
    return "sm_90a" if kind in ("e4m3", "e5m2") else NEWEST


def on_byte(kind):
    """e2m1x2 lies in a .b8 register: the test moves it through one."""
    if kind != "e2m1":
        return "{op} %d, {sources};"
    return "{{ .reg .b8 %y; {op} %y, {sources}; cvt.u16.u8 %d, %y; }}"


@pytest.mark.parametrize("kind", SMALL)
def test_small_floats_saturate_and_pack_by_pairs(kind):
    format_, bits = SMALL[kind]
    text = on_byte(kind)

    def narrow(x, relu):
        """Saturating; e4m3 and e5m2 have a NaN, the others give their largest number for it."""
        return format_.encode(x, relu=relu, satfinite=True)

    def model(read, r):
        return lambda *x: narrow(read(*x)[0], r) << bits | narrow(read(*x)[1], r)

    def table(source, sources, read):
        return {
            text.format(op=f"cvt.rn.satfinite{'.relu' * r}.{kind}x2.{source}", sources=sources): model(read, r)
            for r in (False, True)
        }

    read = lambda a, b: (sf.F32.decode(a), sf.F32.decode(b))  # noqa: E731
    check(table("f32", "%a, %b", read), "b16", ("f32", "f32"), target=introduced(kind))
    for source in ("f16", "bf16"):
        read = lambda a, s=FORMATS[source]: (s.decode(a >> 16), s.decode(a & 0xFFFF))  # noqa: E731
        target = introduced(kind) if source == "f16" else NEWEST
        check(table(f"{source}x2", "%a", read), "b16", (f"{source}x2",), target=target)


@pytest.mark.parametrize("kind", SMALL)
def test_small_floats_widen_exactly(kind):
    format_, bits = SMALL[kind]
    every = list(range(1 << format_.bits))
    columns = [[a << bits | b for a in every[:: max(1, len(every) // 64)] for b in every]]
    text = "cvt.rn{r}.f16x2.{k}x2 %d, %a;"
    if kind == "e2m1":
        text = "{{ .reg .b8 %y; cvt.u8.u16 %y, %a; cvt.rn{r}.f16x2.{k}x2 %d, %y; }}"

    def model(relu):
        one = lambda code: sf.F16.encode(format_.decode(code), relu=relu)  # noqa: E731
        return lambda a: one(a >> bits) << 16 | one(a & (1 << bits) - 1)

    table = {text.format(r=".relu" * relu, k=kind): model(relu) for relu in (False, True)}
    check(table, "b32", ("b16",), columns, target=introduced(kind))


def test_powers_of_two_round_up_or_down_and_lose_their_sign():
    def ue8m0(a, mode, satfinite):
        x = sf.absolute(sf.F32.decode(a)) if sf.F32.decode(a).kind != "nan" else sf.NAN
        if x.kind == "nan" or x.kind == "inf":
            return 0xFF if x.kind == "nan" or not satfinite else 0xFE
        if not x.n:
            return 0
        top = x.n.bit_length() - 1 + x.e
        code = top + (mode == "rp" and x.n & x.n - 1 != 0) + 127
        return max(code, 0) if code < 0xFF else 0xFE if satfinite or mode == "rz" else 0xFF

    both, pairs = {}, {}
    for m, s in itertools.product(("rz", "rp"), (False, True)):
        text = f"cvt.{m}{'.satfinite' * s}.ue8m0x2"
        both[f"{text}.f32"] = lambda a, b, m=m, s=s: ue8m0(a, m, s) << 8 | ue8m0(b, m, s)
        pairs[f"{text}.bf16x2"] = lambda a, f=both[f"{text}.f32"]: f(a & 0xFFFF0000, a << 16 & 0xFFFFFFFF)
    check(both, "b16", ("f32", "f32"), target=NEWEST)
    check(pairs, "b16", ("bf16x2",), target=NEWEST)
    every = [a << 8 | b for a in range(0, 256, 15) for b in range(256)]

    def back(a):
        return 0x7FFF if a == 0xFF else a << 7 if a else 0x40

    table = {"cvt.rn.bf16x2.ue8m0x2": lambda a: back(a >> 8) << 16 | back(a & 255)}
    check(table, "b32", ("b16",), [every], target=NEWEST)


def test_random_bits_decide_a_stochastic_rounding_by_their_carry():
    columns = values("f32", "f32", "b32")

    def rounded(format_, bits, random, lost):
        x = sf.F32.decode(bits)
        if x.kind != "finite" or not x.n:
            return format_.encode(x)
        exponent = abs(x.n).bit_length() - 1 + x.e
        if exponent < format_.least:
            return None
        step = sf.Number(random if x.n > 0 else -random, exponent - format_.mantissa - lost, x.negative)
        total = sf.add(x, step)
        beyond = abs(total.n).bit_length() + total.e > (1 << format_.exponent - 1)
        return format_.encode(sf.infinity(x.negative) if beyond else total, "rz")

    for kind, lost in (("f16", 13), ("bf16", 16)):
        (got,) = apply([f"cvt.rs.{kind}x2.f32"], "b32", ("f32", "f32", "b32"), columns, target=NEWEST)
        seen = 0
        for a, b, r, g in zip(*columns, got):
            for source, half, random in ((a, g >> 16, r >> 16), (b, g & 0xFFFF, r & 0xFFFF)):
                wanted = rounded(FORMATS[kind], source, random & (1 << lost) - 1, lost)
                if wanted is not None and sf.F32.decode(source).kind != "nan":
                    assert half == wanted, (hex(source), hex(random), hex(half))
                    seen += 1
        assert seen > 1000


def test_cvt_pack_clamps_two_integers_above_what_it_keeps():
    def model(kind, keeps):
        n = bits_of(kind)
        mask = (1 << n) - 1
        low = lambda x: clamped(kind, read("s32", x)) & mask  # noqa: E731
        return lambda a, b, c: (low(a) << n | low(b) | (c << 2 * n if keeps else 0)) & 0xFFFFFFFF

    table = {f"cvt.pack.sat.{t}.s32 %d, %a, %b;": model(t, False) for t in ("u16", "s16")}
    table |= {f"cvt.pack.sat.{t}.s32.b32": model(t, True) for t in ("u8", "s8", "u4", "s4", "u2", "s2")}
    check(table, "b32", ("s32", "s32", "b32"))


def test_the_reference_cases_of_pairs_saturation_and_tf32():
    check({"cvt.rn.bf16x2.f32": lambda a, b: 0x3F823F80}, "b32", ("f32", "f32"), [[0x3F818000], [0x3F808000]])
    table = {"cvt.rn.bf16.f32": lambda a: 0x7F80, "cvt.rn.satfinite.bf16.f32": lambda a: 0x7F7F}
    check(table, "b16", ("f32",), [[0x7F7FFFFF]])
    columns = [[0x3F801000, 0x3F800FFF, 0xBF803000, 0x7F7FFFFF]]
    assert apply(["cvt.rna.tf32.f32"], "b32", ("f32",), columns) == [[0x3F802000, 0x3F800000, 0xBF804000, 0x7F800000]]
