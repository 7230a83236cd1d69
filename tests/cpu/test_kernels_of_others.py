"""docs/results/kernels_of_others.md is what benchmarks/kernels_of_others.py writes: a row for each case, all read."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results" / "kernels_of_others.md").read_text()


def script():
    spec = importlib.util.spec_from_file_location("kernels_of_others", ROOT / "benchmarks" / "kernels_of_others.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_case_has_its_row_and_every_row_its_case():
    rows = [line.split(" | ")[:2] for line in PAGE.splitlines() if line.startswith("| ") and " | sm_" in line]
    cases = [[f"| {kernel}", arch] for _, kernel, arch, _ in script().CASES]
    assert sorted(rows) == sorted(cases)


def test_there_are_sixty_kernels_of_ten_projects_each_with_its_version():
    module = script()
    assert len(module.CASES) >= 60 and len({project for project, *_ in module.CASES}) >= 10
    for title, version, _ in (module.PROJECTS[project] for project, *_ in module.CASES):
        assert f"## {title}, {version}\n" in PAGE


def test_every_finding_and_wrong_result_has_been_read():
    assert "not read yet" not in PAGE and "did not run" not in PAGE


def test_a_finding_that_nobody_has_read_says_so():
    module = script()
    assert module.verdict("rope, forward and backward", "race-write-read").startswith("harmless")
    assert module.verdict("vectorAdd: vectorAdd", "race-write-read") == "not read yet"
