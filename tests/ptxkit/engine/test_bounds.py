"""Addresses that no space has: each is a finding, also where address + size would wrap around; the process goes on."""

import pytest
import torch
from assembly import kernel, kinds

from ptxkit.launches import launch

pytestmark = pytest.mark.simulated

LAST = "mov.u64 %rd2, -4;"  # four bytes from here end where the address space does
SHARED_LAST = "mov.u32 %r2, -4;"
LOCAL = ".local .align 16 .b8 v[64];"


@pytest.mark.parametrize("body, access", [
    (LAST, "ld.global.u32 %r1, [%rd2];"),
    (LAST, "st.global.u32 [%rd2], %r1;"),
    (LAST, "atom.global.add.u32 %r1, [%rd2], 1;"),
    ("mov.u64 %rd2, 0;", "ld.global.u32 %r1, [%rd2-4];"),
    ("mov.u64 %rd2, 0;", "st.global.v4.u32 [%rd2-16], {%r1, %r1, %r1, %r1};"),
    ("mov.u64 %rd2, -16;", "cp.async.cg.shared.global [smem], [%rd2], 16;"),
    ("mov.u64 %rd2, -16;", "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [smem], 16;"),
    (LOCAL + LAST, "ld.local.u32 %r1, [%rd2];"),
    (LOCAL + LAST, "st.local.u32 [%rd2], %r1;"),
    (LOCAL + "mov.u64 %rd2, 0x03fffffffffffffc;", "st.u32 [%rd2], %r1;"),
    (SHARED_LAST, "ld.shared.u32 %r1, [%r2];"),
    (SHARED_LAST, "st.shared.u32 [%r2], %r1;"),
    ("", "ld.param.u32 %r1, [p1-4];"),
    ("", "ld.param.v2.u64 {%rd3, %rd4}, [p1-16];"),
    ("mov.u64 %rd2, 0x04fffffffffffffc;", "ld.u32 %r1, [%rd2];"),
])
def test_an_access_whose_end_wraps_around_is_out_of_bounds(body, access):
    out = torch.zeros(64, dtype=torch.int64)
    run = launch(kernel(f"{body} {access} st.global.u32 [%rd1], 7;"), grid=1, block=32, args=[out])
    assert kinds(run) == ["out-of-bounds"]
    assert run.findings[0].place.ptx == access
    assert out[0] == 7                                                         # and the kernel went on
