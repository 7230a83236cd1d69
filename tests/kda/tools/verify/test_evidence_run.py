"""A case of the ledger in the simulator, as it runs on a GPU: results, the same bits, a graph, and what it launched."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from benchmarks import evidence_run, evidence_slots
from benchmarks.evidence_cases import FORWARD, GROUPS, SLOTS, Case, candidates
from kda.backends.common.pool import launch as pool_launch
from kda.backends.common.routine import forget_routines
from kda.model.problem import Problem
from kda.tools.verify import digests
from ptxkit import capture

pytestmark = pytest.mark.simulated

DIGESTS = Path(__file__).parents[3] / "helpers" / "digests.json"
BESIDE_TENSORS = dict.fromkeys(                # fields of a problem that keywords of the call say, and where it runs
    ("device", "state_v_first", "batch_invariant", "slots", "inplace", "start_slots", "checkpoints")
)


@pytest.mark.parametrize("backend, arch", GROUPS)
def test_a_case_has_inputs_of_the_class_of_problems_that_it_names(backend, arch):
    for words in digests.PROBLEMS[backend, arch]:
        if Problem.parse(words).op == "chunk":
            case = Case(backend, arch, words, "as the plan says", FORWARD, tokens=80)
            found, named = evidence_run.drawn(case, "slow", 0).problem(), case.problem
            assert dataclasses.replace(found, **BESIDE_TENSORS) == dataclasses.replace(named, **BESIDE_TENSORS), words


class Stopped(Exception):
    """A call's kernels are known and none of them is built."""


def read_by_it(recipe):
    """Return the recipe without promises for strides of tensors that its kernel has not: no code depends on these."""
    absent = {name for name, value in recipe.constants.items() if value is None}
    return dataclasses.replace(recipe, divisible=[n for n in recipe.divisible if n.partition("_")[0] not in absent])


@pytest.mark.parametrize("call", evidence_slots.FUNCTIONS)
def test_a_call_of_slots_asks_for_the_kernels_that_its_case_is_chosen_for(call, monkeypatch):
    decode_launch = pytest.importorskip("kda.backends.triton.decode.launch", reason="needs triton")
    forget_routines()
    asked = []

    def stopped(recipe, *_):
        asked.append({read_by_it(recipe)})
        raise Stopped

    def of_pool(*described):
        asked.append({*built(*described).values()})
        raise Stopped

    built = pool_launch.recipes_of
    monkeypatch.setattr(decode_launch, "ready", stopped)
    monkeypatch.setattr(pool_launch, "recipes_of", of_pool)
    found = {case: recipes for case, recipes in candidates("triton", "sm90").items() if case.call == call}
    for case in found:
        with capture(arch=case.arch, sms=case.sms or None), pytest.raises(Stopped):
            evidence_run.called(case, evidence_run.drawn(case, "slow", seed=1).map(lambda x: x.to("cuda")))
    of_calls = {SLOTS: "gather scatter places"}.get(call, call.removeprefix("fused_").removesuffix("_kda")).split()
    assert asked and asked == [{read_by_it(r) for r in recipes if r.name in of_calls} for recipes in found.values()]


@pytest.mark.exhaustive
def test_a_forward_is_right_and_says_which_kernels_it_launched():
    committed = json.loads(DIGESTS.read_text())
    words = next(words for words in digests.PROBLEMS["sm89", "sm89"] if "K=64" in words)
    row = evidence_run.run(Case("sm89", "sm89", words, "as the plan says", FORWARD, tokens=40), "cpu")
    assert (row["outcome"], row["errors"]) == ("ok", []) and 0 < row["used"] <= 1
    assert row["launches"] == ["chain", "prepare"]
    if committed["compilers"]["sm89"] == digests.version("sm89"):
        assert set(row["codes"]) <= {known["code"] for known in committed["kernels"].values()}
