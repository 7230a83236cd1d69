"""A copy has read its CTA's shared memory before that CTA ends: a thread of it has waited."""

import pytest
import torch
import transfers as tr
from assembly import reports

from ptxkit.launches import launch
from ptxkit.tensormap import TensorMap

pytestmark = pytest.mark.simulated

everywhere = pytest.mark.parametrize("options", tr.SCHEDULES)
COMMIT, READ = "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;"
PLAIN = "cp.async.bulk.global.shared::cta.bulk_group [%rd1+1024], [%r20], 1024;"
ADDING = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1+1024], [%r20], 1024;"


def by_groups(copy, after):
    """Thread 0 copies from shared memory to the second half of a tensor."""
    body = tr.load_shared(1024) + "fence.proxy.async.shared::cta;\nbar.sync 0;\n" + tr.by_thread_0(copy) + after
    return tr.frame(body), [tr.noise(2048)]


def of_a_map(op, after):
    x = torch.zeros(16, 32, dtype=torch.int32)
    m = TensorMap(x, box=(32, 8))
    text = tr.storing(m, (0, 0), 1024, op=op, wait_for="", after="AFTER").replace(COMMIT, "")
    return text.replace("AFTER", after), [m, tr.noise(1024)]


COPIES = {
    "a copy": lambda after: by_groups(PLAIN, after),
    "a reduction": lambda after: by_groups(ADDING, after),
    "a tensor store": lambda after: of_a_map("", after),
    "a tensor reduction": lambda after: of_a_map("add", after),
}
WAITS = {  # behind the copy; %p1 is false in thread 0
    "the group is waited for": (f"@!%p1 {COMMIT} @!%p1 {READ}", True),
    "it is waited for until it has written": (f"@!%p1 {COMMIT} @!%p1 cp.async.bulk.wait_group 0;", True),
    "an earlier wait named a newer group": (f"{COMMIT} {READ} {COMMIT} cp.async.bulk.wait_group.read 1;", True),
    "nothing follows": ("", False),
    "it is committed alone": (f"@!%p1 {COMMIT}", False),
    "the wait has no group": (f"@!%p1 {READ}", False),
    "the wait lets one group run on": (f"@!%p1 {COMMIT} @!%p1 cp.async.bulk.wait_group.read 1;", False),
    "another lane waits": (f"{COMMIT} @%p1 {READ}", False),
    "all meet at a barrier": (f"@!%p1 {COMMIT} bar.sync 0;", False),
}


def run(program, grid=1, **options):
    text, args = program
    return launch(text, grid=grid, block=tr.THREADS, args=args, **options)


@everywhere
@pytest.mark.parametrize(("after", "clean"), WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_the_thread_that_started_a_copy_waits_for_its_group(copy, after, clean, options):
    reports(run(copy(after), strict=True, **options), [] if clean else ["copy-at-exit"])


def test_compilers_and_silicon_forgive_a_missing_wait():
    result = run(by_groups(PLAIN, COMMIT))
    (note,) = result.notes
    assert not result.findings
    assert str(note) == (
        "note: copy-at-exit: k, CTA 0, warp 0, lane 0: its CTA may end before this has read the CTA's shared memory: "
        "this thread has not waited for its bulk group\n"
        f"    at PTX line 32: {PLAIN}\n"
        "    to fix it: the thread commits it (cp.async.bulk.commit_group) and runs cp.async.bulk.wait_group.read "
        "before it exits"
    )


def test_each_lane_waits_for_its_own_copies():
    """Every lane stores 16 bytes; half of the lanes wait."""
    places = "shl.b32 %r9, %r0, 4; add.u32 %r10, %r20, %r9; cvt.u64.u32 %rd8, %r9; add.s64 %rd9, %rd1, %rd8;\n"
    copy = f"cp.async.bulk.global.shared::cta.bulk_group [%rd9+1024], [%r10], 16;\n{COMMIT}\n"
    body = tr.load_shared(1024) + "fence.proxy.async.shared::cta;\nbar.sync 0;\n" + places + copy
    some = "and.b32 %r11, %r0, 1; setp.eq.u32 %p4, %r11, 0;\n@%p4 "
    assert not run((tr.frame(body + READ), [tr.noise(2048)]), strict=True).findings
    (found,) = run((tr.frame(body + some + READ), [tr.noise(2048)]), strict=True).findings
    assert found.kind == "copy-at-exit" and found.lane == 1 and found.count == tr.THREADS // 2


def sending(after):
    """CTA 0 of two sends its shared memory to CTA 1, which waits for it; another mbarrier lies 8 bytes on."""
    body = f"""
    mov.u32 %r40, %cluster_ctarank;
    setp.eq.u32 %p4, %r40, 0;
    setp.eq.and.u32 %p5, %r0, 0, %p4;
    add.u32 %r42, %r20, 4096;
    mapa.shared::cluster.u32 %r43, %r42, 1;
    mapa.shared::cluster.u32 %r44, %r21, 1;
    mapa.shared::cluster.u32 %r45, %r21, 0;
    @!%p1 mbarrier.init.shared::cta.b64 [%r21+8], 1;
    {tr.load_shared(1024)}
    fence.proxy.async;
    {tr.make_barrier()}
    {tr.by_thread_0(tr.expect(1024))}
    {tr.MEET}
    @%p5 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r43], [%r20], 1024, [%r44];
    @%p4 bra SENT;
    {tr.wait()}
SENT:
    {after}
    """
    return tr.frame(body), [tr.noise(1024)]


ANSWER = """
    @%p4 bra HEAR;
    @!%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r45+8];
    bra HEARD;
HEAR:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p6, [%r21+8], 0;
    @!%p6 bra HEAR;
HEARD:
"""
ORDERS = {
    "the cluster meets": (tr.MEET, True),
    "the receiver answers": (ANSWER, True),
    "nothing follows": ("", False),
    "the cluster meets without an order": (tr.MEET.replace(".arrive", ".arrive.relaxed"), False),
}


@everywhere
@pytest.mark.parametrize(("after", "clean"), ORDERS.values(), ids=ORDERS)
def test_a_cta_that_sends_its_memory_hears_of_the_end(after, clean, options):
    result = run(sending(after), grid=2, cluster=2, strict=True, **options)
    reports(result, [] if clean else ["copy-at-exit"])


def test_the_advice_for_a_sent_copy_is_an_answer():
    (found,) = run(sending(""), grid=2, cluster=2, strict=True).findings
    assert "no thread of this CTA knows that the mbarrier's phase has ended" in found.says
    assert found.cta == 0 and found.advice.startswith("the CTA that waits for the phase (mbarrier.try_wait) then meets")
