"""Faults that tests plant into kernels stand where they say: most of them are planted only in exhaustive tests."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kernel_faults import BACKENDS, Fault, source_of

from benchmarks import sanitized

pytestmark = pytest.mark.simulated

FILES = sorted(file.stem for file in Path(__file__).parents[3].rglob("helpers/sm*_faults.py"))


@pytest.mark.parametrize("name", FILES)
def test_the_text_of_a_fault_stands_once_in_its_file(name):
    tables = [table for table in vars(importlib.import_module(name)).values() if isinstance(table, dict)]
    faults = [row for table in tables for row in table.values() if isinstance(row, Fault)]
    times = {fault.old: source_of(fault.file).read_text().count(fault.old) for fault in faults}
    assert faults and [text for text, n in times.items() if n != 1] == []


def test_what_racecheck_follows_instead_stands_once_in_its_file():
    followed = sanitized.FOLLOWED
    texts = {text: (BACKENDS / file).read_text().count(text) for file, rows in followed.items() for text in rows}
    assert texts and [text for text, n in texts.items() if n != 1] == []
