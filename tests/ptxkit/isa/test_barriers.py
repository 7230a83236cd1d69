"""Barriers, mbarriers and fences: what they order, and every way of using them wrongly that is reported."""

import functools
from dataclasses import replace

import assembly
import pytest
import torch
from assembly import SEEDS, STORE, kernel, kinds, reports

from ptxkit.findings import shortened
from ptxkit.launches import launch

pytestmark = pytest.mark.simulated

ADDRESS = """
    shl.b32 %r10, %r0, 2;
    mov.u32 %r11, smem;
    add.u32 %r11, %r11, %r10;
"""


run = functools.partial(assembly.run, threads=64)
every_seed = pytest.mark.parametrize("seed", [0, *SEEDS])


def gives(out, result, expected):
    """Check that the threads of a clean run have stored these numbers."""
    assert out.tolist() == list(expected)
    assert not result.findings


def exchange(between, far=32):
    """Each thread hands its number to the one so far away: `between` stands between the store and the load."""
    return ADDRESS + f"""
    st.shared.u32 [%r11], %r0;
    {between}
    xor.b32 %r12, %r10, {4 * far};
    mov.u32 %r13, smem;
    add.u32 %r13, %r13, %r12;
    ld.shared.u32 %r9, [%r13];
""" + STORE


@every_seed
@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.cta.sync.aligned 3, 64;", "barrier.sync 2;",
                                     "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"])
def test_a_barrier_orders_what_came_before_it(barrier, seed):
    gives(*run(exchange(barrier), schedule=seed), [n ^ 32 for n in range(64)])


@every_seed
def test_without_it_the_race_is_found_under_every_schedule(seed):
    _, result = run(exchange(""), schedule=seed)
    assert {"race-write-read", "race-read-write", "uninitialised"} & set(kinds(result))
    assert any(f.kind.startswith("race") for f in result.findings)


def test_a_finding_names_both_instructions():
    _, result = run(exchange(""), schedule=1)
    race = next(f for f in result.findings if f.kind.startswith("race"))
    assert {"st.shared.u32 [%r11], %r0;", "ld.shared.u32 %r9, [%r13];"} == {race.place.ptx, race.other.ptx}
    assert "warp" in str(race) and "PTX line" in str(race)


def test_a_fence_is_no_barrier():
    _, result = run(exchange("fence.acq_rel.cta;"))
    assert any(f.kind.startswith("race") for f in result.findings)


def test_lanes_of_a_warp_need_a_warp_barrier():
    reports(run(exchange("", 1), threads=32)[1], ["race-lanes"])
    gives(*run(exchange("bar.warp.sync 0xffffffff;", 1), threads=32), [n ^ 1 for n in range(32)])


def among_lanes(between, far=1):
    """Each lane of a warp reads what the lane so far away has written."""
    initialised = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [smem+1024], 32;"
    return initialised + exchange(between, far)


SYNC, INSTANT = "bar.warp.sync 0xffffffff;", "fence.acq_rel.cta;"              # the latter is for each lane by itself
HALF = "setp.lt.u32 %p3, %r0, 16; @%p3 bar.warp.sync 0xffff; @!%p3 bar.warp.sync 0xffff0000;"
CLUSTER_ARRIVE, CLUSTER_WAIT = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"
ONE_HALF = "setp.lt.u32 %p3, %r0, 16; @%p3 "
APART = """
    setp.lt.u32 %p3, %r0, 16;
    @%p3 bra LOW;
    {0}
    bra TOGETHER;
LOW:
    {0}
TOGETHER:
"""
THROUGH_AN_MBARRIER = f"""
    {SYNC}
    st.shared.u32 [%r11], %r0;
    mbarrier.arrive.shared::cta.b64 %rd5, [smem+1024];
AGAIN:
    mbarrier.test_wait.shared::cta.b64 %p2, [smem+1024], %rd5;
    @!%p2 bra AGAIN;
"""
MEETINGS = {
    "bar.warp.sync": (SYNC, 1, True), "bar.warp.sync after a fence": (INSTANT + SYNC, 1, True),
    "a fence alone": (INSTANT, 1, False), "bar.sync": ("bar.sync 0;", 1, True),
    "bar.arrive": ("bar.arrive 0, 32;", 1, False), "half a warp": (HALF, 1, True), "the other half": (HALF, 16, False),
    "halves, then all": (HALF + SYNC, 16, True),
    "barrier.cluster": (CLUSTER_ARRIVE + CLUSTER_WAIT, 1, True), "an arrival": (CLUSTER_ARRIVE, 1, False),
    "halves at barrier.cluster": (APART.format("barrier.cluster.arrive; barrier.cluster.wait;"), 16, True),
    "a shuffle": (f"shfl.sync.bfly.b32 %r14, %r0, 1, 31, -1; {INSTANT}", 1, False),
    "an mbarrier": (THROUGH_AN_MBARRIER, 1, True),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("between", "far", "met"), MEETINGS.values(), ids=MEETINGS)
def test_lanes_must_meet_whatever_else_lies_between(between, far, met, strict):
    """A note, if there is at least something in between."""
    for seed in (0, *SEEDS):
        out, result = run(among_lanes(between, far), threads=32, schedule=seed, strict=strict)
        assert out.tolist() == [n ^ far for n in range(32)]
        assert {f.kind for f in result.findings + result.notes} == (set() if met else {"race-lanes"})
        assert all(f.grade == ("error" if strict else "note") for f in result.findings + result.notes)


@every_seed
@pytest.mark.parametrize(("between", "count", "found"), [
    (SYNC + "@%p4 ", 1, []), ("@%p4 ", 1, ["race-lanes"]), ("", 32, []), (HALF + "@%p4 ", 1, ["race-lanes"]),
])
def test_a_lane_that_arrives_speaks_for_those_that_it_has_met(between, count, found, seed):
    body = handover(count=count, arrive=f"setp.eq.u32 %p4, %r0, 0; {between}{ARRIVE}")
    assert "@%p4" in body or count == 32
    _, result = run(body, schedule=seed, strict=True)
    assert kinds(result) == found
    assert all("bar.warp.sync" in f.says and f.other.ptx.startswith("st.shared") for f in result.findings)
    assert not run(body, schedule=seed)[1].findings


def test_what_two_lanes_have_told_each_for_itself_is_known_of_both():
    """Lanes 0 and 1 arrive one after the other, at an mbarrier that counts two."""
    arrive = "".join(f"setp.eq.u32 %p4, %r0, {lane}; @%p4 {ARRIVE}" for lane in range(2))
    body = handover(count=2, arrive=arrive)
    for access, below in (("st.shared.u32 [%r11+256]", 2), ("ld.shared.u32 %r9", 34)):
        assert access in body
        body = body.replace(access, f"setp.lt.u32 %p4, %r0, {below}; @%p4 {access}")
    out, result = run(body, strict=True)
    assert not result.findings and out[32:34].tolist() == [0, 1]


def test_arrive_lets_one_side_run_ahead():
    """Warp 0 produces and arrives; warp 1 waits: ordered that way alone."""
    body = ADDRESS + """
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra CONSUMER;
    st.shared.u32 [%r11], %r0;
    bar.arrive 1, 64;
    mov.u32 %r9, 7;
    bra END;
CONSUMER:
    bar.sync 1, 64;
    ld.shared.u32 %r9, [%r11+-128];
END:
""" + STORE
    gives(*run(body), [7] * 32 + list(range(32)))


@every_seed
def test_a_warp_that_arrives_and_then_waits_is_counted_twice(seed):
    """Both warps give what they have written; warp 0 then waits for both, as the third of 96 threads."""
    body = ADDRESS + """
    setp.ge.u32 %p2, %r0, 64;
    @%p2 bra END;
    st.shared.u32 [%r11], %r0;
    mov.u32 %r9, 7;
    bar.arrive 1, {count};
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra END;
    bar.sync 1, {count};
    ld.shared.u32 %r9, [%r11+128];
END:
""" + STORE.replace("st.global", "@!%p2 st.global")
    out, result = run(body.format(count=96), threads=96, schedule=seed)
    assert out[:64].tolist() == [*range(32, 64), *[7] * 32]
    assert not result.findings
    reports(run(body.format(count=64), threads=96, schedule=seed)[1], {"deadlock", "race-write-read", "uninitialised"})


PATHS = """
    setp.lt.u32 %p1, %r0, {lanes};
    mov.u32 %r9, 1;
    @%p1 bra LOW;
    setp.ne.u32 %p2, %r0, 100;
    @%p2 bra {high};
    bra END;
LOW:
    mov.u32 %r9, 2;
    setp.lt.u32 %p3, %r0, 1;
    @%p3 bra {low};
    mov.u32 %r9, 3;
    bra {low};
"""


@every_seed
@pytest.mark.parametrize("meeting", ["bar.sync 0;", "barrier.sync 0;", "bar.red.popc.u32 %r12, 0, %p1;"])
def test_parts_of_a_warp_may_take_different_paths_to_one_barrier(meeting, seed):
    """A compiler gives them such paths where a branch on one thread is followed by one that all of them take alike."""
    body = ADDRESS + PATHS.format(lanes=2, low="MEET", high="MEET") + f"""
MEET:
    st.shared.u32 [%r11], %r9;
    {meeting}
    xor.b32 %r12, %r10, 4;
    mov.u32 %r13, smem;
    add.u32 %r13, %r13, %r12;
    ld.shared.u32 %r9, [%r13];
END:
""" + STORE
    gives(*run(body, schedule=seed), [3, 2, *[1] * 62])


@every_seed
@pytest.mark.parametrize(("low", "high", "found"), [
    ("barrier.sync 1;", "barrier.sync 1;", []),
    ("barrier.cta.sync 1, 64;", "barrier.arrive 1, 64; barrier.sync 2;", ["deadlock"]),
    ("barrier.sync 1;", "barrier.sync 2;", ["deadlock"]),
    ("barrier.sync 1;", "", ["deadlock"]),
    ("bar.sync 1;", "bar.sync 1;", ["diverged"]),
    ("bar.sync 1;", "", ["diverged"]),
    ("barrier.sync.aligned 1;", "barrier.sync.aligned 1;", ["diverged"]),
    ("barrier.sync 1;", "exit;", []),
    ("barrier.sync 1, 64; barrier.arrive 2, 64;", "barrier.sync 1, 64; barrier.arrive 2, 64;", []),
    ("barrier.red.popc.u32 %r9, 1, 64, %p1;", "barrier.red.popc.u32 %r9, 1, 64, %p1;", []),
])
def test_threads_arrive_one_by_one_at_a_barrier_that_is_not_aligned(low, high, found, seed):
    body = f"""
    and.b32 %r2, %r0, 31;
    setp.lt.u32 %p1, %r2, 5;
    mov.u32 %r9, 10;
    @%p1 bra LOW;
    {high}
    bra END;
LOW:
    {low}
END:
""" + STORE
    out, result = run(body, schedule=seed)
    assert kinds(result) == found
    if not found:
        assert out[:5].tolist() == [10] * 5
    if low == "barrier.sync 1;" and found:
        assert any("lanes ffffffe0 of its warp have not" in f.says for f in result.findings)


def test_a_guard_parts_a_warp_at_a_barrier_that_is_not_aligned():
    gives(*run(f"mov.u32 %r9, %r0; {ONE_HALF} barrier.sync 1; @!%p3 barrier.sync 1;" + STORE), range(64))
    reports(run(f"{ONE_HALF} bar.sync 1; @!%p3 bar.sync 1;")[1], {"diverged"})


@pytest.mark.parametrize("what, wrong", [
    ("bar.sync 16;", "barrier"),
    ("bar.sync 1, 33;", "barrier"),
    ("bar.arrive 1, 128;", "barrier"),
    ("bar.arrive 1, 64; bar.arrive 1, 64;", "barrier"),
    ("setp.lt.u32 %p3, %r0, 32; @%p3 bar.arrive 1, 64; @!%p3 bar.red.popc.u32 %r9, 1, 64, %p3;", "barrier"),
    ("barrier.cluster.wait.aligned;", "barrier"),
    ("barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;", "barrier"),
    (f"barrier.cluster.arrive; {ONE_HALF} barrier.cluster.wait; barrier.cluster.arrive;", "barrier"),
    (f"{ONE_HALF} barrier.cluster.arrive; barrier.cluster.wait;", "barrier"),
    (f"barrier.cluster.arrive; {ONE_HALF} barrier.cluster.wait.aligned;", "diverged"),
])
def test_a_misused_barrier_is_reported(what, wrong):
    reports(run(what)[1], {wrong})


@pytest.mark.parametrize("op, expected", [("popc.u32", 40), ("and.pred", 0), ("or.pred", 1)])
def test_a_reducing_barrier_reduces_over_all_threads(op, expected):
    target = "%r9" if op.startswith("popc") else "%p2"
    body = f"""
    setp.lt.u32 %p1, %r0, 40;
    bar.red.{op} {target}, 0, %p1;
    {"" if op.startswith("popc") else "selp.u32 %r9, 1, 0, %p2;"}
""" + STORE
    gives(*run(body), [expected] * 64)


# ---- mbarrier

INIT = """
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [smem], {count};
READY:
    {after}
"""
WAIT = """
AGAIN{n}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [smem], {parity};
    @!%p2 bra AGAIN{n};
"""


ARRIVE = "mbarrier.arrive.shared::cta.b64 %rd5, [smem];"


def handover(count=32, init_barrier="bar.sync 0;", arrive=ARRIVE, wait=True, parity=0):
    """Warp 0 writes and arrives at an mbarrier; warp 1 waits for it and reads."""
    return ADDRESS + INIT.format(count=count, after=init_barrier) + f"""
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra CONSUMER;
    st.shared.u32 [%r11+256], %r0;
    {arrive}
    mov.u32 %r9, 7;
    bra END;
CONSUMER:
    {WAIT.format(n=1, parity=parity) if wait else ""}
    ld.shared.u32 %r9, [%r11+128];
END:
""" + STORE


@every_seed
@pytest.mark.parametrize("strict", [False, True])
def test_an_mbarrier_hands_data_over_without_any_fence(strict, seed):
    gives(*run(handover(), schedule=seed, strict=strict), [7] * 32 + list(range(32)))


FAULTS = {
    "no wait": (dict(wait=False), {"race-write-read", "uninitialised", "race-read-write"}),
    "count one too many": (dict(count=33), {"deadlock"}),
    "count one too few": (dict(count=31), {"mbarrier"}),
    "the other parity": (dict(parity=1), {"race-write-read", "uninitialised", "race-read-write", "deadlock"}),
    "initialisation not ordered": (dict(init_barrier=""), {"race-write-read", "mbarrier"}),
    "relaxed arrival": (dict(arrive="mbarrier.arrive.relaxed.cta.shared::cta.b64 %rd5, [smem];"), {"race-write-read"}),
    "one lane arrives": (dict(arrive=f"setp.eq.u32 %p3, %r0, 0; @%p3 {ARRIVE}"), {"deadlock"}),
    "bytes never come": (dict(arrive="mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], 16;"), {"deadlock"}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_fault_in_the_handover_is_found(fault, seed):
    change, expected = FAULTS[fault]
    reports(run(handover(**change), schedule=seed)[1], expected)


def test_a_deadlock_at_an_mbarrier_says_what_is_missing():
    reports(run(handover(count=33))[1], {"deadlock"}, "phase 0, 1 of 33 arrivals and 0 bytes are missing")


def test_a_deadlock_at_an_mbarrier_that_counts_too_few_says_how_many_phases_have_ended():
    halves = f"setp.lt.u32 %p3, %r0, 16; @%p3 {ARRIVE} @!%p3 {ARRIVE}"         # each ends a phase
    body = INIT.format(count=16, after="bar.sync 0;") + halves + WAIT.format(n=1, parity=0)
    _, result = run(ADDRESS + body, threads=32)
    (finding,) = result.findings
    assert "phase 2 (phases that have ended: 2), 16 of 16 arrivals and 0 bytes are missing" in finding.says


def test_an_arrival_too_many_is_found_where_it_happens():
    first, all_at_once = ARRIVE.replace("[smem]", "[smem], 2"), "mbarrier.arrive.shared::cta.b64 %rd5, [smem], 4;"
    one = f"setp.eq.u32 %p3, %r0, 0; @%p3 {first} @%p3 {all_at_once}"
    _, result = run(ADDRESS + INIT.format(count=4, after="bar.sync 0;") + one, threads=32)
    finding = next(f for f in result.findings if "more arrivals than are pending" in f.says)
    assert finding.kind == "mbarrier" and "[smem], 4" in finding.place.ptx and "mbarrier.init" in finding.other.ptx


def asking(*steps):
    """Return PTX that makes an mbarrier, takes these steps with it, and stores a bit for each answer of a parity."""
    lines, answers = [], [step for step in steps if isinstance(step, int)]
    for step in steps:
        lines.append(f"mbarrier.{step};" if isinstance(step, str) else f"""
    mbarrier.test_wait.parity.shared::cta.b64 %p2, [smem], {step};
    selp.u32 %r10, 1, 0, %p2;
    shl.b32 %r9, %r9, 1;
    or.b32 %r9, %r9, %r10;""")
    return "mov.u32 %r9, 0;\n" + "\n".join(lines) + STORE, len(answers)


ARRIVES, EXPECTS = "arrive.shared::cta.b64 _, [smem]", "arrive.expect_tx.shared::cta.b64 _, [smem], 64"
COMPLETES = "complete_tx.relaxed.cta.shared::cta.b64 [smem], "


@pytest.mark.parametrize(("count", "steps", "answers"), [
    (2, (EXPECTS, 0, f"{COMPLETES}48", 0, ARRIVES, 0, f"{COMPLETES}16", 0, 1), "00010"),
    (1, (1, 0), "10"),
    (1, (f"{COMPLETES}64", EXPECTS, 0), "1"),
], ids=["as documented", "a fresh one lets parity 1 through", "bytes before they are expected"])
def test_a_phase_is_over_when_its_arrivals_and_bytes_have_come(count, steps, answers):
    body, asked = asking(f"init.shared::cta.b64 [smem], {count}", *steps)
    assert asked == len(answers)
    gives(*run(body, threads=1), [int(answers, 2)])


@pytest.mark.parametrize("what, wrong", [
    ("mbarrier.arrive.shared::cta.b64 _, [smem];", "mbarrier"),
    ("mbarrier.init.shared::cta.b64 [smem], 0;", "mbarrier"),
    ("mbarrier.init.shared::cta.b64 [smem], 1; mbarrier.init.shared::cta.b64 [smem], 1;", "mbarrier"),
    ("mbarrier.init.shared::cta.b64 [smem+4], 1;", "misaligned"),
    ("mbarrier.init.shared::cta.b64 [smem], 1; st.shared.u32 [smem+4], 1;", "mbarrier-overwritten"),
    (f"mbarrier.init.shared::cta.b64 [smem], 1; mbarrier.inval.shared::cta.b64 [smem]; {ARRIVE}", "mbarrier"),
    ("mbarrier.init.shared::cta.b64 [smem], 1; mbarrier.arrive.shared::cta.b64 _, [smem], 2;", "mbarrier"),
])
def test_a_misused_mbarrier_is_reported(what, wrong):
    reports(run(what, threads=1)[1], {wrong})


# ---- clusters


FENCE, MEET = "fence.mbarrier_init.release.cluster;", "barrier.cluster.arrive.relaxed.aligned;"


def remote(wait_at_end=True, scope=".cluster", rank_of="xor.b32 %r21, %r20, 1;", fence=FENCE, meet=MEET):
    """Each CTA of a pair writes into the other's shared memory and tells it through the other's mbarrier."""
    return f"""
    mov.u32 %r20, %cluster_ctarank;
    {rank_of}
    mov.u32 %r22, smem;
    mapa.shared::cluster.u32 %r23, %r22, %r21;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [smem], 1;
    {fence}
READY:
    {meet}
    barrier.cluster.wait.acquire.aligned;
    @%p1 bra RECEIVE;
    add.u32 %r24, %r20, 70;
    st.shared::cluster.u32 [%r23+64], %r24;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r23];
RECEIVE:
AGAIN:
    mbarrier.try_wait.parity.acquire{scope}.shared::cta.b64 %p2, [smem], 0;
    @!%p2 bra AGAIN;
    ld.shared.u32 %r9, [smem+64];
    {"barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if wait_at_end else ""}
    mul.wide.u32 %rd9, %r20, 4;
    add.s64 %rd9, %rd1, %rd9;
    @!%p1 st.global.u32 [%rd9], %r9;
"""


def of_a_pair(text, **options):
    """Run a kernel on a pair of CTAs; return what each of them stored, and the Run."""
    out = torch.zeros(2, dtype=torch.int32)
    return out, launch(kernel(text), grid=2, block=64, cluster=2, args=[out], **options)


@every_seed
def test_two_ctas_of_a_cluster_exchange_through_shared_memory(seed):
    gives(*of_a_pair(remote(), schedule=seed), [71, 70])


ORDERED = "barrier.cluster.arrive.release.aligned;"


@every_seed
@pytest.mark.parametrize(("fence", "meet", "strict", "found"), [
    (FENCE, ORDERED, True, []), ("fence.acq_rel.cluster;", ORDERED, True, []), ("", MEET, False, ["race-write-read"]),
    ("", ORDERED, True, ["mbarrier-fence"]), ("fence.acq_rel.cta;", ORDERED, True, ["mbarrier-fence"]),
    ("fence.proxy.async.shared::cta;", ORDERED, True, ["mbarrier-fence"]), ("", ORDERED, False, []),
])
def test_another_cta_sees_an_mbarrier_whose_initialisation_is_fenced(fence, meet, strict, found, seed):
    _, result = of_a_pair(remote(fence=fence, meet=meet), schedule=seed, strict=strict)
    assert kinds(result) == found and (strict or found or {n.kind for n in result.notes} == {"mbarrier-fence"})


RELEASE, ACQUIRE = "arrive.release.cluster.", "parity.acquire.cluster."
ARRIVE_BY_DEFAULT, WAIT_BY_DEFAULT = "arrive.", "parity."


@every_seed
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("arrive", "wait", "noted"), [
    (RELEASE, ACQUIRE, None), (ARRIVE_BY_DEFAULT, WAIT_BY_DEFAULT, "mbarrier.arrive"),
    (ARRIVE_BY_DEFAULT, ACQUIRE, "mbarrier.arrive"), (RELEASE, WAIT_BY_DEFAULT, "mbarrier.try_wait"),
])
def test_an_arrival_at_another_ctas_mbarrier_with_the_default_scope_is_remarked_once(arrive, wait, noted, strict, seed):
    """It is never an error: CUTLASS does the same, and hardware orders it."""
    text = remote(meet=ORDERED).replace(RELEASE, arrive).replace(ACQUIRE, wait)
    out, result = of_a_pair(text, schedule=seed, strict=strict)
    gives(out, result, [71, 70])
    assert [note.kind for note in result.notes] == ["mbarrier-scope"] * bool(noted)
    for note in result.notes:
        assert noted in note.place.ptx and "it relies on .cta between CTAs, as CUTLASS does" in note.says
        assert ".release.cluster" in note.advice and "note: mbarrier-scope" in result.report()


def test_an_mbarrier_of_the_own_cta_needs_no_more_than_the_default_scope():
    assert not run(handover(), strict=True)[1].notes


def test_an_mbarrier_that_is_initialised_again_awaits_another_fence():
    again = f"mbarrier.inval.shared::cta.b64 [smem]; mbarrier.init.shared::cta.b64 [smem], 1; {FENCE}"
    for then, found in ((again, []), (again.replace(FENCE, ""), ["mbarrier-fence"])):
        reports(of_a_pair(remote(fence=FENCE + then, meet=ORDERED), strict=True)[1], found)


def test_a_rank_outside_the_cluster_is_reported():
    reports(of_a_pair(remote(rank_of="mov.u32 %r21, 5;"))[1], {"out-of-bounds"})


# ---- setmaxnreg


def parted(first, low, high):
    """Warps whose threads lie below `first` run one instruction, the others another one."""
    return f"""
    setp.ge.u32 %p1, %r0, {first};
    @%p1 bra HIGH;
    setmaxnreg.{low};
    bra END;
HIGH:
    setmaxnreg.{high};
END:
    mov.u32 %r9, 1;
""" + STORE


GIVE, TAKE = "dec.sync.aligned.u32 40", "inc.sync.aligned.u32 {}"


@pytest.mark.parametrize(("body", "options", "found", "says"), [
    (f"setmaxnreg.{TAKE.format(240)};", {}, ["deadlock"], "registers"),
    (parted(256, GIVE, TAKE.format(216)), {}, [], ""),
    # nine warps have the registers of twelve: what eight of them ask for beyond their own is there
    (parted(256, TAKE.format(232), GIVE), dict(threads=288, registers=160), [], ""),
    (parted(256, TAKE.format(240), GIVE), dict(threads=288, registers=160), ["deadlock"], ""),
    ("setmaxnreg.dec.sync.aligned.u32 20;", {}, {"operand"}, ""),
    ("setmaxnreg.inc.sync.aligned.u32 250;", {}, {"operand"}, ""),
    ("setmaxnreg.dec.sync.aligned.u32 256;", {}, {"operand"}, ""),
], ids=["nobody gives any up", "some warps give them to others", "they are given to four warps at once",
        "more than four warps have", "too few", "not a multiple of 8", "too many"])
def test_registers_that_some_warps_give_up_serve_others(body, options, found, says):
    out, result = run(body, **dict(threads=512) | options)
    reports(result, found, says)
    if not found:
        assert (out == 1).all()


def test_two_lanes_of_one_instruction_are_advised_to_part_not_to_wait():
    body = ADDRESS + "mov.u32 %r13, smem;\nst.shared.u32 [%r13], %r0;\nmov.u32 %r9, 0;\n" + STORE
    _, result = run(body, threads=32)
    (race,) = result.findings
    assert race.kind == "race-lanes" and race.place == race.other
    assert "an address of its own" in race.advice and "syncwarp" not in str(race)


def test_a_mangled_name_is_cut():
    assert shortened("gemm") == "gemm" and shortened("k" * 300) == "k" * 80 + "..."


def test_a_kernel_of_the_dsl_is_called_as_its_function():
    assert shortened("kernel_cutlass_copy_kernel_tensorptrf32gmem_tensorptrf32gmem_0") == "copy_kernel"
    assert shortened("kernel_cutlass_kernel_mineChain_object_at__Arguments_0") == "kernel_mineChain"


def test_a_launch_may_end_at_its_first_error():
    _, whole = run(exchange(""))
    out, stopped = run(exchange(""), stop=True)
    first, n = whole.findings[0], "warp_instructions"
    (ended,) = stopped.findings
    assert len(whole.findings) > 1 and ended.ended and str(replace(ended, ended=False)) == str(first)
    assert stopped.counters[n] < whole.counters[n] and -1 in out.tolist()
    gives(*run(exchange("bar.sync 0;"), stop=True), [n ^ 32 for n in range(64)])


def test_one_lane_may_wait_at_the_clusters_barrier_while_others_exit():
    """The others of its warp have arrived, and that is all."""
    body = """
    mov.u32 %r10, %cluster_ctarank;
    xor.b32 %r11, %r10, 1;
    mov.u32 %r12, smem;
    mapa.shared::cluster.u32 %r13, %r12, %r11;
    setp.ne.u32 %p1, %r0, 0;
    @!%p1 st.shared.u32 [smem], %r10;
    barrier.cluster.arrive.release;
    @%p1 exit;
    barrier.cluster.wait.acquire;
    ld.shared::cluster.u32 %r14, [%r13];
    mul.wide.u32 %rd5, %r10, 4;
    add.s64 %rd5, %rd1, %rd5;
    st.global.u32 [%rd5], %r14;
    barrier.cluster.arrive.release;
    barrier.cluster.wait.acquire;
"""
    for seed in (0, *SEEDS):
        gives(*of_a_pair(body, schedule=seed, strict=True), [1, 0])
