"""Accesses to another CTA's shared memory are over before that CTA ends."""

import pytest
import torch
from assembly import SEEDS, kernel, kinds

from ptxkit.launches import launch

pytestmark = pytest.mark.simulated

# CTA 1 of a cluster of two touches a word, or an mbarrier, of CTA 0
START = """
    mov.u32 %r1, %cluster_ctarank;
    setp.eq.u32 %p1, %r1, 1;
    setp.eq.u32 %p2, %r0, 0;
    setp.eq.u32 %p4, %r1, 0;
    and.pred %p3, %p1, %p2;
    and.pred %p4, %p4, %p2;
    mov.u32 %r2, smem;
    mapa.shared::cluster.u32 %r3, %r2, 0;
    @%p2 mbarrier.init.shared.b64 [smem + 64], 1;
    @%p2 fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""
VISITS = {
    "a store": "@%p3 st.shared::cluster.u32 [%r3], 7;",
    "a load": "@%p4 st.shared.u32 [smem], 7; bar.sync 0; @%p3 ld.shared::cluster.u32 %r4, [%r3 + 64];",
    "an arrival": "@%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3 + 64];",
}
MEET = "barrier.cluster.arrive{}.aligned; barrier.cluster.wait.aligned;"


def run(body, **options):
    return launch(kernel(START + body), grid=2, cluster=2, block=64, args=[torch.zeros(1)], **options)


@pytest.mark.parametrize("seed", [0, *SEEDS])
@pytest.mark.parametrize("visit", VISITS.values(), ids=VISITS)
def test_a_barrier_of_the_cluster_behind_the_last_visit_orders_it(visit, seed):
    assert not run(visit + MEET.format(""), schedule=seed, strict=True).findings


@pytest.mark.parametrize("visit", VISITS.values(), ids=VISITS)
def test_a_relaxed_barrier_orders_nothing(visit):
    """Compilers and silicon forgive it: CTAs that have met end soon after one another."""
    result = run(visit + MEET.format(".relaxed"))
    assert not result.findings and [note.kind for note in result.notes] == ["peer-exited"]
    strict = run(visit + MEET.format(".relaxed"), strict=True)
    assert kinds(strict) == ["peer-exited"] and "whose end nothing orders after this" in strict.findings[0].says


def test_it_is_enough_that_one_thread_of_the_owner_knows():
    """CTA 0 waits for the arrival itself, by one warp."""
    waits = """
    @!%p4 bra done;
    again: mbarrier.try_wait.parity.shared.b64 %p5, [smem + 64], 0;
    @!%p5 bra again;
    done:
    """
    assert not run(VISITS["an arrival"] + waits, strict=True).findings
    assert kinds(run(VISITS["an arrival"], strict=True)) == ["peer-exited"]


def test_what_a_cta_does_in_its_own_memory_needs_no_barrier():
    assert not run("@%p2 st.shared.u32 [smem], 7;", strict=True).findings
