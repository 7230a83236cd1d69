"""Random shapes, options and lengths against the definition."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive import DIFFERENTIABLE, assert_is_the_definition, definition, distance, gradients, make

import kda

lengths = st.lists(st.one_of(st.integers(0, 3), st.integers(30, 35), st.integers(0, 70)), min_size=0, max_size=5)
shapes = st.one_of(
    st.fixed_dictionaries({"lengths": lengths, "tail": st.integers(0, 5)}),
    st.fixed_dictionaries({"B": st.integers(0, 3), "T": st.integers(0, 70)}),
)
options = st.fixed_dictionaries(
    {
        "K": st.integers(1, 7), "V": st.integers(1, 7), "gate": st.sampled_from(["given", "softplus", "bounded"]),
        "beta": st.sampled_from(["given", "sigmoid", "2*sigmoid"]), "l2norm": st.booleans(),
        "initial_state": st.booleans(),
        "state_v_first": st.booleans(), "dt_bias": st.booleans(), "chunk_size": st.sampled_from([32, 64]),
        "disable_recompute": st.sampled_from([False, True, "states"]), "batch_invariant": st.booleans(),
        "scale": st.floats(0.1, 2.0),
    }
)
heads = st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)])
few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def build(shape, options, heads, seed):
    return make(H=heads[0], HV=heads[1], seed=seed, **shape, **options)


@few
@given(shapes, options, heads, st.integers(0, 9))
def test_forward_and_backward_are_the_definition(shape, options, heads, seed):
    call = build(shape, options, heads, seed).requiring_grad()
    o, ht = kda.chunk_kda(**call.arguments, output_final_state=True)
    assert_is_the_definition(call, (o, ht), 1e-11)
    ((o * call.do).sum() + (ht * call.dht).sum()).backward()
    grads = gradients(call)
    largest = max((grad.abs().max().item() for grad in grads.values() if grad.numel()), default=0)
    for name, grad in grads.items():
        difference = (call.tensors[name].grad - grad).abs().max().item() if grad.numel() else 0
        assert difference <= 1e-11 * max(largest, 1), name


@few
@given(shapes, options, heads, st.integers(0, 9))
def test_chunks_and_tokens_agree(shape, options, heads, seed):
    call = build(shape, options, heads, seed)
    chunk = kda.chunk_kda(**call.arguments, output_final_state=True)
    arguments = {n: x for n, x in call.arguments.items() if n not in ("chunk_size", "disable_recompute")}
    token = kda.fused_recurrent_kda(**arguments, output_final_state=True)
    assert distance(chunk[0], token[0]) < 1e-11 and distance(chunk[1], token[1]) < 1e-11


@few
@given(lengths.filter(lambda n: sum(n) > 1), options, heads, st.data())
def test_a_sequence_may_be_cut_anywhere_and_go_on_from_its_state(lengths, options, heads, data):
    T = sum(lengths)
    call = build({"B": 1, "T": T}, options, heads, 0)
    cut = data.draw(st.integers(0, T))
    o, ht = kda.chunk_kda(**call.arguments, output_final_state=True)
    tokens = {n: call.tensors[n] for n in ("q", "k", "v", "g", "beta")}
    rest = {n: x for n, x in call.arguments.items() if n not in tokens}
    a, state = kda.chunk_kda(**{n: x[:, :cut] for n, x in tokens.items()}, **rest, output_final_state=True)
    b, end = kda.chunk_kda(
        **{n: x[:, cut:] for n, x in tokens.items()}, **rest | {"initial_state": state}, output_final_state=True
    )
    assert distance(torch.cat([a, b], 1), o) < 1e-11 and distance(end, ht) < 1e-11


@few
@given(lengths, options, heads, st.randoms(use_true_random=False))
def test_the_order_of_packed_sequences_does_not_matter(lengths, options, heads, random):
    call = build({"lengths": lengths}, options | {"batch_invariant": True}, heads, 0)
    order = list(range(len(lengths)))
    random.shuffle(order)
    ends = call.tensors["cu_seqlens"].tolist()
    tokens = [t for n in order for t in range(ends[n], ends[n + 1])]
    mixed = dict(call.arguments)
    for name in ("q", "k", "v", "g", "beta"):
        mixed[name] = call.tensors[name][:, tokens]
    if "initial_state" in mixed:
        mixed["initial_state"] = mixed["initial_state"][order]
    mixed["cu_seqlens"] = torch.tensor([0, *(lengths[n] for n in order)]).cumsum(0)
    o, ht = kda.chunk_kda(**call.arguments, output_final_state=True)
    mixed_o, mixed_ht = kda.chunk_kda(**mixed, output_final_state=True)
    assert torch.equal(mixed_o, o[:, tokens]) and torch.equal(mixed_ht, ht[order])


def test_the_oracle_of_these_tests_notices_a_wrong_token():
    call = make([40, 3])
    o, _ = kda.chunk_kda(**call.arguments)
    broken = make([40, 3])
    broken.tensors["beta"][:, 20] = 0
    assert distance(o, definition(broken)[0]) > 1e-3
    assert all(name in DIFFERENTIABLE for name in gradients(call))
