"""chunk_kda with a pool of states: prefill from slots and back, checkpoints, and the bits that cuts do not change."""

import pytest
import torch
from naive import assert_is_the_definition, definition, distance, make

import kda

TOKENS = ("q", "k", "v", "g", "beta")
OPTIONS = {
    "float64": {},
    "softplus gate, GVA, states (V, K)": {"gate": "softplus", "HV": 4, "state_v_first": True},
    "gate per head": {"gate": "softplus", "per_head": True},
    "bounded gate, tail": {"gate": "bounded", "tail": 5},
}
LENGTHS = [70, 0, 1, 33, 96]


def index(*values):
    return torch.tensor(values)


def pooled(call, slots, spare=3):
    """Return a pool of random states, with those of the call in their slots."""
    states = call.tensors["initial_state"]
    pool = torch.randn(len(slots) + spare, *states.shape[1:], dtype=states.dtype)
    real = slots >= 0
    pool[slots[real]] = states[real]
    return pool


def run(call, pool, slots, **options):
    return kda.chunk_kda(**call.arguments | {"initial_state": pool, "ssm_state_indices": slots} | options)


def rows(call, start, end):
    return {name: call.tensors[name][:, start:end] for name in TOKENS}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_the_definition_from_slots_and_back(options):
    call, slots = make(LENGTHS, **options), index(6, 0, 3, 2, 5)
    pool = pooled(call, slots)
    before = pool.clone()
    o, returned = run(call, pool, slots)
    assert returned is pool
    assert_is_the_definition(call, (o, pool[slots]))
    others = [slot for slot in range(len(pool)) if slot not in slots]
    assert torch.equal(pool[others], before[others])


def test_rows_of_a_batch_have_slots_too():
    call, slots = make(B=3, T=40), index(4, 1, 0)
    pool = pooled(call, slots)
    o, _ = run(call, pool, slots)
    assert_is_the_definition(call, (o, pool[slots]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_pool_may_be_of_any_float_dtype(dtype):
    call, slots = make(LENGTHS, dtype=torch.float32), index(0, 1, 2, 3, 4)
    pool = pooled(call, slots).to(dtype)
    exact = kda.chunk_kda(**call.arguments | {"initial_state": pool[slots].float()}, output_final_state=True)
    o, _ = run(call, pool, slots)
    assert torch.equal(o, exact[0]) and torch.equal(pool[slots], exact[1].to(dtype))


def test_a_sequence_starts_from_another_slot_or_from_zero_and_may_leave_nothing():
    call = make([40, 40, 40])
    pool = torch.randn(4, *call.tensors["initial_state"].shape[1:], dtype=torch.float64)
    before = pool.clone()
    o, _ = run(call, pool, index(3, 0, -1), initial_state_indices=index(1, -1, 2))
    start = torch.stack((before[1], torch.zeros_like(before[0]), before[2]))
    call.tensors["initial_state"] = start
    exact, finals = definition(call)
    assert distance(o, exact) < 1e-12 and distance(pool[[3, 0]], finals[:2]) < 1e-12
    assert torch.equal(pool[1:3], before[1:3])


def test_slots_may_lie_apart_in_memory():
    call, slots = make([40, 33]), index(2, 0)
    pool = pooled(call, slots)
    wide = torch.full((len(pool), 2, *pool.shape[1:]), torch.nan, dtype=pool.dtype)
    wide[:, 0] = pool
    o, _ = run(call, wide[:, 0], slots)
    expected, _ = run(call, pool, slots)
    assert torch.equal(o, expected) and torch.equal(wide[:, 0], pool) and wide[:, 1].isnan().all()


def test_checkpoints_are_the_final_states_of_what_comes_before():
    call, slots = make(LENGTHS), index(0, 1, 2, 3, 4)
    pool = torch.cat((call.tensors["initial_state"].clone(), torch.zeros(6, 2, 5, 3, dtype=torch.float64)))
    offsets = torch.tensor([[32, 64, 32], [0, 32, 0], [32, 0, 0], [32, -5, 32], [96, 0, 96]])
    to = torch.tensor([[5, 6, -1], [7, -1, -1], [-1, -1, -1], [8, -1, -1], [9, 10, -1]])
    exact = definition(call)[0]
    o, _ = run(call, pool, slots, checkpoint_offsets=offsets, checkpoint_indices=to)
    assert distance(o, exact) < 1e-12
    start = 0
    for n, length in enumerate(LENGTHS):
        for offset, slot in zip(offsets[n].tolist(), to[n].tolist()):
            if slot >= 0:
                state = call.tensors["initial_state"][n : n + 1]
                part = kda.chunk_kda(**call.arguments | rows(call, start, start + offset) | dict(
                    cu_seqlens=None, initial_state=state, output_final_state=True))
                assert distance(pool[slot], part[1][0]) < 1e-12
        start += length
    assert torch.equal(pool[9], pool[4])                                       # at its end: the final state


def test_bits_do_not_depend_on_where_a_sequence_is_cut_or_what_is_beside_it():
    lengths, chunk = [300, 129, 64], 32
    call = make(lengths, dtype=torch.float32, HV=4, K=32, V=16, batch_invariant=True, initial_state=False)
    whole, finals = kda.chunk_kda(**call.arguments, output_final_state=True)
    generator, ends = torch.Generator().manual_seed(1), [0, 300, 429, 493]
    for _ in range(3):
        pool, done = torch.randn(3, 4, 32, 16), [0, 0, 0]
        found = torch.zeros_like(whole)
        while done != lengths:
            turn = [n for n in torch.randperm(3, generator=generator).tolist() if done[n] < lengths[n]]
            turn = turn[: 1 + int(torch.randint(3, (1,), generator=generator))]
            sizes = [min(chunk * int(torch.randint(1, 6, (1,), generator=generator)), lengths[n] - done[n])
                     for n in turn]
            taken = torch.cat([torch.arange(s) + ends[n] + done[n] for n, s in zip(turn, sizes)])
            tensors = {name: call.tensors[name][:, taken] for name in TOKENS}
            o, _ = kda.chunk_kda(
                **call.options, **tensors, cu_seqlens=torch.tensor([0, *sizes]).cumsum(0), initial_state=pool,
                ssm_state_indices=torch.tensor(turn),
                initial_state_indices=torch.tensor([n if done[n] else -1 for n in turn]),
            )
            found[:, taken] = o
            for n, size in zip(turn, sizes):
                done[n] += size
        assert torch.equal(found, whole) and torch.equal(pool, finals)


def test_a_batch_may_mix_prefill_and_decode():
    """One token more of a sequence is what the recurrence gives, but for roundings."""
    call = make([64, 1, 1], dtype=torch.float32, K=32, V=16)
    slots = index(0, 1, 2)
    pool = pooled(call, slots)
    recurrent = pool.clone()
    o, _ = run(call, pool, slots)
    arguments = call.arguments | {"initial_state": recurrent, "ssm_state_indices": slots}
    arguments.pop("chunk_size")
    expected, _ = kda.fused_recurrent_kda(**arguments)
    assert distance(o, expected) < 1e-5 and distance(pool[slots], recurrent[slots]) < 1e-5


def test_four_thousand_sequences_in_one_call():
    lengths = [n % 3 for n in range(4096)]
    call, slots = make(lengths, dtype=torch.float32, H=1), torch.randperm(4096)
    pool = pooled(call, slots)
    exact = kda.chunk_kda(**call.arguments, output_final_state=True)
    o, _ = run(call, pool, slots)
    assert torch.equal(o, exact[0]) and torch.equal(pool[slots], exact[1])


def test_a_compiled_call_writes_the_pool():
    call, slots = make([40, 33], dtype=torch.float32), index(1, 0)
    pool = pooled(call, slots)
    again = pool.clone()
    expected, _ = run(call, pool, slots)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        o, _ = compiled(call, again, slots)
    assert torch.equal(o, expected) and torch.equal(again, pool)


def test_a_call_without_autograd_returns_the_pool_as_final_states():
    call, slots = make([40, 33], dtype=torch.float32), index(1, 0)
    pool = pooled(call, slots)
    out = kda.chunk_kda_fwd(**call.arguments | {"initial_state": pool, "ssm_state_indices": slots})
    assert out.final_state is pool and out.h is out.saved is None


def test_writing_a_pool_is_seen_by_autograd():
    call, slots = make([8], dtype=torch.float32), index(0)
    pool = pooled(call, slots)
    version = pool._version
    run(call, pool, slots)
    assert pool._version > version


@pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_a_pool_without_slots_serves_sequences_that_keep_no_state(function):
    call = make(B=2, T=3, dtype=torch.float32)
    given = {name: x for name, x in call.arguments.items() if name != "chunk_size"}
    HV, K, V = call.tensors["v"].shape[2], call.tensors["k"].shape[3], call.tensors["v"].shape[3]
    with torch.no_grad():
        o, pool = function(**given | {"initial_state": torch.zeros(0, HV, K, V)}, ssm_state_indices=index(-1, -1))
    assert o.isfinite().all() and pool.shape[0] == 0


def test_vmap_over_q_alone_would_write_one_pool_and_is_refused():
    call, slots = make([3]), index(1)
    pool, several = pooled(call, slots), torch.stack([call.tensors["q"]] * 2)
    with pytest.raises(kda.KdaError, match=r"^chunk_kda: .*Map over initial_state as well.* without ssm_state_indices"):
        torch.func.vmap(lambda q: kda.chunk_kda(
            **call.arguments | {"q": q, "initial_state": pool, "ssm_state_indices": slots}
        )[0])(several)
