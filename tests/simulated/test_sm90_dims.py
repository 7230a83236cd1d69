"""The Hopper forward in one kernel for other dims: V = 64 in CTAs alone and in clusters of two of which one walks, and
K = 64.  Calls against the definition, and the bits of the two kernels."""

import dataclasses

import pytest
import torch
from cute_calls import (
    RAGGED,
    Fault,
    assert_a_call_notices,
    assert_the_bits_of_two_kernels,
    called,
    drawn,
    plant,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm90 import launch, plan

pytestmark = pytest.mark.usefixtures("one_thread")
CUT = dict(lengths=(300, 1, 0, 5, 40))       # a walk is longer than a share
SMALL = dict(K=64, V=64)


CASES = {                                    # CTAs of a cluster, clusters that share all walks, drawn inputs
    "alone, stages used several times": (1, None, dict(V=64, T=390)),
    "alone, packed, GVA": (1, None, dict(V=64, HV=2, **RAGGED)),
    "alone, packed, many tokens of none": (1, None, dict(V=64, padding=140, **RAGGED)),
    "alone, a walk is longer than a share": (1, 4, dict(V=64, **CUT)),
    "alone, each cut goes through a walk": (1, 7, dict(V=64, B=2, T=130, HV=2)),
    "alone, any gate": (1, None, dict(V=64, T=200, gate="softplus")),
    "alone, one token": (1, None, dict(V=64, T=1)),
    "one of two walks, stages used several times": (2, None, dict(V=64, T=390)),
    "one of two walks, packed, GVA": (2, None, dict(V=64, HV=2, **RAGGED)),
    "one of two walks, a walk is longer than a share": (2, 4, dict(V=64, **CUT)),
    "one of two walks, any gate": (2, None, dict(V=64, B=2, T=100, gate="given", beta="given", l2norm=False)),
    "one of two walks, no initial state": (2, 3, dict(V=64, T=70, HV=5, initial_state=False)),
    "K = V = 64, alone": (1, 2, dict(HV=2, **SMALL, **RAGGED)),
    "K = V = 64, one of two walks": (2, None, dict(B=2, T=150, **SMALL)),
    "K = 64, both walk": (2, None, dict(K=64, T=390, HV=2)),
    "K = 64, both walk, a walk is longer than a share": (2, 4, dict(K=64, **CUT)),
    "K = 64, clusters of four": (4, None, dict(K=64, T=420)),
    "K = 64, clusters of four, packed, shares": (4, 3, dict(K=64, HV=2, **CUT)),
}


@pytest.mark.spread(every=18, first=1)                       # the kernel of sequences of no tokens
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_the_definition_and_has_the_bits_of_two_kernels(name, at_once):
    ctas, sharing, words = CASES[name]
    case = drawn(**words)
    at_once(ctas, sharing)
    planned = plan.plan(case.problem(), 132)
    assert planned.fused.ctas == ctas and planned.fused.wrapped == (ctas == 1 or bool(sharing))
    assert_the_bits_of_two_kernels(case, lambda: at_once(0))


@pytest.mark.spread(every=8)
@pytest.mark.parametrize("shape", [dict(T=200, HV=2), RAGGED | dict(padding=9)], ids=["rows", "packed"])
@pytest.mark.parametrize("ctas, dims", [(1, dict(V=64)), (2, dict(V=64)), (2, dict(K=64)), (1, SMALL)], ids=str)
@pytest.mark.parametrize("schedule", [1, 2])
def test_any_order_of_warps_gives_the_same_bits(schedule, ctas, dims, shape, at_once):
    case = drawn(**dims, **shape)
    at_once(ctas, 2 if "lengths" in shape else None)
    (expected, _), (found, session) = called(case), called(case, schedule=schedule, early=True)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.parametrize("ctas", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_sequences_of_no_tokens_hand_their_states_through(ctas, at_once):
    case = drawn(V=64, HV=2, lengths=(0, 0), padding=40)
    at_once(ctas)
    found, session = called(case)
    assert not session.findings and not found["o"].any()
    assert torch.equal(found["ht"], case.keywords["initial_state"])


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("ctas, dims", [(1, dict(V=64)), (2, dict(V=64)), (2, dict(K=64)), (4, dict(K=64))], ids=str)
def test_states_that_enter_chunks_have_the_bits_of_two_kernels(ctas, dims, v_first, at_once):
    case = drawn(T=150, HV=2, **dims)
    case.keywords["return_intermediate_states"] = True
    at_once(ctas)
    found, session = called(case, state_v_first=v_first)
    assert not session.findings and len(session.launches) == 1
    at_once(0)
    expected, _ = called(case, state_v_first=v_first)
    assert found.keys() == {"o", "ht", "h"} and all(torch.equal(found[x], expected[x]) for x in expected)


FUSED, HANDOVER = "sm90/fwd/fused", "sm90/parts/handover"
LONG = dict(V=64, T=390, HV=2)
FAULTS = {                                   # CTAs of a cluster, clusters that share all walks, drawn inputs
    "a tile is made before CHAIN has read the last one, alone": (1, None, LONG, Fault(
        HANDOVER, "cute.arch.mbarrier_wait(empty, turn & 1 ^ 1)", "pass", "race-read-write"
    )),
    "the CTA that walks is not told of the other's tiles": (2, None, LONG, Fault(
        HANDOVER, "            else:\n                self.copy(tile, full, Int32(0))\n", "", "deadlock"
    )),
    "the one that does not walk waits for a CHAIN of its own": (2, None, LONG, Fault(
        HANDOVER, "4 * self.c.walking + self.c.saves", "4 * self.c.ctas + self.c.saves", "deadlock"
    )),
    "mbarriers are not there yet, alone": (1, None, LONG, Fault(
        FUSED, "    cute.arch.sync_threads()\n        else:", "    pass\n        else:", "race-read-write", schedule=1
    )),
    "the CTA that walks is gone before the other is done": (2, None, LONG, Fault(
        FUSED, "        if cutlass.const_expr(self.c.ctas > 1):\n            self.meet()\n", "", "peer-exited"
    )),
    "behind the decays of K = 64 nothing was ever written": (2, None, dict(K=64, T=390), Fault(
        FUSED, "                    store(behind, [Float32(0.0)] * 2)\n", "                    pass\n", "uninitialised"
    )),
    "states of V = 64 cross where those of 128 would": (1, 7, dict(V=64, T=70, HV=8), Fault(
        "sm90/parts/share", "x.edges + (Int64(cluster * self.strips + rank)", "x.edges + (Int64(cluster * 2 + rank)",
        "out-of-bounds"
    )),
}


@pytest.mark.spread(every=7)
@pytest.mark.parametrize("ctas, sharing, words, fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(ctas, sharing, words, fault, tmp_path, monkeypatch, at_once):
    at_once(ctas, sharing)
    plant(fault, tmp_path, monkeypatch)
    assert_a_call_notices(fault, drawn(**words))


@pytest.mark.parametrize(
    "K, V, gate, T, H, lengths, ctas",
    [
        (128, 64, "bounded", 8192, 64, (), 2), (128, 64, "bounded", 8192, 128, (), 1),
        (128, 64, "bounded", 8192, 40, (), 2), (128, 64, "bounded", 8192, 96, (), 2),
        (128, 64, "bounded", 8192, 64, (1024,) * 8, 1), (128, 64, "bounded", 8192, 64, (128,) * 64, 1),
        (128, 64, "bounded", 8192, 32, (), "stream"), (128, 64, "bounded", 1024, 64, (), 2),
        (128, 64, "softplus", 8192, 64, (), 2), (128, 64, "softplus", 8192, 128, (), 1),
        (64, 64, "bounded", 8192, 64, (), 2), (64, 64, "bounded", 8192, 24, (), 0),
        (64, 64, "bounded", 8192, 64, (1024,) * 8, 1), (64, 64, "softplus", 8192, 64, (), 0),
        (64, 128, "bounded", 8192, 64, (), 2), (64, 128, "bounded", 8192, 32, (), 4),
        (64, 128, "bounded", 8192, 16, (), 0),
    ],
)
def test_the_form_that_was_fastest_runs(K, V, gate, T, H, lengths, ctas):
    """The times are from an H100 (benchmarks/results/h100-sm90-dims.json)."""
    rows = dict(lengths=(1,) * len(lengths)) if lengths else dict(T=1)
    p = drawn(K=K, V=V, gate=gate, initial_state=False, **rows).problem()
    planned = plan.plan(dataclasses.replace(p, T=T, H=H, HV=H), 132)
    assert ("stream" if planned.stream else planned.fused.ctas if planned.fused else 0) == ctas


@pytest.mark.exhaustive
def test_hardly_a_register_is_spilled(at_once):
    at_once(1)
    kernels = [launch.kernel(plan.plan(drawn(T=33, **dims).problem(), 132).fused) for dims in (dict(V=64), SMALL)]
    assert [kernel.spills for kernel in kernels] == [8, 0]
