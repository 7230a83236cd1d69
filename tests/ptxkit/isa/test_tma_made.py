"""Tensor maps that a kernel makes or changes, and the copies that use them."""

import re

import numpy as np
import pytest
import torch
import transfers as tr
from assembly import reports

from ptxkit.launches import launch
from ptxkit.tensormap import TensorMap, decode

pytestmark = pytest.mark.simulated


def making(replacements, load, acquire="fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;", target="sm_90a"):
    """Warp 0 writes 128 zeros, replaces fields, publishes the map at %rd2; then a load uses it."""
    zero = "@%p4 st.shared.u32 [%r46], 0;\n    bar.warp.sync -1;"
    return tr.frame(f"""
    setp.lt.u32 %p4, %r0, 32;
    add.u32 %r45, %r20, 16384;
    shl.b32 %r46, %r0, 2;
    add.u32 %r46, %r46, %r45;
    {zero}
    @%p1 bra REPLACED;
    {replacements}
REPLACED:
    bar.warp.sync -1;
    @%p4 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2], [%r45], 128;
    {acquire}
    bar.sync 0;
    """ + load, pointers=3, target=target)


REPLACEMENTS = """
    tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r45], %rd3;
    tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r45], 1;
    tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r45], 0, 32;
    tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r45], 1, 8;
    tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r45], 0, 48;
    tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r45], 1, 20;
    tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r45], 0, 96;
    tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%r45], 0, 1;
    tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%r45], 1, 2;
    tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r45], 10;
    tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r45], 2;
    tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%r45], 1;
    tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%r45], 0;
"""
BROUGHT = tr.make_barrier() + tr.by_thread_0(f"""
    {tr.expect(256)}
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r20], [%rd2, {{32, 3}}], [%r21];
""") + tr.wait()
MADE_LOAD = BROUGHT + tr.store_shared(256)


def room(size=128):
    """Return memory that is aligned as a map must be."""
    raw = torch.zeros(256, dtype=torch.uint8)
    place = -raw.data_ptr() % 64
    return raw[place : place + size]


def map_of(x, **more):
    return TensorMap(x, box=(32, 8), element_strides=(1, 2), swizzle=64, **more)


def run_making(text, size=128, grid=1, **options):
    x, raw = tr.tensor(20, 48, dtype=torch.bfloat16), room(size)
    out = torch.zeros(256, dtype=torch.uint8)
    run = launch(text, grid=grid, block=tr.THREADS, args=[out, raw, x], **options)
    return x, bytes(raw.numpy()), out.numpy(), run


@pytest.mark.simulated_only
@pytest.mark.parametrize("options", tr.SCHEDULES)
def test_a_map_that_the_kernel_makes_is_used_after_its_fence(options):
    x, raw, found, run = run_making(making(REPLACEMENTS, MADE_LOAD), **options)
    assert not run.findings
    m = map_of(x, fill="nan")
    assert decode(raw) == m and raw == m.encode()
    np.testing.assert_array_equal(found, tr.image_of(x, m, (32, 3), 256))


@pytest.mark.simulated_only
@pytest.mark.parametrize("options", tr.SCHEDULES)
def test_a_map_that_one_cta_makes_is_used_by_another_after_a_flag(options):
    """CTA 0 publishes the map with a relaxed store: the release is that of cp_fenceproxy."""
    flag = """
    mov.u32 %r50, %ctaid.x;
    setp.ne.u32 %p6, %r50, 0;
    @%p6 bra USER;
    """
    text = making(REPLACEMENTS, "@!%p1 st.relaxed.gpu.global.u32 [%rd2+128], 1;\nbra END;\nUSER:\n" + """
SPIN:
    ld.relaxed.gpu.global.u32 %r51, [%rd2+128];
    setp.eq.u32 %p7, %r51, 0;
    @%p7 bra SPIN;
    fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
    bar.sync 0;
    """ + MADE_LOAD + "END:\n", acquire="")
    text = text.replace("    setp.lt.u32 %p4, %r0, 32;", flag + "    setp.lt.u32 %p4, %r0, 32;", 1)
    x, _, found, run = run_making(text, 132, 2, **options | {"schedule": options["schedule"] or 11})
    assert not run.findings
    np.testing.assert_array_equal(found, tr.image_of(x, map_of(x, fill="nan"), (32, 3), 256))


@pytest.mark.simulated_only
def test_a_long_stride_keeps_its_high_bits():
    text = making(REPLACEMENTS, "").replace("[%r45], 0, 96;", "[%r45], 0, 0x9876543210;")
    _, raw, _, run = run_making(text)
    assert not run.findings
    assert decode(raw).strides == (0x9876543210,)


@pytest.mark.parametrize(
    ("change", "says"),
    [(("[%r45], 0, 96;", "[%r45], 0, 100;"), "multiple of 16"), (("[%r45], 1, 8;", "[%r45], 1, 257;"), "1 to 256")],
)
def test_a_field_that_cannot_be_is_reported(change, says):
    reports(run_making(making(REPLACEMENTS.replace(*change), ""))[-1], ["tensor-map"], says)


TYPES = ["uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float32_ftz", "float64",
         "bfloat16", "tfloat32", "tfloat32_ftz", "16u4_align8b"]
ATOMS = [128, "128/32", "128/32+8", "128/64"]


def replacing(**fields):
    """REPLACEMENTS with other values of some fields, in a map that is made and not used."""
    text = REPLACEMENTS
    for field, value in fields.items():
        line = f"tensormap.replace.tile.{field}.shared::cta.b1024.b32 [%r45], {value};"
        text = re.sub(rf"tensormap.replace.tile.{field}.*;", line, text) if field in text else text + line
    return making(text, "", target="sm_100a")


@pytest.mark.parametrize(("number", "dtype"), list(enumerate(TYPES)))
def test_a_type_number_of_the_instruction_is_that_type_of_the_map(number, dtype):
    _, raw, _, run = run_making(replacing(elemtype=number, fill_mode=0, swizzle_mode=0))
    assert not run.findings and decode(raw).dtype == dtype


@pytest.mark.parametrize(("number", "swizzle"), list(enumerate(ATOMS)))
def test_an_atomicity_of_the_instruction_is_that_swizzle_of_the_map(number, swizzle):
    _, raw, _, run = run_making(replacing(swizzle_mode=3, swizzle_atomicity=number))
    assert not run.findings and decode(raw).swizzle == swizzle


@pytest.mark.simulated_only
def test_a_map_written_by_plain_stores_and_not_fenced_is_found():
    loads = "\n".join(
        f"    ld.global.u64 %rd24, [%rd1+{8 * n}];\n    st.global.u64 [%rd2+{8 * n}], %rd24;" for n in range(16)
    )
    copy = f"@%p1 bra COPIED;\n{loads}\nCOPIED:\n    bar.sync 0;\n"
    x = tr.tensor(20, 48, dtype=torch.bfloat16)
    given = torch.frombuffer(bytearray(map_of(x).encode()), dtype=torch.uint8)
    for fence, found in (
        ("", ["proxy"]),
        ("fence.proxy.tensormap::generic.release.gpu; fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;", []),
    ):
        text = tr.frame(copy + fence + BROUGHT, pointers=2)
        reports(launch(text, grid=1, block=tr.THREADS, args=[given, room()], memory=[x]), found)
