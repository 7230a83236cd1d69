"""The clock's errors: what pages and the figures that kda quotes say is what the predictions are."""

import dataclasses
import json

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from benchmarks import clock_page, predicted, predicted_pairs
from kda.backends.triton.configs import TileConfig
from kda.tools.measure.predicted import ERRORS

pytestmark = pytest.mark.simulated

FOUND, TABLES = (json.loads(file.read_text()) for file in (ERRORS, clock_page.DATA))
SAYS, WRITTEN = clock_page.PAGE.read_text(), clock_page.page(FOUND["rows"], TABLES)
SAID = "run python -m benchmarks write --only predicted"
CHEAP = [("h32-8k", "fused")]  # clusters that walk along a row


def rows():
    return [(call, name) for call in predicted.CALLS for name in call.times]


def holds(call, name):
    found = predicted.row_of(call, name)
    assert found in FOUND["rows"], f"{found}: {SAID}"


def named(row):
    return row["backend"], row["shape"], row["kernel"]


def test_every_row_is_a_time_on_record():
    known = [(call.backend, call.shape, call.times[name]) for call, name in rows()]
    assert [(row["backend"], row["shape"], row["measured"]) for row in FOUND["rows"]] == known
    assert all(row["binds"] and row["stall"] for row in FOUND["rows"])
    assert len({named(row) for row in FOUND["rows"]}) == len(FOUND["rows"])
    assert all(row["where"] and row["timer"] and row["seen"] in ("fitted", "seen", "held out") for row in FOUND["rows"])


def test_new_rows_come_instead_of_the_old_ones_of_their_names():
    old = [{**row, "predicted": 0} for row in FOUND["rows"]]
    assert predicted.merged(old, FOUND["rows"]) == FOUND["rows"]
    assert predicted.merged(old[1:], [FOUND["rows"][0]]) == [FOUND["rows"][0], *old[1:]]


def test_no_error_is_worse_than_the_page_allows():
    """A worst of 30% was the target; `stream` and small kernels of Hopper miss it.  Pages say worst and median."""
    assert FOUND["errors"]["all"]["worst"] <= 45.3
    assert f"The worst is {FOUND['errors']['all']['worst']}%" in SAYS
    far_off = {row["family"] for row in FOUND["rows"] if abs(row["error"]) >= 30}
    assert far_off <= {"sm90 compose", "sm90 join", "sm90 shares", "sm90 stream"}
    assert f"families' medians is {FOUND['errors']['all']['median of families']:.0f}%" in WRITTEN


def test_the_errors_that_are_quoted_are_those_of_the_rows():
    assert FOUND["errors"] == clock_page.summary(FOUND["rows"])
    assert FOUND["calls"] == predicted.calls()
    row = FOUND["rows"][0]
    assert row["error"] == pytest.approx(100 * (row["predicted"] / row["measured"] - 1), abs=0.1)


def test_the_page_holds_the_tables_of_the_rows():
    assert clock_page.with_sentences(SAYS, FOUND["rows"]) == SAYS
    first, second, *others = FOUND["rows"]             # the second one is part of a sum
    worse = [first, {**second, "predicted": 1.0}, *others]
    for table in (clock_page.of_rows, clock_page.of_sums):
        assert "\n".join(table(FOUND["rows"])) in WRITTEN and "\n".join(table(worse)) not in WRITTEN
    worse = [{**first, "error": 99.0}, second, *others]
    assert "\n".join(clock_page.of_errors(FOUND["rows"])) in WRITTEN
    assert "\n".join(clock_page.of_errors(worse)) not in WRITTEN
    assert all("\n".join(rows) in WRITTEN for rows in TABLES.values()) and len(TABLES) == 3


@pytest.mark.parametrize("words", clock_page.sentences(FOUND["rows"]))
def test_a_sentence_of_the_page_has_the_figures_of_the_rows(words):
    figures = clock_page.sentences(FOUND["rows"])[words]
    wrong = clock_page.with_figures(SAYS, words, ["77", *figures[1:]])
    assert wrong != SAYS == clock_page.with_sentences(wrong, FOUND["rows"])


def test_what_the_page_and_the_notes_of_predictions_say_without_figures_is_so():
    rows = FOUND["rows"]
    assert all(row["error"] < 0 for row in rows) and {row["backend"] for row in rows} == {"sm90", "triton", "sm89"}
    backward = clock_page.rows_of(rows, *clock_page.TOGETHER["Triton's backward, 64 heads"])
    measured, predictions = (sorted(backward, key=lambda row: row[key]) for key in ("measured", "predicted"))
    assert measured == predictions


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape, kernel", CHEAP)
def test_a_cheap_row_is_predicted_again(shape, kernel):
    holds(*next((call, name) for call, name in rows() if (call.shape, name) == (shape, kernel)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("call, name", rows(), ids=lambda x: getattr(x, "shape", x))
def test_every_row_is_predicted_again(call, name):
    holds(call, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("header", predicted.TABLES)
def test_every_row_of_the_other_tables_is_predicted_again(header):
    assert [*predicted.TABLES[header]()] == TABLES[header], SAID


@pytest.mark.exhaustive
def test_every_row_of_pairs_is_predicted_again():
    assert {file: file.read_text() for file in (clock_page.DATA, clock_page.PAGE)} == predicted_pairs.texts(), SAID


def test_the_page_says_how_many_pairs_of_its_table_are_right():
    figures = [float(row.split(" | ")[-1].rstrip(" |").replace(",", "")) for row in TABLES[clock_page.OF_PAIRS]]
    found = list(zip(predicted_pairs.WAYS, figures, strict=True))
    assert [predicted_pairs.row(*each) for each in found] == TABLES[clock_page.OF_PAIRS]
    assert predicted_pairs.written(SAYS, found) == SAYS
    assert "0 of 24 such pairs" in predicted_pairs.written(SAYS, [(way, -way.measured) for way, _ in found])


@pytest.mark.parametrize("way", predicted_pairs.WAYS, ids=lambda way: f"{way.kernel} {way.changes}")
def test_what_a_pair_changes_are_fields_of_a_configuration(way):
    config = dataclasses.replace(TileConfig(), **way.changes)
    assert {name: getattr(config, name) for name in way.changes} == way.changes


def test_rows_of_another_table_come_under_its_header_alone():
    data = clock_page.DATA.read_text()
    for header, rows in TABLES.items():
        assert predicted.with_data(data, header, rows) == data
        assert json.loads(predicted.with_data(data, header, rows[1:])) == TABLES | {header: rows[1:]}
    with pytest.raises(LookupError, match="the page has no table nothing"):
        predicted.with_data(data, "nothing", [])
