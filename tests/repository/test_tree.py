"""Tests lie where the code lies that they test, so that a file's path leads to its tests."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
HIDDEN = {"cuda", "cutlass", "fla", "numpy", "torch", "transformers", "triton", "vllm"}  # tests ask whether these exist
KDA_IN_PTXKIT = {  # file -> why it imports kda all the same
    "capturing/test_capture.py": "a capture stands in for the GPU that kda detects",
    "capturing/test_freed.py": "kda's calls are the host code in which memory is freed too early",
    "commands/test_render.py": "kda's command prints through ptxkit",
    "commands/test_simulate_command.py": "`kda simulate` forwards to ptxkit",
    "compile/test_sources.py": "the key of a kernel covers kda's files",
    "compile/test_store.py": "`kda doctor` names the folder of built kernels",
    "test_findings.py": "findings name the fields that kda declares for shared memory",
    "timing/test_timeline.py": "timelines name the roles of warps in kda's kernels",
}


def files_of(folder):
    return sorted((TESTS / folder).rglob("test_*.py"))


def has_counterpart(file):
    """Tell whether the folder of a test file is, without `tests`, a folder or a module of the code."""
    code = ROOT / file.parent.relative_to(TESTS)
    return code.is_dir() or code.with_suffix(".py").is_file()


def imported(code):
    """Return the names of the packages and modules, without what is inside them, that Python code imports."""
    nodes = [*ast.walk(ast.parse(code))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def needs(file):
    """Return what a test file imports, also by way of the modules in tests/helpers."""
    found, files = set(), [file]
    while files:
        new = imported(files.pop().read_text()) - found
        found |= new
        files += [path for name in sorted(new) if (path := TESTS / "helpers" / f"{name}.py").is_file()]
    return found


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by it."""
    names = [file.name for file in files_of(".")]
    assert names and [name for name in {*names} if names.count(name) > 1] == []


@pytest.mark.parametrize("package", ["kda", "ptxkit"])
def test_a_test_file_lies_in_a_folder_that_the_code_has_too(package):
    files = files_of(package)
    assert files and [str(file) for file in files if not has_counterpart(file)] == []


def test_other_test_files_lie_where_contributing_says():
    folders = {file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")}
    assert folders == {"kda", "ptxkit", "repository", "gpu", "peers"}
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [folder for folder in sorted(folders) if f"`tests/{folder}" not in page] == []


def test_a_folder_without_a_counterpart_is_noticed():
    assert has_counterpart(TESTS / "kda" / "calls" / "api" / "test_x.py")
    assert not has_counterpart(TESTS / "kda" / "callers" / "test_x.py")


def test_tests_of_ptxkit_import_kda_only_where_a_reason_is_listed():
    folder = TESTS / "ptxkit"
    found = {str(file.relative_to(folder)) for file in files_of("ptxkit") if "kda" in needs(file)}
    assert found == KDA_IN_PTXKIT.keys()


def test_an_import_inside_a_function_or_by_a_helper_is_noticed(tmp_path):
    file = tmp_path / "test_x.py"
    file.write_text("def f():\n    from kda.calls import api\n    import ptxkit.isa as isa\n")
    assert needs(file) == {"kda", "ptxkit"}
    file.write_text("import sm89_calls\n")
    assert "kda" in needs(file)


def test_no_folder_hides_a_package_that_is_not_installed():
    """pytest puts the folder of a test file on sys.path, where a folder in it passes for a package of its name."""
    folders = {file.parent for file in TESTS.rglob("test_*.py")}
    inside = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    assert not inside & HIDDEN
