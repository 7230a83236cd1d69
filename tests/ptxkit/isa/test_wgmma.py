"""wgmma: operands in every layout of shared memory, registers in flight, fences, groups."""

import functools

import pytest
import torch
from assembly import SEEDS, int32, kernel, reports, vector
from fragments import LANES, packed, places_of_a, unpacked
from matrices import bits_of, decode, dot, encode, random_bits, size_of, small_integers

from ptxkit.launches import launch
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

SHARED_BASE = 0x400
# swizzle -> (the descriptor's layout, 16-byte pieces in a row of the pattern)
MODES = {"none": (0, 1), "32": (3, 2), "64": (2, 4), "128": (1, 8)}
DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


# ---- operands in shared memory


class Matrix:
    """A matrix of bits [rows][k] (rows of A, columns of B) laid out in shared memory for wgmma."""

    def __init__(self, bits, type_, swizzle="128", mn=False, start=SHARED_BASE, leading=None, stride=None):
        self.bits, self.size, self.mn, self.start = bits, size_of(type_), mn, start
        self.layout, self.pieces = MODES[swizzle]
        rows, depth = bits.shape
        each = 16 // self.size
        if mn and self.pieces > 1:  # 8 k of a span of rows, then the next 8 k, then the next span
            self.stride = stride or 128 * self.pieces
            self.leading = leading or self.stride * -(-depth // 8)
        elif mn:
            self.stride = stride or 128 * (depth // 8)
            self.leading = leading or 128
        else:
            self.stride = stride or (128 * self.pieces if self.pieces > 1 else 128 * (depth // each))
            self.leading = leading or 128
        self.places = {(r, k): self.address(r, k) for r in range(rows) for k in range(depth)}
        self.end = max(self.places.values()) + self.size

    def address(self, r, k):
        each, pieces = 16 // self.size, self.pieces
        if not self.mn:
            off = r % 8 * 16 * pieces + r // 8 * self.stride
            off += k % each * self.size + k // each * (self.leading if pieces == 1 else 16)
        elif pieces > 1:
            off = r % (each * pieces) * self.size + r // (each * pieces) * self.leading
            off += k % 8 * 16 * pieces + k // 8 * self.stride
        else:
            off = r % each * self.size + r // each * self.stride + k % 8 * 16 + k // 8 * self.leading
        address = self.start + off
        return address ^ (address >> 3 & 16 * (pieces - 1))

    def descriptor(self, start=None):
        start = self.start if start is None else start
        return (start & 0x3FFFF) >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | self.layout << 62

    def write(self, image):
        for place, address in self.places.items():
            start = address - SHARED_BASE
            image[start : start + self.size] = int(self.bits[place]).to_bytes(self.size, "little")


def up(n, to=1024):
    return -(-n // to) * to


# ---- register fragments: thread -> the (row, column) of each element


def d_places(columns):
    def place(i, w, g, t):
        return 16 * w + g + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * t + (i & 1)

    return [[place(i, w, g, t) for i in range(columns // 2)] for w in range(4) for g, t in LANES]


def a_places(bits):
    """Each warp has 16 rows of A as `mma` has it."""
    return [[(16 * w + row, k) for row, k in lane] for w in range(4) for lane in places_of_a(16, 256 // bits, bits)]


# ---- kernels


def fill(size):
    """Copy the image from %rd1 to shared memory by ordinary stores of 128 threads."""
    text = "shl.b32 %r2, %r0, 4;\n cvt.u64.u32 %rd9, %r2;\n add.s64 %rd9, %rd1, %rd9;\n"
    text += "mov.u32 %r3, smem;\n add.u32 %r3, %r3, %r2;\n"
    four = "{%r4, %r5, %r6, %r7}"
    for offset in range(0, size, 2048):
        text += f"ld.global.v4.u32 {four}, [%rd9+{offset}];\n st.shared.v4.u32 [%r3+{offset}], {four};\n"
    return text


READY = "fence.proxy.async.shared::cta;\n bar.sync 0;\n"
FENCE, COMMIT = "wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"


def run(image, compute, registers, given=None, block=128, ready=READY, **options):
    """Fill shared memory, load registers from `given` (name -> [register][thread]), compute, store %d0, %d1, ..."""
    size = up(len(image), 2048)
    data = torch.frombuffer(bytearray(image.ljust(size, b"\0")), dtype=torch.uint8).clone()
    given = given or {}
    rows = [row for name in given for row in given[name]]
    inputs = int32(rows or [[0] * 128])
    out = torch.full((registers, 128), -1, dtype=torch.int32)
    text = f".reg .b32 %d<{registers}>;\n .reg .b32 %e<128>;\n .reg .b32 %a<4>;\n"
    text += (
        "mul.wide.u32 %rd10, %r0, 4;\n add.s64 %rd11, %rd2, %rd10;\n add.s64 %rd12, %rd3, %rd10;\n" + fill(size) + ready
    )
    loaded = [f"%{name}{r}" for name, its in given.items() for r in range(len(its))]
    text += "".join(f"ld.global.b32 {register}, [%rd11+{512 * n}];\n" for n, register in enumerate(loaded))
    text += compute + "".join(f"st.global.b32 [%rd12+{512 * r}], %d{r};\n" for r in range(registers))
    ptx = kernel(text, pointers=3, shared=size)
    result = launch(ptx, grid=1, block=block, args=[data, inputs, out], **options)
    return [[x & 0xFFFFFFFF for x in row] for row in out.tolist()], result


def mma(columns, types, a, b, scale="1", flags="", modifier="", d="d", sparse=""):
    """Return one wgmma.mma_async; a and b are descriptors (numbers), or `a` is None where it lies in registers."""
    of_d, of_a, of_b = types
    registers = columns // 2 if of_d != "f16" else columns // 4
    text = "" if a is None else f"mov.b64 %rd20, {a};\n"
    text += f"mov.b64 %rd21, {b};\n"
    shape = f"m64n{columns}k{DEPTH[of_a] * (2 if sparse else 1)}"
    name = f"wgmma.mma_async{sparse}.sync.aligned.{shape}{modifier}.{of_d}.{of_a}.{of_b}"
    return text + f"{name} {vector(d, registers)}, {vector('a', 4) if a is None else '%rd20'}, %rd21, {scale}{flags};\n"


def flags_of(of_a, trans_a=0, trans_b=0, scale_a=1, scale_b=1, in_registers=False):
    if of_a in ("s8", "u8"):
        return ""
    text = f", {scale_a}, {scale_b}"
    if size_of(of_a) == 2:
        text += f", {trans_b}" if in_registers else f", {trans_a}, {trans_b}"
    return text


def multiply(types, a, b, c=None, *, scale="1", in_registers=False, modifier="", trans=(0, 0), swizzle="128",
             signs=(1, 1), ready=READY, sparse="", given=None):
    """Return D's bits [64][columns] of one wgmma on bits a [64][k], b [columns][k], and the Run.

    given: registers beside those of D and A, name -> [register][thread].
    """
    of_d, of_a, of_b = types
    columns, bits, bits_d = len(b), bits_of(of_a), bits_of(of_d)
    b_matrix = Matrix(b, of_b, swizzle, bool(trans[1]))
    a_matrix = None if in_registers else Matrix(a, of_a, swizzle, bool(trans[0]), start=up(b_matrix.end))
    image = bytearray(up((a_matrix or b_matrix).end) - SHARED_BASE)
    for matrix in (a_matrix, b_matrix):
        if matrix:
            matrix.write(image)
    places = d_places(columns)
    c = torch.zeros(64, columns, dtype=torch.int64) if c is None else c
    given = {"d": packed(c, places, bits_d)} | (given or {})
    given |= {"a": packed(a, a_places(bits), bits)} if in_registers else {}
    flags = flags_of(of_a, *trans, *signs, in_registers)
    descriptors = a_matrix and a_matrix.descriptor(), b_matrix.descriptor()
    text = mma(columns, types, *descriptors, scale, flags, modifier, sparse=sparse)
    out, result = run(bytes(image), FENCE + text + COMMIT + WAIT, len(given["d"]), given, ready=ready)
    return unpacked(out, places, (64, columns), bits_d), result


def exact(types, a, b, c, signs=(1, 1)):
    of_d, of_a, of_b = types
    return signs[0] * signs[1] * (decode(a, of_a) @ decode(b, of_b).T) + decode(c, of_d)


def operands(types, columns, seed=1, most=4):
    g, (of_d, of_a, of_b) = torch.Generator().manual_seed(seed), types
    shapes = ((64, DEPTH[of_a]), (columns, DEPTH[of_a]), (64, columns))
    return [small_integers(s, t, g, m) for s, t, m in zip(shapes, (of_a, of_b, of_d), (most, most, 100))]


# ---- layouts


@pytest.mark.parametrize("swizzle", MODES)
@pytest.mark.parametrize("types", [("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"), ("f32", "e4m3", "e4m3")])
def test_k_major_operands_are_found_in_every_swizzle(swizzle, types):
    a, b, c = operands(types, 32)
    got, result = multiply(types, a, b, c, swizzle=swizzle)
    assert torch.equal(decode(got, "f32"), exact(types, a, b, c))
    assert not result.findings
    assert result.counters["tensor_flops"] == 2 * 64 * 32 * DEPTH[types[1]]
    assert result.counters["shared_bytes_read"] == (64 + 32) * 32  # A and B once, 32 bytes along k


@pytest.mark.parametrize("swizzle", MODES)
@pytest.mark.parametrize("trans", [(0, 1), (1, 0), (1, 1)])
def test_mn_major_operands_are_found_in_every_swizzle(swizzle, trans):
    types = ("f32", "f16", "f16")
    a, b, c = operands(types, 128, seed=2)
    got, result = multiply(types, a, b, c, swizzle=swizzle, trans=trans)
    assert torch.equal(decode(got, "f32"), exact(types, a, b, c))
    assert not result.findings


def only_one(address, descriptor, columns, trans=0):
    """Return (column, k) of B that the 2 bytes at a shared address are."""
    image = bytearray(0x8000)
    image[address - SHARED_BASE : address - SHARED_BASE + 2] = int(encode([1.0], "bf16")).to_bytes(2, "little")
    a = encode(torch.arange(1, 17).double().expand(64, 16).contiguous(), "bf16")
    flags = flags_of("bf16", trans_b=trans, in_registers=True)
    text = mma(columns, ("f32", "bf16", "bf16"), None, descriptor, "0", flags)
    places = d_places(columns)
    out, result = run(bytes(image), FENCE + text + COMMIT + WAIT, columns // 2, {"a": packed(a, a_places(16), 16)})
    assert not result.findings
    got = decode(unpacked(out, places, (64, columns)), "f32")
    assert bool((got == got[0]).all())
    (column,) = got[0].nonzero()
    return int(column), int(got[0, column]) - 1


@pytest.mark.parametrize(
    "address, start, place", [(0x2490, 0x2400, (1, 0)), (0x28BA, 0x2420, (9, 5)), (0x438E, 0x2460, (63, 15))]
)
def test_128_byte_swizzled_k_major_elements_lie_where_the_manual_says(address, start, place):
    assert only_one(address, 0x4000004000010000 | start >> 4, 64) == place


def test_k_major_elements_without_swizzle_lie_where_the_manual_says():
    base = 0x400  # the case's addresses count from 0, which is not the CTA's
    assert only_one(base + 0x196, 128 >> 4 << 16 | 256 >> 4 << 32 | base >> 4, 64) == (9, 11)


@pytest.mark.parametrize("address, place", [(0x840, (0, 1)), (0x1892, (33, 2)), (0x1A50, (40, 9)), (0xBCE, (31, 15))])
def test_64_byte_swizzled_mn_major_elements_lie_where_the_manual_says(address, place):
    assert only_one(address, 2 << 62 | 512 >> 4 << 32 | 4096 >> 4 << 16 | 0x800 >> 4, 64, trans=1) == place


def test_mn_major_elements_without_swizzle_lie_where_the_manual_says():
    base = 0x400
    assert only_one(base + 0x322, 512 >> 4 << 32 | 256 >> 4 << 16 | base >> 4, 64, trans=1) == (9, 10)


def test_the_owners_of_fragments_are_the_manuals():
    assert next((T, row.index((45, 37))) for T, row in enumerate(d_places(64)) if (45, 37) in row) == (86, 19)
    assert next((T, row.index((45, 11))) for T, row in enumerate(a_places(16)) if (45, 11) in row) == (85, 7)


# ---- types and numbers

TYPES = [("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
         ("f32", "e4m3", "e5m2"), ("f16", "e5m2", "e4m3"), ("s32", "s8", "u8"), ("s32", "u8", "s8")]


@pytest.mark.parametrize("types", TYPES, ids=".".join)
@pytest.mark.parametrize("in_registers", [False, True])
def test_whole_numbers_multiply_exactly(types, in_registers):
    a, b, c = operands(types, 24, seed=3)
    got, result = multiply(types, a, b, c, in_registers=in_registers)
    assert torch.equal(decode(got, types[0]), exact(types, a, b, c).to(decode(got, types[0]).dtype))
    assert not result.findings


@pytest.mark.parametrize("columns", [8, 40, 256])
def test_any_number_of_columns_will_do(columns):
    types = ("f32", "bf16", "bf16")
    a, b, c = operands(types, columns, seed=columns)
    got, result = multiply(types, a, b, c)
    assert torch.equal(decode(got, "f32"), exact(types, a, b, c))
    assert not result.findings


@pytest.mark.parametrize("types", [t for t in TYPES if t[0] != "s32"], ids=".".join)
def test_sums_are_cut_as_the_tensor_core_cuts_them(types):
    of_d, of_a, of_b = types
    g = torch.Generator().manual_seed(7)
    a, b = random_bits((64, DEPTH[of_a]), of_a, g), random_bits((8, DEPTH[of_a]), of_b, g)
    c = random_bits((64, 8), of_d, g)
    got, _ = multiply(types, a, b, c)
    for m, row in enumerate(a.tolist()):
        expected = [dot(row, column, int(c[m, n]), (of_a, of_b, of_d), 90, True) for n, column in enumerate(b.tolist())]
        assert got[m].tolist() == expected


def test_small_terms_survive_as_the_published_model_says():
    e = 2.0**-12
    a, b = torch.zeros(64, 16), torch.zeros(8, 16)
    a[0] = torch.tensor([1, *[0] * 6, e, e, e, *[0] * 6])
    b[0] = torch.tensor([1, *[0] * 6, e, e / 2, e / 2, *[0] * 6])
    a[1] = torch.tensor([2.0**12, 1, *[0] * 6, -(2.0**12), *[0] * 7])
    b[1] = torch.tensor([2.0**12, 0.5, *[0] * 6, 2.0**12, *[0] * 7])
    got, _ = multiply(("f32", "f16", "f16"), encode(a, "f16"), encode(b, "f16"))
    assert (int(got[0, 0]), int(got[1, 1])) == (0x3F800001, 0x3F000000)


def test_an_operand_of_tf32_loses_its_low_13_bits():
    a, b = torch.zeros(64, 8), torch.zeros(8, 8)
    a[:, 0], b[:, 0] = 1.0, 1.0
    bits = encode(a, "tf32")
    bits[3, 0] |= 0x1FFF
    got, _ = multiply(("f32", "tf32", "tf32"), bits, encode(b, "tf32"))
    assert decode(got, "f32").unique().tolist() == [1.0]


def test_integers_saturate_if_asked():
    types = ("s32", "s8", "s8")
    a, b, c = operands(types, 8, most=100)
    c[:] = 2**31 - 10
    full, _ = multiply(types, a, b, c, modifier=".satfinite")
    wrapped, _ = multiply(types, a, b, c)
    true = exact(types, a, b, c)
    assert torch.equal(decode(full, "s32"), true.clamp(-(2**31), 2**31 - 1))
    assert torch.equal(wrapped, true & 0xFFFFFFFF)


def test_a_false_scale_d_ignores_the_old_accumulator_even_nans():
    types = ("f32", "bf16", "bf16")
    a, b, _ = operands(types, 8)
    c = torch.full((64, 8), 0x7FC00000)
    got, _ = multiply(types, a, b, c, scale="0")
    assert torch.equal(decode(got, "f32"), exact(types, a, b, torch.zeros_like(c)))


def test_scale_d_may_be_a_predicate():
    types = ("f32", "bf16", "bf16")
    a, b, c = operands(types, 8)
    for value in (0, 1):
        ready = READY + f"mov.pred %p7, {value};\n"
        got, _ = multiply(types, a, b, c, scale="%p7", ready=ready)
        assert torch.equal(decode(got, "f32"), exact(types, a, b, c * value))


@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1)])
def test_operands_may_be_negated(signs):
    types = ("f32", "f16", "f16")
    a, b, c = operands(types, 8)
    got, _ = multiply(types, a, b, c, signs=signs)
    assert torch.equal(decode(got, "f32"), exact(types, a, b, c, signs))


# ---- a chain over k: what is right, and what is wrong with it

CHAIN_TYPES = ("f32", "bf16", "bf16")


@functools.cache
def chain():
    """Return (image, the descriptors of A and B for two instructions along k, A B^T): 64 x 32 times 16 x 32."""
    g = torch.Generator().manual_seed(5)
    a, b = small_integers((64, 32), "bf16", g), small_integers((16, 32), "bf16", g)
    b_matrix = Matrix(b, "bf16", "64")
    a_matrix = Matrix(a, "bf16", "64", start=up(b_matrix.end))
    image = bytearray(up(a_matrix.end) - SHARED_BASE)
    a_matrix.write(image)
    b_matrix.write(image)
    steps = [tuple(m.descriptor(m.start + 32 * n) for m in (a_matrix, b_matrix)) for n in range(2)]
    return bytes(image), steps, decode(a, "bf16") @ decode(b, "bf16").T


def step(n, scale, d="d"):
    return mma(16, CHAIN_TYPES, *chain()[1][n], scale, flags_of("bf16"), d=d)


def run_chain(compute, **options):
    out, result = run(chain()[0], compute, 8, **options)
    return decode(unpacked(out, d_places(16), (64, 16)), "f32"), result


CLEAN = FENCE + step(0, "0") + step(1, "1") + COMMIT + WAIT


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_a_chain_over_k_adds_up_under_every_schedule(seed):
    got, result = run_chain(CLEAN, schedule=seed)
    assert torch.equal(got, chain()[2])
    assert not result.findings


def test_two_chains_may_be_in_flight():
    add = "".join(f"add.f32 %d{r}, %d{r}, %e{r};\n" for r in range(8))
    got, result = run_chain(FIRST + step(1, "0", "e") + COMMIT + WAIT_FOR_ONE + "mov.b32 %r30, %d0;\n" + WAIT + add)
    assert torch.equal(got, chain()[2])
    assert not result.findings


FIRST, SECOND = FENCE + step(0, "0") + COMMIT, step(1, "1") + COMMIT + WAIT
WAIT_FOR_ONE = "wgmma.wait_group.sync.aligned 1;\n"
CHANGE, STORE, READ_E = "add.f32 %d5, %d5, %d5;\n", "st.shared.u32 [%r3], %r0;\n", "mov.b32 %r30, %e3;\n"
ZEROS = "".join(f"mov.b32 %d{r}, 0;\n" for r in range(8))
LATE = FENCE + ZEROS + step(0, "1") + SECOND
MATRIX_A, MATRIX_B = chain()[1][0]
IN_FLIGHT, STRICT = ["register-in-flight"], dict(strict=True)


def one(b=MATRIX_B, a=MATRIX_A, columns=16, scale="0", d="d"):
    """Return a product of these matrices; without `a` it lies in registers."""
    return mma(columns, CHAIN_TYPES, a, b, scale, flags_of("bf16", in_registers=a is None), d=d)


def disagreeing(change):
    """Return a product in which the descriptor of B is changed at the last moment."""
    return FENCE + one().replace("wgmma.mma", f"{change}\n wgmma.mma") + COMMIT + WAIT


CHAINS = {  # what runs, options, what is found, and what the finding says or names
    "no fence.proxy.async": (CLEAN, dict(ready="bar.sync 0;\n"), ["proxy"], dict(place="wgmma", other="st.shared")),
    "fenced by the readers after the barrier": (CLEAN, dict(ready="bar.sync 0;\n fence.proxy.async;\n"), [], {}),
    "no barrier":
        (CLEAN, dict(ready="fence.proxy.async;\n"), {"race-write-read", "uninitialised"}, {}),
    "an accumulator is read before the wait":
        (FENCE + step(0, "0") + step(1, "1") + COMMIT + "mov.b32 %r30, %d3;\n" + WAIT, {}, IN_FLIGHT,
         dict(place="mov.b32 %r30, %d3", other="wgmma.mma_async")),
    "an accumulator is written before the wait": (FIRST + "mov.b32 %d3, 0;\n" + WAIT, {}, IN_FLIGHT, {}),
    "the wait covers too little":
        (FENCE + step(0, "0", "e") + COMMIT + step(1, "0") + COMMIT + WAIT_FOR_ONE, {}, {*IN_FLIGHT}, {}),
    "read and ended without a wait": (FIRST, {}, ["group", *IN_FLIGHT], {}),
    "a wait without a commit": (FENCE + step(0, "0") + WAIT, {}, {*IN_FLIGHT}, {}),
    "no fence before the first": (step(0, "0") + COMMIT + WAIT, {}, IN_FLIGHT, dict(says="wgmma.fence")),
    "registers are used between two":
        (FIRST + WAIT + CHANGE + SECOND, {}, IN_FLIGHT, dict(says="no wgmma.fence has run since")),
    "registers are used between two, and a fence follows": (FIRST + WAIT + CHANGE + FENCE + SECOND, {}, [], {}),
    "registers are set behind the fence": (LATE, STRICT, ["wgmma-fence"], {}),
    "registers are set between fences": (FENCE + ZEROS + FENCE + step(0, "1") + SECOND, STRICT, [], {}),
    # the first product's registers are fenced; the second one's, read before, are not
    "registers that no wgmma has had are read behind the fence":
        (FENCE + step(0, "0") + READ_E + step(1, "0", "e") + COMMIT + WAIT, STRICT, ["wgmma-fence"], {}),
    "registers that no wgmma has had are read before a fence":
        (FENCE + step(0, "0") + READ_E + FENCE + step(1, "0", "e") + COMMIT + WAIT, STRICT, [], {}),
    "another shape on the same accumulator":
        (FENCE + step(0, "0") + one(columns=8, scale="1") + COMMIT + WAIT, {}, IN_FLIGHT, {}),
    "several products read one A":
        (FENCE + one(a=None) + one(a=None, d="e") + COMMIT + WAIT + "mov.b32 %a2, 1;\n", {}, [], {}),
    "a register of A is written before the wait":
        (FENCE + one(a=None) + COMMIT + "mov.b32 %a2, 1;\n" + WAIT, {}, IN_FLIGHT, dict(says="an A register")),
    "an operand is overwritten before the wait":
        (FIRST + "bar.sync 0;\n" + STORE + WAIT, {}, ["race-read-write"], dict(says="a wgmma of warp")),
    "an operand is overwritten after the wait": (FIRST + WAIT + "bar.sync 0;\n" + STORE, {}, [], {}),
    "an operand is overwritten where other warps may still read":
        (FIRST + "bar.sync 0;\n" + WAIT + STORE, {}, ["race-read-write"], {}),
    "three warps": (CLEAN, dict(block=96), {"group"}, dict(says="four warps")),
    "a warp leaves it out":
        ("setp.ge.u32 %p1, %r0, 96;\n @%p1 bra OUT;\n" + CLEAN + "OUT:\n", {}, ["group"], dict(says="same wgmmas")),
    "warps disagree on a matrix":
        (disagreeing("setp.ge.u32 %p1, %r0, 96;\n @%p1 add.s64 %rd21, %rd21, 2;"), {}, ["group"], {}),
    "half a warp": ("setp.lt.u32 %p1, %r0, 112;\n @%p1 wgmma.fence.sync.aligned;\n", {}, {"diverged"}, {}),
    "lanes disagree on a descriptor":
        (disagreeing("cvt.u64.u32 %rd13, %r0;\n add.s64 %rd21, %rd21, %rd13;"), {}, {"descriptor"}, {}),
    "a base offset":
        (FENCE + one(MATRIX_B + (1 << 49)) + COMMIT + WAIT, {}, {"descriptor"}, dict(says="base offset")),
    "a matrix starts inside the pattern":
        (FENCE + one(MATRIX_B + 8) + COMMIT + WAIT, {}, {"descriptor"}, dict(says="repeats every 512 bytes")),
    "a matrix beyond shared memory":
        (FENCE + one(Matrix(torch.zeros(16, 16, dtype=torch.int64), "bf16", "64", start=0x30000).descriptor()) + COMMIT
         + WAIT, {}, {"out-of-bounds"}, {}),
}


@pytest.mark.parametrize(("compute", "options", "found", "named"), CHAINS.values(), ids=CHAINS)
def test_what_a_chain_does_wrong_is_found(compute, options, found, named):
    given = {"a": [[0] * 128] * 4} if "%a2" in compute else None
    reports(run_chain(compute, given=given, **options)[1], found, **named)


def test_the_setting_of_registers_may_slip_behind_the_fence():
    """CuTe DSL's kernels have their zeros there: the compiler moves them.  The manual forbids it."""
    got, result = run_chain(LATE)
    assert torch.equal(got, chain()[2])
    assert not result.findings and {note.kind for note in result.notes} == {"wgmma-fence"}


# ---- what is refused


FOUR = "{%f0,%f1,%f2,%f3}"


@pytest.mark.parametrize("instruction, says", [
    (f"wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {FOUR}, %rd1, %rd1, 1, 1, 1, 0, 0;", "m64nNk16"),
    ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0,%f1}, %rd1, %rd1, 1, 1, 1, 0, 0;", "4"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {FOUR}, %rd1, %rd1, 1, 2, 1, 0, 0;", "1, -1"),
    (f"wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {FOUR}, %rd1, %rd1, 1, 1, 1, 0, 0;", "scale-d"),
    ("wgmma.mma_async.sync.aligned.m64n8k16.f16.bf16.bf16 {%f0,%f1}, %rd1, %rd1, 1, 1, 1, 0, 0;", "f32"),
    ("wgmma.wait_group.sync.aligned 9;", "0, 1"),
    ("wgmma.wait.sync.aligned;", "wait_group"),
])
def test_a_form_that_is_not_there_is_refused(instruction, says):
    with pytest.raises(PtxError) as error:
        launch(kernel(f"    {instruction}\n"), grid=1, block=128, args=[torch.zeros(32)])
    assert says in str(error.value) and instruction.rstrip(";") in str(error.value)


@pytest.mark.parametrize("target", ["sm_80", "sm_100a"])
def test_other_architectures_have_no_wgmma(target):
    with pytest.raises(PtxError, match=r"tcgen05\.mma replaces it"):
        launch(kernel("    wgmma.fence.sync.aligned;\n", target=target), grid=1, block=128, args=[torch.zeros(32)])
