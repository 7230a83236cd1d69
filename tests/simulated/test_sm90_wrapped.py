"""The Hopper forward in one kernel where walks outnumber clusters: each cluster has an equal share of all walks, and a
state that is cut goes from cluster to cluster.  Against the definition, and the bits of two kernels."""

import itertools

import pytest
import torch
from cute_calls import (
    Fault,
    assert_a_call_notices,
    assert_the_bits_of_two_kernels,
    called,
    changed,
    plant,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm90 import plan
from kda.verify.cases import make_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(**options):
    return make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | options)


@pytest.fixture
def clusters(plan_says):
    """One kernel of so many clusters; 0: two kernels."""

    def ask(count):
        plan_says(FUSED=bool(count), CLUSTERS=count)

    return ask


SHARES = {
    "a walk is cut between two clusters": (2, dict(T=70, HV=3)),
    "each cut goes through a walk": (3, dict(B=2, T=130, HV=2)),
    "a share is a whole number of walks": (2, dict(B=4, T=33)),
    "a share is a chunk": (3, dict(B=4, T=20)),
    "packed, GVA": (2, dict(lengths=(65, 0, 1, 130), HV=2)),
    "a walk is longer than a share": (4, dict(lengths=(300, 1, 0, 5, 40))),
    "packed, many tokens of none": (3, dict(lengths=(40, 33, 0, 70), padding=140)),
    "no initial state": (2, dict(T=70, HV=3, initial_state=False)),
    "more sequences than lanes": (3, dict(lengths=(1, 0, 2) * 13)),
}


@pytest.mark.spread(every=12)
@pytest.mark.parametrize("name", SHARES)
def test_a_call_is_the_definition_and_has_the_bits_of_two_kernels(name, clusters):
    count, shape = SHARES[name]
    case = case_of(**shape)
    clusters(count)
    assert plan.plan(case.problem(), 132).fused.wrapped
    assert_the_bits_of_two_kernels(case, lambda: clusters(0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", range(1, 7))
def test_no_bit_depends_on_the_number_of_clusters(count, clusters):
    case = case_of(lengths=(130, 0, 1, 200, 64, 31), HV=2)
    clusters(count)
    found, session = called(case)
    clusters(0)
    expected, _ = called(case)
    assert not session.findings and all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("shape", [dict(T=130, HV=3), dict(lengths=(100, 0, 1, 90), padding=9)], ids=["rows", "packed"])
@pytest.mark.parametrize("schedule", [1, 2, 3, 4])
def test_any_order_of_warps_gives_the_same_bits(schedule, shape, clusters):
    case = case_of(**shape)
    clusters(2)
    (expected, _), (found, session) = called(case), called(case, schedule=schedule, early=schedule % 2 == 0)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.exhaustive
def test_states_may_be_v_first_and_bfloat16(clusters):
    case = changed(case_of(lengths=(70, 0, 40)), initial_state=lambda x: x.bfloat16())
    clusters(2)
    found, session = called(case, state_v_first=True)
    clusters(0)
    expected, _ = called(case)
    assert not session.findings and all(torch.equal(found[x], expected[x]) for x in expected)


def test_sequences_of_no_tokens_hand_their_states_through(clusters):
    case = case_of(lengths=(0, 0, 0), HV=2, padding=40)
    clusters(2)
    found, session = called(case)
    assert not session.findings and not found["o"].any()
    assert torch.equal(found["ht"], case.keywords["initial_state"])


@pytest.mark.parametrize(
    "walks, clusters, waits", [((248,) * 66, 66, False), ((256,) * 96, 66, False), ((4,) * 4096, 66, False),
                               ((300, 1, 1, 1), 4, True)]
)
def test_nobody_waits_where_no_walk_is_longer_than_a_share(walks, clusters, waits):
    """If a walk has two pieces, the first ends before the second begins, counted in chunks."""
    ends, begins = {}, {}
    starts = [0, *itertools.accumulate(walks)]
    for cluster in range(clusters):
        begin, end = (n * starts[-1] // clusters for n in (cluster, cluster + 1))
        within = [(w, a, b) for w, (a, b) in enumerate(itertools.pairwise(starts)) if a < end and b > begin]
        leaves = [piece for piece in within if piece[1] >= begin and piece[2] > end]
        enters = [piece for piece in within if piece[1] < begin]
        now = 0
        for w, a, b in leaves + [piece for piece in within if piece not in leaves + enters] + enters:
            a, b = max(a, begin), min(b, end)
            begins[w, a], ends[w, b], now = now, now + b - a, now + b - a
    assert waits == any(ends.get((w, a), 0) > t for (w, a), t in begins.items())


FUSED, SHARE = "sm90/fwd/fused", "sm90/parts/share"
MEET = "team.sync()" + 60 * " "
FAULTS = {
    "a state is read before it is there": Fault(
        SHARE, "while crossed == 0:\n", "while crossed == 7:\n", "race-write-read"
    ),
    "one thread says for all that the state is there": Fault(
        SHARE, f"{MEET}# all have stored", "pass", "race-write-read"
    ),
    "the flag orders nothing": Fault(SHARE, 'sem="release"', 'sem="relaxed"', "race-write-read"),
    "the flag is read without an order": Fault(SHARE, 'sem="acquire"', 'sem="relaxed"', "race-write-read"),
    "threads do not wait for the one that waits": Fault(
        SHARE, f"{MEET}# all may read", "pass", "race-write-read"
    ),
    "a share is read before it is there": Fault(
        FUSED, "self.producer.share.publish(x, s.share, cluster, clusters)\n        self.meet()\n",
        "self.producer.share.publish(x, s.share, cluster, clusters)\n", "race-read-write"
    ),
    "stages begin at 0 again": Fault(
        FUSED, "self.make(x, ring, work, begin, tokens, head, piece.number, before)",
        "self.make(x, ring, work, begin, tokens, head, piece.number, 0)", "deadlock"
    ),
    "a piece's chunks end where the walk ends": Fault(SHARE, "cutlass.min(left, within)", "left", "wrong answer"),
}


@pytest.mark.spread(every=12)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch, clusters):
    plant(fault, tmp_path, monkeypatch)
    clusters(2)
    assert_a_call_notices(fault, case_of(T=130, HV=3))
