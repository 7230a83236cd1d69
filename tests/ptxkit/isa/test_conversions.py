"""cvt between every pair of types, against whole-number arithmetic and one exact rounding."""

import itertools

import pytest
import softfloat as sf
from lanes import apply, check, edges, register, values
from softfloat import FORMATS

from ptxkit.ptx import PtxError

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("draws")]
INTEGERS = [f"{s}{n}" for n in (8, 16, 32, 64) for s in "us"]
WIDE = [k for k in INTEGERS if k[1:] != "8"]
NEWEST = "sm_100a"  # for what came with it
MODES, WHOLE = ("rn", "rz", "rm", "rp"), ("rni", "rzi", "rmi", "rpi")


def bits_of(kind):
    return int(kind[1:])


def read(kind, x):
    bits = bits_of(kind)
    x &= (1 << bits) - 1
    return x - (1 << bits) if kind[0] == "s" and x >> bits - 1 else x


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
    columns = values(holder(source))
    for to in (16, 32, 64):
        fitting = [d for d in INTEGERS if bits_of(d) <= to and (bits_of(d) < 16 or to >= bits_of(d))]
        models = [lambda a, d=d, to=to: held(d, read(source, a), to) for d in fitting]
        check([f"cvt.{d}.{source}" for d in fitting], f"b{to}", (holder(source),), columns, models)


@pytest.mark.parametrize("source", INTEGERS)
def test_saturation_clamps_between_integers(source):
    columns = values(holder(source))
    low, high = limits(source)
    for to in (16, 32, 64):
        able = [d for d in INTEGERS if bits_of(d) <= to and not (limits(d)[0] <= low and high <= limits(d)[1])]
        models = [lambda a, d=d, to=to: held(d, clamped(d, read(source, a)), to) for d in able]
        if able:
            check([f"cvt.sat.{d}.{source}" for d in able], f"b{to}", (holder(source),), columns, models)


def test_a_conversion_that_cannot_saturate_takes_no_sat():
    with pytest.raises(PtxError, match=r"cvt\.sat\.u64\.u32"):
        apply(["cvt.sat.u64.u32"], "b64", ("b32",), [[1]])


@pytest.mark.parametrize("wide", ["b32", "b64"])
def test_a_source_register_may_be_wider_than_its_type(wide):
    columns = values(wide)
    narrow = [k for k in INTEGERS if bits_of(k) < int(wide[1:])]
    texts = [f"cvt.{d}.{s} %d, %a;" for d, s in itertools.product(("u32", "s32"), narrow)] + [
        f"cvt.rn.f32.{s} %d, %a;" for s in narrow
    ]
    models = [lambda a, d=d, s=s: held(d, read(s, a), 32) for d, s in itertools.product(("u32", "s32"), narrow)]
    models += [lambda a, s=s: sf.F32.encode(sf.whole(read(s, a))) for s in narrow]
    check(texts, "b32", (wide,), columns, models)


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
    format_ = FORMATS[kind]
    for source in INTEGERS:
        models = [lambda a, s=source, m=m: format_.encode(sf.whole(read(s, a)), m) for m in MODES]
        texts = [conversion(m, kind, source) for m in MODES]
        check(texts, register(kind), (holder(source),), values(holder(source), count=3000), models)
    if kind != "bf16":
        models = [lambda a, m=m: format_.encode(sf.whole(read("s32", a)), m, sat=True) for m in MODES]
        check([f"cvt.{m}.sat.{kind}.s32" for m in MODES], register(kind), ("b32",), values("b32", count=500), models)


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
    format_ = FORMATS[kind]
    columns = [[*range(0, 65536, 5), *edges(kind)]] if kind in ("f16", "bf16") else values(kind)
    for d in INTEGERS:
        models = [to_integer(d, format_, kind, m) for m in WHOLE]
        wide = [lambda a, m=m, d=d: held(d, m(a), int(holder(d)[1:])) for m in models]
        check([conversion(m, d, kind) for m in WHOLE], holder(d), (kind,), columns, wide)


def test_ftz_makes_a_subnormal_round_as_zero_does():
    columns = values("f32", count=1000)
    models = [lambda a, m=m: to_integer("s32", sf.F32, "f32", m, ftz=True)(a) & 0xFFFFFFFF for m in WHOLE]
    check([f"cvt.{m}.ftz.s32.f32" for m in WHOLE], "b32", ("f32",), columns, models)


@pytest.mark.spread(every=2)
@pytest.mark.parametrize(("to", "source"), [p for p in itertools.product(FORMATS, FORMATS) if p[0] != p[1]])
def test_floats_become_other_floats_with_one_rounding(to, source):
    d, s = FORMATS[to], FORMATS[source]
    columns = [list(range(65536))] if source in ("f16", "bf16") else values(source)
    exact = d.mantissa >= s.mantissa and d.exponent >= s.exponent
    texts = [f"cvt.{to}.{source}"] if exact else [f"cvt.{m}.{to}.{source}" for m in MODES]
    # a NaN that comes from or goes to a double, and bf16's in f32, keeps its payload: it is tested on its own
    plain = [x for x in columns[0] if s.decode(x).kind != "nan"]
    modes = ["rn"] if exact else MODES
    check(texts, register(to), (source,), [plain], [lambda a, m=m: d.encode(s.decode(a), m) for m in modes])
    if {to, source} == {"f16", "bf16"} or (source == "f32" and to != "f64") or (to, source) == ("f32", "f16"):
        nans = [x for x in columns[0] if s.decode(x).kind == "nan"]
        assert all(set(row) == {d.nan} for row in apply(texts, register(to), (source,), [nans]))


def test_payloads_of_nan_survive_where_doubles_are_concerned():
    (single,), (half,), (brain,) = (
        apply([f"cvt.rn.{k}.f64"], register(k), ("f64",), [[0xFFF4000020000001]]) for k in ("f32", "f16", "bf16")
    )
    assert (single, half, brain) == ([0xFFE00001], [0xFF00], [0xFFE0])
    assert apply(["cvt.f64.f32", "cvt.ftz.f64.f32"], "b64", ("f32",), [[0x7F800001]]) == [
        [0x7FF8000020000000],
        [0x7FFFFFFFE0000000],
    ]
    assert apply(["cvt.f32.bf16", "cvt.ftz.f32.bf16"], "b32", ("bf16",), [[0x7F81]]) == [[0x7F810000], [0x7FFFFFFF]]
    assert apply(["cvt.f32.f32"], "b32", ("f32",), [[0x7F800001]]) == [[0x7F800001]]


def test_ftz_and_sat_between_floats():
    columns = values("f32", count=3000)
    texts, models = [], []
    for ftz, sat in ((True, False), (False, True), (True, True)):
        texts.append(".".join(w for w in ("cvt", "ftz" * ftz, "sat" * sat, "f32.f32") if w))
        models.append(lambda a, f=ftz, s=sat: sf.F32.encode(sf.F32.decode(a, f), ftz=f, sat=s))
    check(texts, "b32", ("f32",), columns, models)
    texts = ["cvt.rn.ftz.f16.f32", "cvt.rn.sat.f16.f32", "cvt.rz.ftz.bf16.f32"]
    models = [
        lambda a: sf.F16.encode(sf.F32.decode(a, True)), lambda a: sf.F16.encode(sf.F32.decode(a), sat=True),
        lambda a: sf.BF16.encode(sf.F32.decode(a, True), "rz"),
    ]
    check(texts, "b16", ("f32",), columns, models)
    models = [
        lambda a, f=f, s=s: sf.F32.encode(sf.F64.decode(a), ftz=f, sat=s) for f, s in ((True, False), (False, True))
    ]
    plain = [x for x in values("f64", count=3000)[0] if sf.F64.decode(x).kind != "nan"]
    check(["cvt.rn.ftz.f32.f64", "cvt.rn.sat.f32.f64"], "b32", ("f64",), [plain], models)


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
    check([f"cvt.{m}.{kind}.{kind}" for m in WHOLE], register(kind), (kind,), [plain], [model(m) for m in WHOLE])


# ---- narrow floats

FLAGS = (
    ("", {}),
    (".relu", {"relu": True}),
    (".satfinite", {"satfinite": True}),
    (".relu.satfinite", {"relu": True, "satfinite": True}),
)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_two_floats_become_a_pair_with_the_first_on_top(kind):
    format_, columns = FORMATS[kind], values("f32", "f32")
    texts, models, single, singles = [], [], [], []
    for mode, (words, finish) in itertools.product(("rn", "rz"), FLAGS):

        def one(a, m=mode, f=finish):
            return format_.encode(sf.F32.decode(a), m, **f)

        texts.append(f"cvt.{mode}{words}.{kind}x2.f32")
        models.append(lambda a, b, one=one: one(a) << 16 | one(b))
        single.append(f"cvt.{mode}{words}.{kind}.f32")
        singles.append(one)
    check(texts, "b32", ("f32", "f32"), columns, models)
    check(single, "b16", ("f32",), columns[:1], singles)


def test_tf32_keeps_ten_bits_of_the_fraction():
    columns = values("f32")
    texts, models = [], []
    for mode, (words, finish) in itertools.product(("rn", "rz"), FLAGS):
        texts.append(f"cvt.{mode}{words}.tf32.f32")
        models.append(lambda a, m=mode, f=finish: sf.TF32.encode(sf.F32.decode(a), m, **f) << 13)
    check(texts, "b32", ("f32",), columns, models, target=NEWEST)

    def rna(a):
        magnitude = a & 0x7FFFFFFF
        return (a + 0x1000 if magnitude < 0x7F800000 else a) & 0xFFFFE000

    def satfinite(a):
        x = sf.F32.decode(a)
        return 0x7FFFFFFF if x.kind == "nan" else sf.TF32.encode(x, "rna", satfinite=True) << 13

    check(["cvt.rna.tf32.f32"], "b32", ("f32",), columns, [rna])
    check(["cvt.rna.satfinite.tf32.f32"], "b32", ("f32",), columns, [satfinite], target=NEWEST)


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

    columns = values("f32", "f32")
    texts = [text.format(op=f"cvt.rn.satfinite{r}.{kind}x2.f32", sources="%a, %b") for r in ("", ".relu")]
    models = [
        lambda a, b, r=r: narrow(sf.F32.decode(a), r) << bits | narrow(sf.F32.decode(b), r) for r in (False, True)
    ]
    check(texts, "b16", ("f32", "f32"), columns, models, target=introduced(kind))
    for source in ("f16", "bf16"):
        columns = values(f"{source}x2")
        s = FORMATS[source]
        models = [
            lambda a, r=r, s=s: narrow(s.decode(a >> 16), r) << bits | narrow(s.decode(a & 0xFFFF), r)
            for r in (False, True)
        ]
        texts = [text.format(op=f"cvt.rn.satfinite{r}.{kind}x2.{source}x2", sources="%a") for r in ("", ".relu")]
        check(texts, "b16", (f"{source}x2",), columns, models, target=introduced(kind) if source == "f16" else NEWEST)


@pytest.mark.parametrize("kind", SMALL)
def test_small_floats_widen_exactly(kind):
    format_, bits = SMALL[kind]
    every = list(range(1 << format_.bits))
    columns = [[a << bits | b for a in every[:: max(1, len(every) // 64)] for b in every]]
    text = (
        "cvt.rn{r}.f16x2.{k}x2 %d, %a;"
        if kind != "e2m1"
        else "{{ .reg .b8 %y; cvt.u8.u16 %y, %a; cvt.rn{r}.f16x2.{k}x2 %d, %y; }}"
    )

    def model(relu):
        return lambda a: (
            sf.F16.encode(format_.decode(a >> bits), relu=relu) << 16
            | sf.F16.encode(format_.decode(a & (1 << bits) - 1), relu=relu)
        )

    check(
        [text.format(r=r, k=kind) for r in ("", ".relu")],
        "b32",
        ("b16",),
        columns,
        [model(False), model(True)],
        target=introduced(kind),
    )


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

    combinations = list(itertools.product(("rz", "rp"), (False, True)))
    texts = [f"cvt.{m}{'.satfinite' * s}.ue8m0x2.f32" for m, s in combinations]
    models = [lambda a, b, m=m, s=s: ue8m0(a, m, s) << 8 | ue8m0(b, m, s) for m, s in combinations]
    check(texts, "b16", ("f32", "f32"), values("f32", "f32"), models, target=NEWEST)
    texts = [f"cvt.{m}{'.satfinite' * s}.ue8m0x2.bf16x2" for m, s in combinations]
    models = [
        lambda a, m=m, s=s: ue8m0(a & 0xFFFF0000, m, s) << 8 | ue8m0(a << 16 & 0xFFFFFFFF, m, s)
        for m, s in combinations
    ]
    check(texts, "b16", ("bf16x2",), values("bf16x2"), models, target=NEWEST)
    every = [a << 8 | b for a in range(0, 256, 15) for b in range(256)]

    def back(a):
        return 0x7FFF if a == 0xFF else a << 7 if a else 0x40

    check(
        ["cvt.rn.bf16x2.ue8m0x2"],
        "b32",
        ("b16",),
        [every],
        [lambda a: back(a >> 8) << 16 | back(a & 255)],
        target=NEWEST,
    )


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
    columns = values("s32", "s32", "b32")
    two = [f"cvt.pack.sat.{t}.s32 %d, %a, %b;" for t in ("u16", "s16")]
    three = [f"cvt.pack.sat.{t}.s32.b32" for t in ("u8", "s8", "u4", "s4", "u2", "s2")]

    def model(kind, keeps):
        n = bits_of(kind)
        mask = (1 << n) - 1
        low = lambda x: clamped(kind, read("s32", x)) & mask  # noqa: E731
        return lambda a, b, c: (low(a) << n | low(b) | (c << 2 * n if keeps else 0)) & 0xFFFFFFFF

    models = [model(k, False) for k in ("u16", "s16")] + [model(t.split(".")[3], True) for t in three]
    check(two + three, "b32", ("s32", "s32", "b32"), columns, models)


def test_the_reference_cases_of_pairs_saturation_and_tf32():
    assert apply(["cvt.rn.bf16x2.f32"], "b32", ("f32", "f32"), [[0x3F818000], [0x3F808000]]) == [[0x3F823F80]]
    assert apply(["cvt.rn.bf16.f32", "cvt.rn.satfinite.bf16.f32"], "b16", ("f32",), [[0x7F7FFFFF]]) == [
        [0x7F80],
        [0x7F7F],
    ]
    columns = [[0x3F801000, 0x3F800FFF, 0xBF803000, 0x7F7FFFFF]]
    assert apply(["cvt.rna.tf32.f32"], "b32", ("f32",), columns) == [[0x3F802000, 0x3F800000, 0xBF804000, 0x7F800000]]
