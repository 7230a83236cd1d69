"""Global memory that a kernel reads before anything has written it."""

import functools

import pytest
import torch
from small_kernels import COPY, built

from ptxkit import SimulationError, capture
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

# the second of two numbers is used by nobody
FIRST_OF_TWO = built("and.b32 %r2, %r0, 1; setp.ne.u32 %p1, %r2, 0; @%p1 ret;"
                     "ld.global.v2.u32 {%r1, %r2}, [%rd10]; st.global.u32 [%rd11], %r1;")
ADD = built("mov.u32 %r1, 1; atom.global.add.u32 %r2, [%rd11], %r1;")
THROUGH_SHARED = built(
    ".shared .align 4 .b8 room[128]; mov.u32 %r1, room; shl.b32 %r2, %r0, 2; add.u32 %r1, %r1, %r2;"
    "cp.async.ca.shared.global [%r1], [%rd10], 4; cp.async.wait_all; ld.shared.u32 %r2, [%r1];"
    "st.global.u32 [%rd11], %r2;"
)


# a line of 32 numbers is written, read and discarded; then the same, and read again
DISCARDED = ("st.global.u32 [%rd10], %r0; bar.sync 0; ld.global.u32 %r1, [%rd10]; bar.sync 0; setp.ne.u32 %p1, %r0, 0;"
             "@%p1 bra done; discard.global.L2 [%rd10], 128; done: bar.sync 0;")
WRITE_AND_DISCARD = built(DISCARDED + "st.global.u32 [%rd11], %r1;")
READ_AFTER = built(DISCARDED + "ld.global.u32 %r1, [%rd10]; st.global.u32 [%rd11], %r1;")
BY_ANOTHER_WARP = DISCARDED.replace("%r0, 0;", "%r0, 32;").replace("[%rd10], 128", "[%rd1], 128")
DISCARD_IN_TIME, DISCARD_AT_ONCE = (built(text + "st.global.u32 [%rd11], %r1;") for text in (
    BY_ANOTHER_WARP, BY_ANOTHER_WARP.replace("bar.sync 0; setp", "setp")))


def run(kernel, *tensors, **options):
    with capture(arch="sm_90a", **options) as session:
        arguments = [make() for make in tensors]
        kernel.launch(1, *arguments, block=32)
    return session, arguments


def empty():
    return torch.empty(32, dtype=torch.int32, device="cuda")


def zeros():
    return torch.zeros(32, dtype=torch.int32, device="cuda")


def test_a_kernel_that_reads_what_nobody_wrote_is_found_with_the_line_that_allocated_it():
    session, _ = run(COPY, empty, empty)
    (found,) = session.findings
    assert found.kind == "uninitialised" and found.count == 32 and not session.notes
    assert "reads argument 0[0] (int32 [32]), which nothing has written since it was allocated at" in found.says
    assert f"{__file__}:{empty.__code__.co_firstlineno + 1}" in found.says and "ld.global.u32" in found.place.ptx


@pytest.mark.parametrize("kernel", [ADD, THROUGH_SHARED], ids=["an atomic", "a copy into shared memory"])
def test_every_way_to_read_is_looked_at(kernel):
    session, _ = run(kernel, empty, empty)
    assert [found.kind for found in session.findings] == ["uninitialised"]
    assert not run(kernel, zeros, zeros)[0].findings


def test_a_row_of_an_allocation_that_nobody_wrote_is_found():
    def rows():
        x = torch.ones(4, 8, dtype=torch.int32, device="cuda").new_empty(4, 8)
        for i in (0, 1, 3):
            x[i] = i
        return x

    (found,) = run(COPY, rows, empty)[0].findings
    assert found.kind == "uninitialised" and found.count == 8 and "[2, 0] (int32 [4, 8]" in found.says


def columns_of_a_matrix():
    x = torch.empty(8, 4, dtype=torch.int32, device="cuda")
    x[:, ::2] = 1
    x[:, 1::2].fill_(2)
    return x


def results_of_torch():
    return torch.arange(32, dtype=torch.int32, device="cuda").flip(0) * 2


def what_a_kernel_wrote():
    x = empty()
    COPY.launch(1, zeros(), x, block=32)
    return x


def what_the_host_wrote():
    x = empty()
    x.numpy()[:] = 3
    return x


def what_torch_gave_as_out():
    x = empty()
    torch.add(zeros(), 1, out=x)
    return x


def what_a_copy_wrote():
    driver = pytest.importorskip("cuda.bindings.driver")
    x = empty()
    driver.cuMemcpyDtoD(x.data_ptr(), zeros().data_ptr(), 64)
    driver.cuMemsetD32(x.data_ptr() + 64, 5, 16)
    return x


def what_grew():
    x = torch.empty(1, dtype=torch.int32, device="cuda")
    torch.arange(32, dtype=torch.int32, out=x)
    return x


@pytest.mark.parametrize("make", [
    columns_of_a_matrix, results_of_torch, what_a_kernel_wrote, what_the_host_wrote, what_torch_gave_as_out,
    what_a_copy_wrote, what_grew,
], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:The number of elements in the out tensor")
def test_what_was_written_in_any_way_may_be_read(make):
    session, (x, out) = run(COPY, make, empty)
    assert not session.findings and not session.notes
    assert torch.equal(out, x.flatten())


def every_other():
    x = empty()
    x[::2] = torch.arange(16, dtype=torch.int32, device="cuda")
    return x


@pytest.mark.parametrize("strict", [False, True])
def test_a_read_on_which_no_result_depends_is_a_note_and_changes_nothing(strict):
    session, (x, out) = run(FIRST_OF_TWO, every_other, zeros, strict=strict)
    (note,) = session.notes
    assert not session.findings and note.kind == "uninitialised"
    assert note.says.endswith("no result of this launch depends on it")
    assert torch.equal(out[::2], x[::2]) and not out[1::2].any() and (x[1::2] == -1).all()


def test_one_launch_may_use_one_memory_and_not_another():
    two = built("ld.global.u32 %r1, [%rd10]; ld.global.u32 %r2, [%rd11]; and.b32 %r2, %r2, 0; or.b32 %r1, %r1, %r2;"
                "st.global.u32 [%rd11], %r1;")
    session, _ = run(two, empty, empty)
    assert [found.memory.tensor.name for found in session.findings] == ["argument 0"]
    assert [note.memory.tensor.name for note in session.notes] == ["argument 1"]


def test_a_capture_that_raises_raises_for_reads_that_matter_alone():
    run(FIRST_OF_TWO, every_other, zeros, raises=True)
    with pytest.raises(SimulationError, match="uninitialised"):
        run(COPY, empty, empty, raises=True)


def test_memory_from_before_the_capture_has_been_written():
    x = torch.empty(32, dtype=torch.int32)
    assert not run(COPY, lambda: x, empty)[0].findings


def test_what_was_discarded_may_be_read_before_and_not_after():
    session, (x, y) = run(WRITE_AND_DISCARD, empty, empty)
    assert not session.findings and y.tolist() == [*range(32)] and x.tolist() == [-1] * 32
    (found,) = run(READ_AFTER, empty, empty)[0].findings
    assert found.kind == "discarded" and found.count == 32 and "reads argument 0[0] (int32 [32])" in found.says


def test_a_line_that_another_warp_may_still_read_must_not_be_discarded():
    for kernel, kinds in ((DISCARD_IN_TIME, set()), (DISCARD_AT_ONCE, {"race-write-read", "discarded"})):
        with capture(arch="sm_90a") as session:
            x, y = (torch.empty(64, dtype=torch.int32, device="cuda") for _ in range(2))
            kernel.launch(1, x, y, block=64)
        assert {found.kind for found in session.findings} == kinds


def test_a_discard_of_other_sizes_or_of_another_memory_is_refused_or_found():
    with pytest.raises(PtxError, match=r"discard\{\.global\}\.L2 of 128"):
        run(built("discard.global.L2 [%rd10], 64;"), empty, empty)
    shared = built(".shared .align 128 .b8 room[128]; mov.u32 %r1, room; cvt.u64.u32 %rd12, %r1;"
                   "cvta.shared.u64 %rd12, %rd12; discard.L2 [%rd12], 128;")
    assert {found.kind for found in run(shared, empty, empty)[0].findings} == {"out-of-bounds"}
    lines = functools.partial(torch.zeros, 3, 32, dtype=torch.int32, device="cuda")
    session, _ = run(built("discard.global.L2 [%rd1+4], 128;"), lines, empty)
    assert {found.kind for found in session.findings} == {"misaligned"}
