"""The page of the status says what the ledger, the changelog and the backends say."""

import re

import pytest

from benchmarks import status_page
from kda.routing.dispatch import capabilities
from kda.tools.verify.ledger import RAN, Ledger, host_code
from ptxkit.compile.target import TARGETS

CHANGELOG = "# Changelog\n\n## 9.9.9, 2027-01-01\n\n## 9.9.8\n"
FORWARD, DECODE = "sm90: forward, as the plan says", "triton: decode_step"


def page(ledger, changelog=CHANGELOG):
    return status_page.page(ledger, capabilities(), changelog)


def rows(text, *begins):
    """Return the cells of the rows that begin with these."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [cells for cells in found if cells[: len(begins)] == [*begins]]


def run(path, card="H200", date="2026-11-28", outcome="ok", case="a", host=None):
    return {"case": case, "path": path, "outcome": outcome, "codes": {"1234": ""}, "launches": {}, "errors": {},
            "host": host or host_code(path), "card": card, "date": date, "versions": {}}


def made_up(*runs):
    paths = {FORWARD: [], "sm90: forward, kernels apart": [], DECODE: ["a", "b"], "sm90: tests of the forward": []}
    return Ledger({"kernels": {"sm90 sm90": {"packed": {"fused 0": "1234", "walk 0": "5678"}}}, "paths": paths,
                   "runs": [*runs], "compilers": {"sm90": "CuTe DSL 4.8.1"}})


def test_every_call_of_the_ledger_is_counted_once_and_every_gpu_has_a_row():
    ledger, text = Ledger.read(), page(Ledger.read())
    paths = [*ledger.paths()]
    calls = [cells for name in {*status_page.CALLS.values()} for cells in rows(text) if cells[1:2] == [name]]
    assert {(cells[0], cells[1]) for cells in calls} == {
        (f"`{path.name.partition(':')[0]}`", status_page.CALLS[path.name.partition(": ")[2].partition(",")[0]])
        for path in paths}
    counts = [re.fullmatch(r"(\d+) of (\d+)", cells[2]) for cells in calls]
    assert sum(int(count[1]) for count in counts if count) == sum(path.state == RAN for path in paths)
    assert all(rows(text, target.examples) for target in TARGETS.values())
    assert all(rows(text, f"`{group.split()[0]}`", group.split()[1]) for group in ledger.groups)


def test_a_run_is_on_the_page_until_its_code_changes():
    assert rows(page(made_up()), "`sm90`", "`chunk_kda` without gradients") == [
        ["`sm90`", "`chunk_kda` without gradients", "simulated", "-", "-"]]
    text = page(made_up(run(FORWARD)))
    assert rows(text, "`sm90`", "`chunk_kda` without gradients")[0][2:] == ["1 of 2", "H200", "2026-11-28"]
    assert rows(text, "`sm90`", "sm90") == [["`sm90`", "sm90", "1 of 2", "H200", "2026-11-28"]]
    assert rows(text, "H100, H200, H20")[0][2] == "H200" and rows(text, "A100")[0][2] == "none: simulated"
    text = page(made_up(run(FORWARD, host="what it was")))
    assert rows(text, "`sm90`", "`chunk_kda` without gradients")[0][2] == "changed since"


@pytest.mark.parametrize(("runs", "says"), [
    ([run(DECODE)], "in part"), ([run(DECODE), run(DECODE, case="b")], "1 of 1"),
    ([run(DECODE), run(DECODE, case="b", outcome="wrong")], "failed"),
    ([run(FORWARD, card="A100")], "simulated"),
])
def test_a_call_of_several_cases_ran_when_all_of_them_did(runs, says):
    text = page(made_up(*runs))
    assert rows(text, "`triton`", "`decode_step`")[0][2] == says
    assert rows(text, "A100")[0][2] == ("A100" if runs[0]["card"] == "A100" else "none: simulated")


def test_the_version_is_that_of_the_changelog_and_a_changelog_without_one_is_refused():
    assert "Version 9.9.9, 2027-01-01. Before 1.0" in page(made_up())
    assert f"Version {status_page.version(status_page.read_changelog())}." in page(made_up(),
                                                                                  status_page.read_changelog())
    with pytest.raises(ValueError, match="must have a heading for each version"):
        page(made_up(), "# Changelog\n")


def test_what_is_public_is_what_the_policy_calls_public():
    policy, text = (status_page.common.ROOT / "docs" / "policy.md").read_text(), page(made_up())
    variables = [{*re.findall(r"\bKDA_[A-Z_]+\b", each)} for each in (policy, text)]
    assert variables[0] == variables[1] != set()
    for name in ("kda.__all__", "kda.nn", "kda.parallel", "--json", "exit codes", "FLA 0.6.0"):
        assert name in policy and name in text


def test_limits_are_those_that_backends_declare():
    said = {cells[0]: cells[1] for cells in rows(page(made_up())) if "needs" in cells[1]}
    assert said.keys() == {f"`{each.backend}`" for each in capabilities() if each.archs}
    assert "needs K and V of 64 or 128;" in said["`sm90`"] and "{" not in "".join(said.values())
    for each in capabilities():
        kept = [rule for rule in each.rules if each.archs and not rule.id.endswith((".gpu", ".installed"))]
        assert all(rule.why.partition(",")[0].partition(";")[0] in said[f"`{each.backend}`"] for rule in kept)
