"""A backward in two halves, for several GPUs: the first one walks back before gradients of final states are whole."""

import processes
import pytest
import torch
from parallel_cases import simulated

from kda.calls import autograd
from kda.checks.calls import Call
from kda.model.bundles import Grads, OpaqueSaved, Save
from kda.model.problem import Inputs, Options
from kda.parallel import halves
from kda.tools.verify.cases import make_inputs
from ptxkit import capture

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]

# What is drawn, and what is prescribed.
CASES = {
    "one sequence": (dict(lengths=(150,)), {}),
    "packed, with tokens of no sequence": (dict(lengths=(100, 0, 70), padding=30), {}),
    "any gate": (dict(lengths=(70,), gate="softplus"), {}),
    "cut into segments": (dict(lengths=(330,)), dict(segment_chunks=4)),
    "64 channels": (dict(lengths=(130,), K=64, V=64), {}),
}

AT_ONCE = {("sm100", "64 channels", False)}  # walk and gradients are no grid


def call_of(backend, words):
    case = make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | words)
    given = {n: x for n, x in case.keywords.items() if n in Options._fields}
    options = Options(**{"scale": case.keywords["q"].shape[-1] ** -0.5} | given | {"backend": backend})
    inputs = Inputs(**{n: case.keywords.get(n) for n in Inputs._fields})
    return Call("chunk_kda_bwd", inputs, options, do=case.do, dht=case.dht)


def in_halves(call, kept):
    """Return the gradients of both halves, of which the first one knows of no final state, and the first one."""
    first = halves.begin(call._replace(dht=None), kept)
    return first.finish(call), first


def different(found, wanted):
    return [name for name in Grads._fields if not torch.equal(getattr(found, name), getattr(wanted, name))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("keeps", [False, True], ids=["made again", "kept"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["sm90", "sm100"])
def test_both_halves_have_the_bits_of_the_whole_and_the_first_walks_back(backend, name, keeps, force):
    pytest.importorskip("cutlass")
    words, forced = CASES[name]
    force(**forced | {"reverse": True})
    call = call_of(backend, words)
    with capture(arch=backend) as session:
        kept = autograd.forward(call._replace(op="chunk_kda", do=None, dht=None), Save.OWN).saved if keeps else ()
        if (backend, name, keeps) in AT_ONCE:
            assert halves.begin(call, kept) is None
            return
        whole = autograd.backward(call, kept)
        without = autograd.backward(call._replace(dht=None), kept)
        found, first = in_halves(call, kept)
    assert not session.findings, session.findings[:3]
    assert different(found, whole) == [] and torch.equal(first.dh0, without.dh0)
    assert (type(first.begun) is OpaqueSaved) == keeps


@pytest.mark.parametrize("backend", ["sm90", "sm100"])
def test_a_backward_of_kernels_apart_begins_only_with_what_was_kept(backend, force):
    """The first half would hold memory that gradients may lie in."""
    pytest.importorskip("cutlass")
    force(reverse=False)
    with capture(arch=backend, checks=False):
        assert halves.begin(call_of(backend, dict(lengths=(70,))), ()) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("keeps", [False, True], ids=["made again", "kept"])
def test_two_ranks_find_what_one_finds_and_make_nothing_twice(keeps):
    pytest.importorskip("cutlass")
    results = processes.run(2, simulated, "sm90", keeps)
    assert not any(isinstance(x, str) for x in results), results
    for apart, kernels in results:
        assert max(apart.values()) < 2**-7, apart
        assert sum("Prepare" in kernel for kernel in kernels) == 1 + (not keeps)
