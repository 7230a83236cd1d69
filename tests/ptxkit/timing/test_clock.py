"""The clock: each unit against times that a hand can compute, and that a clock changes nothing but the schedule."""

import pathlib

import planted
import pytest
import tensor_core
import torch

from ptxkit import CaptureError, capture
from ptxkit.launches import LaunchError, launch
from ptxkit.timing.chips import CHIPS, assumed
from ptxkit.timing.clock import Setting, longer, together

pytestmark = pytest.mark.simulated

H200 = CHIPS["h200"]
FRAME = """
.version 8.8
.target {target}
.address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
{{
    .reg .pred %p<4>; .reg .b32 %r<64>; .reg .f32 %f<64>; .reg .b64 %rd<16>;
    .shared .align 128 .b8 smem[32768];
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x;
    shr.u32 %r3, %r2, 5;
    mov.u32 %r4, smem;
    {body}
    ret;
}}
"""
ONE = "mov.f32 %f1, 0f3F800000; "
X = torch.zeros(1 << 16)


def timed(body, block=32, grid=1, n=0, clock="h200", target="sm_90a", **options):
    text = FRAME.format(body=body, target=target)
    run = launch(text, grid=grid, block=block, args=[X.zero_(), n], clock=clock, registers=32, **options)
    assert not run.findings and not run.notes
    return run


def each(body, few=64, many=192, before="", **options):
    """Return the clocks of one more repetition."""
    a, b = (timed(before + body * n, **options).clock.clocks for n in (few, many))
    return (b - a) / (many - few)


# ---- issue and arithmetic


@pytest.mark.parametrize("instruction, latency", [
    ("fma.rn.f32 %f1, %f1, %f1, %f1;", H200.fma_latency),
    ("xor.b32 %r2, %r2, %r2;", H200.alu_latency),
    ("ex2.approx.ftz.f32 %f1, %f1;", H200.special_latency),
    ("shfl.sync.bfly.b32 %r2, %r2, 1, 31, 0xffffffff;", H200.shuffle_latency),
])
def test_a_chain_costs_its_latency_for_each_link(instruction, latency):
    assert each(instruction, before=ONE) == latency


@pytest.mark.parametrize("instruction, clocks", [
    ("fma.rn.f32 %f{n}, %f1, %f1, %f1;", H200.fma_busy),
    ("xor.b32 %r{n}, %r2, %r3;", H200.alu_busy),
    ("ex2.approx.ftz.f32 %f{n}, %f1;", H200.special_busy),
    ("add.s64 %rd{n}, %rd1, %rd1;", 2 * H200.alu_busy),  # two instructions
])
def test_independent_instructions_cost_what_their_unit_takes(instruction, clocks):
    body = "".join(instruction.format(n=8 + k % 8) for k in range(64))
    assert each(body, few=4, many=12, before=ONE) == 64 * clocks


def test_warps_of_one_scheduler_share_its_slots():
    body = "".join(f"fma.rn.f32 %f{8 + k % 8}, %f1, %f1, %f1;" for k in range(64))
    alone, four, eight = (each(body, few=4, many=12, before=ONE, block=32 * warps) for warps in (1, 4, 8))
    assert alone == four == 64 and eight == 128


def test_who_waits_for_a_scheduler_says_so():
    body = "".join(f"fma.rn.f32 %f{8 + k % 8}, %f1, %f1, %f1;" for k in range(256))
    clock = timed(ONE + body, block=256).clock
    assert max(clock.stalls, key=clock.stalls.get) == "not selected" and clock.stalls["not selected"] > 4 * 200
    assert clock.binds()[0][0] in ("fma", "issue")


def test_a_load_moves_ahead_of_its_use_by_the_window_and_no_more():
    """Each load is followed by its use: in that order the second load waits for the first, moved ahead it does not."""
    pairs = "".join(f"ld.shared.f32 %f{8 + k}, [%r4+{4 * k}]; mul.f32 %f{16 + k}, %f{8 + k}, %f1;" for k in range(8))
    stores = "".join(f"st.shared.f32 [%r4+{4 * k}], %f1;" for k in range(8))

    def clocks(window):
        constants = H200.constants | {"window": assumed(window, "this test")}
        chip = H200._replace(constants=constants)
        return each(f"{ONE} {stores} bar.sync 0; {pairs} bar.sync 0;", few=2, many=6, clock=chip)

    assert clocks(0) - clocks(48) == pytest.approx(7 * H200.shared_latency, abs=20)
    assert clocks(16) - clocks(48) == pytest.approx(7 * (H200.shared_latency - 16), abs=20)


def test_a_global_load_moves_ahead_of_uses_before_it_but_not_of_a_barrier_or_a_store():
    """Each load is followed by its use: they wait once where they may move, and each for itself where they may not."""
    load = "add.s64 %rd{n}, %rd1, {offset}; ld.global.f32 %f{f}, [%rd{n}]; ex2.approx.ftz.f32 %f{f}, %f{f};"
    loads = [load.format(n=2 + k, f=8 + k, offset=4096 * (k + 1)) for k in range(6)]

    def clocks(between="", **options):
        return timed(ONE + between.join(loads), **options).clock.clocks

    alone, together_ = timed(ONE + loads[0]).clock.clocks, clocks()
    assert together_ - alone < H200.hbm_latency / 2
    for between in ("bar.sync 0;", "st.global.f32 [%rd1], %f1;"):
        assert clocks(between) - alone == pytest.approx(5 * (H200.hbm_latency - 24), rel=0.15)
    for held, waits in ((2, 2), (3, 1)):  # registers that loads may fill
        chip = H200._replace(constants=H200.constants | {"ahead_registers": assumed(held, "this test")})
        assert clocks(clock=chip) - alone == pytest.approx(waits * H200.hbm_latency, rel=0.25)


@pytest.mark.parametrize("sources, clocks", [("%f1, %f1, %f1", 1), ("%f1, %f2, %f3", 1.5)])
def test_the_register_file_reads_two_operands_a_clock(sources, clocks):
    """Only operands that change from one instruction to the next are read; those that stay are not read again."""
    other = "%f4, %f5, %f6" if clocks > 1 else sources
    body = "".join(f"fma.rn.f32 %f{8 + k % 8}, {other if k % 2 else sources};" for k in range(64))
    assert each(body, few=4, many=12, before=ONE) == pytest.approx(64 * clocks, rel=0.02)


def test_one_warp_reads_shared_memory_every_four_clocks_and_waits_for_a_fence():
    loads = "".join(f"ld.shared.f32 %f{8 + k % 16}, [%r4];" for k in range(64))
    assert each(loads, few=4, many=12, before="st.shared.u32 [%r4], 0; bar.sync 0;") / 64 == pytest.approx(4, rel=0.02)
    assert each("fence.proxy.async;") == pytest.approx(33.1, abs=1)


def test_stalls_are_reported_by_line_and_by_warp():
    """Warp 1 waits for warp 0 at a barrier; warp 0 waits for its chain, and for HBM."""
    body = "setp.ne.u32 %p1, %r3, 0; @%p1 bra MEET; ld.global.f32 %f1, [%rd1];\n" + "ex2.approx.ftz.f32 %f1, %f1;" * 20
    body += "\nMEET: bar.sync 0;"
    run = timed(body, block=64)
    (at_barrier, waits), (at_chain, works) = run.stalls()[:2]
    first, second = (int(place.removeprefix("PTX line ")) for place in (at_chain, at_barrier))
    assert second == first + 1 and next(iter(waits)) == "barrier" and set(works) >= {"short", "long"}
    zero, one = run.clock.warps
    assert zero["long"] == pytest.approx(H200.hbm_latency, abs=60) and one["long"] == 0
    assert zero["short"] == pytest.approx(20 * H200.special_latency, abs=60)
    assert one["barrier"] == pytest.approx(H200.hbm_latency + 20 * H200.special_latency, abs=60)
    assert one["lived"] == pytest.approx(one["issued"] + sum(v for k, v in one.items() if k not in ("issued", "lived")))
    for says in ("predicted on h200", "start, steady, drain", "busiest units", "stalls per issue", "barrier"):
        assert says in run.report()
    assert "predicted" not in timed(body, block=64, clock=None).report()


# ---- memory


def test_a_chain_of_shared_loads_costs_latency_and_passes():
    zero = "st.shared.u32 [smem], 0; st.shared.u32 [smem+4], 0; mov.u32 %r5, smem; bar.sync 0;"
    chase = "ld.shared.u32 %r6, [%r5]; add.u32 %r5, %r5, %r6;"
    assert each(chase, before=zero) == pytest.approx(H200.shared_latency + H200.shared_pass + H200.alu_latency)


def test_bank_conflicts_cost_a_pass_each():
    """32 lanes at a stride of 128 bytes are 32 passes; at a stride of 4, one."""

    def clocks(shift):
        address = f"shl.b32 %r5, %r2, {shift}; add.u32 %r5, %r5, %r4; "
        stores = "".join(f"st.shared.u32 [%r5+{4 * k}], %r2;" for k in range(2))
        return each("bar.warp.sync 0xffffffff;" + stores, few=8, many=24, before=address)

    assert clocks(7) == 2 * 32


def test_global_memory_answers_from_l1_l2_or_hbm():
    chase = "ld.global{how}.u64 %rd2, [%rd1{offset}]; add.s64 %rd1, %rd1, %rd2;"
    add, n = H200.alu_latency, 32 / H200.l2_rate_sm
    assert each(chase.format(how="", offset="")) == pytest.approx(H200.l1_latency + add)
    assert each(chase.format(how=".cg", offset="")) == pytest.approx(H200.l2_latency + n + add)
    fresh = [chase.format(how=".cg", offset=f"+{128 * k}") for k in range(256)]
    clocks = timed("".join(fresh)).clock.clocks - timed(fresh[0]).clock.clocks
    assert clocks / 255 == pytest.approx(H200.hbm_latency + 32 / H200.hbm_rate_sm + add, rel=0.01)


# ---- what synchronises


@pytest.mark.parametrize("warps, measured", [(4, 20.6), (8, 28.6), (12, 36.6)])
def test_a_barrier_costs_what_was_measured(warps, measured):
    assert each("bar.sync 0;", block=32 * warps) == pytest.approx(measured, abs=2.5)


INIT = """
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra MADE;
    mbarrier.init.shared.b64 [smem], 1;
    mbarrier.init.shared.b64 [smem+8], 1;
MADE:
    bar.sync 0;
    and.b32 %r7, %r2, 31;
    setp.ne.u32 %p2, %r7, 0;
"""
WAIT = "{name}: mbarrier.try_wait.parity.shared.b64 %p3, [smem+{offset}], {parity}; @!%p3 bra {name};\n"
ARRIVE = "@!%p2 mbarrier.arrive.shared.b64 _, [smem+{offset}];\n"


def hops(n):
    """Time two warps that hand over to each other, n times there and back."""
    first = "".join(ARRIVE.format(offset=0) + WAIT.format(name=f"A{k}", offset=8, parity=k % 2) for k in range(n))
    second = "".join(WAIT.format(name=f"B{k}", offset=0, parity=k % 2) + ARRIVE.format(offset=8) for k in range(n))
    body = f"setp.ne.u32 %p1, %r3, 0; @%p1 bra OTHER; {first} bra END; OTHER: {second} END:"
    return timed(INIT + body, block=64).clock


def test_a_hop_between_two_warps_costs_about_what_was_measured():
    few, many = hops(4), hops(12)
    assert (many.clocks - few.clocks) / 16 == pytest.approx(46.1, abs=1)
    assert max(many.stalls, key=many.stalls.get) == "mbarrier"


def test_a_barrier_of_a_cluster_costs_what_was_measured():
    body = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    assert each(body, grid=2, cluster=2) == pytest.approx(359, abs=3)


def test_an_arrival_at_a_neighbours_mbarrier_takes_the_way_between_them():
    """CTA 0 arrives at CTA 1's mbarrier, which waits for it; both then meet."""
    arrival = (
        "mapa.shared::cluster.u32 %r8, %r4, 1; @!%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];\n"
    )
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    init = (
        INIT + "fence.mbarrier_init.release.cluster;" + meet + "mov.u32 %r9, %cluster_ctarank; setp.ne.u32 %p1, %r9, 0;"
    )
    wait = WAIT.replace(".parity.", ".parity.acquire.cluster.")
    parts = [
        f"@%p1 bra W{k}; {arrival} bra M{k};" + wait.format(name=f"W{k}", offset=0, parity=k % 2) + f"M{k}: {meet}"
        for k in range(6)
    ]
    few, many = (timed(init + "".join(parts[:n]), grid=2, cluster=2).clock.clocks for n in (2, 6))
    assert (many - few) / 4 - 359 == pytest.approx(403, abs=10)


def bulk(size, copies):
    """One thread copies to shared memory and waits, again and again; the first copy brings the bytes into the L2."""
    one = (
        f"@!%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem], {size};\n"
        f"@!%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd1], {size}, [smem];\n"
    )
    body = "".join(one + WAIT.format(name=f"W{k}", offset=0, parity=k % 2) for k in range(copies))
    return timed(INIT + "setp.ne.u32 %p1, %r2, 0; fence.proxy.async; add.u32 %r8, %r4, 1024;" + body).clock.clocks


def test_a_bulk_copy_has_a_latency_and_a_rate():
    small, large = (bulk(size, 9) - bulk(size, 5) for size in (1024, 9216))
    assert (large - small) / 4 == pytest.approx(8192 / H200.l2_rate_sm, rel=0.02)
    fixed = small / 4 - 1024 / H200.l2_rate_sm
    assert fixed == pytest.approx(H200.tma_latency + H200.l2_latency + H200.mbarrier_wake, abs=25)


def test_a_group_of_cp_async_is_waited_for():
    copy = "cp.async.ca.shared.global [%r5], [%rd2], 4; cp.async.commit_group; cp.async.wait_group 0;"
    before = "shl.b32 %r6, %r2, 2; add.u32 %r5, %r4, %r6; cvt.u64.u32 %rd3, %r6; add.s64 %rd2, %rd1, %rd3;"
    clock = timed(before + copy).clock
    assert clock.stalls["copies"] == pytest.approx(H200.hbm_latency + H200.cp_async_latency, abs=48)


# ---- matrix products

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{d}}}, {{%r8, %r9, %r10, %r11}}, {{%r12, %r13}}, {{{d}}};"
ZEROS = "".join(f"mov.b32 %r{k}, 0;" for k in range(8, 14)) + "".join(f"mov.f32 %f{k}, 0f00000000;" for k in range(64))


def product(n):
    return MMA.format(d=", ".join(f"%f{4 * n + k}" for k in range(4)))


def test_products_cost_their_latency_in_a_chain_and_their_rate_side_by_side():
    assert each(product(0), before=ZEROS) == H200.mma_latency
    side_by_side = "".join(product(k) for k in range(16))
    assert each(side_by_side, few=4, many=12, before=ZEROS) == pytest.approx(16 * 16 * 8 * 16 / H200.mma_rate)


def wgmmas(steps):
    """A warpgroup's product m64n64 of depth 128, in a chain; a warpgroup waits for each."""
    d = ", ".join(f"%f{k}" for k in range(32))
    one = f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{d}}}, %rd4, %rd5, 1, 1, 1, 0, 0;"
    start = (
        ZEROS
        + "cvt.u64.u32 %rd6, %r4; shr.u64 %rd4, %rd6, 4; or.b64 %rd4, %rd4, 0x4000004000000000; mov.b64 %rd5, %rd4;"
    )
    zero = "mov.u32 %r5, 0; shl.b32 %r6, %r2, 2; add.u32 %r6, %r6, %r4;"
    zero += "".join(f"st.shared.u32 [%r6+{offset}], %r5;" for offset in range(0, 16384, 512))
    zero += "fence.proxy.async; bar.sync 0;"
    return (
        start
        + zero
        + ("wgmma.fence.sync.aligned;" + one * 8 + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
        * steps
    )


def test_wgmma_costs_what_was_measured():
    few, many = (timed(wgmmas(n), block=128).clock for n in (4, 12))
    assert (many.clocks - few.clocks) / 8 == pytest.approx(318, abs=3)
    few, many = (timed(wgmmas(n), block=256).clock for n in (4, 12))
    assert (many.clocks - few.clocks) / 8 == pytest.approx(523, rel=0.03)
    assert many.units["tensor"] > 0.75


B200 = CHIPS["b200"]


def tcgen05(times, m, n, loads=""):
    """Products of depth 16 by one thread, one after the other; then the warps load what came of them."""
    (a, b), cells = tensor_core.operands("bf16", m, n), tensor_core.pattern(1, n)
    one = tensor_core.mma("f16", (a.descriptor, b.descriptor), tensor_core.idesc("bf16", "bf16", m, n))
    text = tensor_core.source(one * times, n, 0x8000, load=loads or tensor_core.LOADED)
    return launch(text, grid=1, block=128, args=[tensor_core.image_of(a, b), cells, cells.clone()], clock="b200").clock


@pytest.mark.parametrize("m, n", [(128, 64), (128, 32), (64, 64)])
def test_tcgen05_products_cost_their_rate_with_64_rows_as_with_128_or_what_their_operands_take(m, n):
    few, many = tcgen05(8, m, n), tcgen05(24, m, n)
    clocks = max(128 * n * 16 / B200.tensor_rate, (m + n) * 32 / B200.operand_rate)
    assert (many.clocks - few.clocks) / 16 == pytest.approx(clocks)
    assert many.warps[1]["mbarrier"] > many.warps[1]["tensor"]


WORDS = ", ".join(f"%r{k}" for k in range(16, 48))
TENSOR_MEMORY = f"""setp.eq.u32 %p1, %r3, 0; setp.lt.u32 %p2, %r3, 4;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 32;
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    ld.shared.u32 %r8, [%r4]; and.b32 %r9, %r3, 3; shl.b32 %r9, %r9, 21; add.u32 %r9, %r8, %r9;
    {"".join(f"mov.u32 {word}, 0;" for word in WORDS.split(", "))}
    @%p2 tcgen05.st.sync.aligned.32x32b.x32.b32 [%r9], {{{WORDS}}};
    @%p2 tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    LOADS tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    @%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;"""


def loads_of_tensor_memory(times, warps):
    """Return the clock of loads of four columns, each into registers of its own; so many warps share four quadrants."""
    words = (", ".join(f"%r{16 + 4 * n + k}" for k in range(4)) for n in range(times))
    loads = "".join(f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {{{four}}}, [%r9];" for four in words)
    return timed(TENSOR_MEMORY.replace("LOADS", loads), block=32 * warps, clock="b200", target="sm_100a").clock


def test_loads_of_tensor_memory_cost_their_columns():
    one = "tcgen05.ld.sync.aligned.32x32b.x32.b32 {" + ", ".join(f"%x{k}" for k in range(32)) + "}, [%r9];"
    few, many = (tcgen05(1, 128, 64, loads=one * n + tensor_core.LOADED) for n in (2, 10))
    assert (many.clocks - few.clocks) / 8 == pytest.approx(32 * B200.tmem_column)


@pytest.mark.parametrize("warps, sharing", [(4, 1), (8, 2), (16, 4)])
def test_warps_of_a_quadrant_share_its_way_to_tensor_memory(warps, sharing):
    clocks = [loads_of_tensor_memory(n, warps).clocks for n in (2, 10)]
    assert (clocks[1] - clocks[0]) / 8 == pytest.approx(sharing * 4 * B200.tmem_column)


def test_two_floats_at_once_take_a_slot_and_twice_the_unit():
    one, pair = (each(body, clock="b200", target="sm_100a", block=512) for body in (
        "fma.rn.f32 %f1, %f1, %f1, %f1; fma.rn.f32 %f2, %f2, %f2, %f2;", "fma.rn.f32x2 %rd4, %rd4, %rd4, %rd4;",
    ))
    assert one == 4 * 2 * B200.fma_busy and pair == 4 * B200.pair_busy


# ---- whole launches

LOOP = (
    "mov.u32 %r5, 0; TOP: "
    + "fma.rn.f32 %f1, %f1, %f1, %f1;" * 16
    + " add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, %r1; @%p1 bra TOP;"
)


def test_a_launch_is_predicted_from_two_shorter_ones():
    a, b, c = (timed(ONE + LOOP, n=n).clock for n in (10, 20, 400))
    found = longer((10, a), (20, b), 400)
    assert found.clocks == pytest.approx(c.clocks) and found.each == pytest.approx((b.clocks - a.clocks) / 10)
    assert found.milliseconds == pytest.approx(c.milliseconds)
    assert found.fixed == pytest.approx(H200.start, abs=10)
    with pytest.raises(ValueError, match="the shorter one first"):
        longer((20, b), (10, a), 400)


def test_ctas_of_other_sms_cost_nothing_and_those_of_the_same_sm_queue():
    def clocks(grid):
        text = FRAME.format(body=ONE + LOOP, target="sm_90a")
        options = dict(clock="h200", registers=255, checks=False)  # 256 threads take all registers: one CTA at once
        return launch(text, grid=grid, block=256, args=[X, 20], **options).clock

    one, full, two, more = (clocks(grid) for grid in (1, 132, 133, 3 * 132))
    assert one.clocks == full.clocks and full.share == 1 and one.resident == 1
    assert two.share == 2 and two.clocks == pytest.approx(2 * one.clocks)
    assert (more.share, more.detailed) == (3, 24) and more.clocks == pytest.approx(3 * one.clocks)


def test_a_part_of_a_launch_stands_for_it():
    """Four CTAs that stand for ten to each SM: the others follow at their rate."""
    text = FRAME.format(body=ONE + LOOP, target="sm_90a")

    def clocks(grid, clusters):
        options = dict(clock=Setting("h200", clusters), registers=255, checks=False)
        return launch(text, grid=grid, block=256, args=[X, 20], **options).clock

    part, whole = clocks(4, 1320), clocks(10, 1320)
    assert (part.detailed, part.share, whole.detailed) == (4, 10, 10)
    assert part.clocks == pytest.approx(whole.clocks)


def test_a_dependent_launch_begins_before_the_one_ahead_has_ended():
    """One launches its dependents first and then works; the other works before it waits."""
    first = timed("griddepcontrol.launch_dependents;" + ONE + LOOP, n=100)
    second = timed(ONE + LOOP + "griddepcontrol.wait; st.global.f32 [%rd1], %f1;", n=10, behind=first)
    alone = timed(ONE + LOOP + "griddepcontrol.wait; st.global.f32 [%rd1], %f1;", n=10)
    assert first.clock.triggered < first.clock.clocks / 4
    assert second.clock.begins + second.clock.clocks == pytest.approx(first.clock.clocks, abs=100)
    assert together([first, second]) == pytest.approx(first.clock.seconds, rel=0.05)
    gap = (H200.launch - H200.start) / H200.gigahertz / 1e9
    assert together([first, alone]) == pytest.approx(first.clock.seconds + gap + alone.clock.seconds)


# ---- a clock changes nothing

COPIES = {name: (path, call) for name, (path, call) in planted.KERNELS.items()}


@pytest.mark.parametrize("name", COPIES)
def test_kernels_do_the_same_with_a_clock(name, monkeypatch):
    path, call = COPIES[name]
    outputs = []
    monkeypatch.setattr(planted, "nan", lambda *shape: outputs.append(torch.full(shape, float("nan"))) or outputs[-1])
    runs = [call(path.read_text(), strict=True, **options) for options in ({}, {"schedule": 3}, *2 * [{"clock": True}])]
    assert all(right and not run.findings for run, right in runs)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    (plain, _), _, (first, _), (again, _) = runs
    assert plain.clock is None and first.clock.clocks == again.clock.clocks > first.clock.start
    assert first.clock.stalls_of == again.clock.stalls_of
    counted = ("global_bytes_read", "global_bytes_written", "shared_bytes_written", "tensor_flops", "bank_conflicts")
    assert all(first.counters[c] == plain.counters[c] for c in counted)


def test_where_the_hosts_tensors_lie_means_nothing():
    """Two sums of the same tensor, at two places of the host's memory."""
    body = "mul.wide.u32 %rd2, %r2, 16; add.s64 %rd1, %rd1, %rd2;" + "".join(
        f"ld.global.v4.f32 {{%f1, %f2, %f3, %f4}}, [%rd1+{64 * k}]; add.f32 %f5, %f1, %f2;" for k in range(64)
    )
    text, found = FRAME.format(body=body, target="sm_90a"), set()
    for start in (0, 16, 48, 1 << 12):
        x = torch.zeros(1 << 14)[start : start + 8192]
        run = launch(text, grid=1, block=64, args=[x, 0], clock="h200", checks=False)
        found.add(run.clock.clocks)
    assert len(found) == 1


def test_a_deadlock_is_found_with_a_clock_too():
    run = launch(FRAME.format(body="bar.sync 0, 64;", target="sm_90a"), grid=1, block=64, args=[X, 0], clock="h200")
    assert not run.findings
    body = "setp.gt.u32 %p1, %r2, 31; @%p1 bra END; bar.sync 0, 64; END:"
    run = launch(FRAME.format(body=body, target="sm_90a"), grid=1, block=64, args=[X, 0], clock="h200")
    assert [f.kind for f in run.findings] == ["deadlock"]


def test_programs_read_the_time():
    read = "mov.u32 %r{n}, %clock;"
    chain = "fma.rn.f32 %f1, %f1, %f1, %f1;" * 50
    body = read.format(n=8) + chain + read.format(n=9) + "sub.u32 %r10, %r9, %r8; st.global.u32 [%rd1], %r10;"
    timed(ONE + body)
    assert X.view(torch.int32)[0].item() == pytest.approx(50 * H200.fma_latency, abs=8)


def test_a_capture_has_a_clock_if_requested():
    with capture(arch="sm_90a", clock=True) as session:
        pass
    assert session.milliseconds == 0
    with capture(arch="sm_90a") as session, pytest.raises(CaptureError, match="clock=True"):
        assert session.milliseconds


def test_who_spins_for_a_cta_that_does_not_run_in_detail_is_not_left_alone():
    """CTA 0 waits for a flag that the last one sets: of 40 CTAs, eight SMs in detail hold eight."""
    last = "mov.u32 %r5, %ctaid.x; setp.ne.u32 %p1, %r5, 39; @!%p1 st.release.gpu.global.u32 [%rd1], 1;"
    spin = (
        "setp.ne.u32 %p1, %r5, 0; @%p1 bra END; AGAIN: ld.acquire.gpu.global.u32 %r6, [%rd1]; setp.eq.u32 %p2, %r6, 0;"
    )
    run = timed(f"{last} {spin} @%p2 bra AGAIN; END:", grid=40, limit=20_000_000)
    assert run.counters["clusters"] == 40


@pytest.mark.simulated_only
@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda f: f"{f.kernel}: {f.says}".replace(" ", "-"))
def test_a_planted_fault_is_noticed_with_a_clock_unless_a_wait_that_gives_up_is_its_whole_point(fault):
    """A try_wait waits until the phase ends, where without a clock it gives up once."""
    asks_once = any("bra WAIT_" in old for old, _ in fault.edits)
    assert planted.verdict(fault, clock=True) or asks_once


@pytest.mark.parametrize("clock, says", [("h300", "is not a chip with a clock"), ("a100", "sm_80")])
def test_what_is_no_chip_is_refused(clock, says):
    with pytest.raises(LaunchError, match=says):
        timed("", clock=clock)


def test_every_chip_knows_every_constant_and_its_source():
    for chip in CHIPS.values():
        assert set(chip.constants) == set(H200.constants)
        assert all(n.how in ("measured", "published", "assumed") and n.source for n in chip.constants.values())
    text = (pathlib.Path(planted.HERE) / "ptx" / "pipeline_sm80.ptx").read_text()
    for name in ("a100", "rtx4090", "h200", "b200", "gb200"):
        arch = f"sm_{CHIPS[name].arch}" + ("a" if CHIPS[name].arch >= 90 else "")
        run, right = planted.pipeline_sm80(text, clock=name, arch=arch)
        assert right and run.clock.milliseconds > 0
