"""Control flow: lanes part and meet, warps take turns, and nobody waits for ever in silence."""

import subprocess
import sys

import pytest
import torch
from assembly import SEEDS, STORE, kernel, kinds, reports, run

from ptxkit.launches import launch

pytestmark = pytest.mark.simulated


WAYS = {  # what runs, and what each lane then stores
    "lanes that part meet again": ("""
    and.b32 %r2, %r0, 1;
    setp.eq.u32 %p1, %r2, 0;
    mov.u32 %r9, 0;
    @%p1 bra EVEN;
    add.u32 %r9, %r9, 100;
    bra BOTH;
EVEN:
    add.u32 %r9, %r9, 200;
BOTH:
    bar.sync 0;
    add.u32 %r9, %r9, %r0;
""", lambda n: (200 if n % 2 == 0 else 100) + n),
    "a loop ends at a different turn for each lane": ("""
    mov.u32 %r9, 0;
    mov.u32 %r2, 0;
TOP:
    add.u32 %r9, %r9, %r2;
    add.u32 %r2, %r2, 1;
    setp.le.u32 %p1, %r2, %r0;
    @%p1 bra TOP;
    bar.sync 0;
""", lambda n: n * (n + 1) // 2),
    "an early exit leaves the others running": ("""
    setp.lt.u32 %p1, %r0, 7;
    @%p1 ret;
    mov.u32 %r9, 5;
    bar.sync 0;
""", lambda n: -1 if n < 7 else 5),
    "an indexed branch takes each lane to its own target": ("""
    and.b32 %r2, %r0, 3;
TARGETS: .branchtargets A, B, C, D;
    brx.idx %r2, TARGETS;
A:  mov.u32 %r9, 10; bra END;
B:  mov.u32 %r9, 11; bra END;
C:  mov.u32 %r9, 12; bra END;
D:  mov.u32 %r9, 13;
END:
    bar.sync 0;
""", lambda n: 10 + n % 4),
    "lane 0 spins on a flag that lane 1 sets on the other side of the branch": ("""
    st.shared.u32 [smem], 0;
    bar.warp.sync -1;
    mov.u32 %r9, 1;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra OTHERS;
SPIN:
    ld.relaxed.cta.shared.u32 %r3, [smem];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra SPIN;
    bra END;
OTHERS:
    setp.ne.u32 %p3, %r0, 1;
    @%p3 bra END;
    st.relaxed.cta.shared.u32 [smem], 1;
END:
    bar.warp.sync -1;
""", lambda n: 1),
}


@pytest.mark.parametrize(("body", "stored"), WAYS.values(), ids=WAYS)
def test_each_lane_goes_its_own_way(body, stored):
    out, result = run(body + STORE)
    assert out.tolist() == [stored(n) for n in range(32)]
    assert not result.findings


def test_an_aligned_instruction_reached_by_some_lanes_is_reported():
    body = """
    setp.lt.u32 %p1, %r0, 16;
    @%p1 bra END;
    bar.sync 0;
END:
    mov.u32 %r9, 1;
    bar.sync 1;
""" + STORE
    reports(run(body)[1], {"diverged"})


def test_a_barrier_that_is_never_completed_is_a_deadlock_that_names_the_waiters():
    body = """
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra END;
    bar.sync 1, 64;
END:
    mov.u32 %r9, 1;
""" + STORE
    _, result = run(body, threads=64)
    assert len(result.findings) == 1
    reports(result, ["deadlock"], "barrier 1: 32 of 64 threads have arrived", place="bar.sync 1, 64")


COUNTS = "TOP:\n add.u32 %r1, %r1, 1;\n bra TOP;"
COUNTS_AND_SLEEPS = COUNTS.replace("bra", "nanosleep.u32 100; nanosleep.u32 100; bra")  # it waits for no operand


@pytest.mark.parametrize("clock", [None, True])
@pytest.mark.parametrize("loop", [COUNTS, COUNTS_AND_SLEEPS])
def test_a_launch_that_does_not_end_is_given_up_at_its_limit(loop, clock):
    reports(run(loop, limit=10_000, clock=clock)[1], ["too-many-instructions"])


@pytest.mark.parametrize("clock", [None, True])
@pytest.mark.parametrize("body", ["", "nanosleep.u32 100;", "ld.param.u64 %rd5, [p1];"])
def test_a_loop_that_can_never_end_is_a_livelock_without_a_limit(body, clock):
    _, result = run(f"TOP:\n {body} bra TOP;", clock=clock)
    (finding,) = result.findings
    assert finding.kind == "livelock" and finding.place.ptx in ("bra TOP;", body)


def test_ctrl_c_ends_a_launch_with_a_clock_that_would_not_end():
    program = """
import os, signal, sys, threading
import torch
signal.signal(signal.SIGINT, signal.default_int_handler)
from ptxkit.launches import launch, program
ptx = sys.stdin.read()
program(ptx, None, None)
threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
launch(ptx, grid=1, block=32, args=[torch.zeros(1)], clock=True)
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, input=kernel(COUNTS_AND_SLEEPS), capture_output=True, text=True, timeout=600)
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("body, ended", [
    ("mbarrier.init.shared.b64 [smem], 1; W: mbarrier.test_wait.parity.shared.b64 %p1, [smem], 0;"
     " @!%p1 bra W;", ["livelock"]),
    ("setp.ne.u32 %p1, %r0, 0; @!%p1 bar.warp.sync 3; @%p1 bar.sync 0;", ["deadlock"]),
    ("TOP: bra TOP;", ["livelock"]),
    ("setp.ne.u32 %p1, %r0, 0; @%p1 ret; bar.sync 17;", ["barrier"]),
    ("trap;", ["operand"]),
    ("st.global.u32 [%rd1], %r0; trap;", ["operand"]),                     # and a race, which ends nothing
    ("st.global.u32 [%rd1], %r0;", []),
])
def test_a_finding_that_ends_the_launch_says_that_its_results_are_incomplete(body, ended):
    _, result = run(body)
    assert [f.kind for f in result.findings if f.ended] == ended
    assert result.incomplete == bool(ended) == ("incomplete: a finding ended the launch" in result.report())
    assert [f.kind for f in result.findings if "whose results are incomplete" in str(f)] == ended


def spinning(read, threads, others="bra END;", **options):
    """Warp 0 reads a zero until it changes, which never happens; the other warps run `others`."""
    body = f"""
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra OTHERS;
SPIN:
    {read}
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra SPIN;
    bra END;
OTHERS:
    {others}
END:
    mov.u32 %r9, 1;
""" + STORE
    out, flags = torch.zeros(threads, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return launch(kernel(body, pointers=2), grid=1, block=threads, args=[out, flags], **options)


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("options", [
    {}, {"clock": True}, {"schedule": SEEDS[0]},
    *(pytest.param({"schedule": seed}, marks=pytest.mark.exhaustive) for seed in SEEDS[1:]),
], ids=str)
@pytest.mark.parametrize("read", [
    "ld.acquire.gpu.global.u32 %r3, [%rd2];", "atom.acquire.gpu.global.add.u32 %r3, [%rd2], 0;",
    "not.b32 %r4, %r4; ld.volatile.global.u32 %r3, [%rd2];",                   # registers are the same every other time
    "st.global.u32 [%rd2+4], 7; ld.relaxed.gpu.global.u32 %r3, [%rd2];",
], ids=["a load", "an atomic", "two turns", "a store"])
def test_a_lock_that_nobody_releases_is_a_livelock_at_the_loop(read, options):
    result = spinning(read, 64, **options)
    (finding,) = result.findings
    assert finding.kind == "livelock" and "never ends" in finding.says
    assert finding.place.ptx in read + "setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN;"


def test_who_waits_for_a_warp_that_never_ends_is_named_too():
    reports(spinning("ld.acquire.gpu.global.u32 %r3, [%rd2];", 64, others="bar.sync 1, 64;"), ["deadlock", "livelock"])


def test_loops_with_barriers_in_them_never_end_either():
    """Triton's scalar atomics are such loops: one lane reads, and all warps get the number from shared memory."""
    read = """
    setp.ne.u32 %p5, %r0, 0;
    @!%p5 atom.acquire.gpu.global.cas.b32 %r3, [%rd2], 1, 1;
    @!%p5 st.shared.u32 [smem], %r3;
    bar.sync 0;
    ld.shared.u32 %r3, [smem];
    bar.sync 0;
"""
    assert kinds(spinning(read, 32)) == ["livelock"]
    _, result = run("mov.u64 %rd2, %rd1; SPIN:" + read + "setp.ne.u32 %p2, %r3, 0; @%p2 bra SPIN;", threads=160)
    assert kinds(result) == ["livelock"]


def test_a_warp_at_a_barrier_that_spinning_warps_arrive_at_may_go_on():
    """Warps 0 and 1 meet again and again, and every 400,000th time warp 0 arrives where warp 2 waits, which goes on
    and ends the loops."""
    body = """
    mov.u32 %r2, 0;
    setp.ge.u32 %p1, %r0, 64;
    @%p1 bra THIRD;
SPIN:
    bar.sync 1, 64;
    add.u32 %r2, %r2, 1;
    setp.eq.u32 %p4, %r2, 400000;
    @%p4 mov.u32 %r2, 0;
    setp.lt.u32 %p3, %r0, 32;
    and.pred %p4, %p4, %p3;
    @%p4 bar.arrive 2, 64;
    ld.volatile.global.u32 %r3, [%rd1+512];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra SPIN;
    bra END;
THIRD:
    bar.sync 2, 64;
    st.volatile.global.u32 [%rd1+512], 1;
END:
    mov.u32 %r9, 1;
""" + STORE
    out = torch.zeros(160, dtype=torch.int32)
    result = launch(kernel(body), grid=1, block=96, args=[out])
    assert (out[:96] == 1).all() and not {"livelock", "deadlock"} & set(kinds(result))


@pytest.mark.parametrize("options", [{}, {"clock": True}], ids=str)
def test_a_long_loop_that_counts_is_no_livelock(options):
    body = """
    mov.u32 %r9, 0;
TOP:
    add.u32 %r9, %r9, 1;
    setp.lt.u32 %p1, %r9, 1000000;
    @%p1 bra TOP;
""" + STORE
    out, result = run(body, **options)
    assert (out == 1_000_000).all() and not result.findings


def test_a_loop_whose_wait_may_give_up_is_none_before_it_has():
    """try_wait returns false after a while, and then the warp releases the other one."""
    body = """
    .shared .align 8 .b64 barrier;
    mov.u32 %r5, barrier;
    setp.ne.u32 %p3, %r0, 0;
    @%p3 bra READY;
    mbarrier.init.shared.b64 [%r5], 2;
READY:
    bar.sync 0;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra WAITER;
SPIN:
    ld.acquire.gpu.global.u32 %r3, [%rd2];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra SPIN;
    bra END;
WAITER:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r5], 0;
    st.release.gpu.global.u32 [%rd2], 1;
END:
    mov.u32 %r9, 1;
""" + STORE
    out, flags = torch.zeros(64, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    result = launch(kernel(body, pointers=2), grid=1, block=64, args=[out, flags])
    assert (out == 1).all() and "livelock" not in kinds(result)


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_a_spin_on_memory_is_fair_to_the_warp_that_ends_it(seed):
    body = """
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra WRITER;
SPIN:
    ld.acquire.gpu.global.u32 %r3, [%rd2];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra SPIN;
    ld.global.u32 %r9, [%rd2+4];
    bra END;
WRITER:
    mov.u32 %r9, 3;
    setp.ne.u32 %p3, %r0, 32;
    @%p3 bra END;
    st.global.u32 [%rd2+4], 42;
    st.release.gpu.global.u32 [%rd2], 1;
END:
""" + STORE
    out, flags = torch.zeros(64, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    result = launch(kernel(body, pointers=2), grid=1, block=64, args=[out, flags], schedule=seed)
    assert out.tolist() == [42] * 32 + [3] * 32
    assert not result.findings


def test_clusters_that_wait_for_later_ones_get_them_started():
    """CTA 0 spins until CTA 7 has run, though only one cluster is resident at first."""
    body = """
    mov.u32 %r2, %ctaid.x;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra LATER;
SPIN:
    ld.acquire.gpu.global.u32 %r3, [%rd1];
    setp.ne.u32 %p2, %r3, 7;
    @%p2 bra SPIN;
    ret;
LATER:
    setp.ne.u32 %p3, %r0, 0;
    @%p3 bra END;
    atom.add.release.gpu.global.u32 %r4, [%rd1], 1;
END:
"""
    out = torch.zeros(1, dtype=torch.int32)
    result = launch(kernel(body), grid=8, block=32, args=[out])
    assert out.item() == 7
    assert not result.findings


@pytest.mark.simulated_only
def test_every_special_register_has_its_value():
    body = """
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, %nctaid.y;
    mad.lo.u32 %r9, %r2, 10, %r3;
    mov.u32 %r4, %ntid.x;
    mad.lo.u32 %r9, %r4, 1000, %r9;
    mov.u32 %r5, %laneid;
    add.u32 %r9, %r9, %r5;
""" + STORE
    out, result = torch.zeros(32, dtype=torch.int32), None
    result = launch(kernel(body), grid=(1, 3), block=32, args=[out], checks=False)
    assert out.tolist() == [32000 + 20 + 3 + n for n in range(32)]
    assert result.counters["clusters"] == 3


@pytest.mark.simulated_only
def test_the_same_seed_gives_the_same_schedule():
    body = """
    atom.global.add.u32 %r9, [%rd2], 1;
""" + STORE
    def order(seed):
        out, ticket = torch.zeros(256, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        launch(kernel(body, pointers=2), grid=1, block=256, args=[out, ticket], schedule=seed)
        return out.tolist()

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in SEEDS}) > 1
