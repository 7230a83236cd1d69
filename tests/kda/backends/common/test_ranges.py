"""Whole calls in the simulator, over the ranges that inputs may have: logits and rates through the whole range of the
exponentials, norms and gradients of any size, and decays that are slightly above zero.

An exponential overflows or vanishes on the way to a sigmoid or a softplus that does neither: e^88.8 is infinity in
float32, e^-87.4 is no normal number.
"""

import dataclasses

import pytest
import torch
from cute_calls import ANYWHERE, COMMIT, assert_right, called_by_door, changed
from naive import definition, make

import kda
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.definition import budgets
from kda.tools.verify.parity import judge
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "libnvrtc", "kernels_built_here")]


def spread(low, high):
    """Return a function that spreads numbers evenly from low to high over all elements, in random order."""

    def numbers(x):
        order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))
        return torch.linspace(low, high, x.numel())[order].view(x.shape).to(x.dtype)

    return numbers


def sized(x):
    """Return tokens times 2^-59 to 2^59: the sum of their squares is still a float32."""
    return x * 2.0 ** torch.linspace(-59, 59, x.shape[1]).round().to(x.dtype).view(-1, 1, 1)


NO_BIAS = dict(dt_bias=torch.zeros_like)
SWEEPS = {
    "logits of the gate": (dict(T=40), dict(g=spread(-140, 140), **NO_BIAS)),
    "logits of beta": (dict(T=64), dict(beta=spread(-140, 140))),
    "norms of q and k": (dict(T=40), dict(q=sized, k=lambda x: sized(x.flip(1)))),
    "rates": (dict(T=8, H=21), dict(A_log=lambda x: torch.arange(-100.0, 101, 10), **NO_BIAS)),
}
OF_THEIR_OWN = ("reference", "sm89", "triton")   # backends with a backward


def case_of(backend, gate, shape, given):
    return changed(make_inputs(**dict(H=1, gate=gate) | ANYWHERE[backend] | shape), **given)


def called(backend, case):
    """Return o, ht and the backend's gradients, by name, and their budgets."""
    backward = backend in OF_THEIR_OWN
    found, door = called_by_door(case, backend, backward)
    return found, budgets(case, door.rounding(case), backward)


def assert_is_the_definition(backend, case):
    found, limits = called(backend, case)
    assert all(x.isfinite().all() for x in found.values())
    assert_right(judge("call", name, limits[name], found[name], case, whole=True) for name in found)


@pytest.mark.spread(every=14)
@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("backend", ANYWHERE)
def test_calls_with_logits_rates_and_norms_of_any_size_are_the_definition(backend, gate, sweep):
    assert_is_the_definition(backend, case_of(backend, gate, *SWEEPS[sweep]))


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("backend", OF_THEIR_OWN[:2])
def test_gradients_of_any_size_have_the_same_bits(backend, gate):
    """A loss times 2^60 or 2^-60, before or after: nothing overflows or vanishes on the way."""
    case = case_of(backend, gate, dict(T=40), {})
    expected, _ = called(backend, case)
    for size in (2.0**60, 2.0**-60):
        found, _ = called(backend, dataclasses.replace(case, do=size * case.do, dht=size * case.dht))
        assert all(torch.equal(found[x], (size if x.startswith("d") else 1) * expected[x]) for x in expected)


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("backend", ANYWHERE)
def test_decays_that_grow_by_e8_in_a_chunk_are_the_definition(backend):
    """What is given as a decay shall not be positive; but what follows from it is right where it is representable."""
    growing = case_of(backend, "given", dict(T=64), dict(g=spread(0, 0.25)))
    assert growing.keywords["g"].float().sum(1).mean() > 7.9
    assert_is_the_definition(backend, growing)


@pytest.mark.parametrize(("backend", "exponent", "most"), [
    ("sm90", -60, 0.05), pytest.param("sm90", -20, 0.005, marks=COMMIT),
    pytest.param("triton", -60, 0.007, marks=COMMIT),
])
def test_small_rows_of_q_keep_the_accuracy_that_the_page_of_numerics_states(backend, exponent, most):
    call = make(B=1, T=64, H=1, K=64, V=64, dtype=torch.bfloat16, gate="bounded", beta="sigmoid", chunk_size=64)
    call.tensors["q"] = (call.tensors["q"].float() * 2.0**exponent).bfloat16()
    with capture(arch="sm_90a"):
        o, _ = kda.chunk_kda(**call.arguments | {"output_final_state": True}, backend=backend)
    exact = definition(call)[0]
    assert (o - exact).norm() < most * exact.norm()


@pytest.mark.exhaustive
@pytest.mark.commit
def test_a_token_of_little_weight_has_its_gradient_beside_heavy_ones():
    """Every other token weighs 2^-32 of its neighbours in the loss; its dq is a product with its own do alone."""
    pytest.importorskip("triton")
    case = case_of("triton", "bounded", dict(T=64), {})
    weights = torch.ones(64).index_fill(0, torch.arange(0, 64, 2), 2.0**-32).view(1, -1, 1, 1)

    def light_rows(do):
        door = SimulatedDoor("triton", parse("sm90"))
        given = dataclasses.replace(case, do=do, dht=torch.zeros_like(case.dht))
        return door.call(given, True, disable_recompute=True)["dq"][:, ::2].float()

    found, expected = 2.0**32 * light_rows((case.do * weights).bfloat16()), light_rows(case.do)
    assert (found - expected).norm() < 0.005 * expected.norm()
