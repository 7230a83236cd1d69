"""The shapes that `kda bench` times, and what is counted of them."""

from __future__ import annotations

import json
import math

import pytest
from bench_calls import QUICK, run

from kda.tools.commands.bench import asked
from kda.tools.measure.predicted import PredictedCall
from kda.tools.measure.shapes import (
    GATES,
    MODELS,
    SHAPES,
    BenchShape,
    bytes_moved,
    flops,
    gate_in,
    too_large,
    with_gate,
)
from kda.tools.verify import cases

# the formulas


def test_the_backward_has_twice_the_products_of_the_forward():
    shape = BenchShape(T=10, H=2, K=3, V=5)
    assert flops(shape, "forward") == 20 * (6 * 64 * 3 + 4 * 64 * 5 + 6 * 3 * 5)
    assert flops(shape, "backward") == 2 * flops(shape, "forward")


def test_bytes_are_those_of_the_peers_floors():
    """5 tensors forward and 9 backward, in the sizes of the page that the shapes are from."""
    shape = SHAPES["h64-8k"]
    tensor = 8192 * 64 * 128 * 2
    assert bytes_moved(shape, "forward") == 5 * tensor
    assert bytes_moved(shape, "backward") == 9 * tensor
    assert round(bytes_moved(shape, "forward") / 4.3e12 * 1e3, 3) == 0.156


def test_a_step_is_a_forward_and_a_backward():
    shape = SHAPES["h64-8k"]
    for count in (flops, bytes_moved):
        assert count(shape, "step") == count(shape, "forward") + count(shape, "backward")
    result = run(*QUICK, "--regime", "slow", "--direction", "step", "--json")
    (row,) = json.loads(result.stdout)["rows"]
    assert result.exit_code == 0 and row["direction"] == "step" and row["median"] > 0


def test_shared_heads_are_read_once():
    assert bytes_moved(BenchShape(T=1, H=1, HV=4, K=2, V=2, dtype="float32"), "forward") == 4 * (2 + 2 + 8 + 8 + 8)


# the shapes


def test_every_shape_says_what_it_is_for():
    assert all(shape.origin and shape.tokens and shape.heads % shape.H == 0 for shape in SHAPES.values())
    assert len({shape.label for shape in SHAPES.values()}) == len(SHAPES)


def test_every_shape_can_be_drawn_as_a_case():
    for shape in SHAPES.values():
        spec = asked.spec_of(shape, "fast")
        assert spec.heads == shape.heads and math.prod(spec.shape) == shape.tokens


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_can_be_timed_and_is_part_of_the_problem(gate):
    result = run(*QUICK, "--gate", gate, "--regime", "slow", "--json")
    found = json.loads(result.stdout)
    words = "" if gate == "bounded" else f", {gate} gate"
    assert {row["problem"] for row in found["rows"]} == {f"B=1 T=70 H=1 K=V=8 fp32{words}"} and result.exit_code == 0
    parameters = {"dA_log", "ddt_bias"} & set(found["parity"][0]["used"])
    assert len(found["rows"]) == 2 and len(parameters) == (0 if gate == "given" else 2)


def test_a_shape_that_is_called_after_a_model_has_its_heads_and_its_gate_unless_another_one_is_asked_for():
    options = {"names": ("kimi-8k", "h32-8k"), "tokens": None, "lengths": None, "gate": None}
    kimi, other = asked.shapes_asked(options, "gpu").values()
    assert (kimi.H, kimi.gate) == (MODELS["kimi-linear"].heads, MODELS["kimi-linear"].gate) == (32, "softplus")
    assert other == kimi._replace(origin=other.origin, gate="bounded")
    assert {shape.gate for shape in asked.shapes_asked(options | {"gate": "given"}, "gpu").values()} == {"given"}
    assert asked.spec_of(kimi, "slow").gate == "softplus"


@pytest.mark.parametrize("gate", GATES)
def test_a_heading_names_the_gate_whichever_it_is(gate):
    label = BenchShape(T=5, gate=gate).label
    assert gate_in(label) == gate and with_gate(label) == f"B=1 T=5 H=1 K=V=128 bf16, {gate} gate"
    assert f", {gate} gate" in run("--list").stdout or gate == "given"


def test_a_gate_goes_with_named_shapes_and_into_predictions():
    options = {"names": ("h64-8k", "h8-32k"), "tokens": None, "lengths": None, "gate": "softplus"}
    shapes = asked.shapes_asked(options, "gpu")
    assert [shape.label for shape in shapes.values()] == [f"{SHAPES[n].label}, softplus gate" for n in options["names"]]
    like = {PredictedCall("sm_90a", "sm90", shape, True).like for shape in shapes.values()}
    assert [call.shape.gate for call in like] == ["softplus"]


def test_a_problem_made_without_tensors_is_that_of_the_tensors():
    for name in ("tiny", "tiny-grouped", "tiny-packed"):
        spec = asked.spec_of(SHAPES[name], "slow")
        assert asked.problem_of(spec, "backward", "cpu") == cases.make(spec).problem("backward")


def test_list_names_every_shape():
    assert [line.split()[0] for line in run("--list").stdout.splitlines()] == list(SHAPES)
    assert list(json.loads(run("--list", "--json").stdout)["shapes"]) == list(SHAPES)


def test_a_cpu_times_tiny_shapes_unless_told_otherwise():
    options = {"names": (), "tokens": None, "lengths": None, "gate": "bounded"}
    for on in ("cpu", "gpu"):
        assert all(shape.on == on for shape in asked.shapes_asked(options, on).values())
    assert all(too_large(shape, ("forward", "backward"), 1) is None for shape in SHAPES.values() if shape.on == "cpu")
