"""st.bulk, multimem on one device, and ldmatrix of packed elements."""

import pytest
import torch
from assembly import int32, kernel, kinds, reports, vector

from ptxkit.launches import launch
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

FILL = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %r0, 3;
    add.u32 %r2, %r1, %r2;
    mov.b64 %rd9, -1;
    st.shared.u64 [%r2], %rd9;
    bar.sync 0;
"""
COPY_OUT = """
    bar.sync 0;
    ld.shared.u64 %rd9, [%r2];
    mul.wide.u32 %rd8, %r0, 8;
    add.s64 %rd8, %rd1, %rd8;
    st.global.u64 [%rd8], %rd9;
"""


def bulk(store, sync=COPY_OUT):
    out = torch.zeros(64, dtype=torch.int64)
    generic = "cvt.u64.u32 %rd7, %r1;\n cvta.shared.u64 %rd7, %rd7;"
    body = f"{FILL}\n setp.eq.u32 %p1, %r0, 0;\n {generic}\n {store}\n {sync}"
    run = launch(kernel(body, target="sm_100a"), grid=1, block=64, args=[out])
    return out.tolist(), run


@pytest.mark.parametrize("store", ["st.bulk.weak.shared::cta [%r1+64], 256, 0;", "st.bulk [%rd7+64], 256, 0;"])
def test_st_bulk_clears_its_bytes(store):
    out, run = bulk(f"@%p1 {store}")
    assert out == [-1] * 8 + [0] * 32 + [-1] * 24 and not run.findings


def test_st_bulk_that_nothing_orders_is_a_race():
    _, run = bulk("@%p1 st.bulk.weak.shared::cta [%r1+64], 448, 0;", COPY_OUT.replace("bar.sync 0;", ""))
    reports(run, {"race-write-read", "race-read-write"})


def test_st_bulk_of_what_it_cannot_be_is_found_or_refused():
    assert "takes a multiple of 8" in bulk("@%p1 st.bulk.weak.shared::cta [%r1], 12, 0;")[1].findings[0].says
    assert "out-of-bounds" in kinds(bulk("@%p1 st.bulk.weak.shared::cta [%r1], 8192, 0;")[1])
    with pytest.raises(PtxError, match=r"st\.bulk of 0"):
        bulk("st.bulk.weak.shared::cta [%r1], 8, 1;")


def multimem(body, out):
    where = "mul.wide.u32 %rd8, %r0, 16;\n add.s64 %rd8, %rd1, %rd8;\n"
    run = launch(kernel(where + body), grid=1, block=32, args=[out])
    assert not run.findings
    return out


def test_multimem_on_one_device_is_that_devices_memory():
    body = """
    multimem.ld_reduce.relaxed.gpu.global.add.v4.f32 {%f1, %f2, %f3, %f4}, [%rd8];
    add.f32 %f4, %f4, %f4;
    multimem.st.relaxed.gpu.global.v4.f32 [%rd8], {%f4, %f3, %f2, %f1};
    multimem.red.relaxed.gpu.global.add.f32 [%rd8], %f2;
    """
    x = torch.randn(32, 4)
    wanted = torch.stack([2 * x[:, 3] + x[:, 1], x[:, 2], x[:, 1], x[:, 0]], 1)
    assert torch.equal(multimem(body, x), wanted)


def test_multimem_of_narrow_types_moves_their_bits():
    body = """
    multimem.ld_reduce.weak.global.max.v4.e4m3x4 {%r1, %r2, %r3, %r4}, [%rd8];
    multimem.st.weak.global.v4.e4m3x4 [%rd8], {%r4, %r3, %r2, %r1};
    """
    x = torch.randint(-(2**31), 2**31 - 1, (32, 4), dtype=torch.int32)
    assert torch.equal(multimem(body, x.clone()), x.flip(1))


def test_multimem_needs_hopper():
    with pytest.raises(PtxError, match="multimem does not exist on sm_80"):
        launch(kernel("multimem.st.weak.u32 [%rd1], %r1;", target="sm_80"), grid=1, block=32, args=[torch.zeros(1)])


@pytest.mark.parametrize("bits, type_", [(4, "b8x16.b4x16_p64"), (6, "b8x16.b6x16_p32")])
@pytest.mark.parametrize("shape, count", [("m8n16", 1), ("m8n16", 2), ("m8n16", 4), ("m16n16", 1), ("m16n16", 2)])
def test_ldmatrix_spreads_packed_elements_to_bytes(bits, type_, shape, count):
    """Only the packed elements of each row of 16 bytes are read: the rest was never written."""
    wide = shape == "m16n16"
    rows, registers = count * (16 if wide else 8), count * (2 if wide else 1)
    codes = torch.randint(0, 1 << bits, (32, 16), generator=torch.Generator().manual_seed(bits))
    words = [sum(int(x) << bits * n for n, x in enumerate(row)) for row in codes]
    source = int32([[w >> 32 * n & 0xFFFFFFFF for n in range(3)] for w in words])
    out = torch.zeros(registers, 32, dtype=torch.int32)
    body = f"""
    mov.u32 %r1, smem;
    shl.b32 %r2, %r0, 4;
    add.u32 %r2, %r1, %r2;
    mul.wide.u32 %rd8, %r0, 12;
    add.s64 %rd8, %rd1, %rd8;
    ld.global.u32 %r3, [%rd8]; st.shared.u32 [%r2], %r3;
    ld.global.u32 %r3, [%rd8+4]; st.shared.u32 [%r2+4], %r3;
    {"ld.global.u32 %r3, [%rd8+8]; st.shared.u32 [%r2+8], %r3;" if bits == 6 else ""}
    bar.warp.sync -1;
    ldmatrix.sync.aligned.{shape}.x{count}{".trans" if wide else ""}.shared.{type_} {vector("r", registers, 20)}, [%r2];
    mul.wide.u32 %rd8, %r0, 4;
    add.s64 %rd8, %rd2, %rd8;
    """ + "".join(f"st.global.u32 [%rd8+{128 * n}], %r{20 + n};\n" for n in range(registers))
    run = launch(kernel(body, pointers=2, target="sm_120a"), grid=1, block=32, args=[source, out])
    assert not run.findings
    for r in range(registers):
        for lane in range(32):
            g, t = lane >> 2, lane & 3
            if wide:  # four rows of a column
                cells = [(16 * (r // 2) + 4 * t + b, g + 8 * (r % 2)) for b in range(4)]
            else:
                cells = [(8 * r + g, 4 * t + b) for b in range(4)]
            assert int(out[r, lane]) & 0xFFFFFFFF == sum(int(codes[p]) << 8 * b for b, p in enumerate(cells))
    assert rows <= 32
