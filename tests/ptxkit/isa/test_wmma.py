"""wmma: every shape and type, both layouts, strides, and what is refused."""

import itertools

import pytest
import torch
from assembly import kernel, refused, reports, vector
from fragments import shape_of
from matrices import TORCH

from ptxkit.launches import launch

pytestmark = pytest.mark.simulated

FLOATS = ("m16n16k16", "m8n32k16", "m32n8k16")
REGISTERS = {  # the manual's fragments: (type, shape) or type -> registers of A and B
    "f16": (8, 8), ("bf16", "m16n16k16"): (4, 4), ("bf16", "m8n32k16"): (2, 8), ("bf16", "m32n8k16"): (8, 2),
    ("s8", "m16n16k16"): (2, 2), ("s8", "m8n32k16"): (1, 4), ("s8", "m32n8k16"): (4, 1), "tf32": (4, 4), "f64": (1, 1),
    "s4": (1, 1), "b1": (1, 1),
}


def accumulator_registers(shape, type_):
    m, n, _ = shape_of(shape)
    return m * n // 32 // (2 if type_ == "f16" else 1)


def source(shape, type_, d, c, layouts, strides, middle="", space="", modifier=""):
    """d = a b + c of one warp; the kernel's tensors are a, b, c, d."""
    of_a, of_b = REGISTERS.get((type_.replace("u8", "s8"), shape)) or REGISTERS[type_.replace("u4", "s4")]
    kind = {"f64": "f64", "f32": "f32"}
    files = {"a": (of_a, type_), "b": (of_b, type_), "c": (accumulator_registers(shape, c), c),
             "d": (accumulator_registers(shape, d), d)}
    lines = [f".reg .{kind.get(t, 'b32')} %{n}<{count}>;" for n, (count, t) in files.items()]
    stride = {n: f", {s}" if s else "" for n, s in zip("abcd", strides)}
    for n, (name, layout) in enumerate(zip("abc", layouts), 1):
        load = f"wmma.load.{name}.sync.aligned.{layout}.{shape}{space}.{files[name][1]}"
        lines.append(f"{load} {vector(name, files[name][0])}, [%rd{n}]{stride[name]};")
    types = f"{d}.{c}" if type_ == "f16" else f"{d}.{type_}.{type_}.{c}"
    lines.append(middle)
    opcode = f"wmma.mma{modifier}.sync.aligned.{layouts[0]}.{layouts[1]}.{shape}.{types}"
    lines.append(f"{opcode} {', '.join(vector(n, files[n][0]) for n in 'dabc')};")
    store = f"wmma.store.d.sync.aligned.{layouts[3]}.{shape}{space}.{d}"
    lines.append(f"{store} [%rd4], {vector('d', files['d'][0])}{stride['d']};")
    return kernel("\n".join(lines), pointers=4, target="sm_90a", shared=0)


def stored(matrix, layout, stride, dtype):
    """Return a matrix in memory: (the whole tensor, a view of the matrix)."""
    rows, columns = matrix.shape
    lead, other = (rows, columns) if layout == "row" else (columns, rows)
    whole = torch.zeros(lead, stride or other).to(dtype)
    view = whole[:, :other] if layout == "row" else whole[:, :other].T
    view.copy_(matrix)
    return whole, view


def multiply(shape, type_, d, c, layouts=("row", "col", "row", "row"), strides=(0, 0, 0, 0), **options):
    m, n, k = shape_of(shape)
    g = torch.Generator().manual_seed(7)
    low, high = (0, 8) if type_ == "u8" else (-8, 8)
    a, b = (torch.randint(low, high, s, generator=g).double() for s in ((m, k), (k, n)))
    start = torch.randint(-64, 64, (m, n), generator=g).double()
    rows = zip((a, b, start), layouts, strides, (type_, type_, c))
    given = [stored(x, layout, stride, TORCH[t]) for x, layout, stride, t in rows]
    out, view = stored(torch.zeros(m, n), layouts[3], strides[3], TORCH[d])
    tensors = [whole for whole, _ in given] + [out]
    run = launch(source(shape, type_, d, c, layouts, strides, **options), grid=1, block=32, args=tensors)
    return view.double(), a @ b + start, run


CASES = [
    *(("f16", s, d, c) for s in FLOATS for d in ("f16", "f32") for c in ("f16", "f32")),
    *((t, s, d, d) for t, d in (("bf16", "f32"), ("s8", "s32"), ("u8", "s32")) for s in FLOATS),
    ("tf32", "m16n16k8", "f32", "f32"), ("f64", "m8n8k4", "f64", "f64"),
]


@pytest.mark.parametrize("type_, shape, d, c", CASES)
def test_products_of_whole_numbers_are_exact(type_, shape, d, c):
    got, exact, run = multiply(shape, type_, d, c)
    assert torch.equal(got, exact) and not run.findings
    m, n, k = shape_of(shape)
    assert run.counters["tensor_flops"] == 2 * m * n * k


@pytest.mark.parametrize("layouts", list(itertools.product(("row", "col"), repeat=4)), ids="-".join)
def test_matrices_may_lie_by_rows_or_columns_with_any_stride(layouts):
    got, exact, run = multiply("m8n32k16", "f16", "f32", "f32", layouts, (64, 48, 40, 56))
    assert torch.equal(got, exact) and not run.findings


def test_lanes_may_scale_their_elements_of_the_accumulator():
    middle = "".join(f"mul.f32 %c{n}, %c{n}, 0f40000000;\n" for n in range(8))
    got, exact, _ = multiply("m16n16k16", "bf16", "f32", "f32", middle=middle)
    plain, without, _ = multiply("m16n16k16", "bf16", "f32", "f32")
    assert torch.equal(plain, without) and not torch.equal(got, exact)
    half, _, _ = multiply("m16n16k16", "bf16", "f32", "f32", middle=middle.replace("40000000", "00000000"))
    assert torch.equal(got - plain, plain - half)  # the start counts twice, and not at all


@pytest.mark.parametrize("type_", ["s4", "u4"])
def test_4_bit_integers_lie_packed(type_):
    g = torch.Generator().manual_seed(8)
    a, b = torch.randint(0, 16, (8, 32), generator=g), torch.randint(0, 16, (32, 8), generator=g)
    start, out = torch.randint(-9, 9, (8, 8), generator=g).int(), torch.zeros(8, 8, dtype=torch.int32)
    packed = [(x[:, ::2] | x[:, 1::2] << 4).to(torch.uint8).contiguous() for x in (a, b.T.contiguous())]
    text = source("m8n8k32", type_, "s32", "s32", ("row", "col", "row", "row"), (0,) * 4)
    assert not launch(text, grid=1, block=32, args=[*packed, start, out]).findings
    a, b = (torch.where(x >= 8, x - 16, x) if type_ == "s4" else x for x in (a, b))
    assert torch.equal(out.long(), a @ b + start)


@pytest.mark.parametrize("operation", ["xor", "and"])
def test_bits_are_combined_and_counted(operation):
    g = torch.Generator().manual_seed(9)
    a, b = torch.randint(0, 2, (8, 128), generator=g), torch.randint(0, 2, (8, 128), generator=g)
    weights = 1 << torch.arange(8)
    packed = [(x.view(8, 16, 8) * weights).sum(-1).to(torch.uint8) for x in (a, b)]
    start, out = torch.zeros(8, 8, dtype=torch.int32), torch.zeros(8, 8, dtype=torch.int32)
    text = source("m8n8k128", "b1", "s32", "s32", ("row", "col", "row", "row"), (0,) * 4, modifier=f".{operation}.popc")
    assert not launch(text, grid=1, block=32, args=[*packed, start, out]).findings
    both = a[:, None] ^ b if operation == "xor" else a[:, None] & b
    assert torch.equal(out.long(), both.sum(-1))


def test_a_load_of_what_another_warp_writes_is_a_race():
    body = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %r0, 3;
    add.u32 %r2, %r1, %r2;
    mov.b64 %rd9, 0;
    st.shared.u64 [%r2], %rd9;
    {sync}
    wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, [%r1];
    """
    for sync, found in (("", {"race-write-read"}), ("bar.sync 0;", [])):
        reports(launch(kernel(body.replace("{sync}", sync)), grid=1, block=64, args=[torch.zeros(1)]), found)


def test_lanes_that_name_different_addresses_are_found():
    body = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %r0, 5;
    add.u32 %r2, %r1, %r2;
    wmma.load.c.sync.aligned.row.m16n16k16.shared.f16 {%r10, %r11, %r12, %r13}, [%r2];
    """
    run = launch(kernel(body), grid=1, block=32, args=[torch.zeros(1)])
    assert "with the same address and stride" in run.findings[0].says


@pytest.mark.parametrize("text, says", [
    ("wmma.load.a.sync.aligned.row.m16n16k8.f16 {%r1, %r2}, [%rd1];", ".{m16n16k8} of tf32"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.bf16 {%r1, %r2}, [%rd1];", "2 registers for A; supported: 4"),
    ("wmma.load.a.sync.aligned.col.m8n8k32.s4 {%r1}, [%rd1];", ".col of s4; supported: .row of A"),
    ("wmma.load.d.sync.aligned.row.m16n16k16.f32 {%r1}, [%rd1];", "wmma.load.d"),
    ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};", "modifiers"),
])
def test_what_does_not_exist_is_refused(text, says):
    assert says in refused(text)
