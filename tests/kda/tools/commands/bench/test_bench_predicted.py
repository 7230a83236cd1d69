"""`kda bench --predicted`, with predictions made up: what is refused, printed, and done in other processes."""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import pytest
from bench_calls import run
from click.testing import CliRunner

from kda.cli import cli
from kda.tools.commands.bench import predicted as command
from kda.tools.commands.options import timed_arch
from kda.tools.measure.shapes import SHAPES
from ptxkit.compile.target import parse
from ptxkit.timing.chips import CHIPS

PREDICTED = ("--predicted", "--shape", "h64-1k")


@pytest.mark.parametrize(("words", "says"), [
    (("--arch", "sm100"), "--arch needs --predicted"),
    ((*PREDICTED, "--graph"), "--predicted times nothing; leave out --graph"),
    ((*PREDICTED, "--compare", __file__), "leave out --compare"),
    ((*PREDICTED, "--arch", "sm9"), "sm9"),
])
def test_what_is_no_prediction_is_refused(words, says):
    result = run(*words)
    assert result.exit_code == 2 and says in result.stderr


@pytest.mark.parametrize(("words", "says"), [
    (("--arch", "sm100", "--backend", "reference"), "reference has no kernels"),
    (("--arch", "sm90", "--backend", "sm100"), "sm100 has kernels for sm100, sm103, sm110"),
    (("--arch", "sm120"), "the simulator has no clock for sm120; it has one for sm80, sm89, sm90, sm100"),
])
def test_a_chip_or_a_backend_that_cannot_be_predicted_is_named(words, says):
    result = run(*PREDICTED, *words)
    assert result.exit_code == 2 and says in result.stderr


def test_the_notes_say_whose_errors_are_expected():
    said = []
    for kernels_of_errors in ("sm90 fused", "sm90, other kernels", "all, other kernels"):
        row = command.PredictedRow("", "", "forward", "", 1.0, 1.0, None, None, {"of": kernels_of_errors}, {})
        said.append(command.notes(CHIPS["h200"], [row])[0])
    whose = ("kernels of the same names", "the backend's other kernels", "the other backends' kernels")
    assert [f"errors are those of {kernels} on an H200" in text for kernels, text in zip(whose, said)] == [True] * 3


def test_a_step_that_keeps_all_is_of_the_backend_that_keeps_it():
    for keeps, backend in ((False, "sm89"), (True, "triton")):
        found = command.backends_for(SHAPES["tiny"], ("step",), parse("sm90"), None, keeps)
        assert found == {"forward": backend, "backward": backend}


def test_without_an_arch_it_is_that_of_the_backend():
    assert [timed_arch(name) for name in (None, "sm90", "sm100", "sm89", "triton")] == [
        "sm90", "sm90", "sm100", "sm89", "sm90"]


def test_a_prediction_has_its_error_its_floor_and_the_time_on_record(monkeypatch):
    from kda.tools.measure import predicted
    class Of:
        chip, warps, stalls = CHIPS["h200"], [], {}

    asked = []

    def predict(arch, chip, backend, shape, step, keeps):
        asked.append(keeps)
        forward = predicted.PredictedLaunch("kernel_fwdfusedFused", 2e5, 0.0, Of, False)
        back = predicted.PredictedLaunch("state_bwd", 4e5, 0.0, Of, True)
        return predicted.Prediction((forward, back) if step else (forward,))

    monkeypatch.setattr(predicted, "predict", predict)
    found = json.loads(run(*PREDICTED, "--arch", "sm90", "--direction", "both", "--direction", "step", "--json").stdout)
    forward, backward, step = found["rows"]
    assert (found["chip"], found["compared"]) == ("h200", True)
    assert (forward["backend"], backward["backend"], step["backend"]) == ("sm90", "sm90", "sm90")
    assert forward["predicted"] == pytest.approx(2e5 / 1.98e9) and forward["kernels"] == {"fused": forward["predicted"]}
    assert step["predicted"] == pytest.approx(forward["predicted"] + backward["predicted"])
    assert forward["floor"] == pytest.approx(5 * 1024 * 64 * 128 * 2 / (17 * 132 * 1.98e9))
    assert forward["recorded"] == pytest.approx(5.07e-5, rel=0.01) and "h200-sm90-forward.json" in forward["source"]
    assert forward["error"]["of"] == "sm90 fused" and 0 < forward["error"]["median"] <= forward["error"]["worst"]
    packed = run("--predicted", "--shape", "h64-8x1k", "--direction", "step", "--arch", "sm90", "--json").stdout
    assert json.loads(packed)["rows"][0]["backend"] == "sm90"
    kept = json.loads(
        run(*PREDICTED, "--arch", "sm90", "--direction", "step", "--disable-recompute", "states", "--json").stdout
    )
    assert kept["disable_recompute"] == asked[-1] == "states" and kept["rows"][0]["recorded"] is None
    text = run(*PREDICTED, "--arch", "sm90", "--direction", "forward").stdout
    assert "predicted for h200, which stands for sm90 (H100, H200, H20): nothing was timed" in text
    of_a_card = run(*PREDICTED, "--arch", "NVIDIA H100 80GB HBM3", "--direction", "forward").stdout
    assert "predicted for h100 (sm90): nothing was timed" in of_a_card
    assert "predictions for h100 were compared with times of older kernels alone" in of_a_card
    assert [name in command.COMPARED for name in ("h200", "h100", "b200")] == [True, True, False]
    assert "which stands for sm90" in run(*PREDICTED, "--arch", "h100 pcie", "--direction", "forward").stdout
    assert "0.101 ms" not in text.split("recorded")[0] and "--json names those" in text
    assert ".md" not in text


@pytest.fixture
def forecasts(monkeypatch):
    """Make predictions up, in two processes: milliseconds are the tokens; a function may do more, given a shape."""
    from kda.tools.commands.bench import predicted as command
    from kda.tools.measure import predicted
    class Of:
        chip, warps, stalls = CHIPS["b200"], [], {}

    parent, more = os.getpid(), []

    def predict(arch, chip, backend, shape, step, keeps):
        for does in more:
            does(shape, os.getpid() == parent)
        clocks = 1e6 * Of.chip.gigahertz * shape.tokens
        return predicted.Prediction((predicted.PredictedLaunch("kernel_fwdfusedFused", clocks, 0.0, Of, step),))

    monkeypatch.setattr(predicted, "predict", predict)
    monkeypatch.setattr(predicted, "stands_for", lambda calls, chip: [])
    monkeypatch.setattr(command, "workers", lambda shapes: 2)
    return more


ALL = ("--predicted", "--arch", "sm100", "--direction", "forward")
GPU_SHAPES = {name: shape for name, shape in SHAPES.items() if shape.on == "gpu"}


def test_shapes_are_predicted_in_other_processes_and_printed_in_their_order(forecasts):
    def elsewhere(shape, in_parent):
        assert not in_parent

    forecasts.append(elsewhere)
    found = json.loads(run(*ALL, "--json").stdout)["rows"]
    assert [(row["shape"], round(row["predicted"] * 1e3)) for row in found] == [
        (name, shape.tokens) for name, shape in GPU_SHAPES.items()
    ]
    lines = run(*ALL).stdout.splitlines()
    rows = [lines.index(f"{name}: {shape.label}, bounded gate") for name, shape in GPU_SHAPES.items()]
    assert rows == sorted(rows) and all(lines[n + 1].startswith("  forward") for n in rows)
    assert len({lines[n + 1].index(" sm100 ") for n in rows}) == 1


def test_what_is_predicted_is_drawn_and_shown_on_a_page(forecasts, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra `plot`")
    asked = []
    monkeypatch.setattr("kda.tools.commands.timeline.of_machine", lambda screen, *which: asked.append(which) or [])
    out = run(*ALL, "--plot", str(tmp_path / "x.png"), "--html", str(tmp_path / "x.html")).stdout
    assert out.count("drawn") == 2 and (tmp_path / "x.png").exists()
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "predicted, not timed" in text and all(shape.label in text for shape in GPU_SHAPES.values())
    assert ">error (worst)</th>" in text and "p20-p80" not in text and re.search(r"<td>\d+% \(\d+%\)</td>", text)
    assert [(backend, target.name, gate) for backend, target, gate in asked] == [("sm100", "sm100", "bounded")]

@pytest.mark.parametrize("arch", ["h100", "H100 PCIe", "h200", "sm90", "b200", "GB200"])
def test_a_timeline_is_of_the_chip_that_a_prediction_for_the_same_words_is_of(arch, forecasts, monkeypatch, tmp_path):
    chips = []
    forward = "kda.tools.commands.timeline.forward"
    monkeypatch.setattr(forward, lambda target, chip, *_: chips.append(chip.name) or SILENT)
    text = CliRunner().invoke(cli, ["timeline", "--arch", arch, "--out", str(tmp_path / "x.json")]).stdout
    [which] = [line.removeprefix("predicted for ") for line in text.splitlines() if line.startswith("predicted for ")]
    bench = run("--predicted", "--shape", "h64-8k", "--arch", arch, "--direction", "forward").stdout
    assert f"predicted for {which}: nothing was timed" in bench and which.startswith(chips[0])


SILENT = SimpleNamespace(runs=(), milliseconds=0.0)


@pytest.mark.parametrize("gate", [None, "softplus", "given"])
def test_a_timeline_is_of_the_gate_that_was_asked_for_and_names_it(gate, monkeypatch, tmp_path):
    forwards = []
    monkeypatch.setattr("kda.tools.commands.timeline.forward", lambda *asked: forwards.append(asked) or SILENT)
    words = ["timeline", "--arch", "h100", "--out", str(tmp_path / "x.json"), *(["--gate", gate] if gate else [])]
    text = CliRunner().invoke(cli, words).stdout
    named = gate or "bounded"
    assert [asked[-1] for asked in forwards] == [named] and f" bfloat16, {named} gate, by" in text


def test_an_error_of_another_process_reaches_the_user_as_it_is(forecasts):
    from ptxkit import SimulationError

    def fails(shape, in_parent):
        if shape == SHAPES["h16-8k"]:
            raise SimulationError(["a race", "a second race"])

    forecasts.append(fails)
    result = run(*ALL)
    assert result.exit_code == 2 and "SimulationError: a race\na second race (--debug" in result.stderr
    assert [name for name in ("h96-8k", "h16-8k") if SHAPES[name].label in result.stdout] == ["h96-8k"]


def test_a_process_that_was_killed_is_made_up_for(forecasts):
    def dies(shape, in_parent):
        if shape == SHAPES["h96-8k"] and not in_parent:
            os._exit(1)

    forecasts.append(dies)
    found = json.loads(run(*ALL, "--json").stdout)["rows"]
    assert [row["shape"] for row in found] == list(GPU_SHAPES)


def test_one_core_has_one_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert command.workers(8) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert [command.workers(shapes) for shapes in (1, 2, 8)] == [1, 2, 2]
    assert list(command.side_by_side(lambda name: os.getpid(), "ab", "ba", 1)) == [os.getpid()] * 2
