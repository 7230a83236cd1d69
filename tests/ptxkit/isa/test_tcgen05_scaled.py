"""tcgen05.mma.block_scale: factors in tensor memory, packed 4-bit elements, and how factors get there."""

import pytest
import tensor_core as tc
import torch
from assembly import int32, reports

from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E2M1 = tc.TYPES["e2m1"][3]
AT = {"a": 64, "b": 72}  # columns of the factors; D lies below
COUNTS = {("mxf8f6f4", "scale_vec::1X"): 1, ("mxf8f6f4", ""): 1, ("mxf4", "scale_vec::2X"): 2, ("mxf4", "block32"): 2,
          ("mxf4nvf4", "block32"): 2, ("mxf4nvf4", "scale_vec::4X"): 4, ("mxf4nvf4", "block16"): 4}


class Packed:
    """A matrix of 64 e2m1 in K, two to a byte."""

    def __init__(self, x, start, swizzle="none"):
        width = {"none": 0, "128B": 128, "64B": 64, "32B": 32}[swizzle]
        self.x, self.start, self.swizzle = x, start, swizzle
        self.lbo, self.sbo = (128, 256) if swizzle == "none" else (16, 8 * width)
        self.descriptor = tc.descriptor(start, self.lbo, self.sbo, swizzle)

    def place(self, image):
        for mn, row in enumerate(tc.codes("e2m1", self.x).tolist()):
            for k in range(32):
                address = tc.byte_address(mn, k, 1, self.start, self.lbo, self.sbo, self.swizzle, False)
                tc.put(image, address, row[2 * k] | row[2 * k + 1] << 4, 1)


def factor_values(factors, type_):
    return torch.exp2(factors.double() - 127) if type_ == "ue8m0" else E4M3[factors]


def place_factors(cells, factors, column, byte):
    """[rows][count] codes: row r in lane r % 32 of each slab, column r // 32, from that byte on."""
    for r, row in enumerate(factors.tolist()):
        for n, code in enumerate(row):
            cell, shift = (slice(r % 32, None, 32), column + r // 32), 8 * (byte + n)
            cells[cell] = cells[cell] & ~(0xFF << shift) | code << shift


def idesc(kind, types, m, n, type_, ids=(0, 0)):
    a, b = (tc.TYPES[t][1] for t in types) if kind == "mxf8f6f4" else (1, 1)
    return a << 7 | b << 10 | n >> 3 << 17 | (type_ == "ue8m0") << 23 | m >> 7 << 27 | ids[0] << 29 | ids[1] << 4


def product(kind="mxf4nvf4", vec="scale_vec::4X", types=("e2m1", "e2m1"), type_="ue4m3", m=128, n=32, ids=(0, 0),
            group=1, swizzle="none", accumulate=0, spoil=None, a_in_tmem=False, number=None, addresses=None, **options):
    """Return (D, the exact result, the Run) of one scaled mma."""
    g = torch.Generator().manual_seed(11)
    packed, count, k = kind != "mxf8f6f4", COUNTS[kind, vec], 32 if kind == "mxf8f6f4" else 64
    if packed:
        a, b = (E2M1[torch.randint(0, 16, (rows, 64), generator=g)] for rows in (m, n))
    else:
        a, b = (tc.values(t, rows, seed) for t, rows, seed in zip(types, (m, n), (1, 2)))
        a, b = (torch.where((x.abs() <= 8) & (x * 4 == (x * 4).round()), x, 0) for x in (a, b))
    low, high = (125, 130) if type_ == "ue8m0" else (48, 72)
    scales = [torch.randint(low, high, (rows, count), generator=g) for rows in (m, n)]
    cells = torch.randint(0x10, 0x70, (group, 128, 128), generator=g) * 0x01010101
    cells[:, :, :64] = 0x3F800000
    images = []
    for c in range(group):
        mine = [x.chunk(group)[c] for x in (a, b)]
        if packed:
            parts = [Packed(x, at_, swizzle) for x, at_ in zip(mine, (tc.A_AT, tc.B_AT))]
        else:
            parts = [tc.Operand(t, x, at_, swizzle) for t, x, at_ in zip(types, mine, (tc.A_AT, tc.B_AT))]
        images.append(tc.image_of(*parts))
        place_factors(cells[c], scales[0].chunk(group)[c], AT["a"], ids[0])
        place_factors(cells[c], scales[1], AT["b"], ids[1])
        if a_in_tmem:
            of_a = tc.codes("e2m1", mine[0])
            cells[c, : of_a.shape[0], 96:104] = sum(of_a[:, e::8] << 4 * e for e in range(8))
    if spoil:
        spoil(cells)
    vec = f".{vec}" if vec else ""
    addresses = [f"%r8+{column}" for column in AT.values()] if addresses is None else addresses
    lines = [f"mov.b64 %rd10, {parts[0].descriptor};", f"mov.b64 %rd11, {parts[1].descriptor};"]
    lines += [f"mov.b32 %r11, {idesc(kind, types, m, n, type_, ids) if number is None else number};"]
    lines += [f"setp.ne.s32 %p6, {accumulate}, 0;"]
    of_a = "[%r8+96]" if a_in_tmem else "%rd10"
    opcode = f"tcgen05.mma.cta_group::{group}.kind::{kind}.block_scale{vec}"
    lines += [f"{opcode} [%r8], {of_a}, %rd11, %r11, [{addresses[0]}], [{addresses[1]}], %p6;"]
    memory = dict(image=torch.stack(images), cells=int32(cells), columns=128)
    out, result = tc.run("\n".join(lines), **memory, group=group, **options)
    a, b = (x * factor_values(s, type_).repeat_interleave(k // count, 1) for x, s in zip((a, b), scales))
    exact = a @ b.T + (1 if accumulate else 0)
    return tc.bits_float(out[tc.d_spots(group, m, n)]), exact, result


def of_8_bits(*types, **more):
    """Return options of a product of these types, with factors that are powers of two."""
    return dict(kind="mxf8f6f4", vec="", types=types, type_="ue8m0") | more


PRODUCTS = {
    **{f"{kind}.{vec}{' added' * added}": of_8_bits("e4m3", "e2m3", kind=kind, vec=vec, accumulate=added)
       for kind, vec in COUNTS for added in (0, 1)},
    "factors of ue4m3, which are no powers of two": {},
    **{f"elements of 4 and 6 bits, {a} and {b}": of_8_bits(a, b, n=64)
       for a, b in (("e4m3", "e5m2"), ("e2m1", "e4m3"), ("e3m2", "e2m1"))},
    **{f"packed elements, {swizzle}": dict(swizzle=swizzle) for swizzle in ("128B", "64B", "32B")},
    **{f"ids {ids} of mxf8f6f4": of_8_bits("e4m3", "e4m3", ids=ids) for ids in ((1, 3), (2, 0))},
    "ids (2, 0) of mxf4": of_8_bits("e4m3", "e4m3", kind="mxf4", vec="block32", ids=(2, 0)),
    **{f"a pair of CTAs, each of which has all factors of B, M={m}": dict(m=m, n=64, group=2) for m in (128, 256)},
    "A in tensor memory": dict(a_in_tmem=True),
    "bits of the id in an address": dict(addresses=(f"%r8+{64 + (2 << 30)}", "%r8+72")),
}


@pytest.mark.parametrize("options", PRODUCTS.values(), ids=PRODUCTS)
def test_factors_scale_their_blocks(options):
    got, exact, _ = product(**options)
    assert torch.equal(got, exact)


@tc.UNDER_ANY_SCHEDULE
def test_factors_copied_by_the_tensor_core_are_there_for_the_next_product(schedule):
    """32x128b.warpx4: 32 rows of 16 bytes, the factors of 128 rows, to all slabs."""
    g = torch.Generator().manual_seed(12)
    a, b = (E2M1[torch.randint(0, 16, (rows, 64), generator=g)] for rows in (128, 32))
    scales = [torch.randint(48, 72, (rows, 4), generator=g) for rows in (128, 32)]
    image, places = tc.image_of(Packed(a, tc.A_AT), Packed(b, tc.B_AT)), (0x7000, 0x7400)
    for factors, address in zip(scales, places):
        for r, row in enumerate(factors.tolist()):
            tc.put(image, address + r % 32 * 16 + r // 32 * 4, int.from_bytes(bytes(row), "little"), 4)
    lines = []
    for n, (address, column) in enumerate(zip(places, AT.values())):
        lines += [f"mov.b64 %rd1{2 + n}, {tc.descriptor(address, 16, 128, 'none')};"]
        lines += [f"tcgen05.cp.cta_group::1.32x128b.warpx4 [%r8+{column}], %rd1{2 + n};"]
    lines += [f"mov.b64 %rd10, {Packed(a, tc.A_AT).descriptor};", f"mov.b64 %rd11, {Packed(b, tc.B_AT).descriptor};"]
    lines += [f"mov.b32 %r11, {idesc('mxf4nvf4', (), 128, 32, 'ue4m3')};", "setp.ne.s32 %p6, 0, 0;"]
    opcode = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16.collector::a::discard"
    lines += [f"{opcode} [%r8], %rd10, %rd11, %r11, [%r8+{AT['a']}], [%r8+{AT['b']}], %p6;"]
    out, _ = tc.run("\n".join(lines), image=image, columns=128, **schedule)
    a, b = (x * factor_values(s, "ue4m3").repeat_interleave(16, 1) for x, s in zip((a, b), scales))
    assert torch.equal(tc.bits_float(out[tc.d_spots(1, 128, 32)]), a @ b.T)


def spoil(cells):
    cells[0, 70, AT["b"]] ^= 1


NUMBER = idesc("mxf4nvf4", (), 128, 32, "ue4m3")


@pytest.mark.parametrize("options, says", [
    (dict(spoil=spoil), "the factors of B differ between the slabs of 32 lanes"),
    (dict(addresses=(f"%r8+{64 + (32 << 16)}", "%r8+72")), "the factors of A start in lane 32"),
    (dict(number=NUMBER | 1 << 31), "K of 96 (bit 31) is not simulated"),
    (dict(number=NUMBER | 1 << 2), "a sparse A (bit 2) is not simulated"),
    (dict(number=NUMBER | 1 << 24), "24-26 must be 0"),
    (dict(number=NUMBER | 1 << 29), "the factors of A begin at byte 1 (bits 29-30); with 4 of a row"),
    (dict(number=NUMBER ^ 3 << 27), "M=256; it may be 128"),
    (dict(number=NUMBER ^ 3 << 7), "types 2 of A and 1 of B"),
    (dict(vec="block32", type_="ue8m0", number=NUMBER), "ue4m3 (bit 23 is 0) are for kind::mxf4nvf4 with four"),
])
def test_what_means_nothing_is_found(options, says):
    assert says in product(**options, strict=False)[2].findings[0].says


def test_factors_outside_what_was_allocated_are_found():
    reports(product(addresses=("%r8+64", "%r8+128"), strict=False)[2], {"tmem"})


@pytest.mark.parametrize("modifiers, says", [
    ("kind::mxf4nvf4.block_scale", "no .scale_vec with kind::mxf4nvf4; supported: scale_vec::2X, block32"),
    ("kind::mxf4.block_scale.block16", "block16 with kind::mxf4"),
    ("kind::mxf4", "kind::mxf4 without .block_scale"),
])
def test_forms_that_do_not_exist_are_refused(modifiers, says):
    text = f"tcgen05.mma.cta_group::1.{modifiers} [%r8], %rd10, %rd11, %r11, [%r8], [%r8], %p6;"
    with pytest.raises(PtxError) as error:
        tc.run(text)
    assert says in str(error.value)
