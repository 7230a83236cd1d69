"""The times in the pictures of docs/stages are what the clock predicts now."""

import importlib
import pathlib

import pytest

pytestmark = pytest.mark.simulated

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"


@pytest.mark.exhaustive
def test_the_timelines_of_the_pictures_are_those_of_the_clock(monkeypatch):
    monkeypatch.syspath_prepend(PICTURES)
    kernels = importlib.import_module("kernels")
    found = kernels.dumps(kernels.measured([*kernels.KERNELS, *kernels.TIMED]))
    assert found == kernels.TIMES.read_text(), "python docs/pictures/kernels.py --clock draws them anew"
