"""Backends that fuse stages: runs of them in kda.model.stages, in `kda verify` and in `kda selftest`."""

from __future__ import annotations

import json

import backends_made_up as made_up
import pytest
import torch
from click.testing import CliRunner
from torch.overrides import TorchFunctionMode

from kda.backends.reference import chunked, launch
from kda.model.stages import BACKWARD, FORWARD, OPERANDS, STAGES, find, holder, in_order
from kda.routing.capability import Capability, Rule
from kda.routing.dispatch import capabilities
from kda.tools.commands import selftest, verify
from kda.tools.verify import literal, parity
from kda.tools.verify.budget import Rounding
from kda.tools.verify.cases import Spec, make, make_inputs
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import ROUNDS_EVERY_OPERAND, Door
from kda.tools.verify.evidence import Evidence, provable
from kda.tools.verify.faults import FAULTS, Planted

FUSED = ("fwd/gate+intra+wy", "fwd/state+output", "bwd/output+state", "bwd/wy+intra+gate")
RUNS = [
    f"{table[0].name[:4]}{'+'.join(stage.name[4:] for stage in table[first:last])}"
    for table in (FORWARD, BACKWARD)
    for first in range(5)
    for last in range(first + 2, 6)
]
ANEW = "bwd/output+state+wy+intra+gate from inputs"
RUNS.append(ANEW)
SMALL = ["--lengths", "33,0,17", "-K", "32", "-V", "32", "--chunk-size", "32", "--dtype", "float32"]
EDGES = Spec(lengths=(33, 0, 31), K=32, V=32, C=32, dtype="float32", seed=5)


def run(command, *args):
    result = CliRunner().invoke(command, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


@pytest.fixture
def fused(monkeypatch):
    """Make a backend called `fused`: the reference, whose stages come in runs; `spoil` changes what a part wrote."""

    def make_up(stages=FUSED, spoil=lambda name, written: None, rounded_to=None, **declared):
        def stage(name, problem, offsets, tensors):
            assert set(tensors) == set(find(name).reads)
            env = dict(tensors)
            for part in find(name).members:
                written = launch.stage(part.name, problem, offsets, {n: env[n] for n in part.reads})
                spoil(part.name, written)
                env |= written
            return {n: env[n] for n in find(name).writes}

        mine = Capability("fused", 10, "made up", stages=stages, **declared)
        made_up.declare(monkeypatch, mine, stage=stage, rounded_to=rounded_to or launch.rounded_to)
        parity._oracle.cache_clear()
        return Door("fused")

    yield make_up
    parity._oracle.cache_clear()


# ---------------------------------------------------------------------------------------------- the table


WRITES = {
    "fwd/gate+intra+wy": {"A_qk", "A_inv", "w", "u", "qg", "kg", "gc_last"},
    "fwd/state+output": {"h", "v_new", "ht", "o"},
    "bwd/output+state": {"dv_new", "dh", "dh0"},
    "bwd/wy+intra+gate": {"dv", "dq", "dk", "dg", "dbeta", "dA_log", "ddt_bias"},
    "fwd/intra+wy": {"A_qk", "A_inv", "w", "u", "qg", "kg"},
}


@pytest.mark.parametrize("name", WRITES)
def test_a_run_writes_what_is_of_use_after_it(name):
    assert set(find(name).writes) == WRITES[name]


def test_a_run_reads_what_none_of_its_stages_writes():
    assert find("fwd/gate+intra+wy").reads == ("q", "k", "g", "beta", "A_log", "dt_bias", "v")
    assert find("bwd/output+state").reads == ("do", "A_qk", "qg", "kg", "w", "gc_last", "dht")


def test_a_backward_from_inputs_reads_what_a_call_is_given_and_writes_gradients():
    stage = find(ANEW)
    assert set(stage.reads) == {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0", "do", "dht"}
    assert set(stage.writes) == {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"}
    assert stage.backward and holder("bwd/wy", (ANEW,)) == ANEW


def test_a_stage_is_found_as_it_stands_in_the_table():
    assert all(find(name) is stage and stage.members == (stage,) for name, stage in STAGES.items())


@pytest.mark.parametrize("name", [
    "fwd/gat", "fwd/gate+wy", "fwd/wy+intra", "fwd/output+gate", "fwd/gate+", "up/gate", "bwd/wy+intra from inputs",
    "fwd/gate+intra from inputs",
])
def test_stages_that_do_not_follow_each_other_are_no_run(name):
    with pytest.raises(ValueError, match=r"no stage is called '.*'; there are fwd/gate, .*such as fwd/gate\+intra\+wy"):
        find(name)


def test_the_run_that_has_a_stage_is_found():
    assert holder("fwd/wy", FUSED) == "fwd/gate+intra+wy" and holder("fwd/gate+intra", FUSED) == "fwd/gate+intra+wy"
    assert holder("fwd/wy+state", FUSED) is None and holder("fwd/wy", ()) is None


def test_stages_and_runs_are_ordered_by_where_they_begin_and_end():
    names = ["bwd/gate", "fwd/state", "fwd/gate+intra", "fwd/gate", "fwd/intra"]
    ordered = ["fwd/gate", "fwd/gate+intra", "fwd/intra", "fwd/state", "bwd/gate"]
    assert [stage.name for stage in in_order(names)] == ordered


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_the_reference_is_its_formulas_and_its_stages_in_turn(name):
    case = make_inputs(lengths=(40, 0, 3), H=1, HV=2, K=12, V=20, C=32, dtype="float64", gate="softplus", seed=4)
    p, env = case.problem(), case.stage_tensors(torch.float64)
    env = literal.chain(STAGES, p, case.layout, env, torch.float64)
    found = launch.stage(name, p, case.spec.offsets, env)
    assert tuple(found) == find(name).writes
    for n, x in literal.run_stage(name, p, case.layout, env, torch.float64).items():
        assert torch.equal(x, env[n])
        assert float((found[n] - x).norm()) <= 1e-12 * float(x.norm()), n


@pytest.mark.parametrize("name", RUNS)
def test_what_a_tensor_of_a_run_is_said_to_follow_from_can_be_seen_from_outside(name):
    stage = find(name)
    for n in stage.writes:
        causes = set(parity.causes(n, stage))
        assert causes and causes <= {*stage.reads, *stage.writes}, n


# ---------------------------------------------------------------------------------------------- roundings


def test_what_is_rounded_between_two_stages_is_rounded_inside_their_run():
    case = make_inputs(lengths=(65,), H=1, K=32, V=32, dtype="float32", seed=1)
    widths = {}
    for rounded in ((), ("kb",)):
        oracle = parity.Oracle(case, Rounding(torch.float32, dict.fromkeys(rounded, "bfloat16")))
        stage = find("fwd/gate+intra+wy")
        widths[rounded] = {n: b.norm for n, b in oracle.budgets_alone(stage, oracle.feed(stage)).items()}
    assert widths["kb",]["w"] > 100 * widths[()]["w"]
    assert widths["kb",]["u"] == widths[()]["u"] and widths["kb",]["A_qk"] == widths[()]["A_qk"]


@pytest.mark.parametrize(("stage", "rounded", "off"), [
    ("fwd/intra", "D", {"A_qk", "A_kk"}),
    ("fwd/intra", "kD", {"A_qk", "A_kk"}),
    ("fwd/wy", "bv", {"u"}),
    ("fwd/wy", "A_inv", {"A_inv", "w", "u"}),
    ("fwd/state", "h", {"h", "v_new", "ht"}),
    ("fwd/state", "v_new", {"h", "v_new", "ht"}),
    ("bwd/state", "dh", {"dh", "dv_new", "dh0"}),
    ("bwd/state", "dv_new", {"dh", "dv_new", "dh0"}),
    ("bwd/wy", "P", {"db_local", "dkn_local", "dg2_local", "dA_kk"}),
    ("bwd/intra", "D", {"dqn", "dkn", "dg2", "db"}),
    ("bwd/intra", "kD", {"dqn", "dkn", "dg2", "db"}),
    ("bwd/intra", "dA_k", {"dqn", "dkn", "dg2", "db"}),
    ("bwd/intra", "qD", {"dkn", "dg2"}),
    ("bwd/intra", "dA_q", {"dkn", "dg2"}),
])
def test_what_a_stage_goes_on_with_is_what_it_rounded(stage, rounded, off):
    case = make_inputs(lengths=(65, 64), H=1, K=32, V=32, dtype="float32", seed=1)
    p, layout, float64 = case.problem(), case.layout, torch.float64
    exact = literal.chain(STAGES, p, layout, case.stage_tensors(float64), float64)
    found = literal.run_stage(stage, p, layout, exact, float64, Rounding(float64, {rounded: "bfloat16"}))
    assert {n for n, x in found.items() if float((x - exact[n]).norm()) > 1e-6 * float(exact[n].norm())} == off


def bfloat16_alone(problem):
    return {"w": "bfloat16", "kb": "bfloat16"} if problem.dtype == "bfloat16" else {}


def round_in_bfloat16(name, written):
    for n in {"w", "kb"} & set(written):
        written[n] = written[n].bfloat16().to(written[n].dtype)


def test_a_backend_may_round_differently_in_each_dtype(fused):
    door = fused(spoil=round_in_bfloat16, rounded_to=bfloat16_alone)
    narrow, wide = (make(Spec(lengths=(65, 3), K=32, V=32, dtype=dtype, seed=1)) for dtype in ("bfloat16", "float32"))
    assert door.rounding(narrow).stored and not door.rounding(wide).stored
    assert not parity.examine(door, narrow).wrong
    first = parity.examine(door, wide).first
    assert (first.stage, first.tensor, first.itself) == ("fwd/gate+intra+wy", "w", True)


def test_gradients_have_the_room_of_the_backend_that_makes_them(fused):
    forwards = Rule("fused.forward", lambda p, h: p.direction == "forward", "has forwards alone", "leave out backend")
    door = fused(rounded_to=bfloat16_alone, backward=False, rules=(forwards,))
    case = make(Spec(lengths=(65, 3), H=1, K=32, V=32, seed=1))
    rounding, plain = door.rounding(case), Door("reference").rounding(case)
    assert rounding.stored and rounding.gradients == plain.stored == {}
    mixed, mine, theirs = (budgets(case, r) for r in (rounding, rounding._replace(gradients=None), plain))
    for name, limit in mixed.items():
        assert limit[1:] == (mine if name in ("o", "ht") else theirs)[name][1:], name
    assert all(mine[name].norm > 10 * theirs[name].norm for name in ("ht", "dh0"))
    assert not [row for row in parity.whole_call(door, case, backward=True)[0] if row.wrong]


def test_a_rounding_of_what_is_no_tensor_of_a_stage_is_refused(fused):
    door = fused(rounded_to=lambda problem: {"W": "bfloat16"})
    with pytest.raises(ValueError, match=r"fused rounds W, which kda\.model\.stages does not contain"):
        door.rounding(make(EDGES))


class Bfloat16Products(TorchFunctionMode):
    """A mode that rounds both operands of every matrix product, as tensor cores take them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        first = {torch.Tensor.matmul: 0, torch.baddbmm: 1}.get(function)
        if first is not None:
            args = (*args[:first], *(x.bfloat16().to(x.dtype) for x in args[first : first + 2]), *args[first + 2 :])
        return function(*args, **(kwargs or {}))


class TensorCores(Door):
    """The reference with such products, but for the inverse, which declares what it rounds."""

    stages, rounds = FUSED, (*ROUNDS_EVERY_OPERAND, "dA_qk", "dA_kk", *OPERANDS)

    def rounding(self, case):
        return Rounding(torch.float32, dict.fromkeys(self.rounds, "bfloat16"))

    def stage(self, name, case, tensors):
        with Bfloat16Products():
            found = super().stage(name, case, tensors)
        return {n: None if x is None else self.rounding(case)(n, x) for n, x in found.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("regime", ["fast", "slow"])
def test_products_in_bfloat16_are_within_the_budget_of_what_is_declared_and_not_of_less(regime, monkeypatch):
    def exactly(A, inverse=chunked.inverse):
        with torch._C.DisableTorchFunction():
            return inverse(A)

    monkeypatch.setattr(chunked, "inverse", exactly)
    case = make(Spec(lengths=(65, 0, 30), H=1, HV=2, K=64, V=64, regime=regime, seed=7))
    report = parity.examine(TensorCores("reference"), case)
    assert not [row for row in report.rows if row.of_stage and row.wrong]
    monkeypatch.setattr(TensorCores, "rounds", ROUNDS_EVERY_OPERAND)
    wrong = {row.tensor for row in parity.examine(TensorCores("reference"), case).rows if row.of_stage and row.wrong}
    assert {"dk", "dg", "dbeta"} <= wrong


# ---------------------------------------------------------------------------------------------- kda verify


def test_the_walk_is_over_the_backends_own_stages(fused):
    fused()
    result = run(verify.command, *SMALL, "--backend", "fused", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert result.exit_code == 0
    assert list(dict.fromkeys(row["stage"] for row in rows)) == [*FUSED, "forward", "backward"]
    assert {row["tensor"] for row in rows if row["stage"] in FUSED} == set().union(*(find(n).writes for n in FUSED))


IN_ONE = ("fwd/gate+intra+wy+state+output", ANEW)


def test_a_backward_from_inputs_is_walked_after_its_forward(fused):
    report = parity.examine(fused(stages=IN_ONE), make(EDGES))
    walked = {row.stage: row for row in report.rows if row.of_stage}
    assert tuple(walked) == IN_ONE and not report.wrong


def test_it_is_judged_by_what_its_backward_rounds(fused):
    def backward_alone(problem):
        return {"w": "bfloat16"} if problem.direction == "backward" else {}

    def round_w(name, written):
        if name == "fwd/wy":                                                   # in both, and one declares it
            written["w"] = written["w"].bfloat16().to(written["w"].dtype)

    door = fused(stages=IN_ONE, spoil=round_w, rounded_to=backward_alone, some_backwards=True)
    report = parity.examine(door, make(EDGES), keep_going=True)
    assert {row.stage for row in report.wrong if row.of_stage} == {IN_ONE[0]}


def test_a_backward_that_its_backend_refuses_is_not_walked(fused):
    refused = Rule("fused.wide", lambda p, h: p.direction == "forward" or p.K > 32, "needs K > 32, got {p.K}")
    door = fused(stages=IN_ONE, rules=(refused,), some_backwards=True)
    report = parity.examine(door, make(EDGES))
    assert not report.wrong and {row.stage for row in report.rows} == {IN_ONE[0], "forward"}
    result = run(verify.command, *SMALL, "--backend", "fused", "--stage", ANEW)
    assert result.exit_code == 3 and "needs K > 32, got 32" in result.stdout


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("name", ["row-not-inverted", "h-one-percent", "dA-unscaled", "dh0-transposed"])
def test_a_fault_inside_a_backward_from_inputs_is_noticed(fused, name):
    fault = FAULTS[name]
    rows = parity.examine(Planted(fused(stages=IN_ONE), fault), make(fault.suited(EDGES)), keep_going=True).rows
    assert any(row.wrong and row.itself for row in rows if row.stage == ANEW)


def spoil_A_kk(name, written):
    if name == "fwd/intra":
        written["A_kk"][0, :, 5, 3] += 0.5


def test_a_fault_inside_a_run_is_found_where_it_comes_out(fused):
    door = fused(spoil=spoil_A_kk)
    rows = {row.tensor: row for row in parity.examine(door, make(EDGES), keep_going=True).rows if row.of_stage}
    assert rows["A_inv"].itself and rows["A_inv"].follows_from is None
    assert rows["A_inv"].pattern.startswith("Wrong: ") and "seq 0 chunk 0" in rows["A_inv"].pattern
    assert rows["w"].itself and rows["w"].follows_from == "A_inv"
    assert rows["h"].wrong and not rows["h"].itself and rows["h"].follows_from in ("w", "u")
    assert not any(rows[n].wrong for n in ("A_qk", "qg", "kg", "gc_last"))


def test_the_verdict_and_the_replay_line_name_the_run(fused):
    fused(spoil=spoil_A_kk)
    result = run(verify.command, *SMALL, "--backend", "fused")
    says = "First wrong stage: fwd/gate+intra+wy.  It is still wrong with correct inputs (q, k, g, beta, A_log,"
    assert result.exit_code == 1 and says in result.stdout
    assert "replay   kda verify --backend fused --stage fwd/gate+intra+wy" in result.stdout
    assert "not run, because the forward is wrong" in result.stdout
    again = run(verify.command, *SMALL, "--backend", "fused", "--stage", "fwd/gate+intra+wy")
    assert again.exit_code == 1 and "fwd/state" not in again.stdout


@pytest.mark.spread(every=10)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_noticed_though_the_stages_are_fused(fused, name):
    fault = FAULTS[name]
    report = parity.examine(Planted(fused(), fault), make(fault.suited(EDGES)), keep_going=True)
    if fault.place in STAGES:
        assert (report.first.stage, report.first.itself) == (holder(fault.place, FUSED), True)
        assert any(row.wrong for row in report.rows if not row.of_stage)
    assert report.first.wrong


def test_a_stage_inside_a_run_is_not_run_alone(fused):
    fused()
    says = "cannot run fwd/wy alone, which is a part of its fwd/gate+intra+wy; it runs fwd/gate+intra+wy, fwd/state"
    for command in (verify.command, selftest.command):
        result = run(command, "--backend", "fused", "--stage", "fwd/wy")
        assert result.exit_code == 3 and says in result.stdout, result.output
    result = run(verify.command, "--backend", "reference", "--stage", "fwd/gate+intra")
    assert result.exit_code == 3 and "cannot run fwd/gate+intra alone; it runs fwd/gate," in result.stdout
    for command in (verify.command, selftest.command):
        result = run(command, "--backend", "fused", "--stage", "fwd/gate+wy")
        assert result.exit_code == 2 and "no stage is called 'fwd/gate+wy'" in result.stderr


def test_a_run_after_a_gap_is_judged_on_what_the_oracle_feeds_it(fused):
    door = fused(stages=("fwd/gate", "fwd/state+output", "bwd/wy+intra+gate"))
    assert {row.stage for row in parity.examine(door, make(EDGES)).rows if row.of_stage} == set(door.stages)
    for name in door.stages[1:]:
        rows = parity.examine(door, make(EDGES), only_stage=name).rows
        assert [row.tensor for row in rows] == list(find(name).writes) and all(row.itself for row in rows)
        assert not any(row.wrong for row in rows)


def test_a_stage_may_be_there_alone_and_in_a_run(fused):
    door = fused(stages=(*FUSED, "fwd/gate"))
    report = parity.examine(door, make(EDGES))
    stages = list(dict.fromkeys(row.stage for row in report.rows if row.of_stage))
    assert stages == ["fwd/gate", *FUSED] and not report.wrong


# ---------------------------------------------------------------------------------------------- kda selftest


def test_the_selftest_proves_the_runs(fused):
    fused()
    result = run(selftest.command, "--backend", "fused", "--quick")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines() if line[3:4] == "/"] == list(FUSED)
    assert "4 of 4 stages" in result.stdout


def test_the_selftest_notices_a_fault_inside_a_run(fused):
    fused(spoil=spoil_A_kk)
    result = run(selftest.command, "--backend", "fused", "--stage", "fwd/gate+intra+wy")
    assert result.exit_code == 1 and "✗ fwd/gate+intra+wy: A_inv: " in result.stdout


NARROW = Rule("fused.dtype", lambda p, h: p.dtype != "float32", "takes no {p.dtype}", "cast")


def test_stages_are_proven_in_the_dtypes_that_the_backend_declares_and_takes(fused):
    stage, both = "fwd/gate+intra+wy", ("bfloat16", "float32")
    rounds = {"spoil": round_in_bfloat16, "rounded_to": bfloat16_alone}
    proof = parity.prove(fused(proof_dtypes=both, **rounds), stage)
    assert not proof.passed and proof.details and all(line.endswith(", float32") for line in proof.details)
    assert parity.prove(fused(proof_dtypes=both, rules=(NARROW,), **rounds), stage).passed
    proof = parity.prove(fused(rules=(NARROW,)), stage)
    assert not proof.passed and proof.details == (f"{stage}: not accepted: fused.dtype: takes no float32 -> cast",)


def test_stages_are_proven_with_heads_of_the_sizes_that_the_backend_declares(fused):
    wide = Rule("fused.head_dim", lambda p, h: p.K == p.V == 64, "takes no heads of {p.K}", "pad")
    stage = "fwd/gate+intra+wy"
    assert parity.prove(fused(proof_sizes=(64,), rules=(wide,)), stage).passed
    assert not parity.prove(fused(rules=(wide,)), stage).passed


def test_stages_of_sm100_are_proven_with_heads_of_128_and_of_64():
    sizes = [(spec.K, spec.V) for spec in parity.proof_specs(Door("sm100"))]
    assert sizes == [(128, 128)] * 2 + [(64, 64)] * 2


def test_what_every_backend_declares_is_there():
    for c in capabilities():
        assert all(find(name).name == name for name in c.stages)
        assert set(c.proof_dtypes) <= {"bfloat16", "float16", "float32", "float64"}
        assert provable(c) == (tuple(Evidence) if c.archs else (Evidence.EXECUTED,))
