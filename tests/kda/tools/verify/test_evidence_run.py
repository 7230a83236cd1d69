"""A case of the ledger in the simulator, as it runs on a GPU: results, the same bits, a graph, and what it launched."""

import json
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from benchmarks import evidence_run
from benchmarks.evidence_cases import FORWARD, Case
from kda.tools.verify import digests

pytestmark = pytest.mark.simulated

DIGESTS = Path(__file__).parents[3] / "helpers" / "digests.json"


@pytest.mark.exhaustive
def test_a_forward_is_right_and_says_which_kernels_it_launched():
    committed = json.loads(DIGESTS.read_text())
    words = next(words for words in digests.PROBLEMS["sm89", "sm89"] if "K=64" in words)
    row = evidence_run.run(Case("sm89", "sm89", words, "as the plan says", FORWARD, tokens=40), "cpu")
    assert (row["outcome"], row["errors"]) == ("ok", []) and 0 < row["used"] <= 1
    assert row["launches"] == ["chain", "prepare"]
    if committed["compilers"]["sm89"] == digests.version("sm89"):
        assert set(row["codes"]) <= {known["code"] for known in committed["kernels"].values()}
