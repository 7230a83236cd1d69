"""The Hopper forward in one kernel, clusters of two: calls against the definition, and the bits of the two kernels."""

import pytest
import torch
from hopper import RAGGED, called, changed, check, kept_nowhere, plant

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm90 import launch, plan
from kda.backends.sm90.configs import FusedConfig
from kda.verify.cases import make_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def fused(monkeypatch):
    """One kernel where it can be; what it gives turns that off again."""

    def ask(on=True):
        monkeypatch.setattr(plan, "FUSED", on)
        for kept in (plan.plan, launch.steps):
            getattr(kept, "cache_clear", lambda: None)()

    ask()
    yield ask
    ask(False)


OPTIONS = {
    "one chunk and a part of one": dict(T=33),
    "a chunk of each group": dict(T=100),
    "stages used several times, GVA": dict(T=390, HV=2),
    "one token": dict(T=1),
    "a batch": dict(B=2, T=40),
    "packed, GVA": dict(HV=2, **RAGGED),
    "packed, many tokens of none": dict(padding=140, **RAGGED),
    "no initial state": dict(T=70, initial_state=False),
}


def case_of(**options):
    return make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | options)


def kernels(session):
    return [launched.kernel.name for launched in session.launches]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_is_the_definition_and_has_the_bits_of_two_kernels(name, fused):
    case = case_of(**OPTIONS[name])
    found = check(case)
    fused(False)
    expected, _ = called(case)
    assert all(torch.equal(found[x], expected[x]) for x in expected)


def test_it_is_one_kernel(fused):
    _, session = called(case_of(T=33))
    assert len(session.launches) == 1
    _, session = called(case_of(**RAGGED))
    assert len(session.launches) == 2                                          # and the tables
