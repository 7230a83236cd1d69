"""tcgen05.mma, cp, shift, commit: every layout of operands and results, and every way of using them wrongly that is reported."""

import itertools

import pytest
import torch
from assembly import SEEDS, kinds
from tensor_core import (
    IMAGE, STORED, TYPES, WAIT, Operand, bits_float, byte_address, codes, commit, d_spot, d_spots, depth, descriptor, float_bits, idesc, image_of,
    mma, pattern, run, source, values, vector,
)  # fmt: skip

from kda.simulator.launch import launch
from kda.simulator.ptx import PtxError

A_AT, B_AT = IMAGE + 0x800, IMAGE + 0x4800  # 0x1000 and 0x5000
SCHEDULES = [{}, {"early": True}, *({"schedule": s} for s in SEEDS)]
UNDER_ANY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def product(a, b):
    return a.x @ b.x.T


def multiply(a, b, m, n, *, columns=64, ws=False, half=0, group=1, accumulate=0, cells=None, number=None, strict=True, tail="", mask="", **options):
    """D of one mma of two operands in shared memory: (cells afterwards, Run, cells before)."""
    ctas = group
    d = options.pop("d_type", "s32" if TYPES[a.name][0] == "i8" else "f32")
    keys = ("negate_a", "negate_b", "saturate")
    flags = {k: options.pop(k) for k in keys if k in options}
    number = idesc(a.name, b.name, m, n, d, a.mn_major, b.mn_major, **flags) if number is None else number
    image = options.pop("image", None)
    image = image_of(a, b) if image is None else image
    cells = pattern(ctas, columns) if cells is None else cells
    issue = mma(TYPES[a.name][0], "%r8+" + str(half << 20), descriptors=(a.descriptor, b.descriptor), number=number, accumulate=accumulate,
                group=group, flags=".ws" if ws else "", mask=mask, tail=tail)  # fmt: skip
    before = options.pop("before", "")
    out, result = run(before + issue, image=image, cells=cells, columns=columns, group=group, strict=strict, **options)
    return out, result, cells


def expected_cells(cells, d, m, n, *, group=1, ws=False, half=0, d_type="f32"):
    """The cells with D in its place."""
    wanted = cells.clone().reshape(group, 128, -1)
    bits = d.to(torch.int64).to(torch.int32) if d_type == "s32" else float_bits(d + 0.0)  # a sum of zeros is +0
    if d_type == "f16":
        bits = d.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF | -65536
    wanted[d_spots(group, m, n, ws, half)] = bits
    return wanted


def identity(name, n):
    return torch.eye(n, depth(name), dtype=torch.float64)


# ---- operands in shared memory

NOT_TRANSPOSED = [(name, swizzle, False) for name in TYPES for swizzle in ("none", "128B", "64B", "32B")]
TRANSPOSED = [(name, swizzle, True) for name in ("f16", "bf16", "e4m3", "e5m2", "u8", "s8") for swizzle in ("none", "128B", "64B", "32B")]
OPERANDS = [*NOT_TRANSPOSED, *TRANSPOSED, ("tf32", "128B/32B", True)]
LAYOUTS = pytest.mark.parametrize("name, swizzle, mn_major", OPERANDS, ids=lambda v: str(v))


@LAYOUTS
def test_each_element_of_a_is_read_from_its_place(name, swizzle, mn_major):
    k = depth(name)
    a = Operand(name, values(name, 128, seed=1), A_AT, swizzle, mn_major)
    b = Operand(name, identity(name, k), B_AT)
    out, _, cells = multiply(a, b, 128, k)
    assert torch.equal(out, expected_cells(cells, a.x, 128, k, d_type="s32" if name in ("u8", "s8") else "f32"))


@LAYOUTS
def test_each_element_of_b_is_read_from_its_place(name, swizzle, mn_major):
    k, n = depth(name), 64
    a = Operand(name, identity(name, 64), A_AT)
    b = Operand(name, values(name, n, seed=2), B_AT, swizzle, mn_major)
    out, _, cells = multiply(a, b, 64, n)
    wanted = torch.zeros(64, n, dtype=torch.float64)
    wanted[:k] = b.x.T
    assert torch.equal(out, expected_cells(cells, wanted, 64, n, d_type="s32" if name in ("u8", "s8") else "f32"))


# start, LBO, SBO, swizzle, MN-major, descriptor, {(mn, k): address}: worked out by hand from the manual's canonical layouts
WORKED_OUT = [
    ("f16", 0x4000, 0, 0x400, "128B", False, 0x4000404000000400,
     {(0, 0): 0x4000, (1, 0): 0x4090, (5, 3): 0x42D6, (9, 8): 0x4480, (127, 15): 0x7FEE}),
    ("f16", 0x4040, 0, 0x400, "128B", False, 0x4000404000000404,
     {(0, 0): 0x4040, (1, 0): 0x40D0, (5, 3): 0x4296, (9, 8): 0x44C0, (127, 15): 0x7FAE}),
    ("bf16", 0x4000, 0x2000, 0x400, "128B", True, 0x4000404002000400,
     {(0, 0): 0x4000, (8, 1): 0x4080, (63, 7): 0x438E, (64, 0): 0x6000, (100, 13): 0x6698}),
    ("bf16", 0x4800, 0x2000, 0x400, "128B", True, 0x4000404002000480, {(100, 13): 0x6E98}),
    ("e4m3", 0x1000, 0x10, 0x20, "128B", False, 0x4000400200010100,
     {(0, 0): 0x1000, (3, 5): 0x11B5, (8, 0): 0x1020, (13, 17): 0x12E1, (31, 31): 0x138F}),
    ("f16", 0x2000, 0x80, 0x100, "none", False, 0x0000401000080200,
     {(0, 0): 0x2000, (1, 0): 0x2010, (0, 8): 0x2080, (8, 0): 0x2100, (15, 15): 0x21FE}),
    ("f16", 0x8000, 0x10, 0x200, "64B", False, 0x8000402000010800, {(2, 0): 0x8090, (3, 8): 0x80C0, (7, 15): 0x81EE, (8, 0): 0x8200}),
    ("tf32", 0x8000, 0x1000, 0x200, "128B/32B", True, 0x2000402001000800,
     {(0, 0): 0x8000, (8, 1): 0x8080, (31, 3): 0x819C, (32, 0): 0x9000, (40, 6): 0x9360}),
]  # fmt: skip


@pytest.mark.parametrize("name, start, lbo, sbo, swizzle, mn_major, number, places", WORKED_OUT, ids=lambda v: hex(v) if isinstance(v, int) else None)
def test_addresses_worked_out_by_hand_are_those_that_are_read(name, start, lbo, sbo, swizzle, mn_major, number, places):
    rows, k, size = 16 * max(1, -(-(1 + max(mn for mn, _ in places)) // 16)), depth(name), TYPES[name][2]
    m = 64 if rows <= 64 else 128
    assert descriptor(start, lbo, sbo, swizzle) == number
    image = torch.zeros(0xC000, dtype=torch.uint8)
    wanted = torch.zeros(m, k, dtype=torch.float64)
    for n, ((mn, at), address) in enumerate(places.items()):
        assert byte_address(mn, at, size, start, lbo, sbo, swizzle, mn_major) == address
        wanted[mn, at] = n + 1
        code = int(codes(name, torch.tensor(n + 1.0)))
        image[address - IMAGE : address - IMAGE + size] = torch.tensor(list(code.to_bytes(size, "little")), dtype=torch.uint8)
    b = Operand(name, identity(name, k), 0xC000)
    b.place(image)
    a = Operand(name, wanted, start, swizzle, mn_major, lbo or None, sbo)
    a.descriptor = number
    out, _, cells = multiply(a, b, m, k, image=image)
    d = out[d_spots(1, m, k)]
    assert torch.equal(bits_float(d)[:rows], wanted[:rows])


def test_idesc_has_the_compilers_numbers():
    assert idesc("bf16", "bf16", 128, 128, transpose_b=True) == 0x8210490
    assert idesc("f16", "f16", 128, 256) == 0x8400010
    assert idesc("f16", "f16", 128, 256, negate_a=True) == 0x8402010
    assert idesc("bf16", "bf16", 64, 64, transpose_b=True) == 0x4110490
    assert idesc("tf32", "tf32", 128, 128) == 0x8200910
    assert idesc("f16", "f16", 256, 256) == 0x10400010
    assert idesc("e4m3", "e4m3", 128, 32) == 0x8080010


# ---- shapes, and where D goes


def test_places_of_d_worked_out_by_hand():
    assert d_spot(1, 128, 128, 77, 33) == (0, 77, 33)
    assert d_spot(1, 64, 64, 37, 5) == (0, 69, 5) and d_spot(1, 64, 64, 37, 5, half=1) == (0, 85, 5)
    assert d_spot(1, 64, 128, 37, 100, ws=True) == (0, 101, 36)
    assert d_spot(1, 32, 128, 20, 70, ws=True) == (0, 84, 6)
    assert d_spot(2, 128, 128, 100, 90) == (1, 100, 26)
    assert d_spot(2, 256, 256, 200, 255) == (1, 72, 255)


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("n", [8, 16, 24, 136, 248, 256])
def test_every_n_from_8_to_256_writes_its_columns_and_no_others(m, n):
    a, b = Operand("bf16", values("bf16", m, 3), A_AT, "128B"), Operand("bf16", values("bf16", n, 4), 0x6000, "64B")
    out, run_, cells = multiply(a, b, m, n, columns=256, image=image_of(a, b, size=0xC000))
    assert torch.equal(out, expected_cells(cells, product(a, b), m, n))
    assert run_.counters["tensor_flops"] == 2 * m * n * 16
    assert run_.counters["tmem_columns"] == 256


def test_two_tiles_of_64_rows_share_their_columns():
    a, b = Operand("f16", values("f16", 64, 5), A_AT, "128B"), Operand("f16", values("f16", 32, 6), B_AT, "128B")
    lower, _, cells = multiply(a, b, 64, 32)
    upper, _, _ = multiply(a, b, 64, 32, half=1)
    assert torch.equal(lower, expected_cells(cells, product(a, b), 64, 32))
    assert torch.equal(upper, expected_cells(cells, product(a, b), 64, 32, half=1))


@pytest.mark.parametrize("m, n", list(itertools.product([32, 64, 128], [64, 128, 256])))
def test_weight_stationary_layouts(m, n):
    a, b = Operand("bf16", values("bf16", m, 7), A_AT, "128B"), Operand("bf16", values("bf16", n, 8), 0x6000, "128B")
    out, _, cells = multiply(a, b, m, n, ws=True, columns=256, image=image_of(a, b, size=0x10000))
    assert torch.equal(out, expected_cells(cells, product(a, b), m, n, ws=True))


def test_the_zero_column_mask_worked_out_by_hand():
    a, b = Operand("f16", values("f16", 32, 9), A_AT, "128B"), Operand("f16", values("f16", 64, 10), B_AT, "128B")
    mask = 0 | 1 << 8 | 2 << 16 | 1 << 24 | 0b0011 << 32 | 1 << 39 | 2 << 40 | 3 << 48
    out, _, cells = multiply(a, b, 32, 64, ws=True, before=f"mov.b64 %rd12, {mask};\n", tail=", %rd12")
    zero = "".join(reversed("1100001110000111")), "".join(reversed("1110000111000011")), "".join(reversed("0000111000011100"))
    zero = "".join((*zero, "".join(reversed("0001110000111000"))))
    b.x[[n for n, z in enumerate(zero) if z == "1"]] = 0
    assert torch.equal(out, expected_cells(cells, product(a, b), 32, 64, ws=True))
    b.x = values("f16", 64, 10)
    out, _, cells = multiply(a, b, 32, 64, ws=True, before=f"mov.b64 %rd12, {mask & ~(1 << 39)};\n", tail=", %rd12")
    assert torch.equal(out, expected_cells(cells, product(a, b), 32, 64, ws=True))


@pytest.mark.parametrize("m, n", [(128, 32), (128, 64), (256, 16), (256, 64)])
@pytest.mark.parametrize("swizzle, mn_major", [("128B", False), ("none", False), ("64B", True)])
def test_a_pair_of_ctas_takes_half_of_each_operand_from_each(m, n, swizzle, mn_major):
    a, b = values("bf16", m, 11), values("bf16", n, 12)
    if mn_major and n < 64:
        swizzle = "none"
    images = []
    for cta in range(2):
        rows, columns = a[cta * m // 2 : (cta + 1) * m // 2], b[cta * n // 2 : (cta + 1) * n // 2]
        parts = Operand("bf16", rows, A_AT, swizzle, mn_major), Operand("bf16", columns, B_AT, swizzle, mn_major)
        images.append(image_of(*parts))
    number = idesc("bf16", "bf16", m, n, transpose_a=mn_major, transpose_b=mn_major)
    out, run_, cells = multiply(*parts, m, n, group=2, number=number, image=torch.stack(images))
    assert torch.equal(out, expected_cells(cells, a @ b.T, m, n, group=2))
    assert run_.counters["tensor_flops"] == 2 * m * n * 16


# ---- arithmetic


def whole(rows, columns, seed):
    return torch.randint(-100, 100, (rows, columns), generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("name", ["bf16", "tf32", "e4m3", "e5m2", "e2m1"])
def test_d_is_added_to_when_the_predicate_says_so(name):
    a, b = Operand(name, values(name, 128, 13), A_AT, "128B"), Operand(name, values(name, 32, 14), B_AT, "128B")
    c = whole(128, 64, 15)
    out, _, cells = multiply(a, b, 128, 32, accumulate=1, cells=float_bits(c)[None])
    assert torch.equal(out, expected_cells(cells, product(a, b) + c[:, :32], 128, 32))


def test_old_values_are_not_looked_at_otherwise():
    a, b = Operand("bf16", values("bf16", 128, 13), A_AT, "128B"), Operand("bf16", values("bf16", 32, 14), B_AT, "128B")
    cells = torch.full((1, 128, 64), 0x7FC00000, dtype=torch.int32)
    out, _, _ = multiply(a, b, 128, 32, cells=cells)
    assert torch.equal(out, expected_cells(cells, product(a, b), 128, 32))


@pytest.mark.parametrize("negate_a, negate_b", [(True, False), (False, True), (True, True)])
def test_operands_are_negated(negate_a, negate_b):
    a, b = Operand("f16", values("f16", 64, 16), A_AT, "32B"), Operand("f16", values("f16", 32, 17), B_AT, "32B")
    c = whole(128, 64, 18)
    out, _, cells = multiply(a, b, 64, 32, accumulate=1, cells=float_bits(c)[None], negate_a=negate_a, negate_b=negate_b)
    sign = -1 if negate_a != negate_b else 1
    old = bits_float(cells[d_spots(1, 64, 32)])
    assert torch.equal(out, expected_cells(cells, sign * product(a, b) + old, 64, 32))


def test_a_result_in_halves_takes_the_lower_half_of_each_cell():
    a, b = Operand("f16", values("f16", 128, 19), A_AT, "128B"), Operand("f16", values("f16", 32, 20), B_AT, "128B")
    c = torch.randint(-100, 100, (1, 128, 64)).to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF | 0x5A5A0000
    out, _, cells = multiply(a, b, 128, 32, accumulate=1, cells=c, d_type="f16")
    old = (c[0, :, :32] & 0xFFFF).to(torch.int16).view(torch.float16).double()
    assert torch.equal(out, expected_cells(cells, product(a, b) + old, 128, 32, d_type="f16"))


@pytest.mark.parametrize("scale", [0, 1, 15])
@pytest.mark.parametrize("name", ["f16", "tf32"])
def test_the_old_d_can_be_scaled_down(name, scale):
    a, b = Operand(name, values(name, 128, 21), A_AT, "128B"), Operand(name, values(name, 32, 22), B_AT, "128B")
    c = whole(128, 64, 23) * 2.0**scale
    out, _, cells = multiply(a, b, 128, 32, accumulate=1, cells=float_bits(c)[None], tail=f", {scale}")
    assert torch.equal(out, expected_cells(cells, product(a, b) + c[:, :32] * 2.0**-scale, 128, 32))


@pytest.mark.parametrize("a_type, b_type", list(itertools.product(["u8", "s8"], repeat=2)))
def test_integers_are_exact_and_wrap_or_saturate(a_type, b_type):
    a, b = Operand(a_type, values(a_type, 128, 24), A_AT, "64B"), Operand(b_type, values(b_type, 32, 25), B_AT, "64B")
    c = torch.randint(-(2**31), 2**31, (1, 128, 64), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    c[0, :, 0], c[0, :, 1] = 2**31 - 1, -(2**31)
    exact = product(a, b).to(torch.int64) + c[0, :, :32]
    wrapped, _, _ = multiply(a, b, 128, 32, accumulate=1, cells=c)
    assert torch.equal(wrapped[0, :, :32], exact.to(torch.int32))
    limited, _, _ = multiply(a, b, 128, 32, accumulate=1, cells=c, saturate=True)
    assert torch.equal(limited[0, :, :32], exact.clamp(-(2**31), 2**31 - 1).to(torch.int32))
    assert not torch.equal(wrapped, limited)


@pytest.mark.parametrize("name", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
def test_products_of_any_numbers_are_as_close_as_25_bits_below_the_largest_term(name):
    a, b = Operand(name, values(name, 128, 26, exact=False), A_AT, "128B"), Operand(name, values(name, 64, 27, exact=False), B_AT, "128B")
    c = torch.randn(128, 64, generator=torch.Generator().manual_seed(2)).double()
    out, _, cells = multiply(a, b, 128, 64, accumulate=1, cells=float_bits(c)[None])
    exact, got = product(a, b) + c, bits_float(out[0])
    largest = torch.maximum((a.x.abs()[:, None] * b.x.abs()[None]).amax(-1), c.abs())
    limit = (depth(name) + 1) * 2.0**-25 * largest + 2.0**-23 * exact.abs()  # each term is cut, then the sum
    assert ((got - exact).abs() <= limit).all()
    assert (got != exact).any()


@pytest.mark.parametrize("group", [1, 2])
def test_lanes_that_the_mask_disables_keep_what_they_held(group):
    m = 128 * group
    a, b = values("bf16", m, 28), values("bf16", 32, 29)
    images = []
    for cta in range(group):
        parts = Operand("bf16", a[128 * cta : 128 * (cta + 1)], A_AT, "128B"), Operand("bf16", b[32 // group * cta :][: 32 // group], B_AT, "128B")
        images.append(image_of(*parts))
    words = [0x00000001, 0x80000000, 0xFFFFFFFF, 0x0000FF00, 0, 0xF0F0F0F0, 2, 0xFFFF][: 4 * group]
    before = "".join(f"mov.b32 %x{n}, {w};\n" for n, w in enumerate(words))
    out, _, cells = multiply(*parts, m, 32, group=group, image=torch.stack(images), before=before, mask=vector(0, 4 * group) + ", ")
    wanted = expected_cells(cells, a @ b.T, m, 32, group=group)
    for lane in range(m):
        if words[lane // 32] >> lane % 32 & 1:
            wanted[lane // 128, lane % 128] = cells[lane // 128, lane % 128]
    assert torch.equal(out, wanted)


def chain(steps, a, b, number, group=1):
    """MMAs along K: the first replaces D, the others add to it; both descriptors go on by so many 16 bytes."""
    return "\n".join(
        mma("bf16"[1:], descriptors=(a.descriptor + n * steps[0], b.descriptor + n * steps[1]), number=number, accumulate=n > 0, group=group)
        for n in range(4)
    )


@UNDER_ANY_SCHEDULE
def test_a_tile_of_128_x_128_x_64_in_four_steps_has_no_findings(schedule):
    random = torch.Generator().manual_seed(30)
    x, y = (torch.randint(-8, 9, (128, 64), generator=random).double() for _ in range(2))
    image = torch.zeros(0xC000, dtype=torch.uint8)
    for at, z in ((0x800, x), (0x4800, y)):
        for n in range(4):
            Operand("bf16", z[:, 16 * n : 16 * n + 16], IMAGE + at + 32 * n, "128B").place(image)
    a, b = Operand("bf16", x[:, :16], A_AT, "128B"), Operand("bf16", y[:, :16], B_AT, "128B")
    issue = chain((2, 2), a, b, idesc("bf16", "bf16", 128, 128))
    out, _ = run(issue, image=image, columns=128, **schedule)
    assert torch.equal(bits_float(out[0]), x @ y.T)


@UNDER_ANY_SCHEDULE
def test_a_pair_has_no_findings_under_any_schedule(schedule):
    a, b = values("bf16", 256, 31), values("bf16", 32, 32)
    images = []
    for cta in range(2):
        parts = Operand("bf16", a[128 * cta : 128 * (cta + 1)], A_AT, "128B"), Operand("bf16", b[16 * cta : 16 * (cta + 1)], B_AT, "128B")
        images.append(image_of(*parts))
    out, _, cells = multiply(*parts, 256, 32, group=2, image=torch.stack(images), **schedule)
    assert torch.equal(out, expected_cells(cells, a @ b.T, 256, 32, group=2))


# ---- A in tensor memory


def packed_cells(name, x):
    """A as tensor memory holds it: [row][8 cells]."""
    size, container = TYPES[name][2], {"e2m1": 2, "e2m3": 1, "e3m2": 1}.get(name, 0)
    code = codes(name, x) << container
    per = 4 // size
    words = sum(code[:, n::per] << (8 * size * n) for n in range(per))
    return (words & 0xFFFFFFFF).to(torch.int64).where(words < 2**31, words - 2**32).to(torch.int32)


def test_a_in_tensor_memory_worked_out_by_hand():
    x = torch.zeros(64, 16, dtype=torch.float64)
    x[37, 5] = 1
    assert packed_cells("bf16", x)[37, 2] == 0x3F80 << 16 and d_spot(1, 64, 16, 37, 0)[1] == 69 and d_spot(1, 128, 16, 37, 0)[1] == 37


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("m, half", [(64, 0), (64, 1), (128, 0)])
def test_a_can_lie_in_tensor_memory(name, m, half):
    a, b = values(name, m, 33), Operand(name, values(name, 32, 34), B_AT, "128B")
    cells = pattern(1, 64)
    lanes = d_spots(1, m, 8, half=half)[1]
    cells[0, lanes, torch.arange(40, 48).expand(m, 8)] = packed_cells(name, a)
    d_type = "s32" if name in ("u8", "s8") else "f32"
    issue = mma(TYPES[name][0], f"%r8+{half << 20}", f"[%r8+{(half << 20) + 40}]", descriptors=(0, b.descriptor), number=idesc(name, name, m, 32, d_type),
                accumulate=0)  # fmt: skip
    out, _ = run(issue, image=image_of(b), cells=cells)
    assert torch.equal(out, expected_cells(cells, a @ b.x.T, m, 32, half=half, d_type=d_type))


@pytest.mark.parametrize("m", [128, 256])
def test_a_of_a_pair_lies_in_both_tensor_memories(m):
    a, b = values("bf16", m, 35), values("bf16", 32, 36)
    cells = pattern(2, 64)
    rows = packed_cells("bf16", a).reshape(2, m // 2, 8)
    for first in range(0, 128, m // 2):  # M=128: each CTA holds its 64 rows twice
        cells[:, first : first + m // 2, 40:48] = rows
    parts = [Operand("bf16", b[16 * cta : 16 * (cta + 1)], B_AT, "128B") for cta in range(2)]
    issue = mma("f16", a="[%r8+40]", descriptors=(0, parts[0].descriptor), number=idesc("bf16", "bf16", m, 32), accumulate=0, group=2)
    out, _ = run(issue, image=torch.stack([image_of(p) for p in parts]), cells=cells, group=2)
    assert torch.equal(out, expected_cells(cells, a @ b.T, m, 32, group=2))


# ---- cp and shift

COPIES = {
    "128x256b": (128, 32, lambda r: [r]),
    "128x128b": (128, 16, lambda r: [r]),
    "4x256b": (4, 32, lambda r: [32 * r]),
    "64x128b.warpx2::02_13": (64, 16, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 16, lambda r: [64 * (r // 32) + r % 32, 64 * (r // 32) + r % 32 + 32]),
    "32x128b.warpx4": (32, 16, lambda r: [r, r + 32, r + 64, r + 96]),
}


def copied(shape, image, start, lbo, sbo, swizzle, cells, column, unpack=lambda group: group):
    """The cells after a copy, by the definition of its shape."""
    rows, width, lanes = COPIES[shape]
    wanted = cells.clone()
    for row, chunk in itertools.product(range(rows), range(0, width, 16)):
        at = byte_address(row, chunk, 1, start, lbo, sbo, swizzle, False) - IMAGE
        words = unpack(image[at : at + 16]).view(torch.int32)
        for lane in lanes(row):
            wanted[0, lane, column + chunk // 4 : column + chunk // 4 + 4] = words
    return wanted


def random_image(seed, size=0x8000):
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def copy_issue(shape, number, at="%r8+8", group=1):
    return f"mov.b64 %rd10, {number};\n tcgen05.cp.cta_group::{group}.{shape} [{at}], %rd10;"


@pytest.mark.parametrize("shape", COPIES)
@pytest.mark.parametrize("lbo, sbo, swizzle", [(16, 128, "none"), (128, 256, "none"), (16, 1024, "128B"), (16, 256, "32B")])
def test_cp_copies_rows_to_their_lanes(shape, lbo, sbo, swizzle):
    image, cells = random_image(37), pattern(1, 64)
    out, _ = run(copy_issue(shape, descriptor(A_AT, lbo, sbo, swizzle)), image=image)
    assert torch.equal(out, copied(shape, image, A_AT, lbo, sbo, swizzle, cells, 8))


def test_the_address_picks_the_lane_of_4x256b_in_each_slab():
    image, cells = random_image(38), pattern(1, 64)
    out, _ = run(copy_issue("4x256b", descriptor(A_AT, 128, 256, "none"), "%r8+2031616"), image=image)  # lane 31
    moved = copied("4x256b", image, A_AT, 128, 256, "none", cells, 0)
    wanted = cells.clone()
    wanted[0, 31::32, :8] = moved[0, ::32, :8]
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("format_, bits, container", [("b6x16_p32", 6, 1), ("b4x16_p64", 4, 2)])
def test_cp_can_unpack_small_floats_into_bytes(format_, bits, container):
    image, cells = random_image(39), pattern(1, 64)

    def unpack(group):
        packed = int.from_bytes(bytes(group.tolist()), "little")
        return torch.tensor([(packed >> bits * n & (1 << bits) - 1) << container for n in range(16)], dtype=torch.uint8)

    out, _ = run(copy_issue(f"128x128b.b8x16.{format_}", descriptor(A_AT, 16, 128, "none")), image=image)
    assert torch.equal(out, copied("128x128b", image, A_AT, 16, 128, "none", cells, 8, unpack))


def test_a_pairs_copy_takes_place_in_both_ctas():
    images = torch.stack([random_image(40), random_image(41)])
    out, _ = run(copy_issue("128x256b", descriptor(A_AT, 128, 256, "none"), group=2), image=images, group=2)
    for cta in range(2):
        wanted = copied("128x256b", images[cta], A_AT, 128, 256, "none", pattern(2, 64)[cta : cta + 1], 8)
        assert torch.equal(out[cta : cta + 1], wanted)


def test_an_mma_follows_the_copy_that_fills_its_a():
    a, b = values("bf16", 128, 42), Operand("bf16", values("bf16", 32, 43), B_AT, "128B")
    image = image_of(Operand("bf16", a, A_AT, "none"), b)
    issue = copy_issue("128x256b", descriptor(A_AT, 128, 256, "none"), "%r8+40")
    issue += mma("f16", a="[%r8+40]", descriptors=(0, b.descriptor), number=idesc("bf16", "bf16", 128, 32), accumulate=0)
    out, _ = run(issue, image=image)
    assert torch.equal(bits_float(out[0, :, :32]), a @ b.x.T)


def test_shift_moves_32_bytes_of_a_slab_down_one_lane():
    out, _ = run("add.u32 %r10, %r8, 2097160;\n tcgen05.shift.down.cta_group::1 [%r10];")  # lane 32, column 8
    wanted = pattern(1, 64)
    wanted[0, 32:63, 8:16] = pattern(1, 64)[0, 33:64, 8:16]
    assert torch.equal(out, wanted)


# ---- asynchrony


def plain(**options):
    """One mma that writes 32 columns, within a run that is expected to find something."""
    a, b = Operand("bf16", values("bf16", 128, 44), A_AT, "128B"), Operand("bf16", values("bf16", 32, 45), B_AT, "128B")
    number = options.pop("number", idesc("bf16", "bf16", 128, 32))
    first, second = options.pop("descriptors", (a.descriptor, b.descriptor))
    a.descriptor, b.descriptor = first, second
    return multiply(a, b, 128, 32, number=number, strict=False, **options)


@UNDER_ANY_SCHEDULE
def test_to_read_d_without_waiting_is_a_race(schedule):
    _, result, _ = plain(wait="", **schedule)
    assert {"race-write-read", "race-read-write"} & set(kinds(result))


@UNDER_ANY_SCHEDULE
def test_operands_need_a_proxy_fence(schedule):
    _, result, _ = plain(fence="", **schedule)
    assert kinds(result) == ["proxy"]


def test_operands_need_a_barrier_too():
    _, result, _ = plain(sync="")
    assert any(k.startswith("race") for k in kinds(result))


@UNDER_ANY_SCHEDULE
def test_without_a_commit_nobody_is_told(schedule):
    _, result, _ = plain(commit="", **schedule)
    assert kinds(result) == ["deadlock"]


def test_a_commit_by_another_thread_says_nothing_of_the_mma():
    by_other = f"""
issued:
    setp.eq.u32 %p7, %r0, 1;
    @%p7 {commit()}
    bra told;
"""
    _, result, _ = plain(commit=by_other.replace("issued:", "bra.uni other;\nother:"), wait="told:" + WAIT)
    assert "deadlock" in kinds(result)


@UNDER_ANY_SCHEDULE
def test_operands_may_not_be_overwritten_before_the_commit_is_seen(schedule):
    overwrite = "mov.u32 %r12, 0;\n @%p3 st.shared.u32 [%r1+3072], %r12;\n"  # the first word of A
    _, early, _ = plain(wait=overwrite + WAIT, **schedule)
    assert kinds(early)[0].startswith("race-")
    _, late, _ = plain(wait=WAIT + overwrite, **schedule)
    assert not late.findings


@UNDER_ANY_SCHEDULE
def test_an_mma_may_not_overtake_a_store_to_tensor_memory(schedule):
    _, result, _ = plain(accumulate=1, stored="", **schedule)
    assert "race-write-read" in kinds(result)


def test_d_may_not_be_replaced_while_it_is_still_loaded():
    a, b = Operand("bf16", values("bf16", 128, 46), A_AT, "128B"), Operand("bf16", values("bf16", 32, 47), B_AT, "128B")
    issue = mma("f16", descriptors=(a.descriptor, b.descriptor), number=idesc("bf16", "bf16", 128, 32), accumulate=0)
    load = f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {vector(100, 1)}, [%r9];"
    for waited, expected in (("tcgen05.wait::ld.sync.aligned;", []), ("", ["race-read-write"])):
        _, result = run(issue, image=image_of(a, b), stored=f"{STORED}{load}{waited}", strict=False)
        assert kinds(result) == expected


def test_a_loaded_register_that_is_used_counts_as_loaded():
    a, b = Operand("bf16", values("bf16", 128, 46), A_AT, "128B"), Operand("bf16", values("bf16", 32, 47), B_AT, "128B")
    issue = mma("f16", descriptors=(a.descriptor, b.descriptor), number=idesc("bf16", "bf16", 128, 32), accumulate=0)
    load = f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {vector(100, 1)}, [%r9]; add.u32 %x101, %x100, 1;"
    _, result = run(issue, image=image_of(a, b), stored=STORED + load)
    assert not result.findings


# two warps issue: one multiplies, tells the other through a barrier, which adds to the same D and commits
TWO_ISSUERS = """
    setp.eq.u32 %p7, %r0, 32;
    @!%p3 bra first;
    {one}
first:
    {between}
    @!%p7 bra issued;
    {two}
    {commit}
"""


@pytest.mark.parametrize("between, expected", [("bar.sync 1;", []), ("", ["race"])])
@UNDER_ANY_SCHEDULE
def test_operations_of_two_warps_are_ordered_by_what_orders_the_warps(between, expected, schedule):
    a, b = Operand("bf16", values("bf16", 128, 48), A_AT, "128B"), Operand("bf16", values("bf16", 32, 49), B_AT, "128B")
    one, two = (mma("f16", descriptors=(a.descriptor, b.descriptor), number=idesc("bf16", "bf16", 128, 32), accumulate=n) for n in (0, 1))
    body = TWO_ISSUERS.format(one=one, between=between, two=two, commit=commit())
    text = source("ISSUE", 64, 0x8000).replace("@!%p3 bra issued;\n    ISSUE", body, 1)
    text = text.replace(body + "\n    " + commit(), body)
    out = torch.zeros(1, 128, 64, dtype=torch.int32)
    cells = pattern(1, 64)
    result = launch(text, grid=1, block=128, args=[image_of(a, b), cells, out], **schedule)
    assert sorted({k.split("-")[0] for k in kinds(result)}) == expected
    if not expected:
        assert torch.equal(out, expected_cells(cells, 2 * product(a, b), 128, 32))


def test_columns_may_not_be_freed_under_a_running_mma():
    _, result, _ = plain(wait="", load="")
    assert kinds(result) == ["race-write-write"] and result.findings[0].place.ptx.startswith("@%p1 tcgen05.dealloc")


# ---- what is refused


@pytest.mark.parametrize(
    "descriptors, says",
    [
        ((1 << 46 | 3 << 61, None), "swizzle (bits 61-63) 3"),
        ((1 << 46 | 5 << 61, None), "swizzle (bits 61-63) 5"),
        ((None, 1 << 46 | 7 << 61), "swizzle (bits 61-63) 7"),
        ((0, None), "bits 46-48 are 0"),
        ((1 << 46 | 1 << 50 | 2 << 61, None), "base offset (bits 49-51) 2"),
        ((1 << 46 | 1 << 52 | 2 << 61, None), "bit 52"),
        ((None, 1 << 46 | 1 << 57), "bits 53-60 are 0x10"),
        ((1 << 46 | 1 << 61, None), "128B swizzle of 32B atoms"),
    ],
)
def test_a_bad_descriptor_is_described(descriptors, says):
    good = descriptor(A_AT, 16, 1024, "128B"), descriptor(B_AT, 16, 1024, "128B")
    chosen = tuple(g if d is None else d for d, g in zip(descriptors, good))
    _, result, _ = plain(descriptors=chosen)
    assert set(kinds(result)) <= {"descriptor", "unsupported"}
    assert says in result.findings[0].says and ("A" if descriptors[0] is not None else "B") + " descriptor 0x" in result.findings[0].says


BF16 = idesc("bf16", "bf16", 128, 32)


@pytest.mark.parametrize(
    "number, says",
    [
        (idesc("bf16", "bf16", 96, 32), "M=96"),
        (idesc("bf16", "bf16", 256, 32), "M=256"),
        (idesc("bf16", "bf16", 32, 32), "M=32"),
        (idesc("bf16", "bf16", 128, 0), "N=0"),
        (idesc("bf16", "bf16", 128, 264), "N=264"),
        (BF16 | 4 << 7, "types 5"),
        (BF16 & ~0x30, "D of type 0"),
        (BF16 | 1 << 5, "D of type 3"),
        (BF16 | 1 << 2, "sparse"),
        (BF16 | 1 << 3, "saturation"),
        (BF16 | 1 << 6, "bits 6, 23 and 29"),
        (BF16 | 1 << 23, "bits 6, 23 and 29"),
        (BF16 | 1 << 29, "bits 6, 23 and 29"),
        (BF16 | 1 << 30, "for .ws alone"),
    ],
)
def test_a_bad_instruction_descriptor_is_described(number, says):
    _, result, _ = plain(number=number)
    assert len(result.findings) == 1 and result.findings[0].kind in ("descriptor", "unsupported")
    assert says in result.findings[0].says and f"idesc {number:#x}" in result.findings[0].says


@pytest.mark.parametrize(
    "name, m, n, group, ws, taken",
    [
        ("u8", 128, 24, 1, False, True), ("u8", 128, 40, 1, False, False), ("u8", 128, 48, 1, False, True),
        ("bf16", 128, 24, 1, False, True), ("bf16", 256, 24, 2, False, False), ("bf16", 256, 48, 2, False, True),
        ("u8", 256, 48, 2, False, False), ("bf16", 64, 32, 1, True, False), ("bf16", 64, 64, 1, True, True),
        ("tf32", 128, 12, 1, False, True),  # its low bits of N do not exist: N=8
    ],
)  # fmt: skip
def test_each_kind_has_its_own_values_of_n(name, m, n, group, ws, taken):
    a, b = Operand(name, values(name, 128, 50), A_AT, "128B"), Operand(name, values(name, 64, 51), B_AT, "128B")
    image = torch.stack([image_of(a, b)] * group)
    _, result, _ = multiply(a, b, m, n, group=group, ws=ws, image=image, strict=False)
    assert (not result.findings) == taken, result.findings


def test_eight_bit_transposed_b_takes_whole_groups_of_columns():
    a, b = Operand("e4m3", values("e4m3", 128, 52), A_AT, "128B"), Operand("e4m3", values("e4m3", 32, 53), B_AT, "32B", True)
    _, result, _ = multiply(a, b, 128, 24, strict=False)
    assert kinds(result) == ["descriptor"] and "N=24" in result.findings[0].says
    multiply(a, b, 128, 32)


def test_what_32_bit_matrices_cannot_do():
    a, b = Operand("tf32", values("tf32", 128, 54), A_AT, "128B"), Operand("tf32", values("tf32", 32, 55), B_AT, "128B", True)
    _, result, _ = multiply(a, b, 128, 32, strict=False)
    assert "128B swizzle of 32B atoms" in result.findings[0].says


def test_a_in_tensor_memory_cannot_be_transposed():
    b = Operand("bf16", values("bf16", 32, 56), B_AT, "128B")
    issue = mma("f16", a="[%r8+40]", descriptors=(0, b.descriptor), number=idesc("bf16", "bf16", 128, 32, transpose_a=True))
    _, result = run(issue, image=image_of(b), strict=False)
    assert kinds(result) == ["descriptor"] and "transposed" in result.findings[0].says


@pytest.mark.parametrize("d, a, says", [(1, None, "starts in lane 1"), (16, None, "starts in lane 16"), (0, 16, "A starts in lane 16")])
def test_matrices_start_in_the_lanes_that_their_layout_has(d, a, says):
    b = Operand("bf16", values("bf16", 32, 57), B_AT, "128B")
    where = "%rd10" if a is None else f"[%r8+{(a << 16) + 40}]"
    issue = mma("f16", f"%r8+{d << 16}", where, descriptors=(descriptor(A_AT, 16, 1024, "128B"), b.descriptor), number=idesc("bf16", "bf16", 128, 32))
    _, result = run(issue, image=image_of(b), strict=False)
    assert kinds(result) == ["tmem"] and says in result.findings[0].says


def test_columns_that_nobody_allocated_are_refused():
    a, b = Operand("bf16", values("bf16", 128, 58), A_AT, "128B"), Operand("bf16", values("bf16", 32, 59), B_AT, "128B")
    issue = mma("f16", "%r8+40", descriptors=(a.descriptor, b.descriptor), number=idesc("bf16", "bf16", 128, 32))
    _, result = run(issue, image=image_of(a, b), strict=False)
    assert kinds(result) == ["tmem"] and "columns 40 to 71" in result.findings[0].says


def test_a_descriptor_that_leaves_shared_memory_is_found():
    a, b = Operand("bf16", values("bf16", 128, 60), A_AT, "128B"), Operand("bf16", values("bf16", 32, 61), B_AT, "128B")
    wrong = descriptor(0x20000, 16, 1024, "128B")
    _, result, _ = plain(descriptors=(wrong, b.descriptor))
    assert "out-of-bounds" in kinds(result)
    assert a.descriptor != wrong


def test_a_wrong_stride_gives_a_wrong_product():
    a, b = Operand("bf16", values("bf16", 128, 62), A_AT, "128B"), Operand("bf16", values("bf16", 32, 63), B_AT, "128B")
    right, _, cells = multiply(a, b, 128, 32)
    image = image_of(a, b)
    a.descriptor = descriptor(A_AT, 16, 512, "128B")
    wrong, _, _ = multiply(a, b, 128, 32, image=image)
    assert torch.equal(right, expected_cells(cells, product(a, b), 128, 32)) and not torch.equal(right, wrong)


@pytest.mark.parametrize(
    "instruction, says",
    [
        ("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r8], %rd10, %rd11, %r11, [%r8], [%r8], %p6;", "block scaling"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r8], %rd10, %rd11, [%r8], %r11, %p6;", "sparse"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift [%r8], [%r8], %rd11, %r11, %p6;", ".ashift"),
        ("tcgen05.mma.cta_group::1.kind::f64 [%r8], %rd10, %rd11, %r11, %p6;", "kind::f16, kind::f8f6f4"),
        ("tcgen05.mma.kind::f16 [%r8], %rd10, %rd11, %r11, %p6;", "cta_group::1, cta_group::2"),
        ("tcgen05.mma.cta_group::2.kind::f16 [%r8], %rd10, %rd11, %r11, %p6;", "one of them for the whole kernel"),
        ("tcgen05.mma.cta_group::1.kind::i8 [%r8], %rd10, %rd11, %r11, %p6, 2;", "scale-input-d"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r8], %rd10, %rd11, %r11, %p6, 16;", "immediates 0 to 15"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r8], %rd10, %rd11, %r11, {%r1, %r2}, %p6;", "4 with cta_group::1"),
        ("tcgen05.cp.cta_group::1.64x128b [%r8], %rd10;", "64x128b.warpx2::02_13"),
        ("tcgen05.cp.cta_group::1.32x64b [%r8], %rd10;", "128x256b"),
        ("tcgen05.commit.cta_group::1.b64 [smem];", "mbarrier::arrive::one"),
        ("tcgen05.frob.cta_group::1 [%r8];", "mma"),
    ],
)
def test_variants_that_are_not_simulated_are_refused_with_what_is(instruction, says):
    with pytest.raises(PtxError) as caught:
        run(instruction)
    assert says in str(caught.value) and instruction[:20] in str(caught.value)


@pytest.mark.parametrize("target, taken", [("sm_100a", True), ("sm_103a", True), ("sm_90a", False), ("sm_120a", False)])
def test_only_sm_100_and_sm_103_have_a_tensor_memory(target, taken):
    if taken:
        run("", target=target)
    else:
        with pytest.raises(PtxError, match="sm_100a, sm_103a"):
            run("", target=target)


def test_integers_are_for_sm_100_alone():
    with pytest.raises(PtxError, match="kind::i8 on sm_103a"):
        run(mma("i8"), target="sm_103a")


def test_a_pair_needs_a_cluster():
    ptx = source(copy_issue("128x256b", descriptor(A_AT, 128, 256, "none"), group=2), 64, 16, group=2)
    cells = pattern(1, 64)
    result = launch(ptx, grid=1, block=128, args=[torch.zeros(16, dtype=torch.uint8), cells, cells.clone()])
    assert kinds(result) == ["tmem"] and "has no peer" in result.findings[0].says


@pytest.mark.parametrize("at, says", [(1 << 16, "lane 1;"), (16 << 16, "lane 16;"), (160 << 16, "lane 160;")])
def test_shift_starts_at_a_slab(at, says):
    _, result = run(f"add.u32 %r10, %r8, {at};\n tcgen05.shift.cta_group::1.down [%r10];", strict=False)
    assert kinds(result) == ["tmem"] and says in result.findings[0].says


def test_cp_stays_within_the_lanes():
    _, result = run(copy_issue("32x128b.warpx4", descriptor(A_AT, 16, 128, "none"), "%r8+65536"), image=random_image(64), strict=False)
    assert kinds(result) == ["tmem"] and "reaches lane 128" in result.findings[0].says


def test_a_commit_needs_a_barrier():
    _, result = run("", commit=commit().replace("smem+16", "smem+32"), strict=False)
    assert kinds(result) == ["mbarrier"] and "there is no mbarrier at shared address 0x420" in result.findings[0].says
