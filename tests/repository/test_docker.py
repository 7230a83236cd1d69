"""The steps of each Dockerfile run as a script, in a copy of the repository and a bare environment of Python."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "train": ["--steps", 2, "--batch", 2, "--length", 32, "--hidden", 32, "--heads", 2, "--layers", 4, "--device",
              "cpu"],
    "serve": ["--load", 3, "--check", "--device", "cpu"],
}
KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "EXPOSE", "CMD"}


class Step(NamedTuple):
    word: str
    text: str


def steps_of(name):
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [Step(*line.split(" ", 1)) for line in lines]


def script_of(name):
    """Return the steps as a program of sh, but the packages of Debian, and the folder that an image would have."""
    lines = ["set -eu"]
    for word, text in steps_of(name):
        if word in ("ARG", "ENV"):
            key, _, value = text.partition("=")
            lines.append(f"export {key}=" + ("$HERE" * value.startswith("/") + value))
        elif word == "RUN" and not text.startswith("apt-get "):
            lines.append(text)
    return "\n".join(lines) + "\n"


def packages_of(name):
    (installs,) = (step.text for step in steps_of(name) if step.text.startswith("apt-get "))
    return re.findall(r"--no-install-recommends ([\w+. -]*) &&", installs)[0].split()


@pytest.mark.parametrize("name", FILES)
def test_a_dockerfile_copies_this_repository_and_pins_what_ci_tests_with(name):
    steps = steps_of(name)
    assert steps[0].word == "FROM" and {step.word for step in steps} <= KNOWN and Step("COPY", ". .") in steps
    python = re.fullmatch(r"python:(3\.\d+)-slim", steps[0].text)[1]
    assert f"Python :: {python}" in (ROOT / "pyproject.toml").read_text()
    installs = [step.text for step in steps if "pip install" in step.text]
    assert installs and all("-c constraints.txt ./ptxkit" in text or "-c tests/peers" in text for text in installs)
    assert packages_of(name) == ["gcc", "g++", "libc6-dev"]
    (command,) = (json.loads(step.text) for step in steps if step.word == "CMD")
    assert (ROOT / command[1]).is_file()


def test_what_git_ignores_does_not_go_into_an_image():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv*", "build", "dist", "runs"} <= {*ignored}


@pytest.mark.installs
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FILES)
def test_the_steps_of_a_dockerfile_make_an_environment_in_which_its_command_runs(name, tmp_path):
    for program in ("gcc", "g++"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")
    kept = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "runs", "__pycache__", ".*_cache", ".hypothesis")
    copy, bare = tmp_path / "kda", tmp_path / "bare"
    shutil.copytree(ROOT, copy, ignore=kept)
    subprocess.run([sys.executable, "-m", "venv", bare], check=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KDA_"))}
    environment |= {"PATH": f"{bare / 'bin'}{os.pathsep}{os.environ['PATH']}", "HERE": str(tmp_path)}
    (command,) = (json.loads(step.text) for step in steps_of(name) if step.word == "CMD")
    last = shlex.join([*command, *map(str, FILES[name])])
    script = ["sh", "-c", script_of(name) + last]
    ran = subprocess.run(script, cwd=copy, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
