"""benchmarks/first_hour.py without a GPU: what it runs, and what it says of what was measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from benchmarks import common, first_hour
from benchmarks.gpu_checks import FAILED, Part
from kda.cli import cli
from kda.tools.measure.shapes import SHAPES
from ptxkit.benchmarks.microbenchmarks.page import RESULTS
from ptxkit.timing.chips import CHIPS

B200 = CHIPS["b200"]
TIMED = {"shape": "h64-8k", "problem": "B=1 T=8192 H=64 K=V=128 bf16", "regime": "fast", "median": 0.0005}


def put(folder, name, data):
    (folder / name).write_text(json.dumps(data))


def test_without_a_blackwell_gpu_it_says_what_it_needs(tmp_path):
    argv = common.again(first_hour.__spec__, "--out", str(tmp_path / "out"))
    ended = subprocess.run(argv, cwd=common.ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 3 and "needs a GPU of compute capability 10.0 or 10.3; found" in ended.stdout
    assert not (tmp_path / "out").exists()


def test_each_part_is_a_command_that_there_is(tmp_path):
    found = first_hour.parts(tmp_path, "b200", 18)
    assert [*found][:5] == ["doctor", "units", "selftest", "verify", "evidence"]
    for name, part in found.items():
        if part.argv[1:3] == ["-m", "kda"]:
            result = CliRunner().invoke(cli, [part.argv[3], "--help"])
            assert result.exit_code == 0, name
            assert all(word in result.output for word in part.argv[4:] if word.startswith("--")), name
        else:
            argv = [*part.argv[:3], "--help"]
            ended = subprocess.run(argv, cwd=common.ROOT, capture_output=True, text=True, check=True)
            assert all(word in ended.stdout for word in part.argv[3:] if word.startswith("--")), name
    assert {*first_hour.SHAPES} <= {*SHAPES}
    assert found["doctor"].argv[0] == sys.executable


def test_a_constant_that_the_gpu_refutes_is_printed_with_its_source(tmp_path):
    figures = json.loads(RESULTS.read_text())["figures"]
    lines = [*first_hour.far_constants(CHIPS["h200"], {"figures": figures, "failed": {"bulk": "exit 1"}})]
    assert [line.split()[0] for line in lines] == ["pair_busy", "the"] and "bulk was not measured: exit 1" in lines[-1]
    slower = [one | {"value": 30.0} if one["name"] == "HBM, 1 SMs" else one for one in figures]
    first, *_ = first_hour.far_constants(CHIPS["h200"], {"figures": slower})
    assert first.split()[:3] == ["hbm_rate_sm", "35.6", "30"]


@pytest.mark.parametrize(("predicted", "lines"), [
    (0.0005, []), (0.00044, []), (0.0003, ["kept, h64-8k, fast gates: 0.500 ms, predicted 0.300 ms"]),
])
def test_a_time_far_from_its_prediction_is_printed(predicted, lines):
    rows = {"rows": [{"problem": TIMED["problem"], "predicted": predicted}]}
    assert [*first_hour.far_times("kept", {"rows": [TIMED]}, rows)] == lines


def test_a_time_without_a_prediction_and_a_prediction_without_a_time_are_printed():
    rows = {"rows": [{"problem": TIMED["problem"], "predicted": 0.0005}]}
    (line,) = first_hour.far_times("kept", {"rows": [TIMED]}, {})
    assert line == "kept, h64-8k, fast gates: 0.500 ms, without a prediction"
    assert [*first_hour.far_times("kept", {}, rows)] == ["kept: no call was timed"]


def test_what_a_folder_holds_is_put_together(tmp_path):
    put(tmp_path, "forward.json", {"rows": [TIMED], "left_out": ["h96-8k, fast gates: wrong"]})
    log = json.dumps({"rows": [{"problem": TIMED["problem"], "predicted": 0.0003}]})
    (tmp_path / "predicted-forward.log").write_text(f"h64-8k: running its launches in the simulator ...\n{log}\n")
    put(tmp_path, "evidence.json", {"rows": [{"case": "forward, packed", "outcome": "wrong"}]})
    constants, times, cases = first_hour.what_differs(tmp_path, B200).values()
    assert len(constants) > 30 and len(times) == 4 and cases == ["forward, packed: wrong"]
    assert "predicted 0.300 ms" in times[0] and times[1] == "forward: h96-8k, fast gates: wrong"
    assert times[2:] == ["kept: no call was timed", "step: no call was timed"]
    text = first_hour.summary({"Times": times, "Cases": []})
    assert text.splitlines()[1:3] == ["Times", f"  {times[0]}"] and text.endswith("Cases\n  none")


def test_an_hour_goes_on_behind_a_part_that_fails_and_says_so_at_its_end(tmp_path, monkeypatch, capsys):
    """A card and three parts stand in: one writes figures of an H200, one fails, one is not asked for."""
    def parts(out, chip, minutes):
        units = f"import shutil; shutil.copy({str(RESULTS)!r}, {str(out / 'units.json')!r})"
        scripts = {"units": units, "verify": "print('wrong'); raise SystemExit(1)", "selftest": "raise SystemExit(9)"}
        return {name: Part([sys.executable, "-c", script], 60) for name, script in scripts.items()}

    monkeypatch.setattr(first_hour, "card", lambda: ("NVIDIA B200", 10))
    monkeypatch.setattr(first_hour, "parts", parts)
    asked = ["first_hour", "--out", str(tmp_path), "--only", "units", "--only", "verify"]
    monkeypatch.setattr(sys, "argv", asked)
    assert first_hour.main() == FAILED
    said = capsys.readouterr().out
    assert "==== units: ok" in said and "==== verify: failed" in said and "selftest" not in said
    assert said.endswith("Parts that did not end well\n  verify: failed exit 1\n")
    constants = said.partition("Constants that differ")[2].partition("Times that differ")[0]
    assert re.search(r"^  hbm_latency +850 +657 +29% ", constants, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", [*asked, "--report"])
    assert first_hour.main() == FAILED and constants in capsys.readouterr().out
