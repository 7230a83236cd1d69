"""ldmatrix, stmatrix, movmatrix and mma.sync: fragments, and how tensor cores round."""

import pytest
import torch
from assembly import elements, kernel, refused, reports, vector
from fragments import LANES, packed, places_of_a, places_of_b, places_of_c, shape_of, unpacked, warp
from matrices import bits_of, decode, dot, encode, random_bits, small_integers

from ptxkit.launches import launch

pytestmark = pytest.mark.simulated

# ---- ldmatrix, stmatrix, movmatrix


def through_shared(body, image, registers=0, outputs=4, target="sm_100a", block=32, given=None):
    """Run one warp: `image` (bytes) is in `smem`, inputs are in %r10.., outputs come from %r40..; smem comes back
    too."""
    size = len(image)
    data = torch.frombuffer(bytearray(image), dtype=torch.uint8).clone()
    inputs = torch.tensor(given or [[0] * 32], dtype=torch.int64).to(torch.int32)
    out, after = torch.full((max(outputs, 1), 32), -1, dtype=torch.int32), torch.zeros(size, dtype=torch.uint8)
    text = elements(4) + """
    mov.u32 %r1, smem;
    shl.b32 %r2, %r0, 2;
    add.u32 %r2, %r1, %r2;
"""
    steps = range(0, size, 128)
    text += "".join(f"ld.global.u32 %r3, [%rd10+{offset}];\n st.shared.u32 [%r2+{offset}], %r3;\n" for offset in steps)
    text += "".join(f"ld.global.u32 %r{10 + n}, [%rd11+{128 * n}];\n" for n in range(registers))
    text += "bar.warp.sync -1;\n" + body + "bar.warp.sync -1;\n"
    text += "".join(f"st.global.u32 [%rd12+{128 * n}], %r{40 + n};\n" for n in range(outputs))
    text += "".join(f"ld.shared.u32 %r3, [%r2+{offset}];\n st.global.u32 [%rd13+{offset}], %r3;\n" for offset in steps)
    run = launch(kernel(text, pointers=4, target=target), grid=1, block=block, args=[data, inputs, out, after])
    return [[x & 0xFFFFFFFF for x in row] for row in out.tolist()], after, run


IMAGE = bytes(range(256)) + bytes(reversed(range(256)))
HALVES = torch.frombuffer(bytearray(IMAGE), dtype=torch.uint8).view(torch.int16).long() & 0xFFFF
ROWS = HALVES.view(32, 8)  # row r lies at 16 r


ROW_ADDRESS = "shl.b32 %r4, %r0, 4;\n add.u32 %r4, %r4, %r1;\n"  # lane r's row in %r4


def ldmatrix(count, shape="m8n8", trans="", type_="b16", address="%r4"):
    registers = vector("r", count * (2 if shape == "m16n16" else 1), 40)
    return f"ldmatrix.sync.aligned.{shape}.x{count}{trans}.shared.{type_} {registers}, [{address}];\n"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_hands_each_lane_two_neighbours(count, trans):
    out, _, run = through_shared(ROW_ADDRESS + ldmatrix(count, trans=trans), IMAGE, outputs=count)
    for j in range(count):
        matrix = ROWS[8 * j : 8 * j + 8]
        for lane, (g, t) in enumerate(LANES):
            low, high = (matrix[2 * t, g], matrix[2 * t + 1, g]) if trans else (matrix[g, 2 * t], matrix[g, 2 * t + 1])
            assert out[j][lane] == int(low) | int(high) << 16
    assert not run.findings
    assert run.counters["bank_conflicts"] == 0


def test_lane_13_of_ldmatrix_has_the_elements_that_the_manual_names():
    for trans, places in (("", ((3, 2), (3, 3))), (".trans", ((2, 3), (3, 3)))):
        out, *_ = through_shared(ROW_ADDRESS + ldmatrix(1, trans=trans), IMAGE, outputs=1)
        assert out[0][13] == sum(int(ROWS[place]) << 16 * n for n, place in enumerate(places))


def test_lane_21_addresses_row_5_of_matrix_2():
    move = "setp.eq.u32 %p1, %r0, 21;\n @%p1 mov.u32 %r4, %r1;\n"  # to row 0 of the image
    out, *_ = through_shared(ROW_ADDRESS + move + ldmatrix(4), IMAGE)
    assert out[2][20:24] == [int(ROWS[0, 2 * t]) | int(ROWS[0, 2 * t + 1]) << 16 for t in range(4)]
    assert out[2][24:28] == [int(ROWS[22, 2 * t]) | int(ROWS[22, 2 * t + 1]) << 16 for t in range(4)]


def test_lanes_past_the_matrices_need_no_valid_address():
    bad = "setp.ge.u32 %p1, %r0, 8;\n @%p1 mov.u32 %r4, 0xfffffff1;\n"
    _, _, run = through_shared(ROW_ADDRESS + bad + ldmatrix(1), IMAGE, outputs=1)
    assert not run.findings


def test_rows_that_share_banks_are_counted():
    body = "shl.b32 %r4, %r0, 7;\n add.u32 %r4, %r4, %r1;\n" + ldmatrix(1)
    _, _, run = through_shared(body, IMAGE * 2, outputs=1)
    assert run.counters["bank_conflicts"] == 7


def test_ldmatrix_takes_generic_addresses_in_shared_memory():
    to_generic = "cvt.u64.u32 %rd14, %r4;\n cvta.shared.u64 %rd14, %rd14;\n"
    body = ROW_ADDRESS + to_generic + "ldmatrix.sync.aligned.m8n8.x1.b16 {%r40}, [%rd14];\n"
    out, _, run = through_shared(body, IMAGE, outputs=1)
    assert out[0] == [int(ROWS[g, 2 * t]) | int(ROWS[g, 2 * t + 1]) << 16 for g, t in LANES]
    assert not run.findings


def test_ldmatrix_b8_gives_four_rows_of_a_column():
    out, _, run = through_shared(ROW_ADDRESS + ldmatrix(2, "m16n16", ".trans", "b8"), IMAGE)
    for r in range(4):
        for lane, (g, t) in enumerate(LANES):
            addresses = [16 * (16 * (r // 2) + 4 * t + b) + g + 8 * (r % 2) for b in range(4)]
            assert out[r][lane] == int.from_bytes(bytes(IMAGE[a] for a in addresses), "little")
    assert not run.findings


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_undoes_ldmatrix(count, trans):
    given = [[(lane * 0x01010101 + 0x10203040 * n) & 0x7FFFFFFF for lane in range(32)] for n in range(count)]
    store = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r4], {vector('r', count, 10)};\n"
    body = ROW_ADDRESS + store + "bar.warp.sync -1;\n" + ldmatrix(count, trans=trans)
    out, after, run = through_shared(body, bytes(512), registers=count, outputs=count, given=given)
    assert out == given
    matrix = after.view(torch.int16).long().view(32, 8) & 0xFFFF
    for j in range(count):
        for lane, (g, t) in enumerate(LANES):
            low = (2 * t, g) if trans else (g, 2 * t)
            assert int(matrix[8 * j + low[0], low[1]]) == given[j][lane] & 0xFFFF
    assert int(after[128 * count :].sum()) == 0
    assert not run.findings


def test_stmatrix_b8_stores_columns_as_rows():
    given = [[(lane * 0x01030507 + n * 0x11111111) & 0x7FFFFFFF for lane in range(32)] for n in range(2)]
    body = ROW_ADDRESS + "stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r4], {%r10, %r11};\n"
    _, after, run = through_shared(body, bytes(512), registers=2, outputs=0, given=given)
    for r in range(2):
        for lane, (g, t) in enumerate(LANES):
            for b in range(4):
                assert int(after[16 * (8 * r + 2 * t + b % 2) + g + 8 * (b // 2)]) == given[r][lane] >> 8 * b & 0xFF
    assert not run.findings


def test_movmatrix_transposes():
    given = [[lane << 16 | 0x100 + lane for lane in range(32)]]
    body = "movmatrix.sync.aligned.m8n8.trans.b16 %r40, %r10;\n"
    out, _, run = through_shared(body, bytes(512), registers=1, outputs=1, given=given)
    element = lambda r, c: given[0][4 * r + c // 2] >> 16 * (c % 2) & 0xFFFF  # noqa: E731
    assert out[0] == [element(2 * t, g) | element(2 * t + 1, g) << 16 for g, t in LANES]
    assert not run.findings


@pytest.mark.parametrize(("product", "wanted"), [
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{d}}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{{c}}};", 4),
    ("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{d}}}, {{%r1, %r2}}, {{%r5, %r6}}, {{{c}}}, %r9, 0;", 4),
    ("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {{{d}}}, {{%r1, %r2}}, {{%r5}}, {{%r10, %r11}};", 2),
], ids=["f32", "sparse", "f16"])
def test_a_part_of_d_that_nobody_reads_may_be_a_sink(product, wanted):
    inputs = "".join(f"mov.b32 %r{n}, 0x{0x3C003C00 + n:x};\n" for n in range(1, 12)) + "mov.b32 %r9, 0x44444444;\n"
    names = [f"%f{n}" for n in range(4)] if wanted == 4 else ["%r12", "%r13"]
    moves = "".join(f"mov.b32 {name}, 7;\n" for name in names)

    def results(d):
        text = inputs + moves + product.format(d=", ".join(d), c=", ".join(names)) + "\n"
        text += "".join(f"mov.b32 %r{40 + n}, {name};\n" for n, name in enumerate(names))
        return through_shared(text, IMAGE, outputs=wanted, target="sm_90a")[0]

    whole, parts = results(names), results([name if n % 2 else "_" for n, name in enumerate(names)])
    assert parts[1::2] == whole[1::2] and 7 not in parts[1]
    assert parts[0::2] == [[7] * 32] * (wanted // 2)


@pytest.mark.parametrize("instruction", [
    "movmatrix.sync.aligned.m8n8.trans.b16 _, %r1;", "vote.sync.any.pred _, %p1, -1;", "activemask.b32 _;",
    "bar.red.popc.u32 _, 0, %p1;",
    "wmma.load.c.sync.aligned.m16n16k16.global.row.f32 {%f1, _, %f3, _, _, _, _, _}, [%rd1];",
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, _}, [smem];", "match.all.sync.b32 _|%p1, %r1, -1;",
    "isspacep.global _, %rd1;", "atom.global.add.u32 _, [%rd1], 1;",
])
def test_a_sink_takes_any_result(instruction):
    launch(kernel(f"    {instruction}\n"), grid=1, block=32, args=[torch.zeros(1024)])


@pytest.mark.parametrize("instruction", [
    "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r12, %r13}, {%r1, _}, {%r5}, {%r10, %r11};",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, _, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
    "wmma.store.d.sync.aligned.m16n16k16.global.row.f32 [%rd1], {%f1, _, %f3, %f4, %f5, %f6, %f7, %f8};",
])
def test_a_sink_is_nothing_to_read(instruction):
    assert "`_` in " in refused(instruction)


@pytest.mark.parametrize(("before", "found", "says"), [
    ("st.shared.u32 [%r2], %r0;\n", ["race-lanes"], ""),
    ("setp.lt.u32 %p1, %r0, 16;\n mov.u32 %r40, 0;\n @%p1 ", ["diverged"], ""),
    ("setp.eq.u32 %p1, %r0, 31;\n @%p1 exit;\n", {"lane"}, "7fffffff"),
    ("add.u32 %r4, %r4, 8;\n", ["misaligned"], ""),
], ids=["another lane's row without a barrier", "half a warp", "a lane that has exited", "no multiple of 16"])
def test_ldmatrix_needs_its_warp_and_rows_that_are_aligned(before, found, says):
    reports(through_shared(ROW_ADDRESS + before + ldmatrix(1), IMAGE, outputs=1)[2], found, says)


# ---- mma.sync


def mma(shape, types, a, b, c, arch, modifier=""):
    """Return D's bits [m][8] of one warp's mma.sync on bits a [m][k], b [k][8], c [m][8]."""
    (m, _, k), (d, of_a, of_b) = shape_of(shape), types
    bits, bits_d = bits_of(of_a), bits_of(d)
    fragments = [
        packed(a, places_of_a(m, k, bits), bits), packed(b, places_of_b(k, bits), bits),
        packed(c, places_of_c(m), bits_d),
    ]
    name = f"mma.sync.aligned.{shape}.row.col{modifier}.{d}.{of_a}.{of_b}.{d}"
    out, run = warp(f"{name} {{d}}, {{0}}, {{1}}, {{2}};", fragments, len(fragments[2]), f"sm_{arch}")
    assert run.counters["tensor_flops"] == 2 * m * 8 * k
    return unpacked(out, places_of_c(m), (m, 8), bits_d)


FLOATS = [
    *((shape, t, t) for t in ("f16", "bf16") for shape in ("m16n8k8", "m16n8k16")),
    *((shape, "tf32", "tf32") for shape in ("m16n8k4", "m16n8k8")),
    ("m16n8k16", "e4m3", "e4m3"),
    *(("m16n8k32", a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
]
CASES = [(*f, d) for f in FLOATS for d in ("f32", "f16") if d == "f32" or f[1] not in ("bf16", "tf32")]


def test_the_owners_of_fragments_are_the_manuals():
    def owner(rows, place):
        return next((lane, row.index(place)) for lane, row in enumerate(rows) if place in row)

    assert owner(places_of_a(16, 16, 16), (9, 11)) == (5, 7)
    assert owner(places_of_b(16, 16), (13, 6)) == (26, 3)
    assert owner(places_of_c(16), (12, 5)) == (18, 3)
    assert owner(places_of_a(16, 8, 32), (3, 6)) == (14, 2)


@pytest.mark.parametrize("shape, of_a, of_b, d", CASES)
def test_whole_numbers_multiply_exactly(shape, of_a, of_b, d):
    g, k = torch.Generator().manual_seed(1), shape_of(shape)[2]
    a, b = small_integers((16, k), of_a, g), small_integers((k, 8), of_b, g)
    c = small_integers((16, 8), d, g, most=100)
    got = decode(mma(shape, (d, of_a, of_b), a, b, c, 100), d)
    assert torch.equal(got, decode(a, of_a) @ decode(b, of_b) + decode(c, d))


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("shape, of_a, of_b, d", CASES)
def test_sums_are_cut_as_the_tensor_cores_of_each_arch_cut_them(shape, of_a, of_b, d, arch):
    if of_a[0] == "e" and arch < 89:
        instruction = f"mma.sync.aligned.{shape}.row.col.{d}.{of_a}.{of_b}.{d} %r1, %r1, %r1, %r1;"
        assert "sm_89 and later" in refused(instruction, "sm_80")
        return
    g, k = torch.Generator().manual_seed(arch), shape_of(shape)[2]
    a, b = random_bits((16, k), of_a, g), random_bits((k, 8), of_b, g)
    c = random_bits((16, 8), d, g)
    got = mma(shape, (d, of_a, of_b), a, b, c, arch)
    rows, columns, types = a.tolist(), b.T.tolist(), (of_a, of_b, d)
    assert got.tolist() == [[dot(rows[m], columns[n], int(c[m, n]), types, arch) for n in range(8)] for m in range(16)]


@pytest.mark.parametrize(
    "arch, results", [(80, (0x3F800000, 0)), (89, (0x3F800000, 0)), (90, (0x3F800001, 0x3F000000))]
)
def test_small_terms_survive_only_where_the_published_model_says(arch, results):
    e = 2.0**-12
    rows = ([1, *[0] * 6, e, e, e, *[0] * 6], [2.0**12, 1, *[0] * 6, -(2.0**12), *[0] * 7])
    columns = ([1, *[0] * 6, e, e / 2, e / 2, *[0] * 6], [2.0**12, 0.5, *[0] * 6, 2.0**12, *[0] * 7])
    a, b = torch.zeros(16, 16), torch.zeros(16, 8)
    for n in range(2):
        a[n], b[:, n] = torch.tensor(rows[n]), torch.tensor(columns[n])
    c = torch.zeros(16, 8, dtype=torch.int64)
    got = mma("m16n8k16", ("f32", "f16", "f16"), encode(a, "f16"), encode(b, "f16"), c, arch)
    assert (int(got[0, 0]), int(got[1, 1])) == results


def test_nans_and_infinities_come_out_as_one_expects():
    inf, nan = float("inf"), float("nan")
    a, b, c = torch.ones(16, 16), torch.ones(16, 8), torch.zeros(16, 8)
    a[0, 3], a[1, 3], a[2, 3], a[2, 4] = inf, nan, inf, -inf
    a[3, 3], b[3, 1] = -inf, 0
    c[4, 0], c[5, 0], c[6, 0], a[6, 0] = inf, nan, inf, -inf
    got = mma("m16n8k16", ("f32", "f16", "f16"), encode(a, "f16"), encode(b, "f16"), encode(c, "f32"), 90)
    plus, minus, nothing = 0x7F800000, 0xFF800000, 0x7FFFFFFF
    assert [int(got[m, 0]) for m in range(7)] == [plus, nothing, nothing, minus, plus, nothing, nothing]
    assert int(got[3, 1]) == 0x7FFFFFFF  # inf * 0
    assert int(got[7, 7]) == 0x41800000


def test_subnormals_count_and_f16_overflows_to_infinity():
    a, b = torch.zeros(16, 16, dtype=torch.int64), torch.zeros(16, 8, dtype=torch.int64)
    a[0, 0], b[0, 0] = 1, 0x3C00  # the smallest f16 times one
    a[1, :], b[1:, 1] = 0x7BFF, 0x7BFF
    c = torch.zeros(16, 8, dtype=torch.int64)
    got = mma("m16n8k16", ("f16", "f16", "f16"), a, b, c, 90)
    assert (int(got[0, 0]), int(got[1, 1])) == (1, 0x7C00)


@pytest.mark.parametrize(
    "shape, of_a, of_b",
    [("m8n8k16", "s8", "s8"), ("m16n8k16", "u8", "s8"), ("m16n8k32", "s8", "u8"), ("m16n8k32", "u8", "u8")],
)
@pytest.mark.parametrize("modifier", ["", ".satfinite"])
def test_integers_are_exact_and_wrap_or_saturate(shape, of_a, of_b, modifier):
    m, _, k = shape_of(shape)
    g = torch.Generator().manual_seed(k)
    a, b = random_bits((m, k), of_a, g), random_bits((k, 8), of_b, g)
    c = torch.randint(-(2**31), 2**31, (m, 8), generator=g)
    c[0], c[1] = 2**31 - 5, -(2**31) + 5
    got = mma(shape, ("s32", of_a, of_b), a, b, c & 0xFFFFFFFF, 80, modifier)
    exact = decode(a, of_a) @ decode(b, of_b) + c
    expected = exact.clamp(-(2**31), 2**31 - 1) if modifier else exact
    assert torch.equal(got, expected & 0xFFFFFFFF)


@pytest.mark.parametrize("shape", ["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"])
def test_doubles_are_a_chain_of_fused_multiply_adds(shape):
    m, _, k = shape_of(shape)
    g = torch.Generator().manual_seed(k)
    a, b, c = (torch.randint(-1000, 1000, s, generator=g).double() for s in ((m, k), (k, 8), (m, 8)))
    places = (a, places_of_a(m, k, 32)), (b, places_of_b(k, 32)), (c, places_of_c(m))
    inputs = [torch.tensor([[float(matrix[cells[e]]) for cells in where] for e in range(len(where[0]))])
              for matrix, where in places]
    given, out = torch.cat(inputs).double(), torch.zeros(m // 4, 32, dtype=torch.float64)
    names, first = [], 0
    for count in map(len, inputs):
        names.append(vector("v", count, first))
        first += count
    body = f".reg .f64 %v<{first}>;\n .reg .f64 %u<{m // 4}>;\n"
    body += "mul.wide.u32 %rd9, %r0, 8;\n add.s64 %rd10, %rd1, %rd9;\n add.s64 %rd11, %rd2, %rd9;\n"
    body += "".join(f"ld.global.f64 %v{n}, [%rd10+{256 * n}];\n" for n in range(first))
    body += f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64 {vector('u', m // 4)}, {', '.join(names)};\n"
    body += "".join(f"st.global.f64 [%rd11+{256 * n}], %u{n};\n" for n in range(m // 4))
    run = launch(kernel(body, pointers=2), grid=1, block=32, args=[given, out])
    expected = a @ b + c
    for lane, cells in enumerate(places_of_c(m)):
        assert out[:, lane].tolist() == [float(expected[place]) for place in cells]
    assert not run.findings


# ---- what is refused


@pytest.mark.parametrize("instruction, says", [
    ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};", "m16n8k16"),
    ("mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};", "row.col"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};", "4, 4, 2, 4"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};", "bf16.bf16"),
    ("ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r1, %r2, %r3}, [%r4];", "x1, x2, x4"),
    ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r4];", "2"),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r4];", "sm_100a"),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%r1}, [%r4];", "sm_100a"),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r1}, [%r4];", ".m8n16.{x1, x2, x4}.b8x16.b4x16_p64"),
    ("movmatrix.sync.aligned.m8n8.b16 %r1, %r2;", "trans"),
])
def test_a_form_that_is_not_there_is_refused(instruction, says):
    text = refused(instruction)
    assert says in text and instruction.rstrip(";") in text


def test_stmatrix_is_refused_before_sm_90():
    assert "sm_90 and later" in refused("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r1};", target="sm_80")
