"""Budgets, what they must notice, and `kda verify`."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from itertools import pairwise

import backends_made_up as made_up
import pytest
import torch
from click.testing import CliRunner

from kda.backends.reference import launch
from kda.cli import cli
from kda.model.bundles import Saved
from kda.model.stages import BACKWARD, FORWARD, STAGES
from kda.routing.capability import Capability, Rule
from kda.tools.commands.verify import command
from kda.tools.verify import budget as verify_budget
from kda.tools.verify import definition, literal, parity, places
from kda.tools.verify.budget import Budget, Rounding, Scale, dithered, shaken
from kda.tools.verify.cases import Spec, load, make, make_inputs, save
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import ROUNDS_EVERY_OPERAND, Door
from kda.tools.verify.faults import FAULTS, Planted
from kda.tools.verify.literal import chain, run_stage
from kda.tools.verify.parity import examine, smaller
from ptxkit.compile.target import parse

EDGES = {32: (33, 0, 31), 64: (65, 0, 63)}   # chunk size -> tokens of sequences
CHUNKS = pytest.mark.parametrize("C", [32, pytest.param(64, marks=pytest.mark.exhaustive)])
SMALL = ["--lengths", "33,0,17", "-K", "32", "-V", "32", "--chunk-size", "32", "--dtype", "float32"]


def kda_verify(*args: str, small: bool = True):
    return CliRunner().invoke(command, [*(SMALL if small else []), *args])


def budget(exact: torch.Tensor, rounded: torch.Tensor, stored: torch.dtype = torch.float32) -> Budget:
    return Budget.of(exact, rounded, compute=torch.float32, stored=stored, summed=128)


@pytest.fixture(scope="module")
def random() -> torch.Tensor:
    return torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------- the budget


def test_a_rounding_is_within_its_own_budget_and_three_times_its_error_is_not(random):
    rounded = random.bfloat16().double()
    limit = budget(random, rounded)
    assert limit.excess(random) == 0 and limit.excess(rounded) == pytest.approx(0.5, rel=1e-3)
    assert limit.excess(random + 3 * (rounded - random)) == pytest.approx(1.5, rel=1e-3)


def test_an_error_everywhere_breaks_the_norm_and_one_in_a_single_place_the_peak(random):
    limit = budget(random, random.bfloat16().double())
    assert limit.measure(random * (1 + 2 * limit.norm)).kind == "norm"
    spoilt = random.clone()
    spoilt[2, 7] += 3 * limit.peak
    found = limit.measure(spoilt)
    assert (found.kind, found.index) == ("peak", (2, 7)) and found.used > 1
    assert limit.wrong(spoilt).nonzero().tolist() == [[2, 7]]


def test_a_lucky_rounding_still_leaves_room_for_half_an_ulp_of_what_is_stored():
    one = torch.tensor([1 / 3], dtype=torch.float64)
    limit = budget(one, one, torch.bfloat16)
    assert limit.excess(one.bfloat16()) <= 1 < limit.excess(one * 1.01)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_have_to_lie_where_the_exact_ones_lie(random, value):
    exact = random.clone()
    exact[1, 3] = value
    limit = budget(exact, exact)
    assert limit.excess(exact) == 0
    assert limit.excess(random) == math.inf
    found = budget(random, random).measure(exact)
    assert (found.used, found.index) == (math.inf, (1, 3)) and str(found.kind) in str(value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e3])
@pytest.mark.parametrize("place", [0, 5, 17, 29])
def test_a_fault_is_found_in_any_block_of_a_large_tensor(monkeypatch, random, value, place):
    monkeypatch.setattr(verify_budget, "BLOCK", 7)
    exact = random.flatten()[:30].view(5, 6).clone()
    limit, x = budget(exact, exact.float()), exact.float()
    assert limit.excess(x) <= 1
    x.view(-1)[place] = value
    found = limit.measure(x)
    assert found.used > 1 and found.index == (place // 6, place % 6)
    assert found.kind == (str(value) if value != 1e3 else found.kind)


def test_errors_and_scales_of_blocks_are_those_of_the_whole(monkeypatch, random):
    random = random.clone()
    random[0, 3] = torch.inf
    x = random.float()
    limit = budget(random, random.float())
    at_once = limit.measure(x + 1e-3), Scale.of(random)
    monkeypatch.setattr(verify_budget, "BLOCK", 7)
    assert torch.allclose(torch.tensor(Scale.of(random)), torch.tensor(at_once[1]), rtol=1e-12)
    by_blocks = limit.measure(x + 1e-3)
    assert by_blocks.error == pytest.approx(at_once[0].error, rel=1e-12) and by_blocks.index == at_once[0].index


def test_zeros_have_to_be_zeros_and_shapes_the_same():
    zeros = torch.zeros(3, dtype=torch.float64)
    limit = budget(zeros, zeros)
    assert limit.excess(zeros) == 0 and limit.excess(zeros + 1e-30) == math.inf
    assert limit.measure(torch.zeros(4)).kind == "shape"
    assert budget(zeros[:0], zeros[:0]).excess(zeros[:0]) == 0


@pytest.mark.spread(every=25)
@pytest.mark.parametrize("regime", ["fast", "slow"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", ["given", "softplus", "bounded"])
@pytest.mark.parametrize("seed", [11, 12])
def test_correct_results_are_within_budget_in_every_stage_and_as_a_whole(seed, gate, dtype, regime):
    case = make(Spec(lengths=(65, 0, 30, 1), H=1, HV=2, K=64, V=64, gate=gate, dtype=dtype, regime=regime, seed=seed))
    report = examine(Door("reference"), case)
    assert len(report.rows) == (48 if gate != "given" else 44)
    for row in report.rows:
        assert row.measure.used <= 1, f"seed {seed} {row.stage} {row.tensor}: {row.measure}"


def test_float64_is_held_to_float64():
    case = make_inputs(lengths=(65, 0, 3), H=1, K=32, V=32, dtype="float64", seed=1)
    report = examine(Door("reference"), case)
    assert not report.wrong and all(row.measure.budget < 1e-12 for row in report.rows)


@CHUNKS
def test_a_backend_that_says_where_it_rounds_gets_the_room_for_it_and_no_other_does(C):
    class RoundsOperands(Door):
        declared = ROUNDS_EVERY_OPERAND

        def rounding(self, case):
            return Rounding(torch.float32, self.declared)

        def stage(self, name, case, tensors):
            round_ = Rounding(torch.float32, ROUNDS_EVERY_OPERAND)
            return {n: None if x is None else round_(n, x) for n, x in super().stage(name, case, tensors).items()}

    case = make(Spec(lengths=EDGES[C], K=32, V=32, C=C, dtype="float32", seed=3))
    stages = [row for row in examine(RoundsOperands("reference"), case).rows if row.stage in STAGES]
    assert len(stages) == 38 and not [row for row in stages if row.wrong]
    RoundsOperands.declared = {}
    assert examine(RoundsOperands("reference"), case).first.tensor == "qn"


def test_budgets_of_rounded_operands_are_wider_than_those_of_float32():
    case = make_inputs(lengths=(40,), H=1, dtype="float32", seed=2)
    plain, rounded = (budgets(case, Rounding(torch.float32, where)) for where in ({}, ROUNDS_EVERY_OPERAND))
    assert all(rounded[n].norm > 10 * plain[n].norm for n in ("o", "ht", "dq", "dv", "dh0"))


def test_a_rounding_that_is_drawn_again_is_as_large_and_independent():
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    errors = torch.stack([x.bfloat16().float() - x, *(dithered(x, torch.bfloat16, seed) - x for seed in (1, 2))])
    norms = errors.norm(dim=1)
    assert (errors.abs() <= torch.finfo(torch.bfloat16).eps / 2 * x.abs() * 1.001).all()
    assert ((norms / norms[0] - 1).abs() < 0.05).all() and (torch.corrcoef(errors) - torch.eye(3)).abs().max() < 0.05
    assert torch.equal(dithered(x, torch.bfloat16, 1), dithered(x, torch.bfloat16, 1))


def test_every_shake_is_another_one_and_always_the_same():
    x = torch.rand(100)
    assert len({tuple(shaken(x, shake).tolist()) for shake in range(8)}) == 8
    assert torch.equal(shaken(x, 3), shaken(x, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_needs_no_rounding_gets_no_error(dtype):
    for x in (torch.tensor([0.0, 1.0, -3.0, torch.inf, 2.0**-20]), torch.rand(50).to(dtype).float()):
        assert torch.equal(dithered(x, dtype, 0), x)
    assert dithered(torch.tensor([torch.nan]), dtype, 0).isnan().all()


@pytest.fixture
def two_threads():
    with literal.threads(2):
        yield


@pytest.mark.parametrize(("shared", "threads"), [(literal.SHARED, 1), (0, 2)], ids=["small", "large"])
def test_small_steps_of_the_oracle_run_on_one_thread(monkeypatch, two_threads, shared, threads):
    case, seen = make_inputs(lengths=(10,), H=1, K=8, V=8), []
    wy = literal.FUNCTIONS["fwd/wy"]
    monkeypatch.setattr(literal, "SHARED", shared)
    monkeypatch.setitem(literal.FUNCTIONS, "fwd/wy", lambda *a: seen.append(torch.get_num_threads()) or wy(*a))
    chain(STAGES, case.problem(), case.layout, case.stage_tensors(torch.float64), torch.float64)
    assert (seen, torch.get_num_threads()) == ([threads], 2)


def test_the_definition_whole_calls_and_proofs_of_stages_run_on_one_thread(monkeypatch, two_threads):
    seen = []
    of_token = definition.recurrent
    monkeypatch.setattr(definition, "recurrent", lambda *a: seen.append(torch.get_num_threads()) or of_token(*a))
    definition.definition(make_inputs(lengths=(10,), H=1, K=8, V=8), torch.float64, backward=False)
    call = Door.chunk_kda
    monkeypatch.setattr(Door, "chunk_kda", lambda *a, **k: seen.append(torch.get_num_threads()) or call(*a, **k))
    examine(Door("reference", "cpu"), make_inputs(lengths=(10,), H=1, K=8, V=8, dtype="float64"))
    monkeypatch.setattr(parity, "alone", lambda *a: seen.append(torch.get_num_threads()) or [])
    parity.prove(Door("reference", "cpu"), "fwd/wy")
    assert set(seen) == {1} and len(seen) > 3 and torch.get_num_threads() == 2


def test_a_tensor_that_its_stage_goes_on_with_is_rounded_once():
    case = make_inputs(lengths=(40, 60), H=1, K=32, V=32, seed=1)
    p, layout, exact = case.problem(), case.layout, case.stage_tensors(torch.float64)
    exact = chain(STAGES, p, layout, exact, torch.float64)
    once = Rounding(torch.float64, {"h": "bfloat16"}, shake=0)
    h, wanted = run_stage("fwd/state", p, layout, exact, torch.float64, once)["h"], exact["h"]
    assert (h != wanted).any() and ((h - wanted).abs() <= wanted.abs() * 2.0**-8 * 1.001).all()


def test_gradients_of_saved_intermediates_are_within_the_budget_of_their_rounding():
    case, door = make_inputs(lengths=(40, 0, 90), H=1, HV=2, K=32, V=32, seed=2), Door("reference")
    recomputed, of_saved = (door.call(case, backward=True, disable_recompute=keep) for keep in (False, True))
    kept = dict.fromkeys(Saved._fields[:-1], "bfloat16")
    assert all(limit.excess(of_saved[n]) <= 1 for n, limit in budgets(case, Rounding(torch.float32, kept)).items())
    assert not torch.equal(recomputed["dq"], of_saved["dq"])


# ---------------------------------------------------------------------------------------------- faults


@pytest.mark.spread(every=12)
@CHUNKS
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_noticed_where_it_was_planted(name, C):
    fault = FAULTS[name]
    case = make(fault.suited(Spec(lengths=EDGES[C], K=32, V=32, C=C, dtype="float32", seed=5)))
    report = examine(Planted(Door("reference"), fault), case, keep_going=True)
    first = report.first
    assert first.measure.used > 1
    if fault.place in STAGES:
        assert (first.stage, first.itself, first.follows_from) == (fault.place, True, None)
        assert any(row.wrong for row in report.rows if row.stage in ("forward", "backward"))
    elif fault.place == "inputs":
        assert first.stage in ("fwd/gate", "fwd/intra") and not first.itself
    else:
        assert first.stage in ("forward", "backward")


@pytest.mark.spread(every=10)
@pytest.mark.parametrize("name", FAULTS)
def test_kda_verify_exits_with_1_for_every_fault(name):
    result = kda_verify("--fault", name, "--json")
    assert result.exit_code == 1, result.output
    data = json.loads(result.stdout)
    assert data["exit"] == 1 and data["fault"] == name and data["first_wrong"] and data["replay"]


@pytest.mark.parametrize(("fault", "stage", "says"), [
    ("state-stale", "fwd/wy", "sits in fwd/state, and fwd/wy need not notice it; look at --stage fwd/state, or leave"),
    ("state-stale", "bwd/state", "look at --stage fwd/state"), ("o-late", "fwd/output", "look at all stages: leave"),
])
def test_a_fault_that_the_stage_does_not_run_is_refused(fault, stage, says):
    result = kda_verify("--fault", fault, "--stage", stage)
    assert result.exit_code == 2 and says in " ".join(result.stderr.split())
    assert kda_verify("--fault", "state-stale", "--stage", "fwd/state").exit_code == 1


def test_there_is_a_fault_for_every_stage_and_around_them():
    assert {fault.place for fault in FAULTS.values()} >= {"inputs", "results", "bwd/output", "bwd/state", "bwd/wy"}
    assert {stage.name for stage in FORWARD} <= {fault.place for fault in FAULTS.values()}


@CHUNKS
def test_a_stage_with_wrong_inputs_is_distinguished_from_a_wrong_stage(C):
    case = make(Spec(lengths=EDGES[C], K=32, V=32, C=C, dtype="float32", seed=5))
    rows = {row.tensor: row for row in examine(Planted(Door("reference"), FAULTS["state-stale"]), case).rows}
    assert rows["h"].itself and rows["h"].follows_from is None
    assert rows["o"].wrong and not rows["o"].itself and rows["o"].follows_from == "h"
    assert not rows["u"].wrong


@pytest.mark.parametrize("stage", [stage.name for stage in FORWARD + BACKWARD])
def test_one_element_off_by_a_thousandth_breaks_the_budget_of_any_stage(stage):
    case = make(Spec(lengths=(65, 1), H=1, K=32, V=32, dtype="float32", seed=9))
    oracle = parity.Oracle(case, Rounding(torch.float32))
    oracle.reach(STAGES[stage])
    fed = oracle.feed(STAGES[stage])
    exact = run_stage(stage, oracle.p, oracle.layout, fed, torch.float64)
    for name, limit in oracle.budgets_alone(STAGES[stage], fed).items():
        x = parity.masked(name, exact[name], case).clone()
        assert limit.excess(x) == 0
        x.view(-1)[x.abs().argmax()] *= 1.001
        assert limit.excess(x) > 1, name


# ---------------------------------------------------------------------------------------------- where, and smaller


PATTERNS = {
    "half-tile-dropped": "Wrong: row 16..31, every chunk.",
    "diagonal-missing": "Wrong: the diagonal, every chunk.",
    "h-one-percent": "A single element is wrong.",
    "state-stale": "Wrong: seq 0 chunk 1.",
    "o-late": "Wrong: head 1, every chunk.",
    "beta-zeroed": "Wrong: row 0, seq 0 chunk 1.",
}


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("name", PATTERNS)
def test_wrong_places_of_a_simple_shape_are_put_in_words(name):
    case = make(Spec(lengths=(64, 0, 64), K=32, V=32, C=32, dtype="float32", seed=5))
    report = examine(Planted(Door("reference"), FAULTS[name]), case, keep_going=True)
    assert report.first.pattern == PATTERNS[name]


def test_wrong_places_of_no_shape_are_counted():
    case = make(Spec(lengths=(64, 64), K=32, V=32, C=32, dtype="float32"))
    scattered = torch.rand(4, 2, 32, 32, generator=torch.Generator().manual_seed(0)) < 0.02
    assert places.pattern("w", scattered, case, whole=False).endswith("elements are wrong, in no simple shape.")


def test_a_place_of_a_result_is_a_row_of_a_chunk_of_a_sequence():
    case = make(Spec(lengths=(40, 0, 40), padding=3, K=8, V=8, C=32, H=1))
    assert places.place("o", (0, 73, 0, 5), case, whole=True) == {"seq": 2, "chunk": 1, "head": 0, "row": 1, "v": 5}
    assert places.place("o", (0, 81, 0, 5), case, whole=True) == {"token": 81, "head": 0, "v": 5}
    assert places.place("ht", (2, 0, 3, 4), case, whole=True) == {"seq": 2, "head": 0, "k": 3, "v": 4}
    found = places.place("A_qk", (3, 0, 3, 4), case, whole=False)
    assert found == {"seq": 2, "chunk": 1, "head": 0, "row": 3, "col": 4}
    found = places.place("gc_last", (3, 0, 0, 4), case, whole=False)
    assert found == {"seq": 2, "chunk": 1, "head": 0, "k": 4}


def test_a_smaller_case_that_still_fails_is_found_and_its_replay_line_fails_again():
    result = kda_verify("--fault", "tail-dropped", "--heads", "2", "--value-heads", "4", "--seed", "7")
    assert result.exit_code == 1
    line, after = next(pair for pair in pairwise(result.stdout.splitlines()) if pair[0].startswith("replay"))
    assert re.search(r"--lengths \d+ --heads 1 -K", line) and "smallest" in after
    words = shlex.split(line.partition("kda verify")[2])
    again = kda_verify(*words, small=False)
    assert again.exit_code == 1 and "First wrong stage: fwd/output" in again.stdout


def test_nothing_smaller_is_claimed_where_nothing_smaller_fails():
    fault = FAULTS["heads-swapped"]
    spec = fault.suited(Spec(lengths=(33,), H=2, HV=4, K=16, V=16, C=32, dtype="float32"))
    door = Planted(Door("reference"), fault)
    assert smaller(door, examine(door, make(spec)), fault) is None


# ---------------------------------------------------------------------------------------------- equal bits


@pytest.mark.parametrize(
    "spec", [Spec(lengths=(65, 0, 63), seed=1), Spec(B=2, T=40, dtype="float32", HV=4, seed=2)], ids=str
)
def test_the_reference_gives_the_same_bits_run_after_run_and_packed_as_alone(spec):
    rows = examine(Door("reference"), make(spec), exact=True).rows
    assert len(rows) == 18 and all(row.measure.error == 0 for row in rows)


def test_bits_that_differ_are_a_finding():
    class Drifts(Door):
        calls = 0

        def call(self, case, backward, **keywords):
            found = super().call(case, backward, **keywords)
            Drifts.calls += 1
            found["dv"].view(-1)[3] *= 1 + Drifts.calls / 64
            return found

    rows = parity.run_vs_run(Drifts("reference"), make(Spec(lengths=(5,), K=8, V=8, seed=1)), backward=True)
    assert [row.tensor for row in rows if row.wrong] == ["dv"]


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_prints_the_problem_the_stages_and_that_all_is_well():
    result = kda_verify("--seed", "7", "-v")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    packed = "packed [33, 0, 17], bounded gate, slow   seed 7"
    assert lines[0] == f"problem  B=1 T=50 N=3 H=2 K=32 V=32 C=32 float32, {packed}"
    assert lines[2].startswith("[✓] 48 of 48 tensors within budget")
    assert kda_verify("--seed", "7").stdout.splitlines() == [*lines[:3], "         -v prints each stage and tensor"]
    printed = [line.split()[0] for line in lines if line[:1].isalpha()]
    assert printed[3:13] == list(STAGES) and printed[13:15] == ["forward", "backward"]


@pytest.mark.parametrize(("stage", "parts"), [(None, 12), ("fwd/wy", 4)])
def test_as_many_parts_are_told_of_as_were_promised(stage, parts):
    said = []
    case = make(Spec(lengths=(33,), K=8, V=8, C=32, H=1, dtype="float32"))
    examine(Door("reference"), case, stage, tell=said.append)
    assert len(said) == parity.parts(Door("reference"), case, stage) == parts
    assert parity.parts(Door("reference"), case, exact=True) is None


def test_a_wrong_stage_is_named_with_its_worst_place_and_the_backward_is_not_run():
    result = kda_verify("--fault", "state-stale", "--seed", "7")
    assert result.exit_code == 1 and "not run, because the forward is wrong" in result.stdout
    assert "First wrong stage: fwd/state.  It is still wrong with correct inputs (w, u, kg, gc_last" in result.stdout
    assert "✗ seq 0 chunk 1 head" in result.stdout and "✗ follows from h" in result.stdout
    assert "bwd/wy" not in result.stdout and "bwd/wy" in kda_verify("--fault", "state-stale", "--keep-going").stdout


def test_what_a_tensor_is_said_to_follow_from_is_read_or_written_by_its_stage():
    for stage in STAGES.values():
        used = {cause for n in stage.writes for cause in parity.USES.get(n, stage.reads)}
        assert used <= {*stage.reads, *stage.writes} and used >= set(stage.reads), stage.name


def test_one_stage_can_be_requested_alone():
    data = json.loads(kda_verify("--stage", "bwd/wy", "--json").stdout)
    assert {row["stage"] for row in data["rows"]} == {"bwd/wy"} and data["exit"] == 0


def test_json_is_one_object_without_colour_or_numbers_that_json_lacks():
    result = kda_verify("--fault", "nan-planted", "--json", "--color", "always")
    assert "\x1b" not in result.stdout and "\\u001b" not in result.stdout

    def refuse(word: str):
        raise AssertionError(word)

    data = json.loads(result.stdout, parse_constant=refuse)
    assert (data["schema"], data["command"], data["evidence"]) == (1, "verify", "executed")
    row = next(row for row in data["rows"] if row["status"] == "fail")
    assert (row["stage"], row["tensor"], row["kind"], row["used"]) == ("fwd/state", "v_new", "nan", None)
    assert row["worst"]["got"] is None and row["worst"]["chunk"] == 0


@pytest.mark.exhaustive
def test_a_dumped_case_is_loaded_with_the_same_bits(tmp_path):
    file = str(tmp_path / "case.pt")
    assert kda_verify("--fault", "o-late", "--seed", "4", "--dump", file).exit_code == 1
    again, case = load(file), make(Spec(lengths=(33, 0, 17), K=32, V=32, C=32, dtype="float32", seed=4))
    assert again.spec == case.spec
    for n, x in case.keywords.items():
        assert torch.equal(again.keywords[n], x) if isinstance(x, torch.Tensor) else again.keywords[n] == x
    result = kda_verify("--load", file, "--json", small=False)
    assert result.exit_code == 0 and json.loads(result.stdout)["seed"] == 4
    assert kda_verify("--load", file, "--fault", "o-late", small=False).exit_code == 1


def test_a_case_can_be_loaded_after_its_values_were_changed(tmp_path):
    case = make(Spec(lengths=(33,), K=16, V=16, dtype="float32"))
    case.keywords["v"][:] *= 1e4
    save(case, str(tmp_path / "case.pt"))
    assert kda_verify("--load", str(tmp_path / "case.pt"), small=False).exit_code == 0


@pytest.mark.parametrize(("args", "says"), [
    (["--backend", "refrence"], "Did you mean 'reference'?"),
    (["--against", "flaa"], "Did you mean 'fla'?"),
    (["--stage", "fwd/stat"], "Did you mean 'fwd/state'?"),
    (["--fault", "nan-plantd"], "Did you mean 'nan-planted'?"),
    (["--lengths", "65,-1"], "65,0,63"),
    (["--lengths", "a"], "65,0,63"),
    (["--tokens", "64"], "leave out --batch and --tokens"),
    (["--heads", "3", "--value-heads", "4"], "multiple of --heads 3"),
    (["--stage", "fwd/wy", "--exact"], "leave out --stage"),
    (["--load", __file__], "leave out --lengths"),
    (["--dtype", "float8"], "float8"),
])
def test_wrong_options_exit_with_2_and_say_what_is_correct(args, says):
    result = kda_verify(*args)
    assert result.exit_code == 2 and says in result.stderr and not result.stdout


def test_an_option_of_one_letter_is_named_as_it_was_typed():
    result = kda_verify("--load", __file__, "-K", "64", small=False)
    assert result.exit_code == 2 and "--load brings its own problem; leave out -K\n" in result.stderr


def test_a_file_that_is_no_case_exits_with_2():
    result = kda_verify("--load", __file__, small=False)
    assert result.exit_code == 2 and "is not a case" in result.stderr and "torch.load" not in result.stderr


def test_fla_that_is_not_here_exits_with_3_and_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = kda_verify("--against", "fla")
    assert result.exit_code == 3 and "FLA is not installed -> pip install fla-core" in result.stdout


@pytest.fixture
def picky(monkeypatch):
    """Make a backend without stages that takes no float32 and is otherwise the reference."""
    rule = Rule("picky.dtype", lambda p, h: p.dtype == "bfloat16", "needs bfloat16, got {p.dtype}", "cast")
    made_up.declare(monkeypatch, Capability("picky", 1, "", rules=(rule,)), made_up.ALL)


def test_a_backend_that_does_not_take_the_problem_exits_with_3_and_its_reasons(picky):
    result = kda_verify("--backend", "picky", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == data["exit"] == 3 and data["rejections"][0].startswith("picky.dtype: needs bfloat16")
    assert "picky cannot be judged here: picky.dtype" in kda_verify("--backend", "picky").stdout
    assert kda_verify("--against", "picky").exit_code == 3


@pytest.mark.parametrize(("backend", "dtype", "arch"), [
    ("sm90", "bfloat16", "sm90"), ("sm100", "bfloat16", "sm100"), ("sm89", "float32", "sm89"),
])
def test_a_backend_whose_gpu_is_missing_can_be_judged_in_the_simulator(backend, dtype, arch):
    asked = "--backend", backend, "--dtype", dtype, "-V", "128"
    result = kda_verify(*asked, "-K", "128")
    assert result.exit_code == 3
    assert result.stdout.endswith(f"--arch {arch} runs its kernels in the simulator, without such a GPU.\n")
    assert "--arch" not in kda_verify(*asked, "-K", "24").stdout  # no GPU would accept that


@pytest.fixture
def late(monkeypatch):
    """Return a function of stages, which makes the reference with a wrong fwd/output that declares those stages."""
    def wrong(name, *args):
        found = launch.stage(name, *args)
        return found | {"o": 1.05 * found["o"]} if name == "fwd/output" else found

    return lambda *stages: made_up.declare(
        monkeypatch, Capability("late", 1, "", stages=stages), made_up.ALL, stage=wrong
    )


@pytest.mark.parametrize("stages", [("fwd/gate", "fwd/output"), ("fwd/output",)], ids=" ".join)
def test_a_stage_that_no_stage_of_its_own_feeds_is_verified_alone(late, stages):
    late(*stages)
    result = kda_verify("--backend", "late", "--keep-going", "-v")
    assert result.exit_code == 1 and "First wrong stage: fwd/output" in result.stdout
    said, case = [], make(Spec(lengths=(33,), K=8, V=8, C=32, H=1, dtype="float32"))
    report = examine(Door("late"), case, tell=said.append, keep_going=True)
    assert {row.stage for row in report.rows} == {*stages, "forward", "backward"}
    assert len(said) == parity.parts(Door("late"), case)


def raises(*args):
    raise IndexError("of mine")


@pytest.mark.parametrize(("name", "wrong", "says"), [
    ("stage", raises, "the stage fwd/gate of the backend reference failed: IndexError: of mine (--debug"),
    ("forward", raises, "a forward of the backend reference failed: IndexError: of mine (--debug"),
    ("backward", raises, "a backward of the backend reference failed: IndexError: of mine (--debug"),
    ("forward", lambda out: out._replace(o=out.o[:, 1:]), "o must have the shape [1, 50, 2, 32], and has [1, 49, "),
], ids=["stage", "forward", "backward", "a shape"])
def test_a_mistake_of_a_backend_is_called_one(monkeypatch, name, wrong, says):
    real = getattr(launch, name)
    monkeypatch.setattr(launch, name, raises if wrong is raises else lambda *args: wrong(real(*args)))
    result = kda_verify()
    assert result.exit_code == 2 and says in result.stderr and "internal error" not in result.stderr


def test_a_tensor_that_a_stage_does_not_write_is_a_finding(monkeypatch):
    real = launch.stage
    monkeypatch.setattr(launch, "stage", lambda *args: {n: x for n, x in real(*args).items() if n != "h"})
    result = kda_verify()
    assert result.exit_code == 1 and "First wrong stage: fwd/state" in result.stdout
    assert "nothing was written" in result.stdout


@pytest.mark.parametrize("command", [["verify"], ["selftest"]], ids="".join)
def test_a_misspelt_stage_of_a_backend_is_named_with_its_file(late, command):
    late("fwd/outptu")
    result = CliRunner().invoke(cli, [*command, "--backend", "late"])
    assert result.exit_code == 2
    assert "the backend late, `stages` in its capability.py: no stage is called 'fwd/outptu'" in result.stderr


def test_a_backend_without_stages_is_verified_as_a_whole(picky):
    bf16 = ("--dtype", "bfloat16")
    data = json.loads(kda_verify("--backend", "picky", *bf16, "--json").stdout)
    assert {row["stage"] for row in data["rows"]} == {"forward", "backward"} and data["exit"] == 0
    result = kda_verify("--backend", "picky", *bf16, "--fault", "o-late")
    assert result.exit_code == 1 and "declares no stages" in result.stdout
    assert kda_verify("--backend", "picky", *bf16, "--fault", "state-stale").exit_code == 2
    assert kda_verify("--backend", "picky", *bf16, "--stage", "fwd/wy").exit_code == 3


def test_two_backends_are_compared_within_the_room_of_both(picky):
    result = kda_verify("--dtype", "bfloat16", "--backend", "picky", "--against", "reference", "--json")
    rows = [row for row in json.loads(result.stdout)["rows"] if row["stage"] == "to reference"]
    assert result.exit_code == 0 and len(rows) == 10 and all(row["error"] == 0 for row in rows)


def test_loading_the_commands_needs_no_torch():
    source = (
        "import sys; sys.argv[0] = '/bin/kda'; import kda.tools.commands.verify, kda.tools.commands.selftest;"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


def test_the_faults_can_be_listed():
    result = kda_verify("--fault", "list", small=False)
    assert result.exit_code == 0 and all(name in result.stdout for name in FAULTS)


def test_a_spec_prints_the_options_that_draw_it_again():
    spec = Spec(B=2, T=9, H=1, HV=2, K=8, V=4, C=32, dtype="float32", gate="given", regime="fast", seed=3)
    assert shlex.join(spec.arguments()) == (
        "--batch 2 --tokens 9 --heads 1 --value-heads 2 -K 8 -V 4 --chunk-size 32 --dtype float32 --gate given "
        "--regime fast --seed 3"
    )
    assert dataclasses.replace(spec, lengths=(3, 0)).arguments()[:2] == ["--lengths", "3,0"]


@pytest.mark.parametrize("words, says", [
    (("--mutants",), "name their GPU with --arch"),
    (("--mutants", "--arch", "sm90", "--seed", "3"), "leave out --seed"),
    (("--mutants", "--arch", "sm90", "--value-heads", "2"), "leave out --value-heads"),
    (("--mutants", "--arch", "sm90", "-V", "64"), "leave out -V"),
    (("--mutants", "--arch", "sm80"), "has no kernels of its own; sm100, sm90, sm89 have"),
    (("--arch", "sm90", "--sample", "3"), "--sample and --workers go with --mutants"),
], ids=" ".join)
def test_mutants_are_those_of_an_arch_and_of_nothing_else(words, says):
    result = kda_verify(*words, small=False)
    assert result.exit_code == 2 and says in " ".join(result.output.split())


@pytest.mark.parametrize(("backend", "arch", "dtype"), [
    (None, None, "bfloat16"), (None, "sm89", "float32"), ("sm89", None, "float32"), ("triton", "sm89", "bfloat16"),
    (None, "sm90", "bfloat16"), ("reference", None, "bfloat16"),
])
def test_where_no_dtype_is_named_a_backend_gets_one_that_it_handles(backend, arch, dtype):
    from kda.tools.commands import verify

    assert verify.usual_dtype({"backend": backend, "arch": arch and parse(arch)}) == dtype
