"""The file that `python -m ptxkit.benchmarks.others` writes has a row for each case, and all of them were read."""

import json
import pathlib

from ptxkit.benchmarks.others.cases import CASES, NOT_RUN, PROJECTS
from ptxkit.benchmarks.others.page import page, text, verdict

ROOT = pathlib.Path(__file__).parents[3]
FILE = ROOT / "ptxkit" / "docs" / "data" / "kernels_of_others.json"
FOUND = json.loads(FILE.read_text())
PAGE = page(FOUND)


def test_every_case_has_its_row_and_every_row_its_case():
    rows = [line.split(" | ")[:2] for line in PAGE.splitlines() if line.startswith("| ") and " | sm_" in line]
    cases = [[f"| {kernel}", arch] for _, kernel, arch, _ in CASES]
    assert sorted(rows) == sorted(cases)


def test_there_are_sixty_kernels_of_ten_projects_each_with_its_version():
    assert len(CASES) >= 60 and len({project for project, *_ in CASES}) >= 10
    for title, version, *_ in (PROJECTS[project] for project, *_ in CASES):
        assert f"## {title}, {version}\n" in PAGE


def test_every_finding_and_wrong_result_has_been_read():
    assert "not read yet" not in PAGE and "did not run" not in PAGE


def test_the_file_is_as_the_program_writes_it_and_no_project_has_an_older_version():
    assert text(FOUND) == FILE.read_text()
    assert {project: part["version"] for project, part in FOUND.items()} == {p: PROJECTS[p].version for p in FOUND}
    older = FOUND | {"quack": FOUND["quack"] | {"version": "older"}}
    assert page(older).count("\n## ") == PAGE.count("\n## ") - 1


def test_rows_of_some_projects_leave_those_of_the_others():
    new = {"quack": {"version": PROJECTS["quack"].version, "rows": [["a kernel", "sm_90a", "yes", 1, []]]}}
    some = page(FOUND | new)
    assert "| a kernel | sm_90a" in some and "topk, forward | sm_90a | yes | 4,163" not in some
    assert "| cross_entropy, forward and backward | sm_90a |" in some and some.count("\n## ") == PAGE.count("\n## ")


def test_what_does_not_run_has_a_reason():
    assert all(why and project in PROJECTS for project, _, why in NOT_RUN)
    assert "## Not run, and why" in PAGE


def test_a_finding_that_nobody_has_read_says_so():
    assert verdict("rope, forward and backward", "race-write-read").startswith("harmless")
    assert verdict("vectorAdd: vectorAdd", "race-write-read") == "not read yet"
