"""Programmatic dependent launches: griddepcontrol.wait alone orders them after a kernel that may still run."""

import pytest
import torch
from assembly import SEEDS, elements, kernel, kinds, reports

from ptxkit.launches import launch
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

TRIGGER, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
WRITES, READS = "st.global.u32 [%rd10], %r0;", "ld.global.u32 %r2, [%rd10];"


def run(body, *tensors, behind=None, threads=32, **options):
    text = kernel(elements(2) + body, pointers=2)
    return launch(text, grid=1, block=threads, args=list(tensors), behind=behind, **options)


def two(ahead, after, **options):
    """Return what the second of two kernels is told, which begins when the first one allows it."""
    x, y = torch.full((64,), 7, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    first = run(ahead, x, y, **options)
    assert not first.findings
    return run(after, x, y, behind=first, **options), x, y


COPIES = READS + "st.global.u32 [%rd11], %r2;"


@pytest.mark.parametrize("seed", [0, *SEEDS])
@pytest.mark.parametrize(("after", "found"), [
    (WAIT + COPIES, []), (COPIES, ["race-grids"]), (COPIES + WAIT, ["race-grids"]), (TRIGGER + COPIES, ["race-grids"]),
])
@pytest.mark.parametrize("ahead", [TRIGGER + WRITES, WRITES + TRIGGER])
def test_what_the_kernel_ahead_writes_is_read_behind_a_wait(ahead, after, found, seed):
    result, _, y = two(ahead, after, schedule=seed)
    assert kinds(result) == found
    assert y[:32].tolist() == list(range(32))                                  # the numbers of one after the other


@pytest.mark.parametrize(("after", "found"), [(WAIT + WRITES, []), (WRITES, ["race-grids"]), (READS, [])])
def test_what_the_kernel_ahead_reads_is_written_behind_a_wait(after, found):
    result, _, _ = two(TRIGGER + READS, after)
    assert kinds(result) == found
    for finding in result.findings:
        assert "may still read" in finding.says and "griddepcontrol.wait is missing" in finding.says


def test_a_kernel_that_triggers_nothing_is_over_when_the_next_one_begins():
    assert not two(WRITES, COPIES)[0].findings


def test_bytes_that_the_kernel_ahead_leaves_alone_are_free():
    """It writes 32 words; the other 32 are the second kernel's."""
    result, x, _ = two(TRIGGER + WRITES, "add.s64 %rd10, %rd10, 128;" + READS + WRITES)
    assert not result.findings and x.tolist() == [*range(32), *range(32)]


@pytest.mark.parametrize(("between", "found"), [("bar.sync 0;", []), ("", ["race-grids"])])
def test_others_learn_of_the_wait_as_of_anything(between, found):
    only_warp_0 = f"setp.lt.u32 %p1, %r0, 32; @%p1 {WAIT}"
    for seed in (0, *SEEDS):
        reports(two(TRIGGER + WRITES, only_warp_0 + between + COPIES, threads=64, schedule=seed)[0], found)


@pytest.mark.parametrize(("second", "found"), [
    (TRIGGER + WAIT, ["race-grids"]), (TRIGGER, ["race-grids"]), (WAIT + TRIGGER, []),
])
def test_the_one_before_may_still_run_unless_the_kernel_ahead_has_waited_first(second, found):
    x, y = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    first = run(TRIGGER + WRITES, x, y)
    ahead = run(second, x, y, behind=first)
    assert kinds(run(COPIES, x, y, behind=ahead)) == found
    assert not run(WAIT + COPIES, x, y, behind=ahead).findings


def test_views_of_the_same_memory_are_one():
    whole = torch.zeros(96, dtype=torch.int32)
    first = run(TRIGGER + WRITES, whole[40:72], whole[:8])
    part = run(COPIES, whole[64:], whole[:32], behind=first)
    assert kinds(part) == ["race-grids"] and part.findings[0].address == whole[64:].data_ptr()
    assert not run(COPIES, whole[72:], whole[:8], behind=first, threads=8).findings


def test_an_action_that_is_none_is_refused():
    with pytest.raises(PtxError, match="griddepcontrol"):
        run("griddepcontrol.go;", torch.zeros(1), torch.zeros(1))
