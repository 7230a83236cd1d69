"""mma.sync of narrow types: 4-bit and 1-bit integers, and the kinds of sm_120a with their factors."""

import pytest
import torch
from assembly import refused
from fragments import packed, places_of_a, places_of_b, places_of_c, shape_of, unpacked, warp
from matrices import decode, encode
from tensor_core import _table

from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

SM120 = "sm_120a"
VALUES = {
    "e2m1": _table(2, 1, 1),
    "e2m3": _table(2, 3, 1),
    "e3m2": _table(3, 2, 3),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double(),
    "e5m2": torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).double(),
}
FINITE = {name: [c for c in range(len(v)) if v[c].isfinite() and abs(v[c]) <= 448] for name, v in VALUES.items()}
CONTAINER = {"e2m1": 2}  # in 8 bits
ALL = tuple(VALUES)


def random_codes(name, shape, generator):
    able = torch.tensor(FINITE[name])
    return able[torch.randint(0, len(able), shape, generator=generator)]


# ---- integers


def integers(codes, name):
    if name == "b1":
        return codes
    return torch.where(codes >= 8, codes - 16, codes) if name == "s4" else codes


def mma_of_integers(shape, a, b, c, types, modifier="", after=""):
    m, _, k = shape_of(shape)
    bits = 1 if types[0] == "b1" else 4
    opcode = f"mma.sync.aligned.{shape}.row.col{modifier}.s32.{types[0]}.{types[1]}.s32{after}"
    fragments = [
        packed(a, places_of_a(m, k, bits), bits),
        packed(b, places_of_b(k, bits), bits),
        packed(c & 0xFFFFFFFF, places_of_c(m), 32),
    ]
    out, run = warp(opcode + " {d}, {0}, {1}, {2};", fragments, m // 4, "sm_80")
    assert run.counters["tensor_flops"] == 2 * m * 8 * k
    return decode(unpacked(out, places_of_c(m), (m, 8)), "s32")


@pytest.mark.parametrize("shape", ["m8n8k32", "m16n8k32", "m16n8k64"])
@pytest.mark.parametrize("types", [("s4", "s4"), ("u4", "s4"), ("s4", "u4"), ("u4", "u4")], ids=".".join)
def test_products_of_4_bit_integers_are_exact(shape, types):
    (m, _, k), g = shape_of(shape), torch.Generator().manual_seed(3)
    a, b = torch.randint(0, 16, (m, k), generator=g), torch.randint(0, 16, (k, 8), generator=g)
    c = torch.randint(-1000, 1000, (m, 8), generator=g)
    exact = integers(a, types[0]) @ integers(b, types[1]) + c
    assert torch.equal(mma_of_integers(shape, a, b, c, types), exact)


def test_a_sum_of_4_bit_products_saturates_if_asked_to():
    a, b, c = torch.full((16, 32), 7), torch.full((32, 8), 7), torch.full((16, 8), 2**31 - 10)
    assert mma_of_integers("m16n8k32", a, b, c, ("s4", "s4"), ".satfinite").unique().tolist() == [2**31 - 1]
    assert mma_of_integers("m16n8k32", a, b, c, ("s4", "s4")).unique().tolist() == [2**31 - 10 + 49 * 32 - 2**32]


@pytest.mark.parametrize("shape", ["m8n8k128", "m16n8k128", "m16n8k256"])
@pytest.mark.parametrize("operation", ["and", "xor"])
def test_bits_are_combined_and_counted(shape, operation):
    (m, _, k), g = shape_of(shape), torch.Generator().manual_seed(4)
    a, b = torch.randint(0, 2, (m, k), generator=g), torch.randint(0, 2, (k, 8), generator=g)
    c = torch.randint(-1000, 1000, (m, 8), generator=g)
    both = a @ b
    exact = both if operation == "and" else a.sum(1, keepdim=True) + b.sum(0, keepdim=True) - 2 * both
    assert torch.equal(mma_of_integers(shape, a, b, c, ("b1", "b1"), after=f".{operation}.popc"), exact + c)


# ---- kinds of sm_120a


def factors(codes, type_):
    """ue8m0: a power of two; ue4m3: e4m3 without a sign."""
    return torch.exp2(codes.double() - 127) if type_ == "ue8m0" else VALUES["e4m3"][codes]


def scale_registers(scales, thread, byte, of_a):
    """[lane] words that hold [rows][count] factors in the threads and bytes that the selectors name; rest: 0x7f."""
    words = []
    for lane in range(32):
        g, t = lane >> 2, lane & 3
        rows = {2 * thread: g, 2 * thread + 1: g + 8} if of_a else {thread: g}
        held = [0x7F] * 4
        if t in rows:
            held[byte : byte + scales.shape[1]] = scales[rows[t]].tolist()
        words.append(sum(x << 8 * n for n, x in enumerate(held)))
    return [words]


def mma_of_kind(kind, a, b, c, types, scales=None, type_="ue8m0", selectors=(0, 0, 0, 0), vec=True, findings=False):
    k = a.shape[1]
    bits = 4 if k == 64 else 8
    shifts = [CONTAINER.get(t, 0) if bits == 8 else 0 for t in types]
    fragments = [
        packed(a << shifts[0], places_of_a(16, k, bits), bits),
        packed(b << shifts[1], places_of_b(k, bits), bits),
        packed(encode(c, "f32"), places_of_c(16), 32),
    ]
    modifiers, tail, end = f".{kind}", "", ""
    if scales:
        byte_a, thread_a, byte_b, thread_b = selectors
        fragments += [scale_registers(scales[0], thread_a, byte_a, True)]
        fragments += [scale_registers(scales[1], thread_b, byte_b, False)]
        modifiers += ".block_scale" + (f".scale_vec::{scales[0].shape[1]}X" if vec else "")
        tail, end = f", {{3}}, {{{{{byte_a}, {thread_a}}}}}, {{4}}, {{{{{byte_b}, {thread_b}}}}}", f".{type_}"
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col{modifiers}.f32.{types[0]}.{types[1]}.f32{end}"
    out, run = warp(f"{opcode} {{d}}, {{0}}, {{1}}, {{2}}{tail};", fragments, 4, SM120, findings)
    return decode(unpacked(out, places_of_c(16), (16, 8)), "f32"), run


@pytest.mark.parametrize("of_a", ALL)
@pytest.mark.parametrize("of_b", ["e2m1", "e3m2", "e5m2"])
def test_kind_f8f6f4_multiplies_any_two_types(of_a, of_b):
    g = torch.Generator().manual_seed(5)
    a, b = random_codes(of_a, (16, 32), g), random_codes(of_b, (32, 8), g)
    a, b = (torch.where(v[x].abs() <= 8, x, 0) for x, v in ((a, VALUES[of_a]), (b, VALUES[of_b])))
    a, b = (torch.where(v[x] * 4 == (v[x] * 4).round(), x, 0) for x, v in ((a, VALUES[of_a]), (b, VALUES[of_b])))
    c = torch.randint(-8, 9, (16, 8), generator=g).double()
    got, _ = mma_of_kind("kind::f8f6f4", a, b, c, (of_a, of_b))
    exact = VALUES[of_a][a] @ VALUES[of_b][b] + c
    assert torch.equal(got, exact) and exact.abs().max() > 20


SCALED = [
    *(("kind::mxf8f6f4", 32, (t, u), 1, "ue8m0") for t, u in (("e4m3", "e5m2"), ("e2m1", "e4m3"), ("e2m3", "e3m2"))),
    ("kind::mxf4", 64, ("e2m1", "e2m1"), 2, "ue8m0"),
    ("kind::mxf4nvf4", 64, ("e2m1", "e2m1"), 2, "ue8m0"),
    ("kind::mxf4nvf4", 64, ("e2m1", "e2m1"), 4, "ue8m0"),
    ("kind::mxf4nvf4", 64, ("e2m1", "e2m1"), 4, "ue4m3"),
]


def scaled_case(kind, k, types, count, type_):
    g = torch.Generator().manual_seed(count)
    a, b = random_codes(types[0], (16, k), g), random_codes(types[1], (k, 8), g)
    a, b = (torch.where((v[x].abs() <= 4) & (v[x] * 8 == (v[x] * 8).round()), x, 0)
            for x, v in ((a, VALUES[types[0]]), (b, VALUES[types[1]])))
    low, high = (124, 131) if type_ == "ue8m0" else (40, 72)
    scales = [torch.randint(low, high, (rows, count), generator=g) for rows in (16, 8)]
    c = torch.randint(-8, 9, (16, 8), generator=g).double()
    wide = [factors(s, type_).repeat_interleave(k // count, dim=1) for s in scales]
    exact = (VALUES[types[0]][a] * wide[0]) @ (VALUES[types[1]][b] * wide[1].T) + c
    return a, b, c, scales, exact


@pytest.mark.parametrize("kind, k, types, count, type_", SCALED)
def test_factors_scale_their_blocks(kind, k, types, count, type_):
    a, b, c, scales, exact = scaled_case(kind, k, types, count, type_)
    steps = range(0, 5 - count, count)
    for byte_a, thread_a, byte_b, thread_b in ((0, 0, 0, 0), (steps[-1], 1, steps[0], 3), (steps[0], 1, steps[-1], 2)):
        got, _ = mma_of_kind(kind, a, b, c, types, scales, type_, (byte_a, thread_a, byte_b, thread_b))
        assert torch.equal(got, exact)


def test_the_number_of_factors_may_be_left_out_where_there_is_one_choice():
    a, b, c, scales, exact = scaled_case("kind::mxf4", 64, ("e2m1", "e2m1"), 2, "ue8m0")
    assert torch.equal(mma_of_kind("kind::mxf4", a, b, c, ("e2m1", "e2m1"), scales, vec=False)[0], exact)
    with pytest.raises(PtxError, match="scale_vec::4X of ue4m3"):
        mma_of_kind("kind::mxf4nvf4", a, b, c, ("e2m1", "e2m1"), scales, vec=False)


@pytest.mark.parametrize("type_, nan", [("ue8m0", 0xFF), ("ue4m3", 0x7F)])
def test_a_factor_that_is_no_number_spoils_its_row_alone(type_, nan):
    a, b, c, scales, exact = scaled_case("kind::mxf4nvf4", 64, ("e2m1", "e2m1"), 4, type_)
    scales[0][3, 2] = nan
    got, _ = mma_of_kind("kind::mxf4nvf4", a, b, c, ("e2m1", "e2m1"), scales, type_)
    assert got[3].isnan().all()
    rows = [r for r in range(16) if r != 3]
    assert torch.equal(got[rows], exact[rows])


def test_huge_factors_overflow_to_infinity_and_small_ones_to_zero():
    a, b = torch.full((16, 64), 2), torch.full((64, 8), 2)  # ones
    c = torch.zeros(16, 8)
    for code, wanted in ((254, float("inf")), (1, 0.0)):
        scales = [torch.full((rows, 2), code) for rows in (16, 8)]
        got, _ = mma_of_kind("kind::mxf4", a, b, c, ("e2m1", "e2m1"), scales)
        assert got.unique().tolist() == [wanted]


def test_selectors_that_select_nothing_are_found():
    a, b, c, scales, _ = scaled_case("kind::mxf4", 64, ("e2m1", "e2m1"), 2, "ue8m0")
    _, run = mma_of_kind("kind::mxf4", a, b, c, ("e2m1", "e2m1"), scales, selectors=(1, 0, 0, 0), findings=True)
    assert "byte 1 and thread 0 select no factors of A; byte is a multiple of 2" in run.findings[0].says
    _, run = mma_of_kind("kind::mxf4", a, b, c, ("e2m1", "e2m1"), scales, selectors=(0, 1, 0, 3), findings=True)
    assert not run.findings


@pytest.mark.parametrize("spelling, target, says", [
    ("m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32", "sm_100a", "kind::f8f6f4 of mma.sync does not exist"),
    ("m16n8k64.row.col.kind::mxf4.block_scale.f32.e4m3.e2m1.f32.ue8m0", SM120, "kind::mxf4.block_scale.scale_vec"),
    ("m16n8k32.row.col.kind::mxf8f6f4.f32.e4m3.e4m3.f32", SM120, "kind::mxf8f6f4.block_scale.scale_vec::1X"),
    ("m16n8k128.row.col.s32.b1.b1.s32", "sm_80", "modifiers sync.aligned.m16n8k128.row.col.s32.b1.b1.s32"),
    ("m16n8k64.row.col.s32.s4.s8.s32", "sm_80", "m16n8k64"),
])
def test_forms_that_do_not_exist_are_refused(spelling, target, says):
    four = "{%r1, %r1, %r1, %r1}"
    text = f"mma.sync.aligned.{spelling} {four}, {four}, {{%r1, %r1}}, {four};"
    assert says in refused(text, target)
