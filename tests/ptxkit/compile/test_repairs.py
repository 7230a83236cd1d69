"""PTX that some Tritons write wrongly, repaired."""

import re

import pytest

from ptxkit.compile import triton as door
from ptxkit.compile.repairs import REPAIRS, added_in_two_steps, repaired

pytestmark = pytest.mark.compiler

DESCRIPTORS, *_ = REPAIRS
PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry pipelined(.param .u64 out)
{
\t.reg .b64 %rd<4>;
\tld.param.u64 %rd1, [out];
\tcp.async.wait_group \t1;
\tbar.sync \t0;
\tor.b64 \t%rd2, %rd1, -9223371899415822336;
\tadd.s64 \t%rd3, %rd1, -9223371899415822272;
\t// wgmma.mma_async
\tst.global.u64 [%rd1], %rd2;
\tst.global.u64 [%rd1+8], %rd3;
\tcp.async.wait_group \t0;
\tret;
}
"""


@pytest.mark.parametrize("constant", [-9223371899415822272, -1 << 63, -(1 << 57) - 1, -123456789012345678])
def test_two_steps_add_what_one_did(constant):
    text = DESCRIPTORS.pattern.sub(added_in_two_steps, f"add.s64 \t%rd2, %rd1, {constant};")
    (_, x, high), (to, also, low) = re.findall(r"add\.s64 \t(%rd\d), (%rd\d), (-?\d+);", text)
    assert (x, to, also) == ("%rd1", "%rd2", "%rd2") and int(high) + int(low) == constant
    assert int(high) % 2**16 == 0 <= int(low) < 2**16                        # nothing is carried


def test_each_version_of_triton_gets_the_repairs_that_it_needs():
    steps = ("add.s64 \t%rd3, %rd1, -9223371899415822336;\n\tadd.s64 \t%rd3, %rd3, 64;", "fence.proxy.async")
    found = {version: [step in repaired(PTX, version) for step in steps] for version in ("3.6.0", "3.8.0", "3.9.0")}
    assert found == {"3.6.0": [True, True], "3.8.0": [True, False], "3.9.0": [False, False]}


def test_the_fence_stands_between_the_copies_and_the_barrier():
    text = repaired(PTX, "3.7.1")
    assert "cp.async.wait_group \t1;\n\tfence.proxy.async.shared::cta;\n\tbar.sync \t0;" in text
    assert text.count("fence.proxy.async") == 1                              # nobody waits for the last copies


def test_stores_to_shared_memory_are_fenced_with_those_to_tensor_memory():
    ptx = PTX.replace("cp.async.wait_group \t1", "tcgen05.wait::st.sync.aligned")
    assert "tcgen05.wait::st.sync.aligned;\n\tfence.proxy.async.shared::cta;\n\tbar.sync" in repaired(ptx, "3.7.1")
    assert repaired(ptx, "3.8.0").count("fence.proxy.async") == 0


def test_a_kernel_without_the_tensor_cores_that_read_shared_memory_stays_as_it_is():
    ptx = PTX.replace("wgmma.mma_async", "mma.sync")
    assert repaired(ptx, "3.6.0") is ptx


def test_what_was_repaired_is_assembled_again():
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget

    gpu, options = GPUTarget("cuda", 90, 32), {"enable_fp_fusion": True}
    before = {"ptx": PTX, "cubin": b"as it was", "ttir": ""}
    after = door.with_repairs(before, "3.6.0", gpu, options)
    assert after["ptx"] == repaired(PTX, "3.6.0") and after["cubin"][:4] == b"\x7fELF"
    assert door.with_repairs(before, "3.9.0", gpu, options) is before
