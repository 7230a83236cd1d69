"""What `kda selftest` builds together is what stages and calls launch then."""

import functools
import sys

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from kda.model.host import host_of, standing_in
from kda.routing.dispatch import capability
from kda.tools.verify import parity, together
from kda.tools.verify.simulated import SimulatedDoor
from kda.tools.verify.trials import TRIALS, attempt
from ptxkit.compile import fetching
from ptxkit.compile.target import parse

pytestmark = pytest.mark.simulated

TRIAL = next(trial for trial in TRIALS if trial.name == "empty and one-token sequences")
BACKENDS = {"triton": "sm90", "sm90": "sm90", "sm100": "sm100", "sm89": "sm89"}


class Unlaunched:
    """A kernel whose launches do nothing: what a call looks up does not depend on what kernels write."""

    names = tensors = ()

    def launch(self, *args, **options):
        pass

    def bound(self, *args, **options):
        return self

    def send(self, sink, tensors):
        pass

    def __call__(self, *tensors):
        pass


@pytest.fixture(params=[pytest.param("launched", marks=pytest.mark.exhaustive), "not launched"])
def launched(request):
    return request.param == "launched"


@pytest.fixture
def looked_up(monkeypatch, launched):
    """Return the recipes of kernels that were looked for in the store; nothing is remembered from before."""
    found, opened = set(), fetching._opened
    forget_kernels()
    monkeypatch.setattr(fetching, "_FETCHED", {})
    monkeypatch.setattr(fetching, "_opened", lambda kept, recipe: found.add(recipe) or (
        opened(kept, recipe) if launched else Unlaunched()))
    yield found
    forget_kernels()


def forget_kernels():
    modules = [module for name, module in sys.modules.items() if name.startswith("kda.backends")]
    for cached in {id(x): x for module in modules for x in vars(module).values()}.values():
        if type(cached) is functools._lru_cache_wrapper and cached.__module__.startswith("kda.backends"):
            cached.cache_clear()


def built(door, stages, trials):
    with standing_in(host_of(door.target.spelling)):
        return set(together.recipes_of(door, stages, trials))


@pytest.mark.spread(every=4, first=1)
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "sm89"])        # only bfloat16
def test_kernels_of_a_trial_are_built_before_it(backend, looked_up):
    door = SimulatedDoor(backend, parse(BACKENDS[backend]))
    attempt(door, TRIAL)
    assert looked_up and looked_up <= built(door, (), [TRIAL])


@pytest.mark.spread(every=6)
@pytest.mark.parametrize(("backend", "stage"), [
    (backend, stage) for backend in BACKENDS for stage in capability(backend).stages
])
def test_kernels_of_a_stage_are_built_before_it(backend, stage, launched, looked_up, monkeypatch):
    monkeypatch.setattr(parity, "PROOFS", parity.PROOFS[:1])
    door = SimulatedDoor(backend, parse(BACKENDS[backend]))
    assert parity.prove(door, stage).passed or not launched
    assert looked_up and looked_up <= built(door, [stage], ())
