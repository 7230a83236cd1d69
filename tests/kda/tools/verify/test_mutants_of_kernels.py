"""Weakened synchronisation of the shipped kernels is noticed, as docs/mutants.md says."""

import re

import mutants_docs as docs
import pytest

from kda.tools.verify.mutants import CALLS
from ptxkit.mutation import RULES

pytestmark = pytest.mark.simulated

EVERY = 20                                   # mutants of the first call, of which one is looked at in every run


def tables():
    """Section -> the cells of its table's rows, out of the page."""
    found = {}
    for section in docs.PAGE.read_text().split("\n## ")[1:]:
        name, *lines = section.splitlines()
        cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines if line.startswith("| ")]
        found[name] = [[cell.replace("\\|", "|").strip("`") for cell in row] for row in cells[1:]]
    return found


@pytest.fixture(scope="module")
def page():
    return tables()


def test_the_page_has_a_table_for_each_backend_with_kernels_of_its_own(page):
    assert list(page) == list(CALLS)
    assert all(len(row) == 6 for rows in page.values() for row in rows)


def test_nothing_survives_in_the_page(page):
    assert not [row for rows in page.values() for row in rows if "survived" in row[5]]


def test_the_page_names_what_the_rules_do(page):
    assert {row[3] for rows in page.values() for row in rows} <= {rule.name for rule in RULES}


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("backend", CALLS)
def test_a_sample_of_the_mutants_is_noticed_as_the_page_says(backend, page):
    known = {tuple(row[:4]): row for row in page[backend]}
    found = docs.looked_at(backend, sample=EVERY, first=1)
    assert len(found.outcomes) >= 3 and not found.survivors
    for outcome in found.outcomes:
        row = known[docs.key_of(outcome)]
        assert all(kind in row[5] for kind in outcome.noticed), (row, outcome.noticed)
        assert outcome.noticed or "redundant" in row[5]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", CALLS)
def test_all_mutants_are_noticed_as_the_page_says(backend):
    found = docs.looked_at(backend)
    assert found.share >= docs.ENOUGH
    assert "\n".join(docs.rows(found.outcomes)) in docs.PAGE.read_text()
