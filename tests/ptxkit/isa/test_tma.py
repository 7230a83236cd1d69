"""Tensor copies: where every byte lands, and what the mbarrier and the groups say."""

import numpy as np
import pytest
import torch
import transfers as tr
from assembly import reports

from ptxkit.launches import launch
from ptxkit.tensormap import TensorMap

pytestmark = pytest.mark.simulated

# ---- loads


def brings(x, m, start, **options):
    """Check that the load of a box is clean and brings what NumPy computes; return its bytes and the Run."""
    found, run = tr.load(x, m, start, **options)
    assert not run.findings
    np.testing.assert_array_equal(found, tr.image_of(x, m, start, len(found)), err_msg=str(start))
    return found, run


@pytest.mark.parametrize("swizzle", tr.PATTERNS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_a_box_lands_swizzled_by_the_manuals_pattern(swizzle, dtype):
    x = tr.tensor(24, 160, dtype=dtype)
    m = TensorMap(x, box=(tr.SPAN[swizzle] // x.element_size(), 16), swizzle=swizzle)
    brings(x, m, (16, 5), target=tr.target_of(swizzle))


@pytest.mark.parametrize(("target", "refused"), [
    ("sm_100a", True), ("sm_103a", False), ("sm_110a", True), ("sm_120a", True),
])
def test_lines_of_96_bytes_are_swizzled_by_sm_103_alone(target, refused):
    x = tr.tensor(24, 160, dtype=torch.bfloat16)
    _, run = tr.load(x, TensorMap(x, box=(48, 8), swizzle=96), (0, 0), target=target)
    assert any("swizzle 96B needs sm_103" in finding.says for finding in run.findings) is refused


@pytest.mark.parametrize(("swizzle", "place"), [(0, 0x398), (32, 0x388), (64, 0x3A8), (128, 0x3E8), ("128/32", 0x3F8),
                                                ("128/32+8", 0x3F0), ("128/64", 0x3D8)])
def test_the_byte_at_0x398_lands_where_the_formula_says(swizzle, place):
    x = torch.arange(0, 1024, 8, dtype=torch.int64)
    inner = tr.SPAN[swizzle] // 8
    m = TensorMap(x.reshape(-1, inner), box=(inner, 128 // inner), swizzle=swizzle)
    found, run = tr.load(x, m, (0, 0), target=tr.target_of(swizzle))
    assert not run.findings
    assert found.view(np.int64)[place // 8] == 0x398


@pytest.mark.parametrize("early", [False, True])
def test_a_small_box_over_an_edge_is_filled_with_zeros(early):
    x = (100 * torch.arange(3)[:, None] + torch.arange(16)[None, :]).to(torch.uint16)
    m = TensorMap(x.data_ptr(), dims=(10, 3), strides=(32,), box=(8, 4), dtype="uint16")
    object.__setattr__(m, "spans", lambda: [x])
    found, run = tr.load(x, m, (8, -1), early=early)
    assert not run.findings
    rows = found.view(np.uint16).reshape(4, 8).tolist()
    assert rows == [[0] * 8, [8, 9, 0, 0, 0, 0, 0, 0], [108, 109, 0, 0, 0, 0, 0, 0], [208, 209, 0, 0, 0, 0, 0, 0]]


def test_a_start_between_16_byte_boundaries_is_reported_and_lands_by_the_same_rule():
    x = (100 * torch.arange(3)[:, None] + torch.arange(16)[None, :]).to(torch.uint16)
    m = TensorMap(x.data_ptr(), dims=(10, 3), strides=(32,), box=(8, 4), dtype="uint16")
    object.__setattr__(m, "spans", lambda: [x])
    found, run = tr.load(x, m, (6, -1))
    reports(run, ["misaligned"], "12 bytes")
    rows = found.view(np.uint16).reshape(4, 8).tolist()
    assert rows == [
        [0] * 8,
        [6, 7, 8, 9, 0, 0, 0, 0],
        [106, 107, 108, 109, 0, 0, 0, 0],
        [206, 207, 208, 209, 0, 0, 0, 0],
    ]


SHAPES = {1: ((40,), (16,)), 2: ((5, 40), (16, 3)), 3: ((3, 5, 40), (16, 3, 2)), 4: ((2, 3, 5, 40), (16, 3, 2, 2)),
          5: ((2, 2, 3, 5, 40), (16, 3, 2, 2, 2))}


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("side", ["inside", "below", "above", "far away"])
def test_every_rank_on_each_side_of_every_dimension(rank, side):
    shape, box = SHAPES[rank]
    x = tr.tensor(*shape, dtype=torch.int32)
    m = TensorMap(x, box=box)
    inside = (4, *(1,) * (rank - 1))
    for d in range(rank):
        n = shape[::-1][d]
        edge = 4 if d == 0 else 1
        beyond = {"inside": inside[d], "below": -edge, "above": n - edge, "far away": 4 * n}[side]
        start = (*inside[:d], beyond, *inside[d + 1 :])
        brings(x, m, start)


@pytest.mark.parametrize("steps", [(1, 2), (1, 3), (2, 2)])
def test_element_strides_skip_rows_and_leave_the_innermost_dimension_alone(steps):
    x = tr.tensor(20, 32, dtype=torch.int32)
    m = TensorMap(x, box=(16, 8), element_strides=steps)
    assert len(brings(x, m, (8, -2))[0]) == 64 * -(-8 // steps[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_elements_outside_can_be_nan(dtype):
    x = tr.tensor(4, 32, dtype=dtype)
    m = TensorMap(x, box=(16, 4), fill="nan")
    found, run = tr.load(x, m, (24, -1))
    assert not run.findings
    values = torch.from_numpy(found.copy()).view(dtype).reshape(4, 16)
    assert values[0].isnan().all() and values[:, 8:].isnan().all()
    assert torch.equal(values[1:, :8], x[:3, 24:])


def test_a_row_shorter_than_the_swizzle_keeps_the_swizzles_pitch():
    x = tr.tensor(16, 64, dtype=torch.bfloat16)
    m = TensorMap(x, box=(32, 16), swizzle=128)
    assert m.pitch == 128 and m.box_bytes == 1024
    found, _ = brings(x, m, (16, 0))
    assert len(found) == 2048 and (found == tr.FILLER).sum() >= 1024


def test_tf32_rounds_to_even_on_the_way_in_and_ftz_changes_nothing():
    bits = [0x3F801000, 0x3F803000, 0x3F800FFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x00000001, 0x80000001]
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    as_tf32 = [0x3F800000, 0x3F804000, 0x3F800000, 0x7F800000, 0x7F800000, 0x7FFFE000, 0, 0x80000000]
    numbers = {"tfloat32": as_tf32, "float32_ftz": bits, "tfloat32_ftz": as_tf32, "float32": bits}
    for dtype, wanted in numbers.items():
        found, run = tr.load(x, TensorMap(x, box=(8,), dtype=dtype), (0,))
        assert not run.findings
        assert found.view(np.uint32).tolist() == wanted, dtype


@pytest.mark.parametrize("options", tr.SCHEDULES)
def test_a_load_counts_its_bytes_and_is_clean_under_every_schedule(options):
    x = tr.tensor(128, 64, dtype=torch.bfloat16)
    m = TensorMap(x, box=(64, 128), swizzle=128)
    _, run = brings(x, m, (0, 0), **options)
    assert run.counters["global_bytes_read"] == 16384 and run.counters["global_sectors"] == 512 + 128 * 4
    assert run.counters["async_operations"] == 1


# ---- clusters


def multicast(m, ctas, size, target="sm_90a"):
    """Every CTA loads one slice of rows and sends it to all of them."""
    rows = m.box[1]
    load = f"""
    mov.u32 %r40, %cluster_ctarank;
    mul.lo.u32 %r41, %r40, {rows};
    mul.lo.u32 %r42, %r40, {m.box_bytes};
    add.u32 %r42, %r20, %r42;
    mov.u64 %rd20, map1;
    cvta.param.u64 %rd20, %rd20;
    mov.u64 %rd22, 0;
    mov.b16 %h1, {(1 << ctas) - 1};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint
        [%r42], [%rd20, {{0, %r41}}], [%r21], %h1, %rd22;
    """
    body = tr.fill_shared(size) + tr.make_barrier() + tr.by_thread_0(tr.expect(ctas * m.box_bytes), "EXPECTING")
    body += tr.MEET + tr.by_thread_0(load) + tr.wait() + tr.store_shared(size, by_rank=True) + tr.MEET
    return tr.frame(body, maps=1, target=target)


def shared_by(ctas, text, m, images, **options):
    """Run a kernel of a cluster and compare what each CTA has in shared memory, [cta][bytes]; return the Run."""
    out = torch.zeros(ctas, len(images[0]), dtype=torch.uint8)
    run = launch(text, grid=ctas, cluster=ctas, block=tr.THREADS, args=[m, out], **options)
    assert not run.findings
    np.testing.assert_array_equal(out.numpy(), np.stack(images))


@pytest.mark.parametrize("ctas", [2, 4])
@pytest.mark.parametrize("options", tr.SCHEDULES)
def test_a_multicast_reaches_every_cta_and_every_mbarrier(ctas, options):
    x = tr.tensor(8 * ctas, 64, dtype=torch.bfloat16)
    m = TensorMap(x, box=(64, 8), swizzle=128)
    whole = TensorMap(x, box=(64, 8 * ctas), swizzle=128)
    images = ctas * [tr.image_of(x, whole, (0, 0), whole.box_bytes)]
    shared_by(ctas, multicast(m, ctas, whole.box_bytes), m, images, **options)


FOLLOWING = f"@%p5 bra FOLLOWER;\n{tr.wait()}FOLLOWER:\n{tr.MEET}"


def pair(m, size):
    """Two CTAs load a box each; both loads tell the mbarrier of CTA 0, whose wait both rely on."""
    load = f"""
    mov.u32 %r40, %cluster_ctarank;
    mul.lo.u32 %r41, %r40, {m.box[1]};
    and.b32 %r44, %r21, 0xfeffffff;
    mov.u64 %rd20, map1;
    cvta.param.u64 %rd20, %rd20;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2
        [%r20], [%rd20, {{0, %r41}}], [%r44];
    """
    body = "mov.u32 %r45, %cluster_ctarank;\nsetp.ne.u32 %p5, %r45, 0;\n" + tr.fill_shared(size) + tr.make_barrier()
    body += tr.by_thread_0(f"@!%p5 {tr.expect(2 * m.box_bytes)}", "EXPECTING") + tr.MEET + tr.by_thread_0(load)
    return tr.frame(body + FOLLOWING + tr.store_shared(size, by_rank=True), maps=1, target="sm_100a")


@pytest.mark.parametrize("options", tr.SCHEDULES)
def test_a_pair_of_ctas_tells_the_mbarrier_of_one(options):
    x = tr.tensor(32, 64, dtype=torch.bfloat16)
    m = TensorMap(x, box=(64, 16), swizzle=128)
    images = [tr.image_of(x, m, (0, 16 * rank), m.box_bytes) for rank in range(2)]
    shared_by(2, pair(m, m.box_bytes), m, images, **options)


@pytest.mark.parametrize("options", tr.SCHEDULES)
def test_a_multicast_for_pairs_tells_the_even_cta_of_each(options):
    x = tr.tensor(32, 64, dtype=torch.bfloat16)
    m = TensorMap(x, box=(64, 8), swizzle=128)
    whole = TensorMap(x, box=(64, 32), swizzle=128)
    text = multicast(m, 4, whole.box_bytes, "sm_100a")
    odd = "mov.u32 %r45, %cluster_ctarank;\nand.b32 %r45, %r45, 1;\nsetp.ne.u32 %p5, %r45, 0;"
    all_slices = tr.expect(8 * m.box_bytes)                                       # all four, in both CTAs of the pair
    for old, new in (
        ("L2::cache_hint", "L2::cache_hint.cta_group::2"), ("[%r21], %h1", "[%r44], %h1"),
        ("mov.b16 %h1", "and.b32 %r44, %r21, 0xfeffffff;\n    mov.b16 %h1"),
        ("setp.ne.u32 %p1, %r0, 0;", f"setp.ne.u32 %p1, %r0, 0;\n{odd}"),
        (tr.expect(4 * m.box_bytes), f"@!%p5 {all_slices}"), (tr.wait(), FOLLOWING),
    ):
        assert old in text
        text = text.replace(old, new)
    shared_by(4, text, m, 4 * [tr.image_of(x, whole, (0, 0), whole.box_bytes)], **options)


@pytest.mark.parametrize(("text", "rows", "old", "new", "found"), [
    (pair, 16, "cta_group::2", "cta_group::1", {"mbarrier"}),
    (lambda m, size: multicast(m, 2, size), 8, "mov.b16 %h1, 3;", "mov.b16 %h1, 5;", {"operand"}),
], ids=["an mbarrier that does not lie beside the data", "a multicast to a CTA that is not there"])
def test_what_a_cluster_does_not_have_is_reported(text, rows, old, new, found):
    m = TensorMap(tr.tensor(2 * rows, 64, dtype=torch.bfloat16), box=(64, rows), swizzle=128)
    changed = text(m, 2048).replace(old, new)
    run = launch(changed, grid=2, cluster=2, block=tr.THREADS, args=[m, torch.zeros(2, 2048, dtype=torch.uint8)])
    reports(run, found)


# ---- stores and reductions


@pytest.mark.parametrize("swizzle", tr.PATTERNS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64])
def test_a_store_puts_back_what_a_load_would_bring(swizzle, dtype):
    x = tr.tensor(24, 160, dtype=dtype)
    m = TensorMap(x, box=(tr.SPAN[swizzle] // x.element_size(), 16), swizzle=swizzle)
    source = tr.noise(m.box_bytes)
    wanted = tr.scattered(x, m, (16, 5), source)
    run = tr.store(x, m, (16, 5), source, target=tr.target_of(swizzle))
    assert not run.findings
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("start", [(144, 5), (16, 20), (144, 20), (160, 0), (16, 24)])
@pytest.mark.parametrize("swizzle", [0, 64, "128/32+8"])
def test_a_store_leaves_out_what_lies_beyond_the_tensor(start, swizzle):
    around = torch.full((30, 192), 7, dtype=torch.uint16)
    x = around[:24, :160]
    m = TensorMap(x, box=(tr.SPAN[swizzle] // 2 if swizzle else 32, 16), swizzle=swizzle)
    source = tr.noise(m.box_bytes)
    wanted = around.clone()
    wanted[:24, :160] = tr.scattered(x.clone(), m, start, source)
    run = tr.store(x, m, start, source, target=tr.target_of(swizzle))
    assert not run.findings
    assert torch.equal(around, wanted)


def test_a_store_that_a_whole_warp_issues_runs_once():
    x, source = tr.tensor(16, 64, dtype=torch.uint16), tr.noise(2048)
    m = TensorMap(x, box=(64, 16), swizzle=128)
    by_one = tr.storing(m, (0, 0), 2048)
    by_a_warp = by_one.replace("setp.ne.u32 %p1, %r0, 0;", "setp.ge.u32 %p1, %r0, 32;", 1)
    one, warp = (launch(text, grid=1, block=64, args=[m, source]) for text in (by_one, by_a_warp))
    assert not warp.findings and torch.equal(x, tr.scattered(x, m, (0, 0), source))
    assert warp.counters["thread_instructions"] > one.counters["thread_instructions"] + 3 * 31
    assert warp.counters["async_operations"] == one.counters["async_operations"] == 1
    assert warp.counters["global_bytes_written"] == 2048


def test_a_clipped_store_reads_no_more_shared_memory_than_it_stores():
    x = tr.tensor(4, 64, dtype=torch.uint16)
    m = TensorMap(x, box=(64, 16), swizzle=128)
    written = tr.noise(4 * 128)  # only four of the box's sixteen rows
    run = tr.store(x, m, (0, 0), written)
    assert not run.findings
    assert run.counters["global_bytes_written"] == 4 * 128


def test_a_negative_start_of_a_store_is_reported():
    x = tr.tensor(16, 64, dtype=torch.uint16)
    m = TensorMap(x, box=(64, 16), swizzle=128)
    run = tr.store(x, m, (0, -1), tr.noise(m.box_bytes))
    reports(run, ["operand"], "-1 of dimension 1")


OPS = {
    "add": torch.add, "min": torch.minimum, "max": torch.maximum,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
}


@pytest.mark.parametrize(("op", "dtype"), [
    ("add", torch.int32), ("add", torch.float32), ("add", torch.float16), ("add", torch.bfloat16), ("min", torch.int32),
    ("max", torch.int64), ("min", torch.bfloat16), ("max", torch.float16), ("and", torch.int32), ("or", torch.int32),
    ("xor", torch.int32),
])
@pytest.mark.parametrize("early", [False, True])
def test_a_reduction_combines_each_element_inside(op, dtype, early):
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(20, 64, generator=generator) * 100).to(dtype)
    values = (torch.randn(16 * 32, generator=generator) * 100).to(dtype)
    m = TensorMap(x, box=(32, 16))
    source = values.view(torch.uint8)
    wanted = tr.scattered(x, m, (48, 8), source, OPS[op])
    run = tr.store(x, m, (48, 8), source, op=op, early=early)
    assert not run.findings
    assert torch.equal(x, wanted)


def test_inc_and_dec_wrap_at_the_sources_value():
    old, limit = torch.tensor([0, 4, 5, 6, 0, 4, 5, 6]), torch.tensor([5, 5, 5, 5, 5, 5, 5, 5])
    for op, wanted in (("inc", [1, 5, 0, 0, 1, 5, 0, 0]), ("dec", [5, 3, 4, 5, 5, 3, 4, 5])):
        x = old.to(torch.uint32)
        run = tr.store(x, TensorMap(x, box=(8,)), (0,), limit.to(torch.uint32).view(torch.uint8), op=op)
        assert not run.findings
        assert x.tolist() == wanted


def test_a_reduction_of_a_type_that_has_none_is_reported():
    x = torch.zeros(16, dtype=torch.float64)
    run = tr.store(x, TensorMap(x, box=(16,)), (0,), tr.noise(128), op="add")
    reports(run, ["tensor-map"])


@pytest.mark.parametrize("options", tr.SCHEDULES)
def test_reductions_of_many_ctas_onto_one_place_do_not_race(options):
    x, source = torch.zeros(64, dtype=torch.float32), torch.ones(64, dtype=torch.float32)
    m = TensorMap(x, box=(64,))
    text = tr.storing(m, (0,), 256, op="add")
    run = launch(text, grid=6, block=tr.THREADS, args=[m, source.view(torch.uint8)], **options)
    assert not run.findings
    assert torch.equal(x, torch.full((64,), 6.0))


# ---- rows by their own coordinates


def test_gather4_brings_four_rows_and_scatter4_takes_them_back():
    x = tr.tensor(40, 64, dtype=torch.bfloat16)
    m = TensorMap(x, box=(64, 1), swizzle=128)
    rows = [9, 2, 40, 33]  # one of them lies outside
    text = tr.loading(m, (0, *rows), 512, target="sm_100a", count=512)
    text = text.replace("tensor.2d.shared::cta.global.tile.", "tensor.2d.shared::cta.global.tile::gather4.")
    out = torch.zeros(512, dtype=torch.uint8)
    run = launch(text, grid=1, block=tr.THREADS, args=[m, out])
    assert not run.findings
    gathered = torch.zeros(4, 64, dtype=torch.bfloat16)
    for n, row in enumerate(rows):
        gathered[n] = x[row] if row < 40 else 0
    as_box = TensorMap(gathered, box=(64, 4), swizzle=128)
    np.testing.assert_array_equal(out.numpy(), tr.image_of(gathered, as_box, (0, 0), 512))

    y = torch.zeros(40, 64, dtype=torch.bfloat16)
    to = TensorMap(y, box=(64, 1), swizzle=128)
    text = tr.storing(to, (0, *rows), 512, target="sm_100a")
    text = text.replace("global.shared::cta.tile.", "global.shared::cta.tile::scatter4.")
    run = launch(text, grid=1, block=tr.THREADS, args=[to, out])
    assert not run.findings
    wanted = torch.zeros(40, 64, dtype=torch.bfloat16)
    wanted[[9, 2, 33]] = x[[9, 2, 33]]
    assert torch.equal(y, wanted)
