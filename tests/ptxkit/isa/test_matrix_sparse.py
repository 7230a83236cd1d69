"""mma.sp: a product whose A has two zeros in every four neighbours, and metadata that says where."""

import pytest
import torch
from assembly import kernel, refused, reports
from fragments import LANES, packed, places_of_a, places_of_b, places_of_c, shape_of, unpacked, warp
from matrices import bits_of, decode, encode
from test_matrix_narrow import factors, scale_registers

from ptxkit.launches import launch
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4}
CHUNK = {32: 2, 16: 4, 8: 4, 4: 8}  # neighbours in k that share 4 bits of metadata
PAIRS = [(low, high) for high in range(4) for low in range(high)]
FORMS = [
    *((f"m16n8k{k}", t, t, d) for k in (16, 32) for t in ("f16", "bf16") for d in ("f32", "f16")[: 1 + (t == "f16")]),
    *((f"m16n8k{k}", "tf32", "tf32", "f32") for k in (8, 16)),
    *(("m16n8k64", a, b, "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((f"m16n8k{k}", a, b, "s32") for k in (32, 64) for a in ("s8", "u8") for b in ("s8", "u8")),
    *((f"m16n8k{k}", a, b, "s32") for k in (64, 128) for a in ("s4", "u4") for b in ("s4", "u4")),
]


def codes(x, type_):
    """Return the bits of each element."""
    if type_ in ("s4", "u4", "s8", "u8"):
        return x.long() & (1 << BITS[type_]) - 1
    return encode(x, type_)


def whole_numbers(shape, type_, generator):
    return torch.randint(0 if type_[0] == "u" else -4, 4, shape, generator=generator).double()


def sparse(k, type_, generator, ordered=True):
    """Return (A [16][k], its half that is not zero [16][k / 2], metadata [16][chunks])."""
    bits = BITS[type_]
    chunk, together = CHUNK[bits], 2 if bits == 4 else 1
    a, half = torch.zeros(16, k).double(), whole_numbers((16, k // 2), type_, generator)
    metadata = torch.zeros(16, k // chunk, dtype=torch.int64)
    for row in range(16):
        for c in range(k // chunk):
            low, high = PAIRS[int(torch.randint(6, (), generator=generator))]
            if bits == 32:
                low, high = ((0, 1), (2, 3))[low & 1]
            if not ordered and c % 2 and bits != 32:
                low, high = high, low
            metadata[row, c] = low | high << 2
            if bits == 32:
                columns = [low // 2]
            else:
                columns = [together * index + e for index in (low, high) for e in range(together)]
            for e, column in enumerate(columns):
                a[row, c * chunk + column] = half[row, c * chunk // 2 + e]
    return a, half, metadata


def lanes_of(metadata, bits, selector):
    """Return the register with metadata: which lane of four has which part of which row."""
    word = [0xFFFFFFFF] * 32  # what is not selected is not valid
    wide = metadata.shape[1] * 4
    for lane, (g, t) in enumerate(LANES):
        if bits >= 16:
            lanes = wide // 16
            part, rows, chunks = t - lanes * selector, (g, g + 8), 4
        else:
            lanes = wide // 16
            part, rows, chunks = (t - lanes * selector) // 2, (g + 8 * (t % 2),), 8
        if not lanes * selector <= t < lanes * (selector + 1):
            continue
        nibbles = [int(metadata[row, part * chunks + c]) for row in rows for c in range(chunks)]
        word[lane] = sum(nibble << 4 * n for n, nibble in enumerate(nibbles))
    return word


def multiply(form, half, metadata, b, c, variant="sp::ordered_metadata", selector=0, arch=90, modifier=""):
    shape, of_a, of_b, d = form
    k, bits = shape_of(shape)[2], BITS[of_a]
    fragments = [
        packed(codes(half, of_a), places_of_a(16, k // 2, bits), bits),
        packed(codes(b, of_b), places_of_b(k, bits), bits),
        packed(encode(c, d), places_of_c(16), bits_of(d)),
        [lanes_of(metadata, bits, selector)],
    ]
    name = f"mma.{variant}.sync.aligned.{shape}.row.col{modifier}.{d}.{of_a}.{of_b}.{d}"
    text = f"{name} {{d}}, {{0}}, {{1}}, {{2}}, {{3}}, {selector};"
    return warp(text, fragments, len(fragments[2]), f"sm_{arch}", findings=True)


def matrix_of(out, d):
    return decode(unpacked(out, places_of_c(16), (16, 8), bits_of(d)), d).double()


def case(form, ordered=True, seed=1):
    shape, of_a, of_b, _ = form
    g, k = torch.Generator().manual_seed(seed), shape_of(shape)[2]
    a, half, metadata = sparse(k, of_a, g, ordered)
    b = whole_numbers((k, 8), of_b, g)
    c = torch.randint(-9, 9, (16, 8), generator=g).double()
    return a, half, metadata, b, c


@pytest.mark.parametrize("form", FORMS, ids=".".join)
def test_the_product_is_that_of_the_matrix_with_its_zeros(form):
    a, half, metadata, b, c = case(form)
    out, run = multiply(form, half, metadata, b, c)
    assert not run.findings and torch.equal(matrix_of(out, form[3]), a @ b + c)
    assert run.counters["tensor_flops"] == 16 * 8 * shape_of(form[0])[2]  # half of them


@pytest.mark.parametrize(("form", "selectors"), [
    (("m16n8k16", "f16", "f16", "f32"), 4), (("m16n8k32", "bf16", "bf16", "f32"), 2),
    (("m16n8k8", "tf32", "tf32", "f32"), 4), (("m16n8k16", "tf32", "tf32", "f32"), 2),
    (("m16n8k32", "s8", "u8", "s32"), 2), (("m16n8k64", "u4", "s4", "s32"), 2), (("m16n8k64", "s8", "s8", "s32"), 1),
    (("m16n8k128", "s4", "u4", "s32"), 1), (("m16n8k64", "e4m3", "e5m2", "f32"), 1),
])
def test_the_selector_names_the_lanes_whose_metadata_counts(form, selectors):
    a, half, metadata, b, c = case(form, seed=2)
    for selector in range(selectors):
        out, run = multiply(form, half, metadata, b, c, selector=selector)
        assert not run.findings and torch.equal(matrix_of(out, form[3]), a @ b + c)
    with pytest.raises(PtxError, match=f"selector {selectors}"):
        multiply(form, half, metadata, b, c, selector=selectors)


def test_row_0_of_a_16_wide_matrix_has_its_metadata_in_the_low_bits_of_lane_0():
    """Two chunks by hand: 1 at columns 0 and 3 of row 0, 1 at columns 6 and 7 of row 8."""
    half, b = torch.zeros(16, 8), torch.eye(16, 8).double()
    half[0, :2] = half[8, 2:4] = 1
    metadata = torch.full((16, 4), 0x4)
    metadata[0, 0], metadata[8, 1] = 0b1100, 0b1110
    assert lanes_of(metadata, 16, 0)[0] == 0x44E4444C
    out, _ = multiply(("m16n8k16", "f16", "f16", "f32"), half, metadata, b, torch.zeros(16, 8))
    got = matrix_of(out, "f32")
    assert got.nonzero().tolist() == [[0, 0], [0, 3], [8, 6], [8, 7]]


def test_indices_of_mma_sp_need_no_order_those_of_ordered_metadata_do():
    form = "m16n8k32", "f16", "f16", "f32"
    a, half, metadata, b, c = case(form, ordered=False)
    out, run = multiply(form, half, metadata, b, c, variant="sp")
    assert not run.findings and torch.equal(matrix_of(out, "f32"), a @ b + c)
    reports(multiply(form, half, metadata, b, c)[1], ["operand"], "not in order")


@pytest.mark.parametrize(("type_", "shape", "bad", "says"), [
    ("f16", "m16n8k16", 0b0101, "both indices are the same"), ("s8", "m16n8k32", 0b1111, "both indices are the same"),
    ("tf32", "m16n8k8", 0b1001, "it must be 0x4 or 0xe"),
])
@pytest.mark.parametrize("variant", ["sp", "sp::ordered_metadata"])
def test_metadata_that_means_nothing_is_reported_with_its_place(type_, shape, bad, says, variant):
    form = shape, type_, type_, "s32" if type_ == "s8" else "f32"
    _, half, metadata, b, c = case(form)
    metadata[11, 1] = bad
    columns = f"columns {CHUNK[BITS[type_]]} to {2 * CHUNK[BITS[type_]] - 1}"
    says = f"metadata 0x{bad:x} of row 11, {columns}: {says}"
    reports(multiply(form, half, metadata, b, c, variant=variant)[1], ["operand"], says)


@pytest.mark.parametrize("modifier", ["", ".satfinite"])
def test_integers_wrap_or_saturate(modifier):
    form = "m16n8k32", "u8", "u8", "s32"
    _, half, metadata, b, _ = case(form)
    half, b = torch.full_like(half, 255), torch.full_like(b, 255)
    c = torch.full((16, 8), float(2**31 - 1), dtype=torch.float64)
    out, _ = multiply(form, half, metadata, b, c, modifier=modifier)
    total = 2**31 - 1 + 16 * 255 * 255
    assert (matrix_of(out, "s32") == (2**31 - 1 if modifier else total - 2**32)).all()


def unit(type_, bits):
    """Return the bits of 1.0 in a container of so many."""
    return {"e2m1": 8 if bits == 8 else 2, "e2m3": 8, "e3m2": 12, "e4m3": 56, "e5m2": 60}[type_]


@pytest.mark.parametrize("d", ["f32", "f16"])
@pytest.mark.parametrize(("of_a", "of_b"), [("e4m3", "e2m1"), ("e2m1", "e2m3"), ("e3m2", "e5m2"), ("e2m3", "e3m2")])
def test_narrow_floats_of_sm_120a_lie_in_containers_of_8_bits(of_a, of_b, d):
    """Zeros and ones."""
    g = torch.Generator().manual_seed(3)
    a, half, metadata = sparse(64, "s8", g)
    a, half = a.clamp(0, 1), half.clamp(0, 1)
    b, c = torch.randint(0, 2, (64, 8), generator=g), torch.randint(0, 9, (16, 8), generator=g).double()
    fragments = [
        packed(half.long() * unit(of_a, 8), places_of_a(16, 32, 8), 8),
        packed(b * unit(of_b, 8), places_of_b(64, 8), 8),
        packed(encode(c, d), places_of_c(16), bits_of(d)),
        [lanes_of(metadata, 8, 0)],
    ]
    name = f"mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::f8f6f4.{d}.{of_a}.{of_b}.{d}"
    out, run = warp(f"{name} {{d}}, {{0}}, {{1}}, {{2}}, {{3}}, 0;", fragments, len(fragments[2]), "sm_120a")
    assert not run.findings and torch.equal(matrix_of(out, d), a @ b.double() + c)


SCALED = [
    *(("kind::mxf8f6f4", 64, (a, b), 1, "ue8m0") for a, b in (("e4m3", "e5m2"), ("e2m1", "e4m3"), ("e2m3", "e3m2"))),
    ("kind::mxf4", 128, ("e2m1", "e2m1"), 2, "ue8m0"), ("kind::mxf4nvf4", 128, ("e2m1", "e2m1"), 2, "ue8m0"),
    ("kind::mxf4nvf4", 128, ("e2m1", "e2m1"), 4, "ue8m0"), ("kind::mxf4nvf4", 128, ("e2m1", "e2m1"), 4, "ue4m3"),
]


@pytest.mark.parametrize(("kind", "k", "types", "count", "type_"), SCALED)
def test_factors_scale_blocks_of_the_matrix_with_its_zeros(kind, k, types, count, type_):
    g, bits = torch.Generator().manual_seed(7), 4 if k == 128 else 8
    a, half, metadata = sparse(k, "s4" if bits == 4 else "s8", g)
    a, half, b = a.clamp(0, 1), half.clamp(0, 1), torch.randint(0, 2, (k, 8), generator=g)
    c = torch.randint(0, 9, (16, 8), generator=g).double()
    low, high = (124, 131) if type_ == "ue8m0" else (40, 72)
    scales = [torch.randint(low, high, (rows, count), generator=g) for rows in (16, 8)]
    wide = [factors(s, type_).repeat_interleave(k // count, dim=1) for s in scales]
    fragments = [
        packed(half.long() * unit(types[0], bits), places_of_a(16, k // 2, bits), bits),
        packed(b * unit(types[1], bits), places_of_b(k, bits), bits),
        packed(encode(c, "f32"), places_of_c(16), 32),
        [lanes_of(metadata, bits, 0)],
        scale_registers(scales[0], 1, 0, True),
        scale_registers(scales[1], 2, 0, False),
    ]
    name = f"mma.sp::ordered_metadata.sync.aligned.m16n8k{k}.row.col.{kind}.block_scale.scale_vec::{count}X.f32"
    name += f".{types[0]}.{types[1]}.f32.{type_}"
    text = f"{name} {{d}}, {{0}}, {{1}}, {{2}}, {{3}}, 0, {{4}}, {{{{0, 1}}}}, {{5}}, {{{{0, 2}}}};"
    out, run = warp(text, fragments, 4, "sm_120a")
    exact = (a * wide[0]) @ (b * wide[1].T) + c
    assert not run.findings and torch.equal(matrix_of(out, "f32"), exact)


# ---- what is refused

ORDERED = "sp::ordered_metadata.sync.aligned"
FOUR, TWO = "{%r1, %r2, %r3, %r4}", "{%r1, %r2}"


@pytest.mark.parametrize(("instruction", "says"), [
    (f"mma.sp.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {FOUR}, {TWO}, {TWO}, {FOUR}, %r5, 0;", "m16n8k32"),
    (f"mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {FOUR}, {FOUR}, {FOUR}, {FOUR};", "metadata, selector"),
    (f"mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {FOUR}, {FOUR}, {FOUR}, {FOUR}, %r5, 2;", "from 0 to 1"),
    (f"mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {FOUR}, {FOUR}, {FOUR}, {FOUR}, %r5, %r6;", "immediate"),
    (f"mma.sp.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 {FOUR}, {FOUR}, {FOUR}, {FOUR}, %r5, 1;", "selector 1"),
    (f"mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {FOUR}, {FOUR}, {TWO}, {FOUR}, %r5, 0;", "4, 2, 2, 4"),
    (f"mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {FOUR}, {TWO}, {TWO}, {FOUR}, %r5, 0;", "bf16.bf16"),
    (f"mma.sp.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32 {FOUR}, {FOUR}, {FOUR}, {FOUR}, %r5, 0;", "m16n8k128"),
    (f"mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::f8f6f4.f32.e3m2.e2m3.f32 {FOUR}, {FOUR}, {FOUR}, "
     f"{FOUR}, %r5, 0;", "does not exist on sm_90"),
])
def test_a_form_that_does_not_exist_is_refused(instruction, says):
    text = refused(instruction)
    assert says in text and instruction.rstrip(";") in text


@pytest.mark.parametrize(("form", "says"), [
    ("sp.sync.aligned.m16n8k64.row.col.kind::f8f6f4.f32.e3m2.e2m3.f32", "mma.sp::ordered_metadata"),
    (f"{ORDERED}.m16n8k32.row.col.kind::f8f6f4.f32.e3m2.e2m3.f32", "twice as large"),
    (f"{ORDERED}.m16n8k64.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0", "factors"),
])
def test_a_kind_that_is_not_sparse_so_is_refused(form, says):
    text = kernel(f"    mma.{form} {FOUR}, {FOUR}, {FOUR}, {FOUR}, %r5, 0;\n", target="sm_120a")
    with pytest.raises(PtxError, match=says):
        launch(text, grid=1, block=32, args=[torch.zeros(32)])


def test_8_bit_floats_are_refused_before_sm_89():
    _, half, metadata, b, c = case(("m16n8k64", "e4m3", "e4m3", "f32"))
    with pytest.raises(PtxError, match="sm_89 and later"):
        multiply(("m16n8k64", "e4m3", "e4m3", "f32"), half, metadata, b, c, arch=80)
