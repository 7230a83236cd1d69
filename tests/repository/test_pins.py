"""The pins of `constraints.txt` fit together on every Python that kda supports, with the torch that pip downloads.

A CPU build of torch asks for no triton, so a machine that has one cannot notice a triton that the published torch
refuses.  RELEASES therefore repeats what the published metadata of each pinned release states; a new pin needs a new
line there.
"""

from __future__ import annotations

import importlib.metadata
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import kda
from kda.tools.commands.findings import WITH_COMPILERS

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LINUX = {"platform_system": "Linux", "platform_machine": "x86_64", "sys_platform": "linux", "extra": ""}


class Release(NamedTuple):
    python: str                              # Requires-Python
    requires: tuple[str, ...] = ()           # Requires-Dist, as far as it names packages of this table


# What the index says of each pinned release, and, indented, of those that stand between two of them.
RELEASES = {
    "torch==2.13.0": Release(">=3.10", (
        'triton==3.7.1; platform_system == "Linux" and python_version < "3.15"',
        'cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"',
        'cuda-toolkit[nvrtc]==13.0.3; platform_system == "Linux"',
    )),
    "triton==3.7.1": Release(">=3.10,<3.15"),
    "nvidia-cutlass-dsl==4.8.1": Release(">=3.10", ("cuda-bindings>=12.8",)),         # that of its libraries
    "cuda-python==13.4.4": Release(">=3.10", ("cuda-bindings~=13.4.4",)),
    "cuda-bindings==13.4.4": Release(">=3.10"),
    "cuda-toolkit==13.0.3.0": Release("", ("nvidia-cuda-nvrtc==13.0.88.*",)),         # that of its extra nvrtc
    "nvidia-cuda-nvrtc==13.0.88": Release(">=3"),
    "click==8.5.1": Release(">=3.10"),
    "packaging==26.3": Release(">=3.9"),
    "pytest==9.2.0": Release(">=3.10", ("packaging>=24",)),
    "pytest-xdist==3.8.0": Release(">=3.9", ("pytest>=7.0.0",)),
    "hypothesis==6.168.5": Release(">=3.10"),
    "hypothesis==6.170.15": Release(">=3.11"),
    "ruff==0.17.5": Release(">=3.7"),
    "mypy==2.4.1": Release(">=3.10"),
    "matplotlib==3.10.9": Release(">=3.10", ("packaging>=20.0",)),
    "matplotlib==3.11.2": Release(">=3.11", ("packaging>=20.0",)),
    "sphinx==8.1.3": Release(">=3.10", ("packaging>=23.0",)),
    "sphinx==9.0.4": Release(">=3.11", ("packaging>=23.0",)),
    "furo==2025.12.19": Release(">=3.8", ("sphinx<10.0,>=7.0",)),
    "myst-parser==4.0.1": Release(">=3.10", ("sphinx>=7,<9",)),
    "myst-parser==5.2.0": Release(">=3.11", ("sphinx>=8,<10",)),
}
BETWEEN = ("cuda-bindings==13.4.4", "cuda-toolkit==13.0.3.0")
PINS = (ROOT / "constraints.txt").read_text()


COMPILERS = {"triton", "nvidia-cutlass-dsl", "cuda-python"}


@pytest.fixture(scope="module")
def resolve():
    """The program that asks pip what it would install on another machine."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "resolve")))


def requirements(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]


def ours() -> list[Requirement]:
    """What both packages ask for, extras included; read as text, as Python 3.10 has no reader of TOML."""
    text = "\n".join((ROOT / name / "pyproject.toml").read_text() for name in (".", "ptxkit"))
    lists = re.findall(r"^(?:dependencies|plot|test|docs) = \[(.*?)\](?:  #.*)?$", text, re.MULTILINE | re.DOTALL)
    found = [Requirement(each) for each in re.findall(r'"([^"]+)"', "".join(lists))]
    return [each for each in found if each.name != "ptxkit"]                # it lies in this repository


def applies(requirement: Requirement, python: str) -> bool:
    environment = {**LINUX, "python_version": python, "python_full_version": f"{python}.9"}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def conflicts(pins: str, python: str) -> list[str]:
    """What pip would refuse."""
    chosen = [r for r in requirements(pins) if applies(r, python)] + [Requirement(name) for name in BETWEEN]
    versions = {r.name: next(iter(r.specifier)).version for r in chosen}
    found = [] if len(versions) == len(chosen) else ["a package is pinned twice"]
    wanted = [("kda", r) for r in ours()]
    for name, version in versions.items():
        release = RELEASES.get(f"{name}=={version}")
        if release is None:
            found.append(f"{name}=={version} is not in RELEASES")
            continue
        if not SpecifierSet(release.python).contains(f"{python}.9"):
            found.append(f"{name}=={version} wants Python {release.python}")
        wanted += [(name, Requirement(text)) for text in release.requires]
    for who, r in wanted:
        if applies(r, python) and not (r.name in versions and r.specifier.contains(versions[r.name])):
            found.append(f"{who} wants {r.name}{r.specifier}, pinned is {versions.get(r.name)}")
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_fit_together_and_fit_the_python(python):
    assert conflicts(PINS, python) == []


@pytest.mark.parametrize("pin, other, python, says", [
    ("triton==3.7.1", "triton==3.9.0", "3.11", "torch wants triton==3.7.1, pinned is 3.9.0"),
    ('matplotlib==3.10.9; python_version < "3.11"', "", "3.10", "kda wants matplotlib>=3.7, pinned is None"),
    ('; python_version >= "3.11"', "", "3.10", "wants Python >=3.11"),
    ("cuda-python==13.4.4", "cuda-python==12.8.0", "3.12", "cuda-python==12.8.0 is not in RELEASES"),
    ("pytest==9.2.0", "pytest==7.4.0", "3.13", "kda wants pytest>=8, pinned is 7.4.0"),
])
def test_a_pin_that_does_not_fit_is_noticed(pin, other, python, says):
    assert pin in PINS
    assert any(says in line for line in conflicts(PINS.replace(pin, other), python))


@pytest.mark.parametrize("python", PYTHONS)
def test_compilers_are_asked_for_where_an_nvidia_gpu_has_a_linux_host(resolve, python):
    for machine in resolve.MACHINES:
        names = {Requirement(each).name for each in resolve.applying(resolve.declared(), python, machine)}
        assert names >= COMPILERS
        assert ("Linux", machine) in WITH_COMPILERS
    others = resolve.applying(resolve.declared(), python, "riscv64")
    assert not COMPILERS & {Requirement(each).name for each in others} and len(WITH_COMPILERS) == len(resolve.MACHINES)


@pytest.mark.parametrize("python", PYTHONS)
def test_pip_is_asked_with_every_pin_of_the_other_python(resolve, python):
    asked = resolve.applying(resolve.pinned(), python, "aarch64")
    assert {f"{r.name}{r.specifier}" for r in requirements(PINS) if applies(r, python)} == {*asked}
    assert not any(";" in each for each in asked)


def test_a_release_without_a_wheel_for_the_machine_is_refused_by_name(resolve):
    said = resolve.refusal("3.12", "aarch64", ["triton==0.0.1"], [])
    assert "No matching distribution found for triton==0.0.1" in said


@pytest.mark.installs
@pytest.mark.exhaustive
@pytest.mark.parametrize("python", PYTHONS)
def test_everything_that_is_asked_for_has_a_wheel_for_aarch64(resolve, python, capsys):
    assert resolve.main(["aarch64", python]) == 0, capsys.readouterr().out


def test_pre_commit_runs_the_ruff_that_is_pinned():
    (pinned,) = re.findall(r"^ruff==.*$", PINS, re.MULTILINE)
    assert re.findall(r'"(ruff==[^"]*)"', (ROOT / ".pre-commit-config.yaml").read_text()) == [pinned]


def test_the_citation_is_of_this_version():
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == kda.__version__ and f"## {cited}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_supported_python_is_looked_at():
    text = (ROOT / "pyproject.toml").read_text()
    assert tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)) == PYTHONS
    assert len(ours()) > 10


@pytest.mark.parametrize("pinned", RELEASES)
def test_the_table_repeats_the_metadata_of_what_is_installed(pinned):
    name, _, version = pinned.partition("==")
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if Version(metadata["Version"]).public != version:
        pytest.skip(f"{metadata['Version']} is installed")
    assert (metadata["Requires-Python"] or "") == RELEASES[pinned].python
    known = {each.partition("==")[0] for each in RELEASES}
    stated = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    stated = {(r.name, str(r.specifier)) for r in stated if r.name in known and applies(r, PYTHONS[-1])}
    assert stated <= {(r.name, str(r.specifier)) for r in map(Requirement, RELEASES[pinned].requires)}
