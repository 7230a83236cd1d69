"""Faults of tensor copies that are planted, and found."""

import pytest
import torch
from assembly import kinds
from transfers import (
    BARRIER,
    FILLER,
    SCHEDULES,
    THREADS,
    by_thread_0,
    load,
    loading,
    noise,
    refusal,
    scattered,
    store,
    storing,
    tensor,
    wait,
)

from ptxkit.launches import launch
from ptxkit.tensormap import TensorMap

pytestmark = pytest.mark.simulated


def box():
    x = tensor(64, 64, dtype=torch.bfloat16)
    return x, TensorMap(x, box=(64, 32), swizzle=128)


@pytest.mark.parametrize("options", SCHEDULES)
def test_reading_before_the_wait_is_a_race_or_poison(options):
    _x, m = box()
    text = loading(m, (0, 0), 4096).replace(wait(), "")
    run = launch(text, grid=1, block=THREADS, args=[m, torch.zeros(4096, dtype=torch.uint8)], **options)
    assert {"race-write-read", "race-read-write"} & set(kinds(run))


def test_without_a_wait_the_late_copy_leaves_the_old_bytes():
    _x, m = box()
    out = torch.zeros(4096, dtype=torch.uint8)
    text = loading(m, (0, 0), 4096).replace(wait(), "")
    launch(text, grid=1, block=THREADS, args=[m, out])
    assert (out == FILLER).all()
    text = text.replace("st.shared.u32 [%r31], 4008636142;", "")
    run = launch(text, grid=1, block=THREADS, args=[m, out])
    assert "uninitialised" in kinds(run) and (out == 0xFF).all()


@pytest.mark.parametrize("options", SCHEDULES)
def test_the_wrong_parity_is_found(options):
    _x, m = box()
    text = loading(m, (0, 0), 4096).replace(wait(), wait(parity=1))
    run = launch(text, grid=1, block=THREADS, args=[m, torch.zeros(4096, dtype=torch.uint8)], **options)
    assert {"race-write-read", "race-read-write"} & set(kinds(run))


@pytest.mark.parametrize(
    ("count", "missing"), [(4096 + 64, "64 bytes are missing"), (4096 + 16, "16 bytes are missing")]
)
def test_too_many_expected_bytes_are_a_deadlock_that_says_how_many(count, missing):
    x, m = box()
    _, run = load(x, m, (0, 0), count=count)
    assert "deadlock" in kinds(run)
    assert any(missing in f.says for f in run.findings)


def test_too_few_expected_bytes_let_a_reader_through_too_early():
    _x, m = box()
    copy = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    text = loading(m, (0, 0), 8192, count=4096)
    start = text.index(copy)
    first = text[start : text.index(";", start) + 1]
    text = text.replace(
        first, first + "add.u32 %r47, %r20, 4096;\n" + first.replace("[%r20]", "[%r47]").replace("{0, 0}", "{0, 32}")
    )
    run = launch(text, grid=1, block=THREADS, args=[m, torch.zeros(8192, dtype=torch.uint8)])
    assert "race-read-write" in kinds(run)


def test_shared_memory_that_was_written_needs_a_fence_before_a_load_overwrites_it():
    _x, m = box()
    text = loading(m, (0, 0), 4096).replace("fence.proxy.async.shared::cta;", "")
    run = launch(text, grid=1, block=THREADS, args=[m, torch.zeros(4096, dtype=torch.uint8)])
    assert kinds(run) == ["proxy"]


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_store_without_the_fence_after_the_generic_writes_is_found(options):
    x, m = box()
    run = store(x, m, (0, 0), noise(4096), fence="", **options)
    assert kinds(run) == ["proxy"]


@pytest.mark.parametrize("options", SCHEDULES)
@pytest.mark.parametrize(("wait_for", "clean"), [("cp.async.bulk.wait_group.read 0;", True), ("", False),
                                                 ("cp.async.bulk.wait_group.read 1;", False)])
def test_shared_memory_may_be_overwritten_once_it_has_been_read(wait_for, clean, options):
    x, m = box()
    after = "bar.sync 0;\nst.shared.u32 [%r20], 1;\n" + by_thread_0("cp.async.bulk.wait_group 0;", "LAST")
    run = store(
        x, m, (0, 0), noise(4096), wait_for=wait_for, after=after.replace("st.shared", "@!%p1 st.shared"), **options
    )
    assert clean != bool({"race-write-read", "race-read-write"} & set(kinds(run)))
    assert clean == (not run.findings)


@pytest.mark.parametrize("options", SCHEDULES)
@pytest.mark.parametrize(
    ("wait_for", "clean"),
    [("cp.async.bulk.wait_group 0;", True), ("cp.async.bulk.wait_group.read 0;", False), ("", False)],
)
def test_global_memory_may_be_read_once_the_store_is_complete(wait_for, clean, options):
    x, m = box()
    after = "bar.sync 0;\nld.global.u32 %r47, [%rd2];\n" + by_thread_0("cp.async.bulk.wait_group 0;", "LAST")
    text = storing(m, (0, 0), 4096, wait_for=wait_for, after=after)
    text = text.replace(".param .u64 p1)", ".param .u64 p1, .param .u64 p2)").replace(
        "mov.u32 %r0, %tid.x;", "ld.param.u64 %rd2, [p2];\n    mov.u32 %r0, %tid.x;"
    )
    run = launch(text, grid=1, block=THREADS, args=[m, noise(4096), x], **options)
    assert (not run.findings) == clean
    assert clean or {"race-write-read", "race-read-write"} & set(kinds(run))


def test_a_cta_may_end_before_its_store_has_read():
    x, m = box()
    source = noise(4096)
    wanted = scattered(x.clone(), m, (0, 0), source)
    assert not store(x, m, (0, 0), source, wait_for="").findings
    assert torch.equal(x.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize(("change", "kind", "says"), [
    (("[%r20], [%rd20", "[%r47], [%rd20"), "out-of-bounds", "shared address"),
    (("add.u32 %r47, %r20, 32768;", "add.u32 %r47, %r20, 64;"), "misaligned", "not a multiple of 128"),
])
def test_a_box_must_lie_in_shared_memory_and_be_aligned(change, kind, says):
    _x, m = box()
    text = loading(m, (0, 0), 4096).replace(
        "    mov.u64 %rd20, map1;", "    add.u32 %r47, %r20, 32768;\n    mov.u64 %rd20, map1;"
    )
    text = text.replace("[%r20], [%rd20", "[%r47], [%rd20").replace(*change)
    run = launch(text, grid=1, block=THREADS, args=[m, torch.zeros(4096, dtype=torch.uint8)])
    assert kind in kinds(run) and "deadlock" in kinds(run)
    assert any(says in f.says for f in run.findings if f.kind == kind)


@pytest.mark.parametrize(("flips", "says"), [
    (64 << 440, "longer than the span"),
    (1 << 83, "needs sm_100"),
    (1 << 68, "rank 1"),
    (1 << 75, "interleaved"),
])
def test_a_map_that_does_not_fit_is_refused(flips, says):
    x, m = box()
    changed = (int.from_bytes(m.encode(), "little") ^ flips).to_bytes(128, "little")
    out = torch.zeros(4096, dtype=torch.uint8)
    run = launch(loading(m, (0, 0), 4096), grid=1, block=THREADS, args=[changed, out], memory=[x])
    assert any(says in f.says for f in run.findings if f.kind == "tensor-map")


def test_memory_that_holds_no_map_is_refused():
    x, m = box()
    for raw in (b"\xff" * 128, bytes(range(128))):
        run = launch(
            loading(m, (0, 0), 4096),
            grid=1,
            block=THREADS,
            args=[raw, torch.zeros(4096, dtype=torch.uint8)],
            memory=[x],
        )
        assert "tensor-map" in kinds(run)


def test_a_map_must_be_aligned_to_64_bytes():
    _x, m = box()
    text = loading(m, (0, 0), 4096).replace(
        "cvta.param.u64 %rd20, %rd20;", "cvta.param.u64 %rd20, %rd20;\n    add.s64 %rd20, %rd20, 32;"
    )
    run = launch(text, grid=1, block=THREADS, args=[m, torch.zeros(4096, dtype=torch.uint8)])
    assert "misaligned" in kinds(run)


def test_a_map_that_reaches_beyond_its_tensor_is_found():
    x = tensor(64, 64, dtype=torch.bfloat16)
    m = TensorMap(x.data_ptr(), dims=(64, 80), strides=(128,), box=(64, 32), dtype="bfloat16", swizzle=128)
    object.__setattr__(m, "spans", lambda: [x])
    _, run = load(x, m, (0, 48))
    assert kinds(run) == ["out-of-bounds"]


def test_a_load_without_an_mbarrier_is_found():
    _x, m = box()
    text = loading(m, (0, 0), 4096).replace("mbarrier.init.shared::cta.b64 [%r21], 1;", "")
    run = launch(text, grid=1, block=THREADS, args=[m, torch.zeros(4096, dtype=torch.uint8)])
    assert "mbarrier" in kinds(run)


def test_a_box_that_lands_on_its_mbarrier_is_found():
    _x, m = box()
    text = (
        loading(m, (0, 0), 4096)
        .replace("[%r20], [%rd20", "[%r47], [%rd20")
        .replace(
            "    mov.u64 %rd20, map1;",
            f"    add.u32 %r47, %r20, {BARRIER - 4096};\n    mov.u64 %rd20, map1;",
        )
    )
    clean = launch(text, grid=1, block=THREADS, args=[m, torch.zeros(4096, dtype=torch.uint8)])
    assert not clean.findings
    text = text.replace(f"{BARRIER - 4096}", f"{BARRIER - 4096 + 128}").replace("smem[32832]", "smem[40960]")
    run = launch(text, grid=1, block=THREADS, args=[m, torch.zeros(4096, dtype=torch.uint8)])
    assert "mbarrier-overwritten" in kinds(run)


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
    assert says in refusal(text)
