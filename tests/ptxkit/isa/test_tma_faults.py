"""Faults of tensor copies that are planted, and found."""

import pytest
import torch
import transfers as tr
from assembly import reports

from ptxkit.launches import launch
from ptxkit.tensormap import TensorMap

pytestmark = pytest.mark.simulated


RACES = {"race-write-read", "race-read-write"}


def box():
    x = tr.tensor(64, 64, dtype=torch.bfloat16)
    return x, TensorMap(x, box=(64, 32), swizzle=128)


X, M = box()                                                                   # for loads, which leave it as it is


def run(text, m=M, size=4096, **options):
    return launch(text, grid=1, block=tr.THREADS, args=[m, torch.zeros(size, dtype=torch.uint8)], **options)


def changed(*replacements, size=4096, **options):
    """Return a kernel that loads a box, with some of its text replaced."""
    text = tr.loading(M, (0, 0), size, **options)
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("options", tr.SCHEDULES)
@pytest.mark.parametrize("waiting", ["", tr.wait(parity=1)], ids=["no wait", "the wrong parity"])
def test_reading_before_the_wait_is_a_race_or_poison(waiting, options):
    reports(run(changed((tr.wait(), waiting)), **options), RACES)


def test_without_a_wait_the_late_copy_leaves_the_old_bytes():
    out = torch.zeros(4096, dtype=torch.uint8)
    text = changed((tr.wait(), ""))
    launch(text, grid=1, block=tr.THREADS, args=[M, out])
    assert (out == tr.FILLER).all()
    text = text.replace("st.shared.u32 [%r31], 4008636142;", "")
    reports(launch(text, grid=1, block=tr.THREADS, args=[M, out]), {"uninitialised"})
    assert (out == 0xFF).all()


COPY = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes\n        "
COPY += "[%r20], [%rd20, {0, 0}], [%r21];"
SECOND = f"{COPY}add.u32 %r47, %r20, 4096;\n" + COPY.replace("[%r20]", "[%r47]").replace("{0, 0}", "{0, 32}")
PLACE = ("[%r20], [%rd20", "[%r47], [%rd20")


def at(place):
    """Return replacements by which the box lands so far into shared memory."""
    return PLACE, ("    mov.u64 %rd20, map1;", f"    add.u32 %r47, %r20, {place};\n    mov.u64 %rd20, map1;")


LOADS = {  # the kernel, the kinds of what is found (a list: no others), and what it says
    "64 bytes too many are expected": (changed(count=4096 + 64), {"deadlock"}, "64 bytes are missing"),
    "16 bytes too many are expected": (changed(count=4096 + 16), {"deadlock"}, "16 bytes are missing"),
    "too few are expected, and a reader is let through too early":
        (changed((COPY, SECOND), size=8192, count=4096), {"race-read-write"}, ""),
    "no fence after shared memory was written": (changed(("fence.proxy.async.shared::cta;", "")), ["proxy"], ""),
    "a box outside of shared memory": (changed(*at(32768)), {"out-of-bounds"}, "shared address"),
    "which never completes": (changed(*at(32768)), {"deadlock"}, ""),
    "a box that is not aligned": (changed(*at(64)), {"misaligned"}, "not a multiple of 128"),
    "which never completes either": (changed(*at(64)), {"deadlock"}, ""),
    "a map that is not aligned to 64 bytes":
        (changed(("cvta.param.u64 %rd20, %rd20;", "cvta.param.u64 %rd20, %rd20;\n    add.s64 %rd20, %rd20, 32;")),
         {"misaligned"}, ""),
    "no mbarrier": (changed(("mbarrier.init.shared::cta.b64 [%r21], 1;", "")), {"mbarrier"}, ""),
    "a box ends where its mbarrier lies": (changed(*at(tr.BARRIER - 4096)), [], ""),
    "a box lands on its mbarrier":
        (changed(*at(tr.BARRIER - 4096 + 128), ("smem[32832]", "smem[40960]")), {"mbarrier-overwritten"}, ""),
}


@pytest.mark.parametrize(("text", "found", "says"), LOADS.values(), ids=LOADS)
def test_a_fault_of_a_load_is_found(text, found, says):
    reports(run(text, size=8192), found, says)


@pytest.mark.parametrize("options", tr.SCHEDULES)
def test_a_store_without_the_fence_after_the_generic_writes_is_found(options):
    reports(tr.store(*box(), (0, 0), tr.noise(4096), fence="", **options), ["proxy"])


LAST = tr.by_thread_0("cp.async.bulk.wait_group 0;", "LAST")


@pytest.mark.parametrize("options", tr.SCHEDULES)
@pytest.mark.parametrize(("wait_for", "found"), [("cp.async.bulk.wait_group.read 0;", []), ("", RACES),
                                                 ("cp.async.bulk.wait_group.read 1;", RACES)])
def test_shared_memory_may_be_overwritten_once_it_has_been_read(wait_for, found, options):
    after = "bar.sync 0;\n@!%p1 st.shared.u32 [%r20], 1;\n" + LAST
    reports(tr.store(*box(), (0, 0), tr.noise(4096), wait_for=wait_for, after=after, **options), found)


@pytest.mark.parametrize("options", tr.SCHEDULES)
@pytest.mark.parametrize(("wait_for", "found"), [("cp.async.bulk.wait_group 0;", []), ("", RACES),
                                                 ("cp.async.bulk.wait_group.read 0;", RACES)])
def test_global_memory_may_be_read_once_the_store_is_complete(wait_for, found, options):
    after = "bar.sync 0;\nld.global.u32 %r47, [%rd2];\n" + LAST
    x, m = box()
    text = tr.storing(m, (0, 0), 4096, wait_for=wait_for, after=after)
    text = text.replace(".param .u64 p1)", ".param .u64 p1, .param .u64 p2)")
    text = text.replace("mov.u32 %r0, %tid.x;", "ld.param.u64 %rd2, [p2];\n    mov.u32 %r0, %tid.x;")
    reports(launch(text, grid=1, block=tr.THREADS, args=[m, tr.noise(4096), x], **options), found)


def test_a_cta_may_end_before_its_store_has_read():
    (x, m), source = box(), tr.noise(4096)
    wanted = tr.scattered(x.clone(), m, (0, 0), source)
    assert not tr.store(x, m, (0, 0), source, wait_for="").findings
    assert torch.equal(x.view(torch.int16), wanted.view(torch.int16))


BITS = int.from_bytes(M.encode(), "little")


@pytest.mark.parametrize(("raw", "says"), [
    ((BITS ^ 64 << 440).to_bytes(128, "little"), "longer than the span"),
    ((BITS ^ 1 << 83).to_bytes(128, "little"), "needs sm_100"),
    ((BITS ^ 1 << 68).to_bytes(128, "little"), "rank 1"),
    ((BITS ^ 1 << 75).to_bytes(128, "little"), "interleaved"),
    (b"\xff" * 128, ""), (bytes(range(128)), ""),
], ids=["a long span", "of sm_100", "of rank 1", "interleaved", "ones", "no map"])
def test_a_map_that_does_not_fit_or_is_none_is_refused(raw, says):
    reports(run(changed(), raw, memory=[X]), {"tensor-map"}, says)


def test_a_map_that_reaches_beyond_its_tensor_is_found():
    m = TensorMap(X.data_ptr(), dims=(64, 80), strides=(128,), box=(64, 32), dtype="bfloat16", swizzle=128)
    object.__setattr__(m, "spans", lambda: [X])
    reports(tr.load(X, m, (0, 48))[1], ["out-of-bounds"])


IN, BYTES = "cp.async.bulk.tensor.2d.shared::cta.global", "mbarrier::complete_tx::bytes"


@pytest.mark.parametrize(("text", "says"), [
    (f"{IN}.im2col.{BYTES} [%r20], [%rd1, {{0, 0}}], [%r21], {{%h1}};", ".2d with im2col"),
    (f"{IN}.tile.{BYTES} [%r20], [%rd1, {{0, 0, 0}}], [%r21];", "3 coordinates"),
    (f"{IN}.tile.{BYTES}.cta_group::1 [%r20], [%rd1, {{0, 0}}], [%r21];", "sm_100"),
    (f"cp.async.bulk.tensor.2d.global.shared::cta.tile.{BYTES} [%rd1, {{0, 0}}], [%r20];", "not known here"),
    (f"{IN}.tile.{BYTES}.L2::cache_hint [%r20], [%rd1, {{0, 0}}], [%r21];", "operands"),
    (f"{IN}.tile.{BYTES} [%r20], [p1, {{0, 0}}], [%r21];", "generic address"),
    ("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r20], 5, 7;", "dimension 5"),
    ("tensormap.replace.tile.global_dim.shared::cta.b1024.b64 [%r20], 0, %rd1;", ".b64"),
])
def test_what_is_not_simulated_is_refused_with_the_line(text, says):
    assert says in tr.refusal(text)
