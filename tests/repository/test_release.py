"""What a release needs: files that agree, a workflow whose steps are those of .ci/release, wheels that install."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kda

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
AGREE = (
    "pyproject.toml", "ptxkit/pyproject.toml", "CITATION.cff", "CHANGELOG.md", "kda/__init__.py", "ptxkit/__init__.py",
)
PYENV = Path.home() / ".pyenv" / "versions"


@pytest.fixture(scope="module")
def release():
    return SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "release")))


@pytest.fixture
def ready(tmp_path):
    """The files of a version that may be released, in a folder of their own."""
    for name in AGREE:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "ptxkit/pyproject.toml", "CITATION.cff"):
        change(tmp_path / name, "repository.invalid", "repository.example")
    change(tmp_path / "CITATION.cff", "license:", "date-released: 2027-01-31\nlicense:")
    change(tmp_path / "CHANGELOG.md", f"{kda.__version__}, not released yet", f"{kda.__version__}, 2027-01-31")
    return tmp_path


def change(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_a_version_whose_files_agree_may_be_released(release, ready):
    assert release.faults(f"v{kda.__version__}", ready) == []


@pytest.mark.parametrize(("file", "old", "new", "says"), [
    ("kda/__init__.py", f'"{kda.__version__}"', '"9.9.9"', "kda.__version__ is 9.9.9"),
    ("CITATION.cff", f"version: {kda.__version__}", "version: 9.9.9", "CITATION.cff is of version 9.9.9"),
    ("CITATION.cff", "date-released: 2027-01-31", "", "has no date-released"),
    ("CITATION.cff", "2027-01-31", "2027-02-01", "Give it CITATION.cff's date-released"),
    ("CHANGELOG.md", "2027-01-31", "soon", "says 'soon' after"),
    ("CHANGELOG.md", f"## {kda.__version__}", "## 9.9.9", f"says nothing of {kda.__version__}"),
    ("ptxkit/__init__.py", '__version__ = "0.1', '__version__ = "7.1', "ptxkit.__version__ is 7.1"),
    ("ptxkit/pyproject.toml", "repository.example", "elsewhere.example", "the address of the repository differs"),
    ("CITATION.cff", "repository.example", "repository.invalid", "has no address yet"),
])
def test_a_version_whose_files_do_not_agree_is_refused(release, ready, file, old, new, says):
    change(ready / file, old, new)
    assert any(says in fault for fault in release.faults(f"v{kda.__version__}", ready))


def test_a_tag_of_another_version_is_refused(release, ready):
    assert "the tag is v0.0.1" in release.faults("v0.0.1", ready)[0]


def test_the_notes_are_the_section_of_the_version(release, ready):
    text = (ready / "CHANGELOG.md").read_text()
    (ready / "CHANGELOG.md").write_text(text.replace("## ", "## 9.9.9, 2030-01-01\n\nAnother.\n\n## ", 1))
    date, notes = release.section(ready, kda.__version__)
    assert date == "2027-01-31" and notes.startswith("First version.") and "Another." not in notes
    assert release.section(ready, "9.9.9") == ("2030-01-01", "Another.")


def test_the_workflows_run_steps_that_exist_and_publish_without_a_token(release):
    text = (WORKFLOWS / "release.yml").read_text()
    steps = re.findall(r"\.ci/release (\w+)", text + (WORKFLOWS / "ci.yml").read_text())
    assert {*steps} == {"check", "build", "notes", "smoke", "rehearse"} and all(f".ci/release {step}" in release.__doc__
                                                                                for step in steps)
    assert text.index(".ci/release check") < text.index(".ci/release build") < text.index("gh-action-pypi-publish")
    assert "id-token: write" in text and not re.search(r"secrets\.|password:|api-token", text)
    pythons = re.findall(r"python: (\[.*\])", text)
    assert pythons == re.findall(r"python: (\[.*\])", (WORKFLOWS / "ci.yml").read_text())[:1]


def test_the_address_of_the_repository_and_the_status_are_the_same_everywhere(release):
    texts = {name: (ROOT / name).read_text() for name in ("pyproject.toml", "ptxkit/pyproject.toml", "CITATION.cff")}
    addresses = {address for text in texts.values() for address in re.findall(r"https://[^\"\s]*/kda", text)}
    assert len(addresses) == 1
    conf = runpy.run_path(str(ROOT / "ptxkit" / "docs" / "shared.py"))
    for project in ("kda", "ptxkit"):
        (icon,) = conf["settings"](project, "pytest")["html_theme_options"]["footer_icons"]
        assert {icon["url"]} == addresses and icon["html"] == "repository"
    status = [re.findall(r"Development Status :: \d - (\w+)", text) for text in texts.values()]
    assert status == [["Alpha"], ["Alpha"], []]
    policy, readme = ((ROOT / name).read_text() for name in ("docs/policy.md", "README.md"))
    assert "kda and ptxkit are alphas" in policy and "alpha" in readme
    unreleased = "not released yet" in (ROOT / "CHANGELOG.md").read_text()
    assert ("no version has been released yet" in policy) is unreleased


@pytest.mark.installs
@pytest.mark.exhaustive
@pytest.mark.parametrize("python", ("3.10", "3.11", "3.12", "3.13"))
def test_the_wheels_install_into_a_bare_environment_and_work(release, python, tmp_path_factory):
    """The Python is this one, or one that pyenv has."""
    found = [*sorted(PYENV.glob(f"{python}.*/bin/python")), *([sys.executable] if in_use(python) else [])]
    if not found:
        pytest.skip(f"Python {python} is not installed")
    folder = tmp_path_factory.getbasetemp() / "wheels"
    if not folder.exists():
        for name in (".", "ptxkit"):
            command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", folder, ROOT / name]
            subprocess.run(command, check=True)
    release.smoke(str(found[0]), folder)


def in_use(python):
    return python == ".".join(map(str, sys.version_info[:2]))
