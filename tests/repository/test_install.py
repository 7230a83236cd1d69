"""An editable installation, an sdist and a wheel, made without a network of the project's own pyproject.toml."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77", reason="setuptools is not installed")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "tests/repository/test_docs.py", "tests/helpers/digests.json", "docs/index.md", "docs/conf.py", "CHANGELOG.md",
    "benchmarks/README.md", "constraints.txt", "CITATION.cff", ".github/workflows/ci.yml",
)
KINDS = (".py", ".pyi", ".c", ".cpp", ".h", ".cu", ".cuh", ".json", ".typed")
LOOK = """
import importlib.util, site, sys
above, installed = sys.argv[1:]
sys.path.insert(0, above)                                # as Python does for a script that lies there
site.addsitedir(installed)
print(importlib.util.find_spec("kda").origin)
"""


def python(*argv, **options):
    """Python without what is installed in this environment."""
    ran = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=600, **options)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_script_above_an_editable_checkout_imports_the_package_and_not_the_folder(tmp_path):
    """A checkout is called kda, too, and a folder on sys.path would become a namespace package of that name."""
    above, installed = tmp_path / "above", tmp_path / "installed"
    checkout = above / "kda"
    (checkout / "kda").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "kda/__init__.py"):
        shutil.copy(ROOT / name, checkout / name)
    build = "from setuptools import build_meta; import sys; build_meta.build_editable(sys.argv[1])"
    python("-c", build, str(tmp_path), cwd=checkout)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(installed)
    found = python("-I", "-S", "-c", LOOK, str(above), str(installed))
    assert Path(found.strip()) == checkout / "kda" / "__init__.py"


@pytest.mark.exhaustive
def test_an_sdist_has_tests_and_docs_and_makes_a_wheel_of_the_package_alone(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, checkout)
        elif path.name in ("kda", "ptxkit", "tests", "docs", "benchmarks", "examples", ".github", ".ci"):
            shutil.copytree(path, checkout / path.name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    python("-c", "from setuptools import build_meta; build_meta.build_sdist('..')", cwd=checkout)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    for name in SOURCES:
        assert (unpacked / name).exists(), name
    python("-c", "from setuptools import build_meta; build_meta.build_wheel('..')", cwd=unpacked)
    with zipfile.ZipFile(next((tmp_path / "sdist").glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    files = (path for path in (ROOT / "kda").rglob("*"))
    package = {str(path.relative_to(ROOT)) for path in files if path.suffix in KINDS}
    assert package == {name for name in names if ".dist-info" not in name}
