"""A case of the ledger in the simulator, as it runs on a GPU: results, the same bits, a graph, and what it launched."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from benchmarks import evidence_run
from benchmarks.evidence_cases import FORWARD, GROUPS, Case
from kda.model.problem import Problem
from kda.tools.verify import digests

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


@pytest.mark.exhaustive
def test_a_forward_is_right_and_says_which_kernels_it_launched():
    committed = json.loads(DIGESTS.read_text())
    words = next(words for words in digests.PROBLEMS["sm89", "sm89"] if "K=64" in words)
    row = evidence_run.run(Case("sm89", "sm89", words, "as the plan says", FORWARD, tokens=40), "cpu")
    assert (row["outcome"], row["errors"]) == ("ok", []) and 0 < row["used"] <= 1
    assert row["launches"] == ["chain", "prepare"]
    if committed["compilers"]["sm89"] == digests.version("sm89"):
        assert set(row["codes"]) <= {known["code"] for known in committed["kernels"].values()}
