"""Whole calls in the simulator, over the ranges that inputs may have: logits and rates through the whole range of the
exponentials, and gradients of any size.

An exponential overflows or vanishes on the way to a sigmoid or a softplus that does neither: e^88.8 is infinity in
float32, e^-87.4 is no normal number.
"""

import dataclasses

import pytest
import torch
from cute_calls import assert_right, changed

from kda.compile.target import parse
from kda.verify.cases import make_inputs
from kda.verify.definition import budgets
from kda.verify.parity import judge
from kda.verify.simulated import SimulatedDoor

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_memory_is_poisoned")


def spread(low, high):
    """Numbers evenly from low to high over all elements, in no order."""

    def of(x):
        order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))
        return torch.linspace(low, high, x.numel())[order].view(x.shape).to(x.dtype)

    return of


NO_BIAS = dict(dt_bias=torch.zeros_like)
SWEEPS = {
    "logits of the gate": (dict(T=40), dict(g=spread(-140, 140), **NO_BIAS)),
    "logits of beta": (dict(T=64), dict(beta=spread(-140, 140))),
    "rates": (dict(T=8, HV=21), dict(A_log=lambda x: torch.arange(-100.0, 101, 10), **NO_BIAS)),
}
CALLS = {
    "sm89, bounded": ("sm89", "sm89", dict(K=64, V=64, dtype="float32", gate="bounded")),
    "reference": ("reference", "sm89", dict(K=16, V=16, dtype="float32", gate="bounded")),
    "sm89, softplus": ("sm89", "sm89", dict(K=64, V=64, dtype="float32", gate="softplus")),
}


def called(name, case):
    """o, ht and all gradients, by name."""
    backend, arch, _ = CALLS[name]
    door = SimulatedDoor(backend, parse(arch))
    found = door.call(case, backward=True)
    assert not door.findings, "\n".join(map(str, door.findings[:5]))
    return found, door


@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_with_logits_of_any_size_are_the_definition(name, sweep):
    shape, given = SWEEPS[sweep]
    case = changed(make_inputs(**dict(H=1) | CALLS[name][2] | shape), **given)
    found, door = called(name, case)
    assert all(x.isfinite().all() for x in found.values())
    limits = budgets(case, door.rounding(case))
    assert_right(judge("call", name, limits[name], found[name], case, whole=True) for name in found)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_any_size_have_the_same_bits(name):
    """A loss times 2^60 or 2^-60, before or after: nothing overflows or vanishes on the way."""
    case = make_inputs(T=40, **dict(H=1) | CALLS[name][2])
    expected, _ = called(name, case)
    for size in (2.0**60, 2.0**-60):
        found, _ = called(name, dataclasses.replace(case, do=size * case.do, dht=size * case.dht))
        assert all(torch.equal(found[x], (size if x.startswith("d") else 1) * expected[x]) for x in expected)
