"""The halves of a forward and of a backward, for several GPUs, on one Hopper GPU: beside the whole, without waiting,
and from a CUDA graph.  Another rank's part in it, a state that comes between the halves, is there from the
beginning."""

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
    longer,
)
from hopper import ON_HOPPER
from on_a_gpu import DEVICE, captured, nothing_waits

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.calls import autograd
from kda.model.bundles import Save
from kda.parallel import halves

pytestmark = ON_HOPPER

TIMES = 8                                    # as many tokens as in the simulator


def fill_freed_memory():
    """Write nan over memory that a first half has let go of."""
    blocks = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in (1 << 26, 1 << 22, 1 << 18) * 8]
    for block in blocks:
        block.fill_(255)


@pytest.mark.parametrize("of_map", [False, True], ids=["", "with the map"])
@pytest.mark.parametrize("as_the_whole", [True, False], ids=["cut as the whole", "cut as the plan says"])
@pytest.mark.parametrize("name", FORWARDS)
def test_both_halves_of_a_forward_have_the_results_of_the_whole(name, as_the_whole, of_map, force):
    """Where a whole has one segment, the plan cuts the second half of a longer one for itself."""
    words, forced, save = FORWARDS[name]
    chunks = {"segment_chunks": TIMES * forced.get("segment_chunks", 0)} if as_the_whole else {}
    force(form="two kernels", halves=True, **chunks)
    call, step = forward_of(longer(words, TIMES), DEVICE)
    assert_a_forward_in_halves_is_the_whole(call, step, save, of_map, fill_freed_memory, as_the_whole)


@pytest.mark.parametrize("keeps", [False, True], ids=["made again", "kept"])
@pytest.mark.parametrize("name", CASES)
def test_both_halves_of_a_backward_have_the_bits_of_the_whole(name, keeps, force):
    words, forced = CASES[name]
    force(**forced | {"reverse": True})
    call = call_of("sm90", longer(words, TIMES), DEVICE)
    kept = autograd.forward(call._replace(op="chunk_kda", do=None, dht=None), Save.OWN).saved if keeps else ()
    found, first = in_halves(call, kept)
    assert different(found, autograd.backward(call, kept)) == []
    assert torch.equal(first.dh0, autograd.backward(call._replace(dht=None), kept).dh0)


@pytest.mark.parametrize("save", [Save.NOTHING, Save.OWN])
def test_no_half_waits_and_a_graph_replays_both_with_other_numbers(save, force):
    force(halves=True)
    call, _ = forward_of(longer(dict(lengths=(150,)), TIMES), DEVICE)

    def both():
        begun = halves.begin_forward(call._replace(inputs=call.inputs._replace(initial_state=None)), save, True)
        out = begun.finish(call)
        return out.o, out.final_state, *begun.map[:2]

    both()                                                                     # builds kernels
    with nothing_waits():
        both()
    graph, found = captured(both)
    call.inputs.v.copy_(call.inputs.v.roll(1, 1))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(found, both()))
