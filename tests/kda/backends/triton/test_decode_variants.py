"""`python -m benchmarks.decode_variants` without a GPU: what it runs, what it says, and what its variants give."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from triton_calls import building_here

from benchmarks import decode_variants as script
from kda.backends.triton.decode import step_plan
from kda.tools.measure.shapes import BenchShape
from ptxkit import capture

pytestmark = pytest.mark.simulated


FAST = {"config": "4x128", "seconds": 8e-6, "bytes": 16e6}


def test_the_best_of_a_shape_is_named_with_what_it_misses():
    step, plan = script.Step("bfloat16", 1, 32, 64), FAST | {"config": "plan", "seconds": 9e-6}
    found = script.best_of(step, [plan, FAST, {"config": "parts", "seconds": 7e-6}], copy=2.5e12)
    assert (found["best"], found["share_of_copy"]) == ("4x128", pytest.approx(0.8))
    assert not found["reached"] and not found["not_slower"]
    found = script.best_of(step, [plan, FAST, {"config": "parts", "seconds": 9e-6}], copy=2.3e12)
    assert found["reached"] and found["not_slower"]
    assert script.best_of(step, [{"config": "plan", "error": 3.0, "bytes": 1}], copy=1.0)["best"] is None


def test_every_variant_is_a_kernel_of_its_own(monkeypatch):
    with building_here(monkeypatch), capture(arch="sm90"), torch.no_grad():
        assert len(script.recipes("cpu")) == sum(map(len, script.VARIANTS.values()))
    assert {names[0] for names in script.VARIANTS.values()} == {"plan"}


@pytest.mark.parametrize("T", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_rehearsal_on_a_cpu_fills_every_field_and_stops_in_time(T, monkeypatch):
    monkeypatch.setattr(script, "STEPS", {T: ((1, 1),)})
    monkeypatch.setattr(script, "VARIANTS", {(states, T): ("plan", "4x64") for states in ("bfloat16", "float32")})
    monkeypatch.setattr(script, "INVARIANT", (("small", "reference"),))
    monkeypatch.setattr(script, "SHAPES", {"small": BenchShape("small", T=130, H=1, K=16, V=16)})
    with torch.no_grad():
        found = script.timed(60, "cpu")
        assert script.timed(0, "cpu")["left_out"] == [*(s._asdict() for s in script.steps()),
                                                      {"shape": "small", "backend": "reference"}]
    assert [each["best"] is not None for each in found["best"]] == [True] * 2 and not found["left_out"]
    assert {row["config"] for row in found["rows"]} == {"plan", "4x64", "parts", "recurrence"}
    (row,) = found["batch_invariant"]
    assert row["whole"] > 0 and row["cut"] > 0
    assert "batch_invariant, small by reference: " in "\n".join(script.lines(found))


@pytest.mark.exhaustive
def test_variants_of_one_piece_give_the_bits_of_the_plan_without_findings(monkeypatch):
    monkeypatch.setattr(script, "STEPS", {1: ((1, 2),), 4: ((1, 2),)})
    with building_here(monkeypatch), torch.no_grad():
        rows = script.simulated("sm90", "h200")["rows"]
    pieces = {1: {"bfloat16": 128, "float32": 64}, 4: {"bfloat16": 128, "float32": 64}}
    for row in rows:
        config = script.parse_config(row["config"]) or step_plan.StepConfig(4, pieces[row["T"]][row["states"]])
        assert row["same_bits"] == (config.piece == pieces[row["T"]][row["states"]]), row["config"]
