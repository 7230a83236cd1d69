"""decode_step on the reference: its parts are those of the layer, and drafts leave what accepted tokens alone leave."""

import itertools

import pytest
import torch
from drafts import beside_plain_decoding

import kda
from kda import nn
from kda.nn.sequences import Sequences
from kda.tools.verify.steps import copied, make_step, run_step, tokens_of

CASES = {
    "softplus gate": {},
    "bounded gate, GVA": dict(gate="bounded", HV=6),
    "decays and beta given, no l2norm": dict(gate="given", beta="given", l2norm=False),
    "gate per head": dict(per_head=True, HV=6),
    "decay per head": dict(per_head=True, gate="given"),
    "2*sigmoid": dict(beta="2*sigmoid"),
    "no convolution": dict(conv=False),
    "no norm": dict(norm=False),
    "the recurrence alone": dict(conv=False, norm=False),
    "three tokens, a bias, a wide convolution": dict(T=3, bias=True, W=6),
    "K=5 V=3": dict(K=5, V=3),
    "five tokens, a narrow convolution": dict(T=5, W=2),
}


def wide(**words):
    return copied(make_step(**words), torch.float64)


def apart(x):
    """Run the layer's functions one after the other; return o, states, and tails of sequences with a slot."""
    real = x["ssm_state_indices"] >= 0
    slots = x["ssm_state_indices"][real].long()
    q, k, v, g, beta = (x[name][real] for name in ("q", "k", "v", "g", "beta"))
    heads, N, tails = (q.shape[2], v.shape[2]), len(q), None
    if x.get("conv_weight") is not None:
        mixed = torch.cat([t.flatten(2) for t in (q, k, v)], -1)
        before, rows = x["conv_states"][slots], Sequences.of_rows(N)
        convolved = nn.short_convolution(mixed, x["conv_weight"], x.get("conv_bias"), before, rows)
        tails = nn.next_state(mixed, x["conv_weight"].shape[1], before, rows)
        sizes = [t.flatten(2).shape[2] for t in (q, k, v)]
        q, k, v = (t.unflatten(2, (n, -1)) for t, n in zip(convolved.split(sizes, -1), (heads[0], *heads)))
    names = ("A_log", "dt_bias", "lower_bound", "allow_neg_eigval", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
             "use_beta_sigmoid_in_kernel")
    asked = {name: x[name] for name in names if name in x}
    o, states = kda.fused_recurrent_kda(
        q, k, v, g, beta, **asked, initial_state=x["states"][slots], output_final_state=True, state_v_first=True
    )
    if x.get("norm_weight") is not None:
        o = nn.gated_rms_norm(o, x["norm_gate"][real], x["norm_weight"])
    return real, slots, o, states, tails


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_convolution_the_recurrence_and_the_norm(name):
    x = wide(slots=[4, -1, 0], **CASES[name])
    real, slots, o, states, tails = apart(x)
    before = copied(x)
    found = run_step(x)
    assert torch.allclose(found["o"][real], o, rtol=0, atol=1e-12) and not found["o"][~real].any()
    assert torch.allclose(x["states"][slots], states, rtol=0, atol=1e-12)
    others = [slot for slot in range(len(x["states"])) if slot not in slots]
    assert torch.equal(x["states"][others], before["states"][others])
    if tails is not None:
        assert torch.equal(x["conv_states"][slots], tails)
        assert torch.equal(x["conv_states"][others], before["conv_states"][others])


def test_every_orientation_of_pools_gives_the_same():
    x = wide(HV=4)
    expected = run_step(copied(x))
    k_first = copied(x) | {"states": x["states"].mT.contiguous(), "state_v_first": False}
    channels = copied(x) | {"conv_states": x["conv_states"].mT.contiguous(), "conv_channels_first": True}
    assert torch.equal(run_step(k_first)["o"], expected["o"])
    assert torch.equal(k_first["states"].mT, expected["states"])
    assert torch.equal(run_step(channels)["o"], expected["o"])
    assert torch.equal(channels["conv_states"].mT, expected["conv_states"])


def test_without_slots_state_n_is_that_of_sequence_n():
    x = wide(slots=[0, 1, 2], pool=3)
    expected = run_step(copied(x))
    del x["ssm_state_indices"]
    assert torch.equal(run_step(x)["o"], expected["o"])


def test_what_is_not_read_of_padding_is_not_checked():
    x = make_step(N=2, T=3, H=2, K=5, V=3, slots=[0, -1], drafts=True, tree=True)
    x["accepted_path"] = torch.tensor([[0, 1, 2]] * 2)
    for name, wrong in (("num_accepted_tokens", 0), ("accepted_path", 9), ("parents", 9)):
        x[name][1] = wrong
    run_step(x)
    with pytest.raises(kda.InputError, match="found 0 for sequence 1"):
        run_step(x | {"ssm_state_indices": torch.tensor([0, 1], dtype=torch.int32)})


def test_slots_below_the_first_are_padding():
    x = wide(slots=[0, 2, 3]) | {"first_slot": 1}
    before = x["states"].clone()
    assert not run_step(x)["o"][0].any() and torch.equal(x["states"][:2], before[:2])


def test_o_goes_where_it_is_asked_for():
    x = wide()
    out = torch.full_like(x["v"], torch.nan)
    assert kda.decode_step(**copied(x), out=out) is out
    assert torch.equal(out, kda.decode_step(**x))


def test_no_sequences():
    x = make_step(N=0, slots=[])
    assert run_step(x)["o"].shape == (0, 1, 2, 16)


# drafts


SHAPES = {
    "a line": dict(T=4), "a line without a convolution": dict(T=3, conv=False), "two tokens": dict(T=2, W=2),
    "a tree": dict(T=7, tree=True), "a tree, GVA, without a norm": dict(T=5, tree=True, HV=4, norm=False),
    "a wide convolution": dict(T=3, W=6), "bfloat16 states": dict(T=4, states="bfloat16"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_leave_what_the_accepted_tokens_alone_leave(name):
    """Bit for bit, in a call for each of them."""
    for what, a, b in beside_plain_decoding(run_step, **SHAPES[name]):
        assert torch.equal(a, b), what


def test_a_draft_that_is_not_accepted_leaves_no_trace():
    x = wide(T=4, drafts=True)
    other = copied(x)
    for name in ("q", "k", "v", "g", "beta"):
        other[name][:, 2:] = torch.randn_like(other[name][:, 2:])
    a, b = run_step(copied(x)), run_step(other)
    assert torch.equal(a["states"], b["states"]) and torch.equal(a["o"][:, :2], b["o"][:, :2])
    then = tokens_of(wide(T=4, drafts=True, seed=5)) | {"num_accepted_tokens": torch.tensor([2, 1, 2])}
    a, b = (run_step(copied(x | then | {n: found[n] for n in ("states", "conv_states", "records")}))
            for found in (a, b))
    assert torch.equal(a["o"], b["o"]) and torch.equal(a["states"], b["states"])


def test_tokens_of_a_tree_see_their_ancestors_alone():
    x = wide(T=5, drafts=True)
    x["parents"] = torch.tensor([[0, 0, 0, 1, 2]] * 3)
    o = run_step(copied(x))["o"]
    for way in ([0, 1, 3], [0, 2, 4]):
        line = {name: x[name][:, way] for name in tokens_of(x)}
        line |= {"parents": None, "records": x["records"][:, :2].contiguous(), "conv_states": x["conv_states"][:, :5]}
        assert torch.allclose(run_step(copied(x | line))["o"], o[:, way], rtol=0, atol=1e-12)


# torch


def test_a_compiled_call_is_one_graph_and_gives_the_same():
    torch._dynamo.reset()
    x = wide(HV=4)
    expected = run_step(copied(x))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(tensors):
        return 2 * kda.decode_step(**tensors, lower_bound=None)

    with torch.no_grad():
        o = step({n: t for n, t in x.items() if isinstance(t, torch.Tensor)})
    assert torch.equal(o, 2 * expected["o"])
    assert torch.equal(x["states"], expected["states"]) and torch.equal(x["conv_states"], expected["conv_states"])


def test_a_mode_sees_one_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Names(), torch.no_grad():
        kda.decode_step(**make_step())
    assert "kda.decode_step_.default" in names


def test_gradients_are_refused_and_versions_are_counted():
    x = make_step()
    x["q"].requires_grad_()
    with pytest.raises(kda.InputError, match="no backward"):
        kda.decode_step(**x)
    versions = x["states"]._version, x["conv_states"]._version
    run_step(x)
    assert x["states"]._version > versions[0] and x["conv_states"]._version > versions[1]


@pytest.mark.parametrize("backend", ["triton", "sm90", "sm100", "sm89"])
def test_a_backend_that_cannot_says_why(backend):
    with pytest.raises(kda.NoBackendError, match=backend), torch.no_grad():
        kda.decode_step(**make_step(), backend=backend)


def test_shapes_that_were_seen_are_checked_again_where_numbers_are():
    x = make_step(slots=[0, 1, 2])
    run_step(x)
    for wrong in ([0, 1, 1], [0, 1, 9]):
        with pytest.raises(kda.InputError, match="ssm_state_indices"):
            run_step(x | {"ssm_state_indices": torch.tensor(wrong, dtype=torch.int32)})


def test_a_record_is_smaller_than_a_state_for_every_model():
    for K, V, size in itertools.product((64, 128), (64, 128), (2, 4)):
        assert K * V * size > 5 * 4 * (2 * K + V)


def test_numbers_of_numpy_are_numbers():
    x = make_step(N=2, T=1, H=2, K=5, V=3)
    numpy = pytest.importorskip("numpy")
    o = kda.decode_step(**copied(x) | {"scale": 0.5, "lower_bound": -5.0})
    assert torch.equal(o, kda.decode_step(**copied(x) | {"scale": numpy.float32(0.5), "lower_bound": numpy.int64(-5)}))


def test_wrong_numbers_and_flags_are_named():
    x = make_step(N=2, T=1, H=2, K=5, V=3)
    for wrong in ({"scale": 10**400}, {"norm_eps": 10**400}, {"lower_bound": -(10**400)}):
        with pytest.raises(kda.InputError, match=next(iter(wrong))):
            kda.decode_step(**copied(x) | wrong)
    with pytest.raises(kda.InputTypeError, match="conv_channels_first must be True or False; found str 'yes'"):
        kda.decode_step(**copied(x), conv_channels_first="yes")


def test_a_weight_of_a_convolution_that_mixes_channels_is_not_taken_for_a_wider_one():
    x = make_step(N=2, T=1, H=2, K=5, V=3)
    weight = x["conv_weight"]
    x |= {"conv_weight": weight.view(weight.shape[0], 2, -1)}
    with pytest.raises(kda.InputError, match="conv_weight must be"):
        kda.decode_step(**x)


def test_vmap_is_refused():
    x = make_step(N=2, T=1, H=2, K=5, V=3)
    q = torch.stack([x.pop("q")] * 2)
    with pytest.raises(kda.KdaError, match="vmap"):
        torch.func.vmap(lambda each: kda.decode_step(each, **x))(q)


@pytest.mark.parametrize("name", ["q", "states", "norm_gate"])
def test_a_sparse_tensor_is_named_also_after_a_call_of_the_same_kind(name):
    x = make_step(N=2, T=1, H=2, K=5, V=3)
    kda.decode_step(**copied(x))
    with pytest.raises(kda.InputTypeError, match=f"{name} must be a dense torch.Tensor.*; found a tensor of layout"):
        kda.decode_step(**copied(x) | {name: x[name].to_sparse()})
