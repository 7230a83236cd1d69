"""The oldest versions that pyproject.toml permits: together they install, and kda works with them."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PYENV = Path.home() / ".pyenv" / "versions"
RESOLVE = runpy.run_path(str(ROOT / ".ci" / "resolve"))
OLDEST, *_ = RESOLVE["PYTHONS"]
TESTS = (
    "tests/kda/calls/test_chunk.py", "tests/kda/calls/test_gate.py", "tests/kda/calls/test_operators.py",
    "tests/kda/calls/test_lazy_tensors.py", "tests/kda/nn/test_layer.py", "tests/ptxkit/compile",
    "tests/ptxkit/capturing/test_own_kernels.py",
)


def floors():
    """Return each requirement with its lowest version, such as "torch==2.10"; ptxkit and kda may have another floor."""
    lowest = {}
    for requirement in map(Requirement, RESOLVE["applying"](RESOLVE["declared"](), OLDEST, "x86_64")):
        versions = [each.version for each in requirement.specifier if each.operator == ">="]
        name = requirement.name + (f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else "")
        lowest.setdefault(name, []).append(max(map(Version, versions)) if versions else None)
    return {name: max(versions) if None not in versions else None for name, versions in lowest.items()}


def test_every_requirement_has_an_oldest_version():
    found = floors()
    assert {"torch", "triton", "click", "packaging", "cuda-python", "nvidia-cutlass-dsl[cu13]"} == {*found}
    assert all(found.values())


def test_the_readme_and_the_doctor_name_these_versions():
    found, readme = floors(), (ROOT / "README.md").read_text()
    (row,) = re.findall(r"^\| needs \|(.*)\|$", readme, re.MULTILINE)
    assert f"torch {found['torch']}, Triton {found['triton']}" in row
    from kda.tools.commands.findings import LOWEST_DRIVER

    assert f"driver {LOWEST_DRIVER[12]} for CUDA 12, {LOWEST_DRIVER[13]} for CUDA 13" in row
    (versions,) = re.findall(r"Python (3\.\d+) to (3\.\d+)", row)
    assert versions == (OLDEST, RESOLVE["PYTHONS"][-1])


@pytest.mark.installs
@pytest.mark.exhaustive
def test_kda_works_with_the_oldest_of_everything(tmp_path):
    pythons = [*PYENV.glob(f"{OLDEST}.*/bin/python"), *filter(None, [shutil.which(f"python{OLDEST}")])]
    python, bare = str(pythons[0] if pythons else sys.executable), tmp_path / "bare"
    subprocess.run([python, "-m", "venv", bare], check=True)
    oldest = [f"{name}=={version}" for name, version in floors().items()]
    tools = ["pytest", "pytest-xdist", "hypothesis", "numpy"]
    program = bare / "bin" / "python"
    subprocess.run([program, "-m", "pip", "install", "-q", *oldest, *tools, ROOT / "ptxkit", ROOT], check=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KDA_"))}
    for command in (["selftest", "--quick"], ["doctor", "deps.pins"]):
        subprocess.run([bare / "bin" / "kda", *command], check=True, cwd=tmp_path, env=environment)
    command = [program, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:]
