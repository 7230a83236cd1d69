"""The times in the pictures of docs/stages are what the clock predicts now."""

import dataclasses
import importlib
import pathlib

import pytest

from kda.calls import ahead
from kda.model.bundles import Save
from kda.model.host import host_of, standing_in
from kda.routing.dispatch import route
from kda.tools.commands.bench.asked import problem_of
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
        if (call := kernel.call) is None or call.backend not in ("sm90", "sm100"):
            continue
        spec = Spec(lengths=None, T=call.T, H=call.H, K=128, V=128, initial_state=False, dtype=call.dtype)
        with standing_in(host_of(call.backend)):
            p = dataclasses.replace(problem_of(spec, "forward", "cuda:0"), disable_recompute=call.step and call.keep)
            found = ahead.recipes_of_step(route(p, call.backend, training=True), None) if call.step else (
                ahead.recipes_of(call.backend, p, Save.NOTHING, None))
            if kernel.config not in [recipe.config for recipe in found]:
                absent.append(kernel.name)
    assert not absent
