"""benchmarks/gpu_checks.py without a GPU: what cannot run, what is stopped, what is kept of it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import pytest

from benchmarks import common
from benchmarks import gpu_checks as checks


def python(text):
    return [sys.executable, "-c", text]


def test_parts_that_cannot_run_say_what_is_missing(tmp_path):
    asked = ["--only", "memcheck", "--only", "fla-tests", "--out", str(tmp_path)]
    argv = common.again(checks.__spec__, *asked)
    ended = subprocess.run(argv, env={"PATH": ""}, cwd=common.ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr
    assert "compute-sanitizer on PATH; found none" in ended.stdout and "needs --fla-tests CHECKOUT" in ended.stdout
    states = json.loads((tmp_path / "gpu_checks.json").read_text())["parts"]
    assert {name: state["status"] for name, state in states.items()} == {"memcheck": "not run", "fla-tests": "not run"}


@pytest.mark.parametrize(("text", "status", "says"), [
    ("print('all well')", "ok", ""), ("raise SystemExit(1)", "failed", "exit 1"),
    ("raise SystemExit(3)", "not run", "exit 3"),
])
def test_a_part_ends_as_its_exit_code_says(tmp_path, text, status, says):
    done = checks.run("mine", checks.Part(python(text), 600), lambda: 600, tmp_path, {})
    assert (done.status, done.says) == (status, says)


@pytest.mark.exhaustive
def test_a_part_that_takes_too_long_is_stopped_with_all_its_processes(tmp_path):
    wait = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    done = checks.run("mine", checks.Part(python(wait), 5), lambda: 600, tmp_path, {})
    assert done.status == "too slow" and 5 <= done.seconds < 500


def test_no_part_begins_when_no_time_is_left(tmp_path):
    done = checks.run("mine", checks.Part(python("raise SystemExit(1)"), 60), lambda: 2, tmp_path, {})
    assert done == checks.Done("not run", 0.0, "no time was left")


def test_wheels_are_unpacked_where_a_part_finds_them(tmp_path):
    wheel = tmp_path / "mine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mine_of_a_wheel.py", "here = True")
    environment = checks.environment_with([wheel], tmp_path / "unpacked")
    looks = "import mine_of_a_wheel, importlib.util as u; assert mine_of_a_wheel.here and u.find_spec('kda')"
    part = checks.Part(python(looks), 600)
    assert checks.run("mine", part, lambda: 600, tmp_path, environment).status == "ok"
