"""What type checkers say of programs that import kda, and that the stubs which they read are those of the code."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stub

ROOT = Path(__file__).resolve().parents[2]
USES = ROOT / "tests" / "helpers" / "typed" / "uses.py"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CHECKERS = ("mypy", "pyright")


def test_the_stubs_are_those_of_the_code():
    for path, text in stub.stubs().items():
        assert path.read_text() == text, "run python tests/helpers/stub.py --write"


def test_a_stub_follows_a_parameter_that_is_added_to_a_function(monkeypatch):
    tree_of = stub.tree_of

    def changed(module):
        tree = tree_of(module)
        for node in tree.body:
            if getattr(node, "name", "") == "chunk_kda":
                node.args.kwonlyargs[0].arg = "another"
        return tree

    monkeypatch.setattr(stub, "tree_of", changed)
    text = stub.of_kda()
    assert text.count("another: Tensor | None = None") == text.count("def chunk_kda(") + 3    # fwd, bwd, explain


def test_the_code_of_both_packages_is_checked_with_none_told_apart():
    assert "strict_optional" not in (ROOT / "pyproject.toml").read_text()
    modules = [path for package in ("kda", "ptxkit") for path in (ROOT / package).rglob("*.py")]
    assert len(modules) > 300 and [path for path in modules if "\n# mypy:" in path.read_text()] == []


def blocks(page: Path) -> str:
    """Return the Python of a page as one program, whose lines have their numbers on the page."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines) + "\n"


def write_programs(folder: Path) -> None:
    """Put the examples, and each page with Python, into a folder, as programs of somebody who has kda installed."""
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, folder)
    for page in PAGES:
        if (text := blocks(page)).strip():
            (folder / f"page_{page.stem.lower()}.py").write_text(text)


def refusals(checker: str, folder: Path) -> list[str]:
    """Return "file:line: message" of each error that a checker reports of the programs in a folder."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    if checker == "mypy":
        command = ["--config-file=", "--cache-dir", str(ROOT / ".mypy_cache"), "--ignore-missing-imports",
                   "--follow-imports=silent", "--check-untyped-defs", "--no-error-summary", "--no-pretty",
                   "--python-version", "3.10", *sorted(path.name for path in folder.glob("*.py"))]
    else:
        settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "basic", "reportMissingImports": False,
                    "pythonVersion": "3.10"}
        (folder / "pyrightconfig.json").write_text(json.dumps(settings))
        command = ["--project", ".", "--pythonpath", sys.executable, "--outputjson"]
    environment = os.environ | {"MYPYPATH": str(ROOT), "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-m", checker, *command], capture_output=True, text=True, cwd=folder,
                         env=environment, timeout=600)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    if checker == "mypy":
        return re.findall(r"^.*?:\d+: error: .*$", ran.stdout, re.MULTILINE)
    return [f"{Path(row['file']).name}:{row['range']['start']['line'] + 1}: {row['message']}"
            for row in json.loads(ran.stdout)["generalDiagnostics"] if row["severity"] == "error"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_accepts_the_examples_and_the_python_of_every_page(checker, tmp_path):
    write_programs(tmp_path)
    assert len({*tmp_path.iterdir()}) > 8 and (tmp_path / "page_readme.py").exists()
    assert refusals(checker, tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_refuses_misspelt_keywords_and_wrong_unpacking_and_nothing_else(checker, tmp_path):
    shutil.copy(USES, tmp_path)
    wrong = {n for n, line in enumerate(USES.read_text().splitlines(), 1) if line.endswith("# wrong")}
    found = refusals(checker, tmp_path)
    assert len(wrong) > 25 and {int(line.split(":")[1]) for line in found} == wrong, found
