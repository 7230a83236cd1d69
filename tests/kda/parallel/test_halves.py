"""A forward and a backward in two halves, for several GPUs: the first one of a forward makes tiles before the state has
come, that of a backward walks back before gradients of final states are whole."""

import dataclasses

import processes
import pytest
import torch
from halves_cases import (
    CASES,
    FORWARDS,
    assert_a_forward_in_halves_is_the_whole,
    call_of,
    different,
    forward_of,
    in_halves,
)
from parallel_cases import simulated

from kda.backends.sm90 import plan as sm90_plan
from kda.calls import autograd
from kda.model.bundles import OpaqueSaved, Save
from kda.model.force import forced, forcing
from kda.model.problem import Problem
from kda.parallel import halves
from ptxkit import capture

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]

AT_ONCE = {("sm100", "64 channels", False)}  # walk and gradients are no grid


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
            assert halves.begin_backward(call, kept) is None
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
        assert halves.begin_backward(call_of(backend, dict(lengths=(70,))), ()) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("of_map", [False, True], ids=["", "with the map"])
@pytest.mark.parametrize("name", FORWARDS)
def test_both_halves_of_a_forward_have_the_results_of_the_whole(name, of_map, force):
    pytest.importorskip("cutlass")
    words, forced, save = FORWARDS[name]
    force(**forced | {"form": "two kernels", "halves": True})
    with capture(arch="sm90") as session:
        assert_a_forward_in_halves_is_the_whole(*forward_of(words), save, of_map)
    assert not session.findings, session.findings[:3]


@pytest.mark.parametrize(("save", "options"), [
    (Save.PRODUCTS, {}), (Save.NOTHING, {"return_intermediate_states": True}),
], ids=["what Triton reads", "states between chunks"])
def test_a_forward_that_keeps_what_no_half_makes_is_done_at_once(save, options, force):
    pytest.importorskip("cutlass")
    force(halves=True)
    call, _ = forward_of(dict(lengths=(70,)))
    with capture(arch="sm90", checks=False):
        assert halves.begin_forward(call._replace(options=call.options._replace(**options)), save, False) is None


# Tokens and heads of a rank, whether others wait for its map, and chunks of a segment: nothing is kept, and all is.
CHOSEN = {
    (65536, 64, False): (0, 0), (65536, 64, True): (0, 0),                     # a walk for each SM
    (65536, 32, False): (1024, 1024), (65536, 32, True): (1024, 1024),         # two of each sequence
    (262144, 8, False): (1024, 1024),                                          # eight, which the backward has as well
    (650, 2, False): (None, None), (650, 2, True): (None, None),               # one launch more is most of it
}


@pytest.mark.parametrize(("tokens", "heads", "of_map"), CHOSEN)
def test_a_forward_is_in_halves_where_that_is_counted_to_be_faster(tokens, heads, of_map):
    p = Problem.parse(f"bfloat16 bounded l2norm packed final_state T={tokens} H={heads} HV={heads} N=1")
    p = dataclasses.replace(p, state_dtype="float32", lower_bound=-5.0)
    found = tuple(sm90_plan.length_in_halves(p, 132, save, of_map) for save in (Save.NOTHING, Save.OWN))
    assert found == CHOSEN[tokens, heads, of_map]
    with forcing(halves=False):
        at_once = dataclasses.replace(p, force=forced())
    assert sm90_plan.length_in_halves(at_once, 132, Save.OWN, of_map) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("keeps", [False, True], ids=["made again", "kept"])
def test_ranks_find_what_one_finds_and_make_nothing_twice(keeps, world):
    pytest.importorskip("cutlass")
    results = processes.run(world, simulated, "sm90", keeps, world)
    assert not any(isinstance(x, str) for x in results), results
    of_A_log = {2: 2**-7, 3: 2**-5}[world]                                     # a sum of terms that cancel
    for apart, kernels in results:
        assert all(far < (of_A_log if name == "dA_log" else 2**-7) for name, far in apart.items()), apart
        assert sum("Prepare" in kernel for kernel in kernels) == 1 + (not keeps)


@pytest.mark.exhaustive
def test_a_rank_with_padding_behind_its_tokens_has_zeros_there():
    """Kernels of a sequence that is not packed know of no padding."""
    pytest.importorskip("cutlass")
    results = processes.run(2, simulated, "sm90", False, 2, 50)
    assert not any(isinstance(x, str) for x in results), results
    assert all(max(apart.values()) < 2**-6 for apart, _ in results), results
