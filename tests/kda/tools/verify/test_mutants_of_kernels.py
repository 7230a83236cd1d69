"""Weakened synchronisation of the shipped kernels is noticed, as docs/data/mutants.json says."""

import mutant_table
import pytest
from mutant_table import Entry, Key

from kda.tools.verify.mutants import CALLS
from ptxkit.mutation import RULES, SCHEDULES, WAYS

pytestmark = pytest.mark.simulated

EVERY = 20                                   # mutants of the first call, of which one is looked at in every run
ENOUGH = 0.98                                # share of the mutants that matter


@pytest.fixture(scope="module")
def table():
    """Backend -> its rows in the file, by key."""
    return {name: {Key(*row[:4]): Entry(*row[4:]) for row in part["rows"]}
            for name, part in mutant_table.read().items()}


def test_the_file_has_a_table_for_each_backend_with_kernels_of_its_own(table):
    assert list(table) == list(CALLS) and len(SCHEDULES) == 4, "the page says four"
    for backend, part in mutant_table.read().items():
        assert [*part["ways"]] == [*WAYS] and len(table[backend]) == len(part["rows"])
        counted = sum(entry.mutants - entry.redundant - entry.survived for entry in table[backend].values())
        assert sum(part["ways"].values()) == counted


def test_nothing_survives_in_the_file(table):
    assert not [key for rows in table.values() for key, entry in rows.items() if entry.survived]


def test_the_file_names_what_the_rules_do(table):
    assert {key.mutation for rows in table.values() for key in rows} <= {rule.name for rule in RULES}


@pytest.mark.parametrize("backend", CALLS)
def test_the_file_names_statements_that_stand_in_the_kernels(backend, table):
    """A row whose statement was moved or reworded is a row that no mutant has."""
    found = mutant_table.statements()
    assert [key for key in table[backend] if (key.file, key.statement) not in found] == []


def test_the_file_is_as_the_program_writes_it():
    assert mutant_table.text(mutant_table.read()) == mutant_table.FILE.read_text()


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("backend", CALLS)
def test_a_sample_of_the_mutants_is_noticed_as_the_file_says(backend, table):
    found = mutant_table.looked_at(backend, sample=EVERY, first=1)
    assert len(found.outcomes) >= 3 and not found.survivors
    for outcome in found.outcomes:
        entry = table[backend][mutant_table.key_of(outcome)]
        assert {*outcome.noticed} <= {*entry.noticed}, (entry, outcome.noticed)
        assert outcome.noticed or entry.redundant


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", CALLS)
def test_all_mutants_are_noticed_as_the_file_says(backend):
    found = mutant_table.looked_at(backend)
    assert found.share >= ENOUGH
    assert mutant_table.section(found) == mutant_table.read()[backend]
