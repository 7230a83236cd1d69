"""What goes wrong on one rank is an error on all of them, in time; and no error is no wrong data."""

import functools
import os
import time
import weakref
from datetime import timedelta

import processes
import pytest
import torch
import torch.distributed as dist
from naive import make
from processes import PATIENCE

import kda
from kda.parallel import agreement

LIMIT = 1.5                                  # seconds that ranks wait for one that does not come
SIZES = dict(H=2, K=8, V=6, chunk_size=32, initial_state=False)


def called(group=None, V=6, T=30, timeout=PATIENCE, **words):
    """Return a call with one sequence of 30 tokens a rank."""
    world = dist.get_world_size(group)
    context = kda.parallel.build_cp_context(torch.tensor([0, 30 * world]), group, timeout=timeout)
    call = make(B=1, T=T, **SIZES | {"V": V} | words)
    return functools.partial(kda.chunk_kda, **call.arguments, cp_context=context)


def lose_patience(context):
    """Wait for all ranks.  From then on none waits for another longer than LIMIT seconds."""
    dist.barrier()
    context.timeout = LIMIT
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT), dist.group.WORLD)


def outcome(function):
    start = time.time()
    try:
        function()
        found = "nothing"
    except kda.KdaError as error:
        found = f"{type(error).__name__}: {error}"
    return found, time.time() - start


def another_shape_at_once(rank):
    return outcome(called(V=12 if rank == 1 else 6))


def another_shape_later(rank):
    for _ in range(2):
        called()()
    call = called(V=12 if rank == 1 else 6)
    lose_patience(call.keywords["cp_context"])
    return outcome(call)


def another_scale(rank):
    return outcome(called(scale=3.0 if rank == 1 else 0.5))


def other_states_of_its_own(rank):
    return outcome(called(state_v_first=rank == 1, output_final_state=rank == 1))


def other_offsets(rank):
    offsets = torch.tensor([0, 20 + 10 * (rank == 1), 60])
    return outcome(lambda: kda.parallel.build_cp_context(offsets, lengths=[30, 30, 30], timeout=PATIENCE))


def too_many_tokens(rank):
    return outcome(called(T=31 if rank == 1 else 30))


def tokens_of_all_ranks_to_a_layer(rank):
    context = kda.parallel.build_cp_context(torch.tensor([0, 90]), None, 4, timeout=PATIENCE)
    x = torch.zeros(1, 90 if rank == 1 else 30, 8)
    return outcome(lambda: kda.nn.KimiDeltaAttention(8, 2, 4)(x, cp_context=context))


def another_width_of_halo(rank):
    context = kda.parallel.build_cp_context(torch.tensor([0, 90]), None, 4, timeout=PATIENCE)
    return outcome(lambda: kda.parallel.conv_halo(torch.zeros(1, 30, 5 + (rank == 1)), context))


def dead(rank):
    call = called()
    call()
    lose_patience(call.keywords["cp_context"])
    if rank == 1:
        os._exit(processes.DIED)
    return outcome(call)


def dead_before_the_context(rank):
    if rank == 1:
        os._exit(processes.DIED)
    return outcome(lambda: called(timeout=LIMIT))


def absent(rank):
    call = called()
    call()
    lose_patience(call.keywords["cp_context"])
    if rank == 1:
        time.sleep(2 * LIMIT)
        return "nothing", 0.0
    return outcome(call)


def absent_from_the_backward(rank):
    call = called(group=None)
    o, _ = call()
    x = o.detach().requires_grad_()
    context = kda.parallel.build_cp_context(torch.tensor([0, 90]), None, timeout=PATIENCE)
    arguments = make(B=1, T=30, **SIZES).arguments
    o, _ = kda.chunk_kda(**arguments | {"v": x}, cp_context=context)
    lose_patience(context)
    if rank == 1:
        time.sleep(2 * LIMIT)
        return "nothing", 0.0
    return outcome(lambda: o.sum().backward())


def test_ranks_that_disagree_all_say_so_and_name_what_differs():
    for function, words in {
        another_shape_at_once: ("rank 0: maps of HV=2 K=8 V=6", "rank 1: maps of HV=2 K=8 V=12", "cp_context.agreed"),
        another_scale: ("rank 0: maps of HV=2", "scale=0.5", "scale=3", "cp_context.agreed"),
        other_offsets: ("offsets [0, 20, 60]", "offsets [0, 30, 60]", "cp_context.agreed"),
        another_width_of_halo: ("D=5", "D=6", "cp_context.agreed"),
    }.items():
        for found, seconds in results(function):
            assert found.startswith("InputError") and all(word in found for word in words)
            assert seconds < PATIENCE


def test_what_a_rank_has_for_itself_may_differ():
    assert [found for found, _ in results(other_states_of_its_own)] == ["nothing"] * 3


def test_agreed_texts_are_forgotten_before_there_are_too_many(monkeypatch):
    monkeypatch.setattr(agreement, "MOST_KNOWN", 3)
    group = agreement.Agreement(None, 0, 1)
    for i in range(10):
        group.agree_on_exchange(f"scale={i}", None)
        assert len(group.known) <= 3


def test_a_call_that_is_wrong_on_one_rank_is_an_error_there_and_the_others_hear_of_it():
    first, second, third = (found for found, _ in results(too_many_tokens))
    assert "found T=31" in second and "cp_context.tokens" in second
    assert first == third and "cp_context.agreed" in first and "found T=31" in first


def a_group_that_has_ended(rank):
    """Return whether the group is gone, and what a call with its context says."""
    group = dist.new_group()
    kept, function = weakref.ref(group), called(group)
    function()
    dist.destroy_process_group(group)
    del group
    return kept() is None, outcome(function)[0]


def test_a_context_does_not_keep_a_group_that_was_destroyed():
    """Destroyed later, when Python ends, a group of gloo aborts the process."""
    for ended, found in results(a_group_that_has_ended):
        assert ended and found.startswith("InputError") and "Build a new context" in found


def test_so_is_one_of_a_layer():
    first, second, third = (found for found, _ in results(tokens_of_all_ranks_to_a_layer))
    assert "InputError: KimiDeltaAttention: x must be [1, 30, 8], this rank's tokens; found [1, 90, 8]" in second
    assert first == third and "KimiDeltaAttention: x must be [1, 30, 8]" in first


def layers(known):
    """Return the differentiable forwards of two layers of one size, in one context, after steps that ranks know."""
    context = kda.parallel.build_cp_context(torch.tensor([0, 90]), timeout=PATIENCE)
    calls = [make(B=1, T=30, gate="softplus", **SIZES).requiring_grad().arguments for _ in range(2)]
    calls[1] = calls[1] | {"A_log": (calls[1]["A_log"].detach() + 0.5).requires_grad_()}

    def forward(n):
        return kda.chunk_kda(**calls[n], cp_context=context)[0].square().sum()

    for _ in range(2 * known):                                                 # a step, an evaluation
        (forward(0) + forward(1)).backward()
        forward(0), forward(1), forward(0)
    return forward


def a_backward_skipped(rank):
    forward = layers(known=True)

    def function():
        loss = forward(0) + forward(1)
        if rank != 1:
            loss.backward()
        forward(0)

    return outcome(function)


def a_forward_repeated(rank):
    forward = layers(known=True)

    def function():
        loss = forward(0) + forward(1)
        if rank == 1:
            forward(0)
        loss.backward()

    return outcome(function)


def layers_in_another_order(rank):
    forward = layers(known=True)
    return outcome(lambda: (forward(rank == 1), forward(rank != 1)))


def backwards_in_another_order(rank):
    forward = layers(known=True)
    losses = [forward(0), forward(1)]
    return outcome(lambda: [loss.backward() for loss in (losses[::-1] if rank == 1 else losses)])


def another_context(rank):
    layers(known=True)
    contexts = [kda.parallel.build_cp_context(torch.tensor([0, 90]), None, 4, timeout=PATIENCE) for _ in range(2)]
    x = torch.ones(1, 30, 3)
    for context in contexts:
        kda.parallel.conv_halo(x, context)
    return outcome(lambda: kda.parallel.conv_halo(x, contexts[rank == 1]))


MARKED = {
    a_backward_skipped: ("rank 0: maps of HV=2 K=8 V=6 in torch.float64, backward", "rank 1: maps of HV=2 K=8 V=6 in "
                         "torch.float64, forward"),
    a_forward_repeated: ("in torch.float64, backward", "rank 1: maps of HV=2 K=8 V=6 in torch.float64, forward"),
    layers_in_another_order: ("other values of A_log or dt_bias",),
    backwards_in_another_order: ("another forward",),
    another_context: ("halo of 3 rows of D=3 torch.float32, forward",),
}


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("function", MARKED, ids=lambda f: f.__name__)
def test_a_rank_at_another_call_is_noticed_by_all_though_every_exchange_is_known(function):
    for found, _ in results(function):
        assert found.startswith("InputError") and all(word in found for word in (*MARKED[function], "exchange"))


LOST = [another_shape_later, dead, absent_from_the_backward,
        *(pytest.param(f, marks=pytest.mark.exhaustive) for f in (absent, dead_before_the_context))]


@pytest.mark.spread(every=6)
@pytest.mark.parametrize("function", LOST, ids=lambda f: f.__name__)
def test_ranks_that_wait_in_vain_give_up_in_time(function):
    found = results(function)
    waiting = [x for rank, x in enumerate(found) if rank != 1 or function is another_shape_later]
    for text, seconds in waiting:
        assert text.startswith("RankLost: ") and "all ranks of the context's group must make the call" in text
        assert seconds < PATIENCE


def results(function):
    found = processes.run(3, function)
    assert not any(x == "hangs" or "Traceback" in x for x in found), found
    return found
