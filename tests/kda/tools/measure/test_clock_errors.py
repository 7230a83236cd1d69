"""The clock's errors: what the page and the figures that kda quotes say is what the predictions are."""

import json

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from benchmarks import predicted, predicted_pairs
from kda.tools.measure.predicted import ERRORS

pytestmark = pytest.mark.simulated

FOUND = json.loads(ERRORS.read_text())
SAID = "run python -m benchmarks write --only predicted"
CHEAP = [("h64-1k", "fused")]  # clusters that walk along a row


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
    """A worst of 30% was the target; Hopper's backward and `stream` miss it.  The page says worst and median."""
    assert FOUND["errors"]["all"]["worst"] <= 31.6
    assert f"The worst is {FOUND['errors']['all']['worst']}%" in predicted.PAGE.read_text()
    far_off = {row["family"] for row in FOUND["rows"] if abs(row["error"]) >= 30}
    assert far_off <= {"sm90 grads", "sm90 walk", "sm90 stream"}
    assert f"families' medians is {FOUND['errors']['all']['median of families']:.0f}%" in predicted.PAGE.read_text()


def test_the_errors_that_are_quoted_are_those_of_the_rows():
    assert FOUND["errors"] == predicted.summary(FOUND["rows"])
    assert FOUND["calls"] == predicted.calls()
    row = FOUND["rows"][0]
    assert row["error"] == pytest.approx(100 * (row["predicted"] / row["measured"] - 1), abs=0.1)


def test_the_page_holds_the_table_of_the_rows():
    page = predicted.PAGE.read_text()
    assert page == predicted.written(page, FOUND["rows"])
    worse = [{**FOUND["rows"][0], "predicted": 1.0}, *FOUND["rows"][1:]]
    assert page != predicted.written(page, worse)


@pytest.mark.parametrize("words", predicted.sentences(FOUND["rows"]))
def test_a_sentence_of_the_page_has_the_figures_of_the_rows(words):
    page, figures = predicted.PAGE.read_text(), predicted.sentences(FOUND["rows"])[words]
    wrong = predicted.with_figures(page, words, ["77", *figures[1:]])
    assert wrong != page == predicted.written(wrong, FOUND["rows"])


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
    page = predicted.PAGE.read_text()
    assert predicted.with_rows(page, header, predicted.TABLES[header]()) == page, SAID


@pytest.mark.exhaustive
def test_every_row_of_pairs_is_predicted_again():
    page, found = predicted.PAGE.read_text(), [(way, predicted_pairs.predicted(way)) for way in predicted_pairs.WAYS]
    assert predicted_pairs.written(page, found) == page, SAID


def test_the_page_says_how_many_pairs_of_its_table_are_right():
    page = predicted.PAGE.read_text()
    table = page.partition(f"{predicted_pairs.HEADER}\n")[2].partition("\n\n")[0]
    figures = [float(row.split(" | ")[-1].rstrip(" |").replace(",", "")) for row in table.split("\n")[1:]]
    ways = predicted_pairs.WAYS
    assert predicted_pairs.written(page, list(zip(ways, figures, strict=True))) == page
    assert "0 of 24 such pairs" in predicted_pairs.written(page, [(way, -way.measured) for way in ways])
