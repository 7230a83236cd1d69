"""Prefill from and to slots of a pool on a GPU: the bits of whole sequences, and a captured call with other numbers."""

import pytest
import torch
from on_a_gpu import captured

pytest.importorskip("triton", reason="needs triton")

import kda

pytestmark = pytest.mark.gpu

H, D, SLOTS = 4, 128, 8
GATE = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
            batch_invariant=True, state_v_first=True)


def index(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def tokens(T):
    random = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(1, T, *shape, generator=random, device="cuda").bfloat16()

    return dict(q=normal(H, D), k=normal(H, D), v=normal(H, D), g=normal(H, D), beta=normal(H))


def rows(x, start, end):
    return {name: t[:, start:end] for name, t in x.items()}


def checkpoints(offsets, slots):
    return dict(checkpoint_offsets=torch.tensor(offsets, device="cuda"),
                checkpoint_indices=torch.tensor(slots, device="cuda"))


@pytest.mark.parametrize("backend", [None, "triton"], ids=["the GPU's own", "triton"])
@torch.no_grad()
def test_a_prefix_from_a_checkpoint_goes_on_with_the_bits_of_no_cut(backend):
    x, options = tokens(1000), dict(GATE, backend=backend)
    o, state = kda.chunk_kda(**x, **options, output_final_state=True)
    pool = torch.full((SLOTS, H, D, D), torch.nan, device="cuda")
    first, _ = kda.chunk_kda(
        **x, **options, cu_seqlens=index(0, 0, 1000), initial_state=pool, ssm_state_indices=index(5, 3),
        initial_state_indices=index(-1, -1), **checkpoints([[0, 0], [512, 960]], [[-1, -1], [1, 2]]),
    )
    assert torch.equal(first, o) and torch.equal(pool[3], state[0])
    for start, slot in ((512, 1), (960, 2)):
        rest, _ = kda.chunk_kda(**rows(x, start, 1000), **options, initial_state=pool, ssm_state_indices=index(4),
                                initial_state_indices=index(slot))
        assert torch.equal(rest, o[:, start:]) and torch.equal(pool[4], state[0])


@pytest.mark.parametrize("backend", [None, "triton"], ids=["the GPU's own", "triton"])
@torch.no_grad()
def test_a_captured_call_is_replayed_with_other_offsets_and_slots(backend):
    x, pool = tokens(600), torch.zeros(SLOTS, H, D, D, device="cuda")
    given = dict(cu_seqlens=index(0, 600, 600), ssm_state_indices=index(0, -1), initial_state_indices=index(-1, -1),
                 **checkpoints([[64], [0]], [[1], [-1]]))
    other = dict(cu_seqlens=index(0, 200, 530), ssm_state_indices=index(2, 3), initial_state_indices=index(-1, 1),
                 **checkpoints([[128], [320]], [[4], [5]]))

    def call(numbers):
        return kda.chunk_kda(**x, **GATE, backend=backend, initial_state=pool, **numbers)[0]

    call(given)
    graph, result = captured(lambda: call(given))
    pool.normal_(generator=torch.Generator("cuda").manual_seed(1))
    before = pool.clone()
    for name, numbers in other.items():
        given[name].copy_(numbers)
    graph.replay()
    found = result.clone(), pool.clone()
    pool.copy_(before)
    expected = call(other)
    assert torch.equal(found[0][:, :530], expected[:, :530]) and torch.equal(found[1], pool)
