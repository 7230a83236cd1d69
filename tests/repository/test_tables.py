"""Figures on pages that are counted here, or are ptxas', are those of today's kernels."""

import json
import re

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from benchmarks import pages
from benchmarks.counted import blackwell_times, float32, hopper
from benchmarks.counted import figures as tables

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("libnvrtc")]

SAID = "python -m benchmarks write --only counted"
CHEAP = {
    "float32, 64 channels": (tables.SM89, lambda: float32.rows([64])),
    "Hopper, 64 channels": (tables.SM90, lambda: hopper.rows([64], [("prepare", "record")])),
}
FIGURES = pytest.mark.parametrize("figures", tables.FIGURES, ids=lambda figures: f"{figures.page}: {figures[1][:40]}")


def page_of(name):
    return (tables.DOCS / name).read_text()


def not_there(rows, page):
    return [row for row in rows if f'"{row}"' not in page]


def changed(text):
    """Each text that has another digit in one place."""
    for digit in re.finditer(r"\d", text):
        yield f"{text[: digit.start()]}{(int(digit[0]) + 1) % 10}{text[digit.end() :]}"


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("name", CHEAP)
def test_rows_that_are_counted_soon_are_on_the_page(name):
    page, count = CHEAP[name]
    rows, text = [*count()], page_of(page)
    assert rows and not_there(rows, text) == [], SAID
    assert all(not_there([row], text.replace(row, other)) for row in rows for other in changed(row))


@pytest.mark.exhaustive
@FIGURES
def test_all_figures_of_a_page_are_those_of_its_kernels(figures):
    text = page_of(figures.page)
    assert figures.renewed(text, figures.count()) == text, SAID


@pytest.mark.exhaustive
def test_counts_of_blackwells_kernels_and_the_clock_agree_within_a_quarter():
    for name, (counted, why, clock) in blackwell_times.compared().items():
        if name != "shares":                                                   # some microseconds, most of them launch
            assert abs(counted / clock - 1) < 0.25, (name, counted, why, clock)


@FIGURES
def test_figures_that_are_not_as_counted_are_written_anew(figures):
    text = page_of(figures.page)
    if figures.put is pages.with_data:
        data = json.loads(text)
        first, row, *others = counted = data[figures.where]
        rows = [first, next(changed(row)), *others], [first, *others], [first, row, row, *others]
        wrong = [json.dumps(data | {figures.where: other}) for other in rows]
    elif figures.put is pages.with_rows:
        counted = text.partition(f"\n{figures.where}\n")[2].partition("\n\n")[0].split("\n")[1:]
        row = f"{counted[1]}\n"
        wrong = [text.replace(row, other) for other in (next(changed(row)), "", 2 * row)]
    else:
        counted = pages.match_of(text, figures.where).groups()
        wrong = [pages.with_figures(text, figures.where, ["77", *counted[1:]])]
    assert figures.renewed(text, counted) == text
    assert all(page != text and figures.renewed(page, counted) == text for page in wrong)


@pytest.mark.parametrize("figures", {figures.put: figures for figures in tables.FIGURES}.values(),
                         ids=lambda figures: figures.put.__name__)
def test_a_page_that_lacks_them_is_refused(figures):
    with pytest.raises(LookupError, match=f"the page (has no table|does not say) {re.escape(figures[1])}"):
        figures.renewed("{}", [])
