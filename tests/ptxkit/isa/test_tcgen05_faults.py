"""tcgen05: what orders its operations, every way of using them wrongly that is reported, and what is refused."""

import pytest
import tensor_core as tc
import torch
from assembly import kinds, reports

from ptxkit.launches import launch
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

BF16 = tc.idesc("bf16", "bf16", 128, 32)


def plain(descriptors=(None, None), number=BF16, **options):
    """Run one mma that writes 32 columns, in a run that may find something."""
    a, b = tc.operands("bf16", 128, 32)
    image = tc.image_of(a, b)
    for operand, chosen in zip((a, b), descriptors):
        operand.descriptor = operand.descriptor if chosen is None else chosen
    return tc.multiply(a, b, 128, 32, number=number, image=image, strict=False, **options)[1]


# ---- order

RACES = {"race-write-read", "race-read-write", "race-write-write"}
BY_THREAD = "setp.eq.u32 %p7, %r0, {}; bar.warp.sync 0xffffffff; @%p7 " + tc.commit() + tc.WAIT
OVERWRITE = f"mov.u32 %r12, 0;\n @%p3 st.shared.u32 [{tc.A_AT}], %r12;\n"
LOADED = tc.STORED + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%x100}, [%r9];"
ORDERS = {
    "D is read without waiting": (dict(wait=""), RACES),
    "operands without a proxy fence": (dict(fence=""), ["proxy"]),
    "nothing is committed": (dict(commit=""), ["deadlock"]),
    "another thread commits": (dict(commit="", wait=BY_THREAD.format(1)), RACES),
    "the thread of the mma commits": (dict(commit="", wait=BY_THREAD.format(0)), []),
    "operands are overwritten before the commit is seen": (dict(wait=OVERWRITE + tc.WAIT), RACES),
    "operands are overwritten once the commit is seen": (dict(wait=tc.WAIT + OVERWRITE), []),
    "an mma overtakes a store to tensor memory": (dict(accumulate=1, stored=""), {"race-write-read"}),
    "D is replaced after a wait for its load": (dict(stored=LOADED + "tcgen05.wait::ld.sync.aligned;"), []),
    "D is replaced once it is used": (dict(stored=LOADED + "add.u32 %x101, %x100, 1;"), []),
    "D is replaced while it is loaded": (dict(stored=LOADED), ["race-read-write"]),
    "the barrier is invalidated once its commit is seen":
        (dict(wait=tc.WAIT + "bar.sync 0;\n @%p2 mbarrier.inval.shared.b64 [smem+16];\n"), []),
}


@tc.UNDER_ANY_SCHEDULE
@pytest.mark.parametrize(("parts", "found"), ORDERS.values(), ids=ORDERS)
def test_an_mma_is_ordered_by_its_commit_and_fences(parts, found, schedule):
    reports(plain(**parts, **schedule), found)


@pytest.mark.parametrize(("parts", "found", "place"), [
    (dict(sync=""), RACES, ""),
    (dict(wait="", load=""), ["race-write-write"], "@%p1 tcgen05.dealloc"),
    (dict(descriptors=(tc.descriptor(0x20000, 16, 1024, "128B"), None)), {"out-of-bounds"}, ""),
    (dict(descriptors=(None, tc.descriptor(0x400, 16, 256, "none"))), ["uninitialised"], ""),
], ids=["operands without a barrier", "columns freed under the mma", "a matrix outside", "operands never written"])
def test_an_mma_on_memory_that_is_not_its_own_is_found(parts, found, place):
    reports(plain(**parts), found, place=place)


@pytest.mark.parametrize("between", ["bar.sync 1;", ""])
@tc.UNDER_ANY_SCHEDULE
def test_operations_of_two_warps_are_ordered_by_what_orders_the_warps(between, schedule):
    a, b = tc.operands("bf16", 128, 32)
    one, two = (tc.mma("f16", (a.descriptor, b.descriptor), BF16, accumulate=n) for n in (0, 1))
    text = tc.source("ISSUE", 64, 0x8000)
    text = text.replace("@!%p3 bra issued;\n    ISSUE", tc.TWO_ISSUERS.format(one=one, between=between, two=two))
    cells = tc.pattern(1, 64)
    out = torch.zeros_like(cells)
    result = launch(text, grid=1, block=128, args=[tc.image_of(a, b), cells, out], **schedule)
    if between:
        assert not result.findings and torch.equal(out, tc.with_d(cells, 2 * a.x @ b.x.T, 128, 32))
    else:
        reports(result, RACES)


# thread 32 writes a word of A and tells thread 0, which multiplies; thread 64 knows of the commit alone
HAND_OVER = f"""
    setp.eq.u32 %p7, %r0, 32;
    mov.u32 %r12, 0;
    @%p7 st.shared.u32 [{tc.A_AT}], %r12;
    fence.proxy.async.shared::cta;
    setp.gt.u32 %p8, %r2, 1;
    @%p8 bra issued;
    bar.sync 1, 64;
"""


@tc.UNDER_ANY_SCHEDULE
def test_who_sees_a_commit_knows_what_its_operations_knew(schedule):
    a, b = tc.operands("bf16", 128, 32)
    overwrite = f"setp.eq.u32 %p7, %r0, 64;\n @%p7 st.shared.u32 [{tc.A_AT}], %r0;\n"
    text = tc.source(tc.mma("f16", (a.descriptor, b.descriptor), BF16), 64, 0x8000, wait=tc.WAIT + overwrite)
    text = text.replace("    @!%p3 bra issued;", HAND_OVER + "    @!%p3 bra issued;")
    cells = tc.pattern(1, 64)
    result = launch(text, grid=1, block=128, args=[tc.image_of(a, b), cells, cells.clone()], **schedule)
    assert not result.findings


@tc.UNDER_ANY_SCHEDULE
def test_a_commit_speaks_for_the_tensor_core_of_its_own_cta(schedule):
    a, b = tc.operands("bf16", 128, 32)
    issue = tc.mma("f16", (a.descriptor, b.descriptor), BF16)
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    first = f"{meet} setp.ne.u32 %p7, %r4, 1; @%p7 bra met; @!%p2 bra met; {issue} met: {meet}"
    tell = tc.commit(2).replace("cta_group::2", "cta_group::1")  # CTA 0 tells CTA 1, which has committed nothing
    cells, images = tc.pattern(2, 64), torch.stack([tc.image_of(a, b)] * 2)
    text = tc.source(issue, 64, 0x8000, 1, 2, sync=first, commit=tell)
    reports(launch(text, grid=2, block=128, cluster=2, args=[images, cells, cells.clone()], **schedule), RACES)
    # with its own commit the barrier counts two
    own_commit = f"@%p7 bra told; @!%p2 bra told; {tc.commit()} told:" + tc.WAIT
    text = tc.source(issue, 64, 0x8000, 1, 2, sync=first, commit=tc.commit(), wait=own_commit)
    assert not launch(text, grid=2, block=128, cluster=2, args=[images, cells, cells.clone()], **schedule).findings


def test_a_cta_may_not_exit_while_its_peer_still_multiplies():
    leave = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; setp.ne.u32 %p7, %r4, 0; @%p7 exit;"
    parts, images = tc.operands_of_a_pair(tc.values("bf16", 256, 1), tc.values("bf16", 32, 2))
    _, result, _ = tc.multiply(*parts, 256, 32, group=2, image=images, sync=leave, end="", strict=False)
    assert "peer-exited" in kinds(result)


# ---- descriptors

OK = 1 << 46


@pytest.mark.parametrize("descriptors, says", [
    ((OK | 3 << 61, None), "swizzle (bits 61-63) 3"),
    ((OK | 5 << 61, None), "swizzle (bits 61-63) 5"),
    ((None, OK | 7 << 61), "swizzle (bits 61-63) 7"),
    ((0, None), "bits 46-48 are 0"),
    ((OK | 1 << 50 | 2 << 61, None), "base offset (bits 49-51) 2"),
    ((OK | 1 << 52 | 2 << 61, None), "bit 52"),
    ((None, OK | 1 << 57), "bits 53-60 are 0x10"),
    ((OK | 1 << 61, None), "128B swizzle of 32B atoms"),
])
def test_a_bad_matrix_descriptor_is_described(descriptors, says):
    (finding,) = plain(descriptors).findings
    name = "A" if descriptors[0] is not None else "B"
    assert finding.kind in ("descriptor", "unsupported")
    assert says in finding.says and f"{name} descriptor 0x" in finding.says


@pytest.mark.parametrize("number, says", [
    (tc.idesc("bf16", "bf16", 96, 32), "M=96"), (tc.idesc("bf16", "bf16", 256, 32), "M=256"),
    (tc.idesc("bf16", "bf16", 32, 32), "M=32"), (tc.idesc("bf16", "bf16", 128, 0), "N=0"),
    (tc.idesc("bf16", "bf16", 128, 264), "N=264"), (BF16 | 4 << 7, "types 5"), (BF16 & ~0x30, "D of type 0"),
    (BF16 | 1 << 5, "D of type 3"), (BF16 | 1 << 2, "sparse"), (BF16 | 1 << 3, "saturation"),
    (BF16 | 1 << 6, "bits 6, 23 and 29"), (BF16 | 1 << 23, "bits 6, 23 and 29"), (BF16 | 1 << 29, "bits 6, 23 and 29"),
    (BF16 | 1 << 30, "for .ws alone"),
])
def test_a_bad_instruction_descriptor_is_described(number, says):
    (finding,) = plain(number=number).findings
    assert finding.kind in ("descriptor", "unsupported")
    assert says in finding.says and f"idesc {number:#x}" in finding.says


@pytest.mark.parametrize("name, m, n, group, ws, taken", [
    ("u8", 128, 24, 1, "", True), ("u8", 128, 40, 1, "", False), ("u8", 128, 48, 1, "", True),
    ("u8", 256, 48, 2, "", False), ("bf16", 128, 24, 1, "", True), ("bf16", 256, 24, 2, "", False),
    ("bf16", 256, 48, 2, "", True), ("bf16", 64, 32, 1, ".ws", False), ("bf16", 64, 64, 1, ".ws", True),
])
def test_each_kind_has_its_own_values_of_n(name, m, n, group, ws, taken):
    a, b = tc.operands(name, 128, 64)
    image = torch.stack([tc.image_of(a, b)] * group)
    _, result, _ = tc.multiply(a, b, m, n, group=group, ws=ws, image=image, strict=False)
    assert [f"N={n} is" in f.says for f in result.findings] == ([] if taken else [True])


@pytest.mark.parametrize("n, taken", [(24, False), (32, True)])
def test_eight_bit_transposed_b_takes_whole_groups_of_columns(n, taken):
    a = tc.Operand("e4m3", tc.values("e4m3", 128, 1), tc.A_AT, "128B")
    b = tc.Operand("e4m3", tc.values("e4m3", 32, 2), tc.B_AT, "32B", mn_major=True)
    _, result, _ = tc.multiply(a, b, 128, n, strict=False)
    assert kinds(result) == ([] if taken else ["descriptor"])


TRANSPOSED = dict(flags={"transpose_b": True})
SHIFTED = dict(ws=".ws", tail=", %rd12")


@pytest.mark.parametrize("name, m, n, options, found, says", [
    ("tf32", 128, 32, TRANSPOSED, ["descriptor"], "128B swizzle of 32B atoms"),
    ("e2m1", 128, 32, TRANSPOSED, ["descriptor"], "elements of 4 bits cannot be transposed"),
    ("f16", 32, 64, SHIFTED | dict(before=f"mov.b64 %rd12, {1 << 56};\n"), ["unsupported"], "a column shift"),
    ("f16", 32, 64, SHIFTED | dict(before=f"mov.b64 %rd12, {1 << 61};\n"), ["unsupported"], "a column shift"),
    ("f16", 128, 32, dict(d_type="f16", tail=", 3"), ["unsupported"], "rounding is not documented"),
], ids=["tf32 transposed", "4 bits transposed", "a shift", "another shift", "an f16 result scaled"])
def test_what_an_mma_cannot_do_is_refused(name, m, n, options, found, says):
    a, b = tc.operands(name, m, n)
    reports(tc.multiply(a, b, m, n, strict=False, **options)[1], found, says)


LANE = 1 << 16                                                                 # in an address of tensor memory


@pytest.mark.parametrize("m, n, d, a, more, found, says", [
    (128, 32, 1 * LANE, None, {}, ["tmem"], "D of M=128 starts in lane 1;"),
    (128, 32, 16 * LANE, None, {}, ["tmem"], "D of M=128 starts in lane 16;"),
    (64, 32, 8 * LANE, None, {}, ["tmem"], "D of M=64 starts in lane 8;"),
    (128, 32, 0, 16 * LANE + 40, {}, ["tmem"], "A starts in lane 16 and D in lane 0"),
    (64, 32, 16 * LANE, 40, {}, ["tmem"], "A starts in lane 0 and D in lane 16"),
    (128, 32, 40, None, {}, ["tmem"], "D takes columns 488 to 519"),
    (128, 32, 0, 60, {}, ["tmem"], "A takes columns 508 to 515"),
    (128, 32, 0, 40, {"transpose_a": True}, ["descriptor"], "A in tensor memory cannot be transposed"),
    (64, 64, 0, 40, {"ws": ".ws"}, ["unsupported"], "not documented"),
])
def test_matrices_lie_in_the_lanes_and_columns_that_their_layout_has(m, n, d, a, more, found, says):
    """`a` is where A lies if that is in tensor memory."""
    left, right = tc.operands("bf16", m, n)
    number = tc.idesc("bf16", "bf16", m, n, transpose_a=more.get("transpose_a", False))
    where = dict(d=f"%r8+{d}", a="%rd10" if a is None else f"[%r8+{a}]")
    issue = tc.mma("f16", (left.descriptor, right.descriptor), number, **where, ws=more.get("ws", ""))
    reports(tc.run(issue, image=tc.image_of(left, right), strict=False)[1], found, says)


def test_a_wrong_stride_gives_a_wrong_product():
    a, b = tc.operands("bf16", 128, 32)
    image = tc.image_of(a, b)
    right, _, cells = tc.multiply(a, b, 128, 32, image=image)
    a.descriptor = tc.descriptor(tc.A_AT, 16, 512, "128B")
    wrong, _, _ = tc.multiply(a, b, 128, 32, image=image)
    assert torch.equal(right, tc.with_d(cells, a.x @ b.x.T, 128, 32)) and not torch.equal(right, wrong)


# ---- cp, shift, commit


@pytest.mark.parametrize("issue, kind, says", [
    (f"tcgen05.shift.cta_group::1.down [%r8+{1 << 16}];", "tmem", "lane 1;"),
    (f"tcgen05.shift.cta_group::1.down [%r8+{160 << 16}];", "tmem", "lane 160;"),
    ("tcgen05.shift.cta_group::1.down [%r8+60];", "tmem", "columns 508 to 515"),
    (tc.copy("32x128b.warpx4", tc.descriptor(tc.A_AT, 16, 128, "none"), "%r8+65536"), "tmem", "reaches lane 128"),
    (tc.copy("4x256b", tc.descriptor(tc.A_AT, 16, 128, "none"), "%r8+2097152"), "tmem", "reaches lane 128"),
    (tc.copy("128x256b", tc.descriptor(tc.A_AT, 16, 128, "none"), "%r8+60"), "tmem", "columns 508 to 515"),
    (tc.copy("128x256b", tc.descriptor(tc.A_AT, 16, 128, "128B/32B")), "descriptor", "128B swizzle of 32B atoms"),
    (tc.copy("128x256b", 3 << 61 | OK), "descriptor", "swizzle (bits 61-63) 3"),
])
def test_copies_and_shifts_stay_within_what_there_is(issue, kind, says):
    _, result = tc.run(issue, image=tc.random_image(64), strict=False)
    reports(result, [kind], says)


def test_a_commit_needs_a_barrier():
    _, result = tc.run("", commit=tc.commit().replace("smem+16", "smem+32"), strict=False)
    assert kinds(result) == ["mbarrier"]
    assert "there is no mbarrier at shared address 0x420" in result.findings[0].says


def test_a_commit_needs_no_proxy_fence():
    tc.run("", fence="")


def test_a_commit_without_a_wait_may_outlive_its_cta():
    free = "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 64;"
    tc.run("", commit="", wait="", end=f"bar.sync 0; {free} @%p2 {tc.commit()}")


def test_a_commit_follows_the_initialisation_of_its_barrier():
    late = "bar.sync 0; setp.eq.u32 %p7, %r0, 32; @%p7 mbarrier.init.shared::cta.b64 [smem+32], 1;"
    to_it = tc.commit().replace("smem+16", "smem+32")
    assert kinds(tc.run("", sync=late, commit=to_it, wait="", strict=False)[1]) == ["race-write-read"]
    assert not tc.run("", sync=late + "bar.sync 0;", commit=to_it, wait="")[1].findings


@pytest.mark.parametrize("address, taken", [("cvta.shared.u64 %rd12, %rd13;", True), ("mov.u64 %rd12, %rd1;", False)])
def test_a_commit_takes_a_generic_address_of_shared_memory(address, taken):
    generic = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd12+16];"
    parts = dict(commit=f"mov.u64 %rd13, smem; {address} {generic}", wait=tc.WAIT if taken else "")
    reports(tc.run("", **parts, strict=False)[1], [] if taken else ["out-of-bounds"])


# ---- what is refused


@pytest.mark.parametrize("instruction, says", [
    ("mma.sp.cta_group::1.kind::f16 [%r8], %rd10, %rd11, [%r8], %r11, %p6;", "sparse"),
    ("mma.cta_group::1.kind::f16.ashift [%r8], [%r8], %rd11, %r11, %p6;", ".ashift"),
    ("mma.cta_group::1.kind::f64 [%r8], %rd10, %rd11, %r11, %p6;", "kind::f16, kind::f8f6f4"),
    ("mma.kind::f16 [%r8], %rd10, %rd11, %r11, %p6;", "cta_group::1, cta_group::2"),
    ("mma.cta_group::2.kind::f16 [%r8], %rd10, %rd11, %r11, %p6;", "one of them for the whole kernel"),
    ("mma.cta_group::1.kind::i8 [%r8], %rd10, %rd11, %r11, %p6, 2;", "scale-input-d"),
    ("mma.cta_group::1.kind::f16 [%r8], %rd10, %rd11, %r11, %p6, 16;", "immediates 0 to 15"),
    ("mma.cta_group::1.kind::f16 [%r8], %rd10, %rd11, %r11, {%r1, %r2}, %p6;", "4 with cta_group::1"),
    ("mma.cta_group::1.kind::f16.collector::b0::fill [%r8], %rd10, %rd11, %r11, %p6;", "collector::b0::fill"),
    ("cp.cta_group::1.64x128b [%r8], %rd10;", "64x128b.warpx2::02_13"),
    ("cp.cta_group::1.32x64b [%r8], %rd10;", "128x256b"),
    ("commit.cta_group::1.b64 [smem];", "mbarrier::arrive::one"),
    ("frob.cta_group::1 [%r8];", "mma"),
])
def test_variants_that_are_not_simulated_are_refused_with_what_is(instruction, says):
    with pytest.raises(PtxError) as caught:
        tc.run("tcgen05." + instruction)
    assert says in str(caught.value) and instruction[:20] in str(caught.value)


@pytest.mark.parametrize("target, taken", [
    ("sm_100a", True), ("sm_103a", True), ("sm_110a", True), ("sm_90a", False), ("sm_120a", False), ("sm_121a", False),
])
def test_only_sm_100_sm_103_and_sm_110_have_a_tensor_memory(target, taken):
    if taken:
        tc.run("", target=target)
    else:
        with pytest.raises(PtxError, match="sm_100a, sm_103a, sm_110a"):
            tc.run("", target=target)


def test_what_one_of_these_archs_lacks_is_refused():
    with pytest.raises(PtxError, match="kind::i8 on sm_103; supported: sm_100a, sm_110a"):
        tc.run(tc.mma("i8", (0, 0), 0), target="sm_103a")
    with pytest.raises(PtxError, match="scale-input-d on sm_110; supported: sm_100a, sm_103a"):
        tc.run(tc.mma("f16", (0, 0), 0, tail=", 2"), target="sm_110a")


def test_a_pair_needs_a_cluster():
    ptx = tc.source(tc.copy("128x256b", tc.descriptor(tc.A_AT, 128, 256, "none"), group=2), 64, 16, group=2)
    cells = tc.pattern(1, 64)
    result = launch(ptx, grid=1, block=128, args=[torch.zeros(16, dtype=torch.uint8), cells, cells.clone()])
    reports(result, ["tmem"], "has no peer")
