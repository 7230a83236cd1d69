"""The times in the pictures of docs/stages are what the clock predicts now."""

import importlib
import pathlib

import pytest

from benchmarks.checkouts import recipes_of
from kda.model.host import host_of, standing_in
from kda.tools.verify.cases import Spec

pytestmark = pytest.mark.simulated

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"


@pytest.mark.exhaustive
def test_the_timelines_of_the_pictures_are_those_of_the_clock(monkeypatch):
    monkeypatch.syspath_prepend(PICTURES)
    kernels = importlib.import_module("kernels")
    found = kernels.dumps(kernels.measured([*kernels.KERNELS, *kernels.TIMED]))
    assert found == kernels.TIMES.read_text(), "python docs/pictures/kernels.py --clock draws them anew"


def test_a_picture_is_of_a_kernel_that_its_call_launches(monkeypatch):
    monkeypatch.syspath_prepend(PICTURES)
    kernels = importlib.import_module("kernels")
    absent = []
    for kernel in kernels.KERNELS:
        if call := kernel.call:
            spec = Spec(lengths=None, T=call.T, H=call.H, K=128, V=128, initial_state=False, dtype=call.dtype)
            direction, options = ("step", {"disable_recompute": call.keep}) if call.step else ("forward", {})
            with standing_in(host_of(call.backend)):
                launched = [recipe.config for recipe in recipes_of(direction, spec, options)]
            if kernel.config not in launched:
                absent.append(kernel.name)
    assert not absent
