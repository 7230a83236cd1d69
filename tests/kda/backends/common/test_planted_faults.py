"""Faults that tests plant into kernels stand where they say: most of them are planted only in exhaustive tests."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from cute_calls import Fault

import kda.backends
from benchmarks import sanitized

pytestmark = pytest.mark.simulated

BACKENDS = Path(kda.backends.__file__).parent
TESTS = Path(__file__).parents[3]
FILES = {file.stem: file for file in sorted(TESTS.rglob("*sm*.py")) if " Fault(" in file.read_text()}


def faults_of(module):
    """Yield all faults of a module's tables, in which a fault may stand in a table of its file."""
    for table in (value for name, value in vars(module).items() if "FAULTS" in name and isinstance(value, dict)):
        for row in table.values():
            yield from [row] if isinstance(row, Fault) else row.values()


def source_of(file):
    return BACKENDS / "sm89" / file if "." in file else BACKENDS / f"{file}.py"


@pytest.mark.parametrize("name", FILES)
def test_the_text_of_a_fault_stands_once_in_its_file(name, monkeypatch):
    monkeypatch.syspath_prepend(FILES[name].parent)
    faults = list(faults_of(importlib.import_module(name)))
    times = {fault.old: source_of(fault.file).read_text().count(fault.old) for fault in faults}
    assert faults and [text for text, n in times.items() if n != 1] == []


def test_what_racecheck_follows_instead_stands_once_in_its_file():
    followed = sanitized.FOLLOWED
    texts = {text: (BACKENDS / file).read_text().count(text) for file, rows in followed.items() for text in rows}
    assert texts and [text for text, n in texts.items() if n != 1] == []
