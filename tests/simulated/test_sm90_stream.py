"""The Hopper forward for few heads, in which some CTAs make tiles of two chunks and others walk: calls against the
definition, the order of CTAs and warps, planted faults, and when the plan chooses it."""

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch
from cute_calls import (
    RAGGED,
    Fault,
    assert_a_call_notices,
    assert_less_shared_memory_is_too_little,
    called,
    changed,
    check,
    has_products_that_wait_for_no_other,
    kept_nowhere,
    looks_at_no_later_token,
    plant,
    saturated,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm90 import launch, plan
from kda.backends.sm90.configs import GROUPS, StreamConfig
from kda.problem import Problem
from kda.verify.cases import make_inputs

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(**options):
    return make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | options)


@pytest.fixture
def streamed(plan_says, monkeypatch):
    """Makers and walkers, so many makers, and segments of every sequence; None: as many makers as keep up."""
    usual = plan.makers_of_stream

    def ask(makers=None, segments=1):
        monkeypatch.setattr(plan, "makers_of_stream", usual if makers is None else lambda *_: makers)
        plan_says(STREAM=True, STREAM_SEGMENTS=segments)

    yield ask
    monkeypatch.undo()
    launch.forget_plans()


CASES = {
    "an odd number of chunks": dict(T=70),
    "a group makes several steps": dict(T=450),
    "one token": dict(T=1),
    "one more than a step": dict(T=65, H=2),
    "packed, GVA": dict(HV=2, **RAGGED),
    "packed, tokens of no sequence": dict(lengths=(40, 33, 0, 70), padding=140),
    "rows of a batch": dict(B=2, T=100, HV=2),
    "no initial state": dict(T=130, initial_state=False),
    "64 columns": dict(T=150, V=64),
    "g of float32": dict(T=130, g_dtype="float32"),
    "softplus": dict(T=150, gate="softplus"),
    "softplus, packed": dict(gate="softplus", HV=2, **RAGGED),
    "given decays": dict(T=150, gate="given"),
    "given decays of float32, 64 columns": dict(T=150, V=64, gate="given", g_dtype="float32"),
    "no norms": dict(T=100, l2norm=False),
    "states of (V, K)": dict(T=100, state_v_first=True),
}


@pytest.mark.spread(every=16, first=1)
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_the_definition(name, streamed):
    shape = dict(CASES[name])
    dtype, v_first = shape.pop("g_dtype", "bfloat16"), shape.pop("state_v_first", False)
    case = changed(case_of(**shape), g=lambda x: x.to(getattr(torch, dtype)))
    streamed()
    config = plan.plan(case.problem(), 132).stream
    assert config.staged == (dtype == "bfloat16")
    check(case, state_v_first=v_first)


CUT = {
    "GVA, segments of four steps": dict(T=450, HV=2),
    "the last segment has one token": dict(T=385, segments=3),
    "a segment has no tokens": dict(T=100, segments=3),
    "packed, GVA": dict(HV=2, segments=3, **RAGGED),
    "packed, tokens of no sequence": dict(lengths=(140, 33, 0, 70), padding=250),
    "rows of a batch": dict(B=2, T=150),
    "no initial state": dict(T=200, initial_state=False),
    "64 columns": dict(T=300, V=64, segments=3),
    "softplus that forgets": dict(T=200, gate="softplus", regime="fast"),
    "states of (V, K)": dict(T=150, state_v_first=True),
    "several blocks of rows of a segment": dict(T=1200),
}


@pytest.mark.spread(every=12, first=3)
@pytest.mark.parametrize("name", CUT)
def test_a_call_that_is_cut_is_the_definition(name, streamed):
    shape = dict(CUT[name])
    segments, v_first = shape.pop("segments", 2), shape.pop("state_v_first", False)
    streamed(segments=segments)
    case = case_of(**shape)
    found = plan.plan(case.problem(), 132)
    assert found.stream.cut and found.stream_segments == segments and found.compose
    check(case, state_v_first=v_first)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", ["bounded", "softplus", "given"])
@pytest.mark.parametrize("segments", [1, 3])
def test_saturated_gates_are_within_the_budget(gate, segments, streamed):
    streamed(segments=segments)
    check(saturated(case_of(T=150, gate=gate)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("makers", [1, 2, 5, 50])
@pytest.mark.parametrize("segments", [1, 2])
def test_no_bit_depends_on_the_number_of_makers(makers, segments, streamed):
    case = case_of(lengths=(130, 0, 1, 200, 64, 31), HV=2)
    streamed(3, segments)
    expected, _ = called(case)
    streamed(makers, segments)
    found, session = called(case)
    assert not session.findings and all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.exhaustive
def test_sequences_of_a_batch_do_not_see_each_other(streamed):
    """A sequence alone has the bits that it has beside others."""
    case, start = case_of(lengths=(130, 33), HV=2), 130
    streamed(2)
    found, _ = called(case)
    x = case.keywords
    alone = {name: x[name][:, start:] for name in ("q", "k", "v", "g", "beta")} | {"cu_seqlens": None}
    alone["initial_state"] = x["initial_state"][1:]
    behind = dataclasses.replace(case, keywords=x | alone)
    expected, session = called(behind)
    assert not session.findings
    assert torch.equal(found["o"][:, start:], expected["o"]) and torch.equal(found["ht"][1:], expected["ht"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [dict(T=390), dict(lengths=(290, 0, 1, 90), padding=9)], ids=["rows", "packed"])
@pytest.mark.parametrize("schedule", [1, 2, 3, 4])
@pytest.mark.parametrize("segments", [1, 2])
def test_any_order_of_warps_gives_the_same_bits(segments, schedule, shape, streamed):
    case = case_of(**shape)
    streamed(2, segments)
    (expected, _), (found, session) = called(case), called(case, schedule=schedule, early=schedule % 2 == 0)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.exhaustive
def test_nothing_depends_on_later_tokens(streamed):
    streamed(2, segments=2)
    looks_at_no_later_token(case_of(T=200), 100, "sm90")


@pytest.mark.exhaustive
@pytest.mark.parametrize("segments", [1, 2])
def test_sequences_of_no_tokens_hand_their_states_through(segments, streamed):
    case = case_of(lengths=(0, 40, 0), HV=2, padding=40)
    streamed(segments=segments)
    found, session = called(case)
    assert not session.findings and not found["o"][:, 40:].any()
    assert torch.equal(found["ht"][::2], case.keywords["initial_state"][::2])


STREAM, STEPS = "sm90/fwd/stream", "sm90/parts/steps"
FAULTS = {
    "tiles are read before they are there": Fault(
        STREAM, "while ready == 0:", "while ready == 2:", "race-read-write", schedule=2
    ),
    "the flag is set before the copy has ended": Fault(
        STREAM, "            cute.arch.cp_async_bulk_wait_group(0)\n", "", "race-write-read", schedule=2
    ),
    "the next step is made before the copy has read this one": Fault(
        STREAM, "cute.arch.mbarrier_wait(field_at(work.base, self.struct.taken), turn & 1 ^ 1)", "pass",
        "race-read-write", schedule=2
    ),
    "pairs of the next chunk come before INVERSE has read those of this one": Fault(
        STREAM, "cute.arch.mbarrier_wait(field_at(work.base, self.struct.solved), before & 1 ^ 1)\n        if", "if",
        "race-read-write", schedule=2
    ),
    "chunks are joined before their inverses are there": Fault(
        STREAM, "            cute.arch.mbarrier_wait(field_at(work.base, self.struct.solved), before & 1 ^ 1)\n", "",
        "race-write-read", schedule=2
    ),
    "the step leaves before it is whole": Fault(STREAM, "            JOINED.sync(group)\n", "", "race-write-read"),
    "A2 is made where KT is": Fault(
        STEPS, "self.put_A2(field_at(a, self.tile.TB), rows, A2)", "self.put_A2(field_at(a, self.tile.KG), rows, A2)",
        "race-write-read"
    ),
    "parts of a step are read before all have made theirs": Fault(
        STEPS, "        self.team.meet()                                                       # KT_a and A2_b",
        "        # KT_a and A2_b", "race-write-read"
    ),
    "kE is overwritten before all have read it": Fault(
        STEPS, "        self.team.meet()                                                       # G is there",
        "        # G is there", "race-read-write", schedule=2
    ),
    "a stage is overwritten before CHAIN has read it": Fault(
        STREAM, "cute.arch.mbarrier_wait(read + stage, phase ^ 1)\n            with", "with", "race-write-write",
        schedule=2
    ),
    "o is overwritten before STORE has read it": Fault(
        STREAM, 'cute.arch.mbarrier_wait(self.field(shared, "taken") + place, phase_of(i, OUTPUTS) ^ 1)', "pass",
        "race-read-write", schedule=2
    ),
    "STORE reads o before it is there": Fault(
        STREAM, "cute.arch.mbarrier_wait(written + place, phase_of(i, OUTPUTS))", "pass", "uninitialised"
    ),
    "o is put where STORE reads it before its product is done": Fault(
        STREAM, "wait_group(1)\n            self.hand_back", "wait_group(2)\n            self.hand_back",
        "register-in-flight"
    ),
}


JOIN, SEGMENTS = "common/cute/join", "common/cute/segments"
FAULTS_OF_SEGMENTS = {
    "all segments begin with the state that enters the sequence": Fault(
        STREAM, "if walk.segment == 0:", "if walk.segment >= 0:", "wrong answer"
    ),
    "M begins with nothing": Fault(STREAM, "self.state.identity(S, walk.strip)", "pass", "wrong answer"),
    "M is not transposed": Fault(STREAM, "walk.strip, c.K, True, S)", "walk.strip, c.K, False, S)", "wrong answer"),
    "zeros of M's walk are read before they are there": Fault(
        STREAM, "                cute.arch.mbarrier_arrive(full + stage)\n",
        "                arrive_when_copied(full + stage)\n", "race-write-read"
    ),
    "a segment's tokens are another's": Fault(SEGMENTS, "return begin + first,", "return begin,", "wrong answer"),
    "a segment's steps are elsewhere": Fault(
        STREAM, "step + skipped // TOKENS", "step + skipped // C", "out-of-bounds"
    ),
    "the last rows of o are left": Fault(
        JOIN, "if lane_rows[r] < rows:", "if lane_rows[r] < rows - 1:", "wrong answer"
    ),
    "channels of edge lie as they are counted": Fault(
        JOIN, "row = place_of_channel(channel)", "row = channel", "wrong answer"
    ),
    "edge is read before all of it is there": Fault(
        JOIN, "            cute.arch.sync_threads()\n", "", "race-write-read"
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch, streamed):
    streamed(1)
    plant(fault, tmp_path, monkeypatch)
    assert_a_call_notices(fault, case_of(T=650))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS_OF_SEGMENTS.values(), ids=FAULTS_OF_SEGMENTS)
def test_a_fault_of_segments_is_noticed(fault, tmp_path, monkeypatch, streamed):
    streamed(1, segments=2)
    plant(fault, tmp_path, monkeypatch)
    assert_a_call_notices(fault, case_of(T=300))


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_the_form_that_racecheck_follows_is_this_kernel(gate, tmp_path, monkeypatch, streamed):
    for x, name in ((launch, "kernel"), (sys, "path")):                         # `follow` changes both
        monkeypatch.setattr(x, name, getattr(x, name))
    monkeypatch.syspath_prepend(BENCHMARKS)
    kept_nowhere(monkeypatch)
    case = case_of(T=390, gate=gate)
    streamed()
    expected, _ = called(case)
    importlib.import_module("sanitized").follow(tmp_path)
    assert all(torch.equal(x, expected[name]) for name, x in check(case).items())


@pytest.mark.exhaustive
def test_it_takes_the_shared_memory_that_its_configuration_says(monkeypatch, streamed):
    streamed()
    assert_less_shared_memory_is_too_little(case_of(T=300), monkeypatch, StreamConfig)


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("segments", [1, 2])
def test_roles_share_out_the_registers_of_the_launch(segments, gate, tmp_path, streamed):
    streamed(segments=segments)
    config = plan.plan(case_of(T=33, gate=gate).problem(), 132).stream
    kernel, (chain, others) = launch.kernel(config), config.registers
    assert kernel.spills <= (16 if gate == "bounded" else 96)
    assert 128 * chain + 512 * others <= 640 * kernel.registers <= 65536 and config.shared <= 227 * 1024
    assert (GROUPS - 1) * config.group.bytes + config.group.end <= config.shared
    has_products_that_wait_for_no_other(kernel, tmp_path)


CHOSEN = {                                   # segments, makers; as measured on an H200
    "T=8192 H=16": (1, 86), "T=4096 H=12": (1, 64), "T=8192 H=20": (1, 92), "T=8192 H=24": (1, 84),
    "T=2048 H=16": (1, 86), "T=8192 H=16 V=64": (1, 86), "T=2048 H=8": (1, 43), "T=8192 H=8": (2, 84),
    "T=32768 H=8": (2, 84), "T=8192 H=4": (4, 76), "T=32768 H=2": (7, 75), "T=32768 H=8 V=64": (2, 86),
    "T=8192 H=32": (0, 0), "T=8192 H=64": (0, 0), "T=512 H=16": (0, 0), "T=1024 H=8": (0, 0), "T=32768 H=12": (0, 0),
    "T=8192 H=4 N=4 packed": (0, 0),
}


@pytest.mark.parametrize("shape", CHOSEN)
def test_the_plan_chooses_it_where_it_was_faster_with_as_many_makers_as_keep_up(shape):
    found = plan.plan(Problem.parse(f"bounded l2norm bfloat16 K=128 V=128 {shape}"), 132)
    assert (found.stream_segments, found.makers) == CHOSEN[shape] and bool(found.stream) == bool(found.makers)


@pytest.mark.parametrize("options", [dict(batch_invariant=True), dict(intermediate_states=True)])
def test_the_plan_does_not_choose_it_for_calls_that_promise_or_request_more(options):
    """Its bits are those of steps of 64 tokens, so a call that promises the same bits for any batch does without."""
    p = Problem.parse("bounded l2norm bfloat16 K=128 V=128 T=8192 H=16")
    assert plan.plan(p, 132).stream and not plan.plan(dataclasses.replace(p, **options), 132).stream
