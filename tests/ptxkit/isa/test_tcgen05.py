"""tcgen05.mma, cp and shift: every layout of operands and results, and their arithmetic."""

import itertools

import pytest
import tensor_core as tc
import torch
from assembly import int32

pytestmark = pytest.mark.simulated


def product(a, b):
    return a.x @ b.x.T


def agrees(a, b, m, n, d=None, *, ws="", half=0, group=1, d_type=None, **options):
    """Check that one mma leaves D, or else A B^T, in its place and all other cells as they were; return the Run."""
    places = dict(group=group, half=half)
    out, run, cells = tc.multiply(a, b, m, n, ws=ws, d_type=d_type, **places, **options)
    d = product(a, b) if d is None else d
    wanted = tc.with_d(cells, d, m, n, ws=bool(ws), d_type=d_type or tc.d_type_of(a.name), **places)
    assert torch.equal(out, wanted)
    return run


def identity(name, n):
    return torch.eye(n, tc.depth(name), dtype=torch.float64)


# ---- operands in shared memory

PLAIN = ("none", "128B", "64B", "32B")
TRANSPOSABLE = ("f16", "bf16", "e4m3", "e5m2", "u8", "s8")
OPERANDS = [(name, swizzle, False) for name in tc.TYPES for swizzle in PLAIN]
OPERANDS += [(name, swizzle, True) for name in TRANSPOSABLE for swizzle in PLAIN] + [("tf32", "128B/32B", True)]
LAYOUTS = pytest.mark.parametrize("name, swizzle, mn_major", OPERANDS, ids=str)


@pytest.mark.spread(every=3)
@LAYOUTS
def test_each_element_of_a_is_read_from_its_place(name, swizzle, mn_major):
    k = tc.depth(name)
    a = tc.Operand(name, tc.values(name, 128, seed=1), tc.A_AT, swizzle, mn_major)
    b = tc.Operand(name, identity(name, k), tc.B_AT)
    agrees(a, b, 128, k, a.x)


@pytest.mark.spread(every=3, first=1)
@LAYOUTS
def test_each_element_of_b_is_read_from_its_place(name, swizzle, mn_major):
    a = tc.Operand(name, identity(name, 64), tc.A_AT)
    b = tc.Operand(name, tc.values(name, 64, seed=2), tc.B_AT, swizzle, mn_major)
    d = torch.zeros(64, 64, dtype=torch.float64)
    d[: tc.depth(name)] = b.x.T
    agrees(a, b, 64, 64, d)


@pytest.mark.parametrize("name, swizzle, mn_major, lbo, sbo", [
    ("f16", "none", False, 0x400, 0x90),
    ("f16", "128B", False, 0x10, 0x420),  # rows of eight that do not end with the pattern
    ("e4m3", "32B", False, 0x10, 0x80),  # blocks of eight rows that overlap
    ("bf16", "none", True, 0x800, 0x80),
    ("bf16", "64B", True, 0x400, 0x2000),
    ("u8", "128B", True, 0x3000, 0x400),
    ("tf32", "128B/32B", True, 0x800, 0x2000),
])
def test_strides_are_what_the_descriptor_says(name, swizzle, mn_major, lbo, sbo):
    k = tc.depth(name)
    a = tc.Operand(name, tc.values(name, 64, seed=1), tc.A_AT, swizzle, mn_major, lbo, sbo)
    b = tc.Operand(name, identity(name, k), 0xC000)
    image = tc.image_of(b, size=0xC000)
    held = {}
    for mn, row in enumerate(tc.codes(name, a.x).tolist()):
        for column, code in enumerate(row):
            held[a.address(mn, column, tc.TYPES[name][2])] = mn, column, code
    for address, (_, _, code) in held.items():
        tc.put(image, address, code, tc.TYPES[name][2])
    out, _, _ = tc.multiply(a, b, 64, k, image=image)
    d = out[tc.d_spots(1, 64, k)]
    d = d.double() if tc.TYPES[name][0] == "i8" else tc.bits_float(d)
    for mn, column, _ in held.values():  # where blocks overlap, the last one written
        assert d[mn, column] == a.x[mn, column]


# start, LBO, SBO, swizzle, MN-major, descriptor, {(mn, k): address}: by hand from the manual's canonical layouts
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
    ("f16", 0x8000, 0x10, 0x200, "64B", False, 0x8000402000010800,
     {(2, 0): 0x8090, (3, 8): 0x80C0, (7, 15): 0x81EE, (8, 0): 0x8200}),
    ("tf32", 0x8000, 0x1000, 0x200, "128B/32B", True, 0x2000402001000800,
     {(0, 0): 0x8000, (8, 1): 0x8080, (31, 3): 0x819C, (32, 0): 0x9000, (40, 6): 0x9360}),
]


@pytest.mark.parametrize("name, start, lbo, sbo, swizzle, mn_major, number, places", WORKED_OUT)
def test_addresses_worked_out_by_hand_are_read(name, start, lbo, sbo, swizzle, mn_major, number, places):
    k, size = tc.depth(name), tc.TYPES[name][2]
    m = 64 if max(mn for mn, _ in places) < 64 else 128
    assert tc.descriptor(start, lbo, sbo, swizzle) == number
    image, d = torch.zeros(0xC000, dtype=torch.uint8), torch.zeros(m, k, dtype=torch.float64)
    for n, ((mn, column), address) in enumerate(places.items(), 1):
        assert tc.byte_address(mn, column, size, start, lbo, sbo, swizzle, mn_major) == address
        tc.put(image, address, int(tc.codes(name, torch.tensor(float(n)))), size)
        d[mn, column] = n
    a, b = tc.Operand(name, d, start, swizzle, mn_major), tc.Operand(name, identity(name, k), 0xC000)
    a.descriptor = number
    b.place(image)
    out, _, _ = tc.multiply(a, b, m, k, image=image)
    rows = sorted({mn for mn, _ in places})
    assert torch.equal(tc.bits_float(out[tc.d_spots(1, m, k)])[rows], d[rows])


def test_idesc_has_the_compilers_numbers():
    for types, m, n, flags, number in (
        ("bf16", 128, 128, {"transpose_b": True}, 0x8210490), ("f16", 128, 256, {}, 0x8400010),
        ("f16", 128, 256, {"negate_a": True}, 0x8402010), ("bf16", 64, 64, {"transpose_b": True}, 0x4110490),
        ("tf32", 128, 128, {}, 0x8200910), ("f16", 256, 256, {}, 0x10400010), ("e4m3", 128, 32, {}, 0x8080010),
    ):
        assert tc.idesc(types, types, m, n, **flags) == number


# ---- shapes, and where D goes


def test_places_of_d_worked_out_by_hand():
    assert tc.d_spot(1, 128, 128, 77, 33) == (0, 77, 33)
    assert tc.d_spot(1, 64, 64, 37, 5) == (0, 69, 5) and tc.d_spot(1, 64, 64, 37, 5, half=1) == (0, 85, 5)
    assert tc.d_spot(1, 64, 128, 37, 100, ws=True) == (0, 101, 36)
    assert tc.d_spot(1, 32, 128, 20, 70, ws=True) == (0, 84, 6)
    assert tc.d_spot(2, 128, 128, 100, 90) == (1, 100, 26)
    assert tc.d_spot(2, 256, 256, 200, 255) == (1, 72, 255)


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("n", [8, 16, 24, 136, 248, 256])
def test_every_n_from_8_to_256_writes_its_columns_and_no_others(m, n):
    a, b = tc.operands("bf16", m, n, b_at=0x6000)
    result = agrees(a, b, m, n, columns=256, image=tc.image_of(a, b, size=0x10000))
    assert result.counters["tensor_flops"] == 2 * m * n * 16
    assert result.counters["tmem_columns"] == 256


@pytest.mark.parametrize("half", [0, 1])
def test_two_tiles_of_64_rows_share_their_columns(half):
    a, b = tc.operands("f16", 64, 32)
    agrees(a, b, 64, 32, half=half)


@pytest.mark.parametrize("m", [32, 64, 128])
@pytest.mark.parametrize("n", [64, 128, 256])
def test_weight_stationary_layouts(m, n):
    a, b = tc.operands("bf16", m, n, b_at=0x6000)
    agrees(a, b, m, n, ws=".ws", columns=256, image=tc.image_of(a, b, size=0x10000))


ZERO_COLUMNS = ("1100001110000111", "1110000111000011", "0000111000011100", "0001110000111000")  # highest column first
ZERO_MASK = 0 | 1 << 8 | 2 << 16 | 1 << 24 | 0b0011 << 32 | 1 << 39 | 2 << 40 | 3 << 48


@pytest.mark.parametrize("on", [True, False])
def test_the_zero_column_mask_worked_out_by_hand(on):
    a, b = tc.operands("f16", 32, 64)
    image = tc.image_of(a, b)
    number = ZERO_MASK if on else ZERO_MASK & ~(1 << 39)
    columns = "".join(part[::-1] for part in ZERO_COLUMNS)
    b.x[[n for n, zero in enumerate(columns) if on and zero == "1"]] = 0       # in what is expected: the image is made
    agrees(a, b, 32, 64, ws=".ws", before=f"mov.b64 %rd12, {number};\n", tail=", %rd12", image=image)


@pytest.mark.parametrize("m, n", [(128, 32), (128, 64), (256, 16), (256, 64)])
@pytest.mark.parametrize("swizzle, mn_major", [("128B", False), ("none", False), ("32B", True), ("none", True)])
def test_a_pair_of_ctas_takes_half_of_each_operand_from_each(m, n, swizzle, mn_major):
    if swizzle == "32B" and n < 32:
        swizzle = "none"
    a, b = tc.values("bf16", m, 11), tc.values("bf16", n, 12)
    parts, images = tc.operands_of_a_pair(a, b, swizzle, mn_major)
    result = agrees(*parts, m, n, a @ b.T, group=2, image=images)
    assert result.counters["tensor_flops"] == 2 * m * n * 16


# ---- arithmetic


def whole(rows, columns, seed):
    return torch.randint(-100, 100, (rows, columns), generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("name", ["bf16", "tf32", "e4m3", "e5m2", "e2m1"])
def test_d_is_added_to_when_the_predicate_says_so(name):
    a, b = tc.operands(name, 128, 32)
    c = whole(128, 64, 15)
    agrees(a, b, 128, 32, product(a, b) + c[:, :32], accumulate=1, cells=tc.float_bits(c)[None])


def test_old_values_are_not_looked_at_otherwise():
    a, b = tc.operands("bf16", 128, 32)
    cells = torch.full((1, 128, 64), 0x7FC00000, dtype=torch.int32)  # NaN
    agrees(a, b, 128, 32, cells=cells)


@pytest.mark.parametrize("flags", [{"negate_a": True}, {"negate_b": True}, {"negate_a": True, "negate_b": True}])
def test_operands_are_negated(flags):
    a, b = tc.operands("f16", 64, 32, swizzle="32B")
    cells = tc.float_bits(whole(128, 64, 18))[None]
    old = tc.bits_float(cells[tc.d_spots(1, 64, 32)])
    agrees(a, b, 64, 32, product(a, b) * (-1) ** len(flags) + old, accumulate=1, cells=cells, flags=flags)


def test_a_result_in_halves_takes_the_lower_half_of_each_cell():
    a, b = tc.operands("f16", 128, 32)
    c = whole(128, 64, 19).to(torch.float16)
    cells = (c.view(torch.int16).to(torch.int32) & 0xFFFF | 0x5A5A0000)[None]
    agrees(a, b, 128, 32, product(a, b) + c[:, :32].double(), accumulate=1, cells=cells, d_type="f16")


@pytest.mark.parametrize("scale", [0, 1, 15])
@pytest.mark.parametrize("name", ["f16", "tf32"])
def test_the_old_d_can_be_scaled_down(name, scale):
    a, b = tc.operands(name, 128, 32)
    c = whole(128, 64, 23)
    cells = tc.float_bits(c * 2.0**scale)[None]
    agrees(a, b, 128, 32, product(a, b) + c[:, :32], accumulate=1, cells=cells, tail=f", {scale}")


@pytest.mark.parametrize("a_type, b_type", list(itertools.product(["u8", "s8"], repeat=2)))
def test_integers_are_exact_and_wrap_or_saturate(a_type, b_type):
    a = tc.Operand(a_type, tc.values(a_type, 128, 24), tc.A_AT, "64B")
    b = tc.Operand(b_type, tc.values(b_type, 32, 25), tc.B_AT, "64B")
    low, high = -(2**31), 2**31 - 1
    c = torch.randint(low, high, (1, 128, 64), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    c[0, :, 0], c[0, :, 1] = high, low
    exact = product(a, b).to(torch.int64) + c[0, :, :32]
    wrapped, _, _ = tc.multiply(a, b, 128, 32, accumulate=1, cells=c)
    limited, _, _ = tc.multiply(a, b, 128, 32, accumulate=1, cells=c, flags={"saturate": True})
    assert torch.equal(wrapped[0, :, :32], exact.to(torch.int32))
    assert torch.equal(limited[0, :, :32], exact.clamp(low, high).to(torch.int32))
    assert not torch.equal(wrapped, limited)


@pytest.mark.parametrize("name", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
def test_products_of_any_numbers_are_as_close_as_25_bits_below_the_largest_term(name):
    a, b = tc.operands(name, 128, 64, exact=False)
    c = torch.randn(128, 64, generator=torch.Generator().manual_seed(2)).double()
    out, _, _ = tc.multiply(a, b, 128, 64, accumulate=1, cells=tc.float_bits(c)[None])
    exact, got = product(a, b) + c.float().double(), tc.bits_float(out[0])
    largest = torch.maximum((a.x.abs()[:, None] * b.x.abs()[None]).amax(-1), c.abs())
    limit = (tc.depth(name) + 1) * 2.0**-25 * 2 * largest + 2.0**-23 * exact.abs()  # each term is cut, then the sum
    assert ((got - exact).abs() <= limit).all()
    assert (got != exact).any()


LANE_MASK = [0x00000001, 0x80000000, 0xFFFFFFFF, 0x0000FF00, 0, 0xF0F0F0F0, 2, 0xFFFF]


@pytest.mark.parametrize("group", [1, 2])
def test_lanes_that_the_mask_disables_keep_what_they_held(group):
    words = LANE_MASK[: 4 * group]
    options = {"mask": tc.vector(0, 4 * group) + ", ", "group": group, "accumulate": 1}
    options["before"] = "".join(f"mov.b32 %x{n}, {w};\n" for n, w in enumerate(words))
    options["cells"] = tc.float_bits(whole(128 * group, 64, 28)).reshape(group, 128, 64)
    if group == 1:
        parts, a, b = tc.operands("bf16", 128, 32), tc.values("bf16", 128, 1), tc.values("bf16", 32, 2)
    else:
        a, b = tc.values("bf16", 256, 29), tc.values("bf16", 32, 30)
        parts, options["image"] = tc.operands_of_a_pair(a, b)
    out, _, cells = tc.multiply(*parts, 128 * group, 32, **options)
    wanted = tc.with_d(cells, a @ b.T + tc.bits_float(cells).reshape(-1, 64)[:, :32], 128 * group, 32, group=group)
    for lane in range(128 * group):
        if words[lane // 32] >> lane % 32 & 1:
            wanted[lane // 128, lane % 128] = cells[lane // 128, lane % 128]
    assert torch.equal(out, wanted)


@tc.UNDER_ANY_SCHEDULE
def test_a_tile_of_128_x_128_x_64_in_four_steps(schedule):
    x, y = (torch.cat([tc.values("bf16", 128, seed + n) for n in range(4)], 1) for seed in (31, 35))
    image, steps = torch.zeros(0xC000, dtype=torch.uint8), []
    for n in range(4):  # 32 bytes further along K
        columns = slice(16 * n, 16 * n + 16)
        a, b = (tc.Operand("bf16", z[:, columns], start + 32 * n, "128B") for z, start in ((x, tc.A_AT), (y, tc.B_AT)))
        a.place(image)
        b.place(image)
        number = tc.idesc("bf16", "bf16", 128, 128)
        steps.append(tc.mma("f16", (a.descriptor, b.descriptor), number, accumulate=n > 0))
    out, result = tc.run("\n".join(steps), image=image, columns=128, **schedule)
    assert torch.equal(tc.bits_float(out[0]), x @ y.T)
    assert result.counters["tensor_flops"] == 2 * 128 * 128 * 64


@tc.UNDER_ANY_SCHEDULE
def test_a_pairs_product_under_any_schedule(schedule):
    a, b = tc.values("bf16", 256, 31), tc.values("bf16", 32, 32)
    parts, images = tc.operands_of_a_pair(a, b)
    agrees(*parts, 256, 32, a @ b.T, group=2, image=images, **schedule)


# ---- A in tensor memory


def packed_cells(name, x):
    """Return a as tensor memory holds it: [row][8 cells]; small floats have a byte each, in its middle."""
    size, container = tc.TYPES[name][2], {"e2m1": 2, "e2m3": 1, "e3m2": 1}.get(name, 0)
    code = tc.codes(name, x) << container
    return int32(sum(code[:, n :: 4 // size] << 8 * size * n for n in range(4 // size)))


def test_a_in_tensor_memory_worked_out_by_hand():
    x = torch.zeros(64, 16, dtype=torch.float64)
    x[37, 5] = 1
    assert packed_cells("bf16", x)[37, 2] == 0x3F80 << 16
    assert tc.d_spot(1, 64, 16, 37, 0)[1] == 69 and tc.d_spot(1, 128, 16, 37, 0)[1] == 37


@pytest.mark.parametrize("name", tc.TYPES)
@pytest.mark.parametrize("m, half", [(64, 0), (64, 1), (128, 0)])
def test_a_can_lie_in_tensor_memory(name, m, half):
    a, b = tc.values(name, m, 33), tc.Operand(name, tc.values(name, 32, 34), tc.B_AT, "128B")
    cells, d_type, offset = tc.pattern(1, 64), tc.d_type_of(name), half << 20
    lanes = tc.d_spots(1, m, 8, half=half)[1]
    cells[0, lanes, torch.arange(40, 48).expand(m, 8)] = packed_cells(name, a)
    number = tc.idesc(name, name, m, 32, d_type)
    issue = tc.mma(tc.TYPES[name][0], (0, b.descriptor), number, d=f"%r8+{offset}", a=f"[%r8+{offset + 40}]")
    out, _ = tc.run(issue, image=tc.image_of(b), cells=cells)
    assert torch.equal(out, tc.with_d(cells, a @ b.x.T, m, 32, half=half, d_type=d_type))


@pytest.mark.parametrize("m", [128, 256])
def test_a_of_a_pair_lies_in_both_tensor_memories(m):
    a, b = tc.values("bf16", m, 35), tc.values("bf16", 32, 36)
    cells = tc.pattern(2, 64)
    for first in range(0, 128, m // 2):  # M=128: each CTA holds its 64 rows twice
        cells[:, first : first + m // 2, 40:48] = packed_cells("bf16", a).reshape(2, m // 2, 8)
    (_, part), images = tc.operands_of_a_pair(a, b)
    issue = tc.mma("f16", (0, part.descriptor), tc.idesc("bf16", "bf16", m, 32), a="[%r8+40]", group=2)
    out, _ = tc.run(issue, image=images, cells=cells, group=2)
    assert torch.equal(out, tc.with_d(cells, a @ b.T, m, 32, group=2))


# ---- cp and shift

COPIES = {  # rows, bytes of a row, lanes of a row
    "128x256b": (128, 32, lambda r: [r]),
    "128x128b": (128, 16, lambda r: [r]),
    "4x256b": (4, 32, lambda r: [32 * r]),
    "64x128b.warpx2::02_13": (64, 16, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 16, lambda r: [64 * (r // 32) + r % 32, 64 * (r // 32) + r % 32 + 32]),
    "32x128b.warpx4": (32, 16, lambda r: [r, r + 32, r + 64, r + 96]),
}


def copied(shape, image, cells, column, lbo=128, sbo=256, swizzle="none", unpack=lambda group: group):
    """Return the cells after a copy from A_AT."""
    rows, width, lanes = COPIES[shape]
    wanted = cells.clone()
    for row, chunk in itertools.product(range(rows), range(0, width, 16)):
        offset = tc.byte_address(row, chunk, 1, tc.A_AT, lbo, sbo, swizzle, False) - tc.IMAGE
        first = column + chunk // 4
        for lane in lanes(row):
            wanted[0, lane, first : first + 4] = unpack(image[offset : offset + 16]).view(torch.int32)
    return wanted


SOURCE = tc.descriptor(tc.A_AT, 128, 256, "none")


@pytest.mark.parametrize("shape", COPIES)
@pytest.mark.parametrize(
    "lbo, sbo, swizzle", [(16, 128, "none"), (128, 256, "none"), (16, 1024, "128B"), (16, 256, "32B")]
)
def test_cp_copies_rows_to_their_lanes(shape, lbo, sbo, swizzle):
    image = tc.random_image(37)
    out, _ = tc.run(tc.copy(shape, tc.descriptor(tc.A_AT, lbo, sbo, swizzle)), image=image)
    assert torch.equal(out, copied(shape, image, tc.pattern(1, 64), 8, lbo, sbo, swizzle))


@pytest.mark.parametrize("shape", [shape for shape in COPIES if "." in shape])
def test_a_cp_may_name_its_shape_behind_its_warps_as_triton_does(shape):
    image = tc.random_image(37)
    (one, other) = shape.split(".")
    out, _ = tc.run(tc.copy(f"{other}.{one}", SOURCE), image=image)
    assert torch.equal(out, copied(shape, image, tc.pattern(1, 64), 8))


def test_the_address_picks_the_lane_of_4x256b_in_each_slab():
    image, wanted = tc.random_image(38), tc.pattern(1, 64)
    out, _ = tc.run(tc.copy("4x256b", SOURCE, f"%r8+{31 << 16}"), image=image)
    wanted[0, 31::32, :8] = copied("4x256b", image, wanted, 0)[0, ::32, :8]
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("format_, bits, container", [("b6x16_p32", 6, 1), ("b4x16_p64", 4, 2)])
def test_cp_can_unpack_small_floats_into_bytes(format_, bits, container):
    def unpack(group):
        packed = int.from_bytes(bytes(group.tolist()), "little")
        return torch.tensor([(packed >> bits * n & (1 << bits) - 1) << container for n in range(16)], dtype=torch.uint8)

    image = tc.random_image(39)
    out, _ = tc.run(tc.copy(f"128x128b.b8x16.{format_}", SOURCE), image=image)
    assert torch.equal(out, copied("128x128b", image, tc.pattern(1, 64), 8, unpack=unpack))


def test_a_pairs_copy_takes_place_in_both_ctas():
    images = torch.stack([tc.random_image(40), tc.random_image(41)])
    out, _ = tc.run(tc.copy("128x256b", SOURCE, group=2), image=images, group=2)
    for cta in (slice(0, 1), slice(1, 2)):
        assert torch.equal(out[cta], copied("128x256b", images[cta][0], tc.pattern(2, 64)[cta], 8))


def test_an_mma_follows_the_copy_that_fills_its_a():
    a, b = tc.operands("bf16", 128, 32, swizzle="none")
    issue = tc.copy("128x256b", SOURCE, "%r8+40")
    issue += tc.mma("f16", (0, b.descriptor), tc.idesc("bf16", "bf16", 128, 32), a="[%r8+40]")
    out, _ = tc.run(issue, image=tc.image_of(a, b))
    assert torch.equal(tc.bits_float(out[0, :, :32]), product(a, b))


@pytest.mark.parametrize("name", ["shift.down.cta_group::1", "shift.cta_group::1.down"])
def test_shift_moves_32_bytes_of_a_slab_by_one_lane(name):
    out, _ = tc.run(f"tcgen05.{name} [%r8+{(32 << 16) + 8}];")
    before, wanted = tc.pattern(1, 64), tc.pattern(1, 64)
    wanted[0, 32:63, 8:16] = before[0, 33:64, 8:16]
    assert torch.equal(out, wanted)
