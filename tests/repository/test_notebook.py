"""The notebook prints what stands in it, and its cells are whole."""

import re

import pytest

from benchmarks import notebook

NOTEBOOK = notebook.read()
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.exhaustive
@pytest.mark.simulated
@pytest.mark.compiler
def test_each_cell_prints_what_stands_under_it():
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    assert [*notebook.differences(NOTEBOOK)] == []


def test_cells_were_run_in_their_order_and_show_a_training_a_profile_and_a_bug_at_its_line():
    assert [cell["execution_count"] for cell in CELLS] == [*range(1, len(CELLS) + 1)]
    assert all(cell["outputs"] for cell in CELLS if "print(" in notebook.code_of(cell) and CELLS.index(cell))
    printed = "".join(map(notebook.printed_of, CELLS))
    assert "recalls 9" in printed or "recalls 100%" in printed
    assert "chain: " in printed and "race-read-write at outer.py:13" in printed
    assert "line 13: tl.store(place, tl.load(place) + part)" in printed
    assert re.findall(r"^exit code (\d)$", printed, re.MULTILINE) == ["0", "1", "0"]


def test_links_of_the_notebook_lead_to_files():
    for cell in (cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown"):
        for link in re.findall(r"\]\((?!https:)([^)]+)\)", notebook.code_of(cell)):
            assert (notebook.FILE.parent / link).is_file(), link


def made_up(*cells):
    return {"cells": [{"cell_type": "code", "metadata": {"tags": [notebook.VARY]} if varies else {}, "source": [code],
                       "outputs": [{"text": [text]}]} for code, text, varies in cells]}


@pytest.mark.parametrize(("code", "said", "varies", "differs"), [
    ("print('a 1')", "a 1\n", False, False), ("print('a 2')", "a 1\n", False, True),
    ("print('a 2')", "a 1\n", True, False), ("print('b 2')", "a 1\n", True, True), ("x = 1", "a 1\n", True, True),
    ("print('a  12.5 ██')", "a 1 █\n", True, False), ("open('f', 'w').write('x')", "", False, False),
])
def test_another_text_is_noticed_and_another_number_only_where_numbers_do_not_vary(code, said, varies, differs):
    found = [*notebook.differences(made_up(("import os", "", False), (code, said, varies)))]
    assert bool(found) == differs


def test_a_cell_sees_the_names_of_those_before_it_and_an_error_is_not_hidden():
    assert [text for _, text in notebook.run(made_up(("x = 1", "", False), ("print(x)", "", False)))] == ["", "1\n"]
    with pytest.raises(ZeroDivisionError):
        [*notebook.run(made_up(("1 / 0", "", False)))]
