"""kda.nn on a CPU: the layer against its definition token by token, its cache, masks, packing, modes, checkpoints."""

import copy
import functools
import math
import pickle
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from layers import D, hidden, make, of_kinds
from naive import make as naive_call

import kda
from kda import nn
from kda.nn import LAYOUTS, Cache, CheckpointError, KimiDeltaAttention, Sequences, convolution, norm

kinds = of_kinds()


def defined(layer, x):
    """Return y (T, D) of x (T, D), by the formulas, one token after the other."""
    def convolved(proj, conv):
        z, w, W = proj(x), conv.weight[:, 0], conv.width
        before = torch.cat([z.new_zeros(W - 1, z.shape[1]), z])
        sums = torch.stack([(before[t : t + W] * w.T).sum(0) for t in range(len(x))])
        return F.silu(sums if conv.bias is None else sums + conv.bias)

    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_dim, layer.head_v_dim
    q, k = (convolved(p, c).view(-1, H, K).repeat_interleave(HV // H, 1)
            for p, c in ((layer.q_proj, layer.q_conv1d), (layer.k_proj, layer.k_conv1d)))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    v = convolved(layer.v_proj, layer.v_conv1d).view(-1, HV, V)
    f = layer.f_proj(x) if layer.forget_rank is None else layer.f_b_proj(layer.f_a_proj(x))
    f, rate = (f + layer.dt_bias).view(-1, HV, K), layer.A_log.exp()[:, None]
    g = -rate * F.softplus(f) if layer.lower_bound is None else layer.lower_bound * torch.sigmoid(rate * f)
    beta = (2 if layer.allow_neg_eigval else 1) * torch.sigmoid(layer.b_proj(x))
    S, o = x.new_zeros(HV, K, V), []
    for t in range(len(x)):
        S = g[t].exp()[..., None] * S
        S = S + torch.einsum("h,hk,hv->hkv", beta[t], k[t], v[t] - torch.einsum("hk,hkv->hv", k[t], S))
        o.append(torch.einsum("hk,hkv->hv", q[t], S) * K**-0.5)
    o = torch.stack(o)
    n = o / (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt() * layer.o_norm.weight
    gate = layer.g_proj(x) if layer.gate_rank is None else layer.g_b_proj(layer.g_a_proj(x))
    return layer.o_proj((n * torch.sigmoid(gate.view(-1, HV, V))).flatten(1))


def gradients(layer, function, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)).sum().backward()
    return y.detach(), {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def close(a, b, tolerance=1e-12):
    return (a - b).abs().max() <= tolerance * max(1, b.abs().max())


def assert_same(layer, function, other, x, tolerance=1e-12):
    """Check that two functions of x agree, and their gradients of x and of the layer's parameters."""
    (y, found), (expected, exact) = gradients(layer, function, x), gradients(layer, other, x)
    assert close(y, expected, tolerance)
    assert [name for name, grad in exact.items() if not close(found[name], grad, 10 * tolerance)] == []


@kinds
def test_outputs_and_gradients_are_those_of_the_definition(options):
    layer, x = make(**options), hidden(70)
    assert_same(layer, layer, lambda x: torch.stack([defined(layer, row) for row in x]), x)


def test_a_wrong_convolution_is_noticed():
    layer, x = make(), hidden(20)
    expected = torch.stack([defined(layer, row) for row in x])
    with torch.no_grad():
        layer.k_conv1d.weight.copy_(layer.k_conv1d.weight.flip(2))
    assert not close(layer(x), expected, 1e-3)


@kinds
def test_pieces_and_single_tokens_through_a_cache_are_the_whole(options):
    layer, x = make(**options), hidden(60)
    whole, cache, found, first = layer(x), Cache(), [], 0
    with torch.no_grad():
        for length in (2, 1, 30, *[1] * 5, 22):
            found.append(layer(x[:, first : first + length], cache=cache))
            first += length
    assert first == 60 and close(torch.cat(found, 1), whole)
    assert cache[0].recurrent.shape == (2, layer.num_v_heads, layer.head_v_dim, 8)
    assert [c.shape[1] for c in cache[0].conv] == [layer.conv_size - 1] * 3


def test_a_copy_of_a_cache_keeps_what_was_and_select_takes_sequences():
    layer, x = make(), hidden(12)
    cache = Cache()
    with torch.no_grad():
        layer(x[:, :10], cache=cache)
        before = cache.copy()
        y = layer(x[:, 10:], cache=cache)
        assert torch.equal(layer(x[:, 10:], cache=before.copy()), y)
        assert close(layer(x[[1, 0, 0], 10:], cache=before.select(torch.tensor([1, 0, 0]))), y[[1, 0, 0]])
    assert [*before] == [0] and len(Cache()) == 0


def test_gradients_flow_through_a_cache():
    """They flow from one piece into those before, through the states of the recurrence and of the convolutions."""
    layer, x = make(), hidden(9)

    def pieces(x):
        cache = Cache()
        return torch.cat([layer(x[:, a:b], cache=cache) for a, b in ((0, 2), (2, 8), (8, 9))], 1)

    assert_same(layer, pieces, layer, x)


MASKS = {
    "left": [[0] * 7 + [1] * 13, [1] * 20],
    "right": [[1] * 13 + [0] * 7, [1] * 20],
    "within, and nobody": [[1, 0, 0, 1] * 5, [0] * 20],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding_affects_no_token(mask):
    layer, x, mask = make(), hidden(20), torch.tensor(mask)

    def alone(x):
        y = torch.zeros_like(x)
        for b in range(2):
            real = mask[b].bool()
            if real.any():
                y = y.index_put((torch.tensor(b), real.nonzero()[:, 0]), layer(x[b : b + 1, real])[0])
        return y

    assert_same(layer, lambda x: layer(x, mask), alone, x)


def test_a_padded_batch_goes_on_through_a_cache():
    layer, x = make(), hidden(20)
    mask = torch.tensor(MASKS["left"])
    cache = Cache()
    with torch.no_grad():
        found = [layer(x[:, :12], mask[:, :12], cache=cache)]
        found += [layer(x[:, t : t + 1], mask[:, : t + 1], cache=cache) for t in range(12, 20)]
        assert close(torch.cat(found, 1), layer(x, mask))


@kinds
def test_packed_sequences_are_as_alone(options):
    layer, x, offsets = make(**options), hidden(50, B=1), torch.tensor([0, 7, 7, 8, 45])

    def alone(x):
        pieces = [layer(x[:, a:b]) for a, b in ((0, 7), (7, 8), (8, 45))]
        return torch.cat([*pieces, torch.zeros_like(x[:, 45:])], 1)

    assert_same(layer, lambda x: layer(x, cu_seqlens=offsets), alone, x)


def test_packed_sequences_go_on_through_a_cache():
    layer, x, cache = make(), hidden(30, B=1), Cache()
    with torch.no_grad():
        first = layer(x[:, :15], cu_seqlens=torch.tensor([0, 10, 15]), cache=cache)
        then = layer(x[:, 15:], cu_seqlens=torch.tensor([0, 1, 15]), cache=cache)
        a = layer(torch.cat([x[:, :10], x[:, 15:16]], 1))
        b = layer(torch.cat([x[:, 10:15], x[:, 16:]], 1))
    assert close(torch.cat([first[:, :10], then[:, :1]], 1), a) and close(torch.cat([first[:, 10:], then[:, 1:]], 1), b)


def test_no_tokens_and_no_sequences():
    layer, cache = make(), Cache()
    assert layer(hidden(0)).shape == (2, 0, D)
    assert layer(hidden(4, B=0)).shape == (0, 4, D)
    x = hidden(6)
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
        layer(x[:, :0], cache=cache)
        assert close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])


@pytest.mark.parametrize("mode", ["auto", "chunk"])
def test_no_packed_sequences_go_on_through_a_cache(mode):
    layer, cache, none = make(mode=mode), Cache(), torch.tensor([0])
    with torch.no_grad():
        for _ in range(3):
            y = layer(hidden(4, B=1), cu_seqlens=none, cache=cache)
            assert y.shape == (1, 4, D) and not y.any()
    assert cache[0].N == 0


def test_a_rank_whose_tokens_are_all_padding_has_zeros(monkeypatch):
    """Its halo has a row for each sequence, and there is none."""
    layer, x = make(), hidden(7, B=1)
    context = types.SimpleNamespace(cu_seqlens=torch.tensor([0]), tokens=7, crosses=True)
    with_halo(monkeypatch, lambda x, cp_context, rows: x.new_zeros(0, rows, x.shape[-1]))
    monkeypatch.setattr(sys.modules["kda.nn.layer"], "chunk_kda", lambda *tensors, cp_context, **options: kda.chunk_kda(
        *tensors, **options, cu_seqlens=cp_context.cu_seqlens))
    y = layer(x.fill_(math.nan), cp_context=context)
    grads = torch.autograd.grad(y.sum(), [*layer.parameters()])
    assert not y.any() and not any(grad.any() for grad in grads)


def test_short_calls_without_gradients_go_token_by_token(monkeypatch):
    calls = []
    layer = make()
    for name in ("chunk_kda", "fused_recurrent_kda"):
        ours = getattr(kda, name)
        monkeypatch.setattr(sys.modules["kda.nn.layer"], name,
                            lambda *a, _ours=ours, **k: calls.append(_ours.__name__) or _ours(*a, **k))
    layer(hidden(10))
    with torch.no_grad():
        layer(hidden(64))
        layer(hidden(65))
        layer.mode = "recurrent"
        layer(hidden(65))
        layer.mode = "chunk"
        layer(hidden(1))
    assert calls == ["chunk_kda", "fused_recurrent_kda", "chunk_kda", "fused_recurrent_kda", "chunk_kda"]


def test_it_compiles_without_a_graph_break():
    layer, x = make(dtype=torch.float32), hidden(20, dtype=torch.float32)
    mask = torch.tensor(MASKS["left"])
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert close(compiled(x), layer(x), 1e-6) and close(compiled(x, mask), layer(x, mask), 1e-6)


def test_autocast_and_checkpointing():
    layer, x = make(dtype=torch.float32), hidden(20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and close(y.float(), layer(x), 0.05)
    y, found = gradients(layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), x)
    expected, exact = gradients(layer, layer, x)
    assert torch.equal(y, expected) and all(torch.equal(found[name], grad) for name, grad in exact.items())


def test_gates_start_where_models_are_trained_from():
    torch.manual_seed(0)
    layer = KimiDeltaAttention(D, 64, 8)
    rate, step = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert rate.min() >= 1 and rate.max() <= 16
    assert step.min() >= 0.99e-3 and step.max() <= 0.101
    assert step.log().mean().exp().item() == pytest.approx(0.01, rel=0.2)
    bounded = KimiDeltaAttention(D, 2, 8, lower_bound=-5.0)
    assert not bounded.A_log.any() and bounded.A_log._no_weight_decay and bounded.dt_bias._no_weight_decay
    half = KimiDeltaAttention(D, 2, 8, dtype=torch.bfloat16)
    assert (half.q_proj.weight.dtype, half.A_log.dtype) == (torch.bfloat16, torch.float32)
    before = copy.deepcopy(half)
    assigned = make()
    assigned.load_state_dict({name: x.clone() for name, x in make(1).state_dict().items()}, assign=True)
    for layer in (before, assigned, pickle.loads(pickle.dumps(half))):         # where torch drops attributes, and not
        assert layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay
    half.reset_parameters()
    assert not torch.equal(before.q_proj.weight, half.q_proj.weight)


# sequences on several ranks


def with_halo(monkeypatch, exchange):
    module = types.ModuleType("kda.parallel")
    module.conv_halo, module.adopt = exchange, lambda context, op: context
    monkeypatch.setitem(sys.modules, "kda.parallel", module)


def test_a_context_brings_what_came_before_into_the_convolutions(monkeypatch):
    """Two ranks by hand: the second is given the last inputs of the first, and the state."""
    layer, x = make(), hidden(30, B=1)
    context, asked = types.SimpleNamespace(cu_seqlens=torch.tensor([0, 14]), tokens=14), []
    others = torch.cat([p(x[:, :16]) for p in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)

    def exchange(projected, cp_context, rows):
        assert cp_context is context and projected.shape[1:] == (14, others.shape[-1])
        return others[:, -rows:]

    with_halo(monkeypatch, exchange)
    cache, whole = Cache(), layer(x)
    with torch.no_grad():
        layer(x[:, :16], cache=cache)

    def core(*tensors, cp_context, **options):
        asked.append(cp_context)
        return kda.chunk_kda(*tensors, **options | {"initial_state": cache[0].recurrent})

    monkeypatch.setattr(sys.modules["kda.nn.layer"], "chunk_kda", core)
    assert close(layer(x[:, 16:], cp_context=context), whole[:, 16:]) and asked == [context]


# checkpoints


def written(layout, seed=0):
    """Return a layer that has a layout, and its weights in this layout."""
    to = LAYOUTS[layout]
    ranks = {name: "head" if rank == "low" else None for name, rank in
             (("forget_rank", to.forget), ("gate_rank", to.gate))}
    layer = make(seed, torch.float32, **ranks)
    return layer, layer.to_checkpoint(layout, "model.layers.3.self_attn.")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_bit_for_bit(layout):
    layer, tensors = written(layout)
    found = KimiDeltaAttention.from_checkpoint(tensors, "model.layers.3.self_attn.", lower_bound=None, norm_eps=1e-5)
    assert torch.equal(found(hidden(9).float()), layer(hidden(9).float()))
    back = found.to_checkpoint(layout, "model.layers.3.self_attn.")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(x, tensors[name]) for name, x in back.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_known_by_its_names(layout):
    _, tensors = written(layout)
    others = {"model.embed_tokens.weight": torch.ones(3)}
    assert nn.prefixes_of(tensors | others) == ["model.layers.3.self_attn."]
    assert nn.layout_of(tensors | others, "model.layers.3.self_attn.") == layout
    assert nn.layout_of(tensors) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_state_dict_of_a_whole_model_takes_every_layout(layout):
    layer, tensors = written(layout)
    whole = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(
        torch.nn.ModuleDict({"self_attn": written(layout, seed=seed)[0]}) for seed in (4, 5, 6, 7)
    )})})
    state = whole.state_dict()
    if layout == "fla":                                                        # without the bias that is zero there
        del tensors["model.layers.3.self_attn.g_proj.1.bias"]
    rest = {name: x for name, x in state.items() if "layers.3." not in name}
    whole.load_state_dict(rest | tensors)
    found = whole.model.layers[3].self_attn if hasattr(whole, "model") else whole["model"]["layers"][3]["self_attn"]
    assert torch.equal(found(hidden(9).float()), layer(hidden(9).float()))


def test_the_names_of_a_layer_of_fla():
    layer = make(dtype=torch.float32, gate_bias=True)
    fla = layer.to_checkpoint("fla")
    assert sorted(fla) == sorted([
        "A_log", "dt_bias", "b_proj.weight", "f_proj.0.weight", "f_proj.1.weight", "g_proj.0.weight", "g_proj.1.bias",
        "g_proj.1.weight", "k_conv1d.weight", "k_proj.weight", "o_norm.weight", "o_proj.weight", "q_conv1d.weight",
        "q_proj.weight", "v_conv1d.weight", "v_proj.weight",
    ])
    assert fla["A_log"].shape == (2,) and fla["q_conv1d.weight"].shape == (16, 1, 4)


@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1), (2, 1)], ids=str)
def test_a_decay_of_any_shape_loads(shape):
    layer, tensors = make(dtype=torch.float32), make(1, torch.float32).state_dict()
    layer.load_state_dict(tensors | {"A_log": tensors["A_log"].view(shape), "dt_bias": tensors["dt_bias"].view(2, 8)})
    assert torch.equal(layer.A_log, tensors["A_log"].view(-1))


def test_a_config_tells_what_tensors_do_not():
    _, tensors = written("kimi_linear")
    read = lambda config, **options: KimiDeltaAttention.from_checkpoint(  # noqa: E731
        tensors, "model.layers.3.self_attn.", config=config, **options)
    kimi = read({"model_type": "kimi_linear", "rms_norm_eps": 1e-5})
    assert (kimi.lower_bound, kimi.o_norm.eps, kimi.num_heads, kimi.head_dim, kimi.hidden_size) == (None, 1e-5, 2, 8, D)
    glm = read(types.SimpleNamespace(model_type="glm5_next_text", rms_norm_eps=1e-5, linear_lower_bound=-5.0))
    ling = {"model_type": "bailing_hybrid", "rms_norm_eps": 1e-6, "kda_safe_gate": True, "kda_lower_bound": -4.0}
    k3 = {"model_type": "kimi_linear", "rms_norm_eps": 1e-5, "linear_attn_config": {"gate_lower_bound": -5.0}}
    assert read({"model_type": "kimi_k3", "text_config": k3}).lower_bound == -5.0
    file = {"model_type": "glm5_next", "rms_norm_eps": 1e-5, "linear_attn_config": {"gate_lower_bound": -4.5}}
    assert read(file).lower_bound == -4.5
    assert (glm.lower_bound, read(ling).lower_bound, read(ling, norm_eps=1e-3).o_norm.eps) == (-5.0, -4.0, 1e-3)


def test_an_eigenvalue_that_may_be_negative_is_of_the_caller_or_of_the_config():
    _, tensors = written("kimi_linear")
    read = functools.partial(KimiDeltaAttention.from_checkpoint, tensors, "model.layers.3.self_attn.")
    config = {"model_type": "kimi_linear", "rms_norm_eps": 1e-5}
    layers = [read(config=config), read(config=config | {"allow_neg_eigval": True}),
              read(lower_bound=None, norm_eps=1e-5, allow_neg_eigval=True)]
    assert [layer.allow_neg_eigval for layer in layers] == [False, True, True]
    assert ["allow_neg_eigval=True" in str(layer) for layer in layers] == [False, True, True]


def broken(name):
    """Return a wrong call, and a part of its message."""
    layer, tensors = written("kimi_linear")
    above, prefix, plain = "model.layers.3.", "model.layers.3.self_attn.", layer.state_dict()
    options = {"lower_bound": None, "norm_eps": 1e-5}
    read = KimiDeltaAttention.from_checkpoint
    bias = {"g_b_proj.bias": torch.ones(16)}
    without = {n: x for n, x in plain.items() if n != "k_proj.weight"}
    merged = layer.to_checkpoint("transformers.glm5_next")
    return {
        "no such prefix": (lambda: read(tensors, above, **options), f"Prefixes with an A_log: '{prefix}'"),
        "no options": (lambda: read(tensors, prefix), "lower_bound and norm_eps, which no tensor contains"),
        "a file's name": (lambda: read("model.safetensors", prefix), "a dict of tensors by name; found str. Load"),
        "an unknown config": (lambda: read(tensors, prefix, config={"model_type": "kimi_k3"}), "found 'kimi_k3'"),
        "other names": (lambda: read(plain | {"wq.weight": D}, **options), "names that no layout has: wq.weight"),
        "half a layer": (lambda: read(without, **options), "found none named k_proj.weight"),
        "a layer without convolutions": (
            lambda: read({n: x for n, x in plain.items() if "conv1d" not in n}, **options), "named k_conv1d.weight"),
        "mixed sizes": (lambda: read(plain | {"A_log": torch.ones(3)}, **options), "not a KDA layer"),
        "a weight twice": (
            lambda: read(plain | {"dense.weight": torch.ones(D, D)}, **options), "o_proj.weight under two names"),
        "a convolution of another size": (
            lambda: read(merged | {"conv1d.weight": torch.ones(40, 1, 4)}, **options), "has the channels of q"),
        "a bias": (lambda: layer.load_state_dict(plain | bias), "gate_bias=True"),
        "a bias for a layer without": (
            lambda: make(gate_bias=True).to_checkpoint("kimi_linear"), "which has none. Use 'fla'"),
        "one projection": (lambda: layer.load_state_dict(written("kimi_k3")[0].state_dict()), "gate_rank=None"),
        "two projections": (lambda: written("kimi_k3")[0].load_state_dict(plain), "gate_rank=8"),
        "other heads": (lambda: layer.load_state_dict(
            KimiDeltaAttention(D, 4, 8).state_dict()), r"A_log of shape \[2\]; found \[4\]"),
        "an unknown layout": (lambda: layer.to_checkpoint("llama"), "one of the layouts kimi_linear"),
        "a layout of another rank": (
            lambda: layer.to_checkpoint("kimi_k3"), "where its rank is full. Use kimi_linear or glm5_next or "),
        "a layout without biases of convolutions": (
            lambda: make(conv_bias=True).to_checkpoint("transformers.kimi_linear"), "convolutions have a bias"),
    }[name]


@pytest.mark.parametrize("name", [
    "no such prefix", "no options", "a file's name", "an unknown config", "other names", "half a layer", "mixed sizes",
    "a layer without convolutions",
    "a weight twice", "a convolution of another size", "a bias", "a bias for a layer without", "one projection",
    "two projections", "other heads", "an unknown layout", "a layout of another rank",
    "a layout without biases of convolutions",
])
def test_a_checkpoint_of_another_layout_says_what_was_asked_found_and_what_to_do(name):
    act, says = broken(name)
    with pytest.raises(CheckpointError, match=says) as caught:
        act()
    error = caught.value
    assert error.asked and error.found and error.fix and error.check.startswith("nn.checkpoint.")


WRONG = {
    "x": (lambda: make()(hidden(3)[0]), "x must be .B, T, 24.; found .3, 24."),
    "attention_mask": (lambda: make()(hidden(3), torch.ones(2, 2)), r"of 0 and 1; found \[2, 2\] beside x \[2, 3"),
    "half precision": (lambda: make()(hidden(3).half()), "weights; found float16 beside weights in float64. Cast x"),
    "numbers of tokens": (lambda: make()(hidden(3).long()), "weights; found int64 beside weights in float64. Cast x"),
    "cu_seqlens": (lambda: make()(hidden(3), cu_seqlens=torch.tensor([0, 3])), "with B = 1; found B = 2"),
    "x is a list": (lambda: make()([[0.0] * D]), "found list. Pass hidden states"),
    "a mask is a list": (lambda: make()(hidden(3), [[1, 1, 1]] * 2), "found list beside x"),
    "offsets are a list": (lambda: make()(hidden(3, 1), cu_seqlens=[0, 3]), "found list. Pass a tensor of int32"),
    "both": (lambda: make()(hidden(3, 1), torch.ones(1, 3), cu_seqlens=torch.tensor([0, 3])), "pass one"),
    "cache": (lambda: make()(hidden(3), cache={}), "a kda.nn.Cache; found dict"),
    "layer_idx": (lambda: KimiDeltaAttention(D, 2, 8)(hidden(3).float(), cache=Cache()), "layer_idx="),
    "mode": (lambda: make(mode="fast"), "one of auto, chunk, recurrent; found 'fast'"),
    "recorded": (lambda: make(mode="recurrent")(hidden(3)), "records gradients"),
    "heads": (lambda: make(num_v_heads=3), "a multiple of num_heads=2; found 3"),
    "no heads": (lambda: KimiDeltaAttention(D, 0, 8), "num_heads must be an int of 1 or more; found 0"),
    "half a head": (lambda: KimiDeltaAttention(D, 2.5, 8), "num_heads must be an int of 1 or more; found 2.5"),
    "a word": (lambda: KimiDeltaAttention(D, "2", 8), "num_heads must be an int of 1 or more; found '2'"),
    "lower_bound": (lambda: make(lower_bound=5.0), "negative, or None; found 5.0"),
    "norm_eps": (lambda: make(norm_eps=math.nan), "norm_eps must be a finite number >= 0; found nan"),
    "a number of a layer": (lambda: KimiDeltaAttention(D, 2, 8, layer_idx="0"), "an int or None; found '0'"),
    "a convolution": (lambda: make(conv_size="4"), "conv_size must be an int of 2 or more; found '4'"),
    "cp_context and cache": (lambda: make()(hidden(3, 1), cp_context=1, cache=Cache()), "None with a cp_context"),
    **{f"dtype {dtype}": (
        lambda dtype=dtype: KimiDeltaAttention(8, 1, 8, dtype=dtype), r"a torch\.dtype such as .*\[nn\.dtype\]")
       for dtype in ("bf16", torch.int8)},
    "a cache of another batch": (
        lambda: make()(hidden(3, 1), cache=used_cache()), "of 1 sequences, as in the call; found one of 2"),
    "a copy of offsets alone": (
        lambda: make()(hidden(3, 1), cu_seqlens_cpu=torch.tensor([0, 3])), "cu_seqlens_cpu must be a copy of cu_seqle"),
    **{f"a cache of a layer of other {name}": (
        lambda name=name, size=size: make(**{name: size})(hidden(1), cache=used_cache()),
        r"of this layer; found .* of layer_idx=0\. Create each .*nn\.cache\.layer\]")
       for name, size in (("num_v_heads", 4), ("conv_size", 3))},
    **{f"a mask of other numbers, {mask}": (
        lambda mask=mask: make()(hidden(3, 1), attention_mask=torch.tensor([mask])), "must be .* found other numbers")
       for mask in ([0.0, 0.0, -math.inf], [0.5, 1.0, 1.0], [2, 1, 1])},
    **{f"offsets, {found}": (
        lambda offsets=offsets: make()(hidden(3, 1), cu_seqlens=offsets), re.escape(found))
       for offsets, found in ((torch.tensor([[0, 3]]), "[1, 2] of int64"), (torch.tensor(3), "[] of int64"),
                              (torch.tensor([0.0, 3]), "float32"))},
    **{f"{name} without numbers": (
        lambda name=name, given=given: make()(hidden(3, 1), **{name: given.to("meta")}),
        f"{name} must be on the device of x.* found meta beside x on cpu")
       for name, given in (("attention_mask", torch.ones(1, 3)), ("cu_seqlens", torch.tensor([0, 3])))},
}


def used_cache():
    """Return a cache with the state of a layer and of two sequences."""
    cache = Cache()
    make()(hidden(3), cache=cache)
    return cache


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_says_what_was_asked_found_and_what_to_do(wrong):
    act, says = WRONG[wrong]
    with pytest.raises(kda.InputError, match=says) as caught:
        act()
    assert caught.value.check.startswith("nn.") and caught.value.fix


OFFSETS = types.SimpleNamespace(cu_seqlens=torch.tensor([0, 3]))


@pytest.mark.parametrize("context", ["x", OFFSETS], ids=["a str", "offsets alone"])
def test_what_is_no_context_is_refused_as_chunk_kda_refuses_it(context):
    x, layer, call = hidden(3, 1), make(), naive_call(B=1, T=3)
    errors = []
    for act in (
        lambda: layer(x, cp_context=context),
        lambda: layer.explain(x, cp_context=context),
        lambda: kda.chunk_kda(**call.arguments, cp_context=context),
    ):
        with pytest.raises(kda.InputTypeError, match=r"a context of .* found .*\. Call kda\.parallel") as caught:
            act()
        errors.append(caught.value)
    assert [error.op for error in errors] == ["KimiDeltaAttention", "KimiDeltaAttention", "chunk_kda"]
    assert len({(error.check, error.found, error.fix) for error in errors}) == 1


PADDED = torch.tensor([[0] * 3 + [1] * 6, [1] * 7 + [0] * 2])
NO_TOKENS = {  # words of a call, and 1 where its x has a token
    "padding": ({"attention_mask": PADDED}, PADDED),
    "past the last offset": ({"cu_seqlens": torch.tensor([0, 3, 3, 6])}, torch.tensor([[1] * 6 + [0] * 3])),
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("words, real", NO_TOKENS.values(), ids=NO_TOKENS)
def test_what_is_no_token_may_hold_anything(words, real, value):
    """Neither outputs nor gradients of weights know of it."""
    layer, found = make(gate_bias=True, conv_bias=True), []
    for filler in (0.0, value):
        x = hidden(9, len(real)).masked_fill(real[..., None] == 0, filler).requires_grad_()
        y = layer(x, **words)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert not found[1][0][real == 0].any() and not found[1][1][real == 0].any()


def test_a_cache_says_what_it_has():
    cache = Cache()
    assert repr(cache) == "Cache(0 layers)"
    make()(hidden(3), cache=cache)
    assert repr(cache) == "Cache(1 layer, of 2 sequences)"


def test_an_unknown_option_suggests_the_nearest_or_says_what_the_one_of_fla_is_here():
    with pytest.raises(kda.InputError, match=r"head_size must be an existing keyword.* Did you mean 'head_dim'"):
        KimiDeltaAttention(D, 2, head_size=8)
    with pytest.raises(TypeError, match="Pass head_v_dim, in channels: it is head_dim"):
        KimiDeltaAttention(D, 2, expand_v=2)
    with pytest.raises(kda.InputError, match=r"Known: hidden_size, num_heads, .*dtype") as caught:
        KimiDeltaAttention(D, 2, wombat=True)
    assert "self" not in caught.value.fix and "unknown," not in caught.value.fix


@pytest.mark.parametrize("way", ["forward", "explain"])
def test_so_does_an_unknown_argument_of_a_call(way):
    call = getattr(make(), way)
    with pytest.raises(kda.InputError, match=r"past_key_values .* It is called cache: pass a kda\.nn\.Cache\(\)"):
        call(hidden(3), past_key_values=None)
    with pytest.raises(kda.InputError, match="Did you mean 'attention_mask'"):
        call(hidden(3), attention=None)


def test_an_unknown_argument_is_named_where_torch_compile_traces_the_call():
    compiled = torch.compile(make(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="It is called cache"):
        compiled(hidden(3), past_key_values=None)


# parts


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_convolution_is_that_of_torch(dtype):
    conv, x = nn.ShortConvolution(6, 4, bias=True), torch.randn(2, 9, 6).to(dtype)
    with torch.no_grad():
        z = F.conv1d(x.double().mT, conv.weight.double(), conv.bias.double(), padding=3, groups=6)[..., :9].mT
        y = conv(x)
    assert y.dtype == dtype and torch.allclose(y.double(), F.silu(z), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_offsets_tell_where_tokens_belong():
    s = Sequences.of_offsets(torch.tensor([0, 3, 3, 5]), 7, torch.device("cpu"))
    assert s.starts.tolist() == [0, 0, 0, 3, 3, 7, 7] and s.numbers.tolist()[:5] == [0, 0, 0, 2, 2] and s.N == 3


def torchs_own():
    """Return, in torch, the functions that launch kernels on a GPU."""
    def convolve(x, weight, bias, state, starts, numbers):
        s = Sequences(0, None, None, starts, numbers)
        return convolution._in_torch(x, weight, bias, state, s)

    def backward(function, tensors, dy):
        given = [None if x is None else x.detach().requires_grad_() for x in tensors]
        present = [x for x in given if x is not None]
        with ThreadPoolExecutor(1) as thread:                                  # inside an operator nothing is recorded
            grads = iter(thread.submit(lambda: torch.autograd.grad(function(*given), present, dy)).result())
        return tuple(None if x is None else next(grads) for x in given)

    def norm_gate(x, gate, weight, eps):
        return (F.rms_norm(x.double(), x.shape[-1:], weight.double(), eps) * torch.sigmoid(gate.double())).to(x.dtype)

    return types.SimpleNamespace(
        convolve=convolve, norm_gate=norm_gate, convolution_refused=lambda *_: (), norm_refused=lambda *_: (),
        convolve_bwd=lambda x, w, b, state, starts, numbers, _, dy: backward(
            lambda *t: convolve(*t, starts, numbers), (x, w, b, state), dy),
        norm_gate_bwd=lambda x, gate, w, eps, dy: backward(lambda *t: norm_gate(*t, eps), (x, gate, w), dy),
    )


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "padded"])
def test_the_way_of_a_gpu_compiles_without_a_graph_break(masked, monkeypatch):
    """Stand-ins replace the launches: operators that torch.compile does not look into, forward and backward."""
    for module in (convolution, norm):
        monkeypatch.setattr(module, "takes_kernels", lambda x: True)
        monkeypatch.setattr(module, "kernels", torchs_own)
    layer, x = make(dtype=torch.float32), hidden(20, dtype=torch.float32)
    mask = torch.tensor(MASKS["left"]) if masked else None
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_same(layer, lambda x: compiled(x, mask), lambda x: layer(x, mask), x, 1e-6)


@pytest.mark.parametrize(("option", "value"), [
    ("forget_rank", "heads"), ("gate_rank", 0), ("lower_bound", "-5"), ("lower_bound", -math.inf), ("gate_bias", "no"),
    ("allow_neg_eigval", 2), ("disable_recompute", "all"), ("num_v_heads", True),
])
def test_a_wrong_option_is_named_when_the_layer_is_created(option, value):
    with pytest.raises(kda.InputError, match=re.escape(f"found {value!r}")) as error:
        make(**{option: value})
    assert error.value.argument == option and error.value.check == f"nn.{option}"


def test_an_unknown_backend_is_named_when_the_layer_is_created():
    with pytest.raises(kda.InputError, match="Did you mean 'reference'"):
        make(backend="refrence")


@pytest.mark.filterwarnings("ignore:torch.searchsorted..:UserWarning")       # vmap expands what is searched for
def test_torch_func_goes_through_a_layer_with_a_mask():
    layer, x, mask = make(), hidden(7), torch.ones(2, 7)
    mask[0, :3] = 0
    several, tangent = torch.stack([x, -x, 2 * x]), torch.randn_like(x)

    def loss(x, mask=mask):
        return layer(x, attention_mask=mask).square().sum()

    each = torch.stack([torch.autograd.grad(loss(y), y)[0] for y in several.clone().requires_grad_()])
    masks = torch.stack([mask] * 3)
    gradient = torch.func.vmap(torch.func.grad(loss))
    for found in (gradient(several), gradient(several, masks)):
        torch.testing.assert_close(found, each)
    along = torch.func.jvp(loss, (x,), (tangent,))[1]
    torch.testing.assert_close(along, (each[0] * tangent).sum())


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_torch_has_rules_of_vmap_for_all_that_a_mask_per_example_needs():
    layer, masks = make(), torch.ones(3, 2, 7)
    masks[1, 0, :3] = masks[2, 1, 5:] = 0
    several = torch.stack([hidden(7)] * 3)
    found = torch.func.vmap(lambda x, mask: layer(x, attention_mask=mask))(several, masks)
    torch.testing.assert_close(found, torch.stack([layer(x, attention_mask=m) for x, m in zip(several, masks)]))


def test_explain_accepts_a_copy_of_offsets():
    offsets = torch.tensor([0, 3])
    assert "does not use" in make().explain(hidden(3, B=1), cu_seqlens=offsets, cu_seqlens_cpu=offsets)


def test_a_cache_holds_states_of_layers_on_the_device_of_the_call():
    layer, cache = make(), Cache()
    with torch.no_grad():
        layer(hidden(3), cache=cache)
    state = cache[0]
    for wrong, found in (
        (1, "int 1"), (slice(1), "slice"), (torch.tensor(1), r"shape \[\]"), (torch.tensor([[1]]), r"shape \[1, 1\]"),
        (torch.tensor([0.0]), "float32"), (torch.tensor([True]), "a mask of 1"), ([0, 2], "2"), ((-1, 0), "-1"),
    ):
        with pytest.raises(kda.InputError, match=rf"numbers of some sequences \(M,\), from 0 to 1; found {found}"):
            cache.select(wrong)
    for chosen, N in (([], 0), (range(2), 2), ((1,), 1), (torch.tensor([True, False]), 1)):
        assert cache.select(chosen)[0].N == N
    with pytest.raises(kda.InputTypeError, match="found Tensor"):
        cache[0] = state.recurrent
    cache[0] = nn.LayerState(state.recurrent, tuple(x.to("meta") for x in state.conv))
    with pytest.raises(kda.InputError, match="found states on meta"):
        layer(hidden(1), cache=cache)


def test_a_convolution_and_a_norm_of_wrong_shapes_are_refused():
    x, weight = hidden(5), torch.ones(hidden(5).shape[-1], 4)
    for name, wrong in {"weight": {"weight": weight[1:]}, "bias": {"bias": weight[1:, 0]}, "x": {"x": x[0]},
                        "state": {"state": x[:, :2]}}.items():
        with pytest.raises(kda.InputError, match=f"{name} must be"):
            nn.short_convolution(**{"x": x, "weight": weight} | wrong)
    for name, wrong in {"gate": {"gate": x[..., 1:]}, "weight": {"weight": weight}}.items():
        with pytest.raises(kda.InputError, match=f"{name} must be"):
            nn.gated_rms_norm(**{"x": x, "gate": x, "weight": weight[:, 0]} | wrong)


@pytest.mark.parametrize(("models", "found"), [([], "none"), (3, "3"), ("llama", "'llama'")])
def test_models_of_transformers_that_are_none_of_ours_are_refused(models, found):
    with pytest.raises(kda.InputError, match=f"among kimi_linear, .* found {found}"):
        kda.hf.use(models)


@pytest.mark.exhaustive
def test_one_compiled_layer_takes_calls_of_other_sizes():
    """Sizes are symbols from the second call on, and torch.compile cannot print them."""
    layer, mask = make(), torch.tensor([1.0, 1.0, 0.0])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for B, T in ((2, 5), (2, 9), (3, 70)):
        x = hidden(T, B)
        padding = mask[:B, None].expand(B, T)
        assert close(compiled(x, attention_mask=padding), layer(x, attention_mask=padding))


def test_sequences_of_a_cache_are_selected_beside_another_default_device():
    states = torch.randn(3, 2, 4, 4)
    cache = kda.nn.Cache({0: kda.nn.LayerState(states, (torch.randn(3, 3, 8),) * 3)})
    torch.set_default_device("meta")
    try:
        found = cache.select([2, 0])[0].recurrent
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, states[[2, 0]])


@pytest.mark.simulated
@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda", 0)], ids=["by name", "by number", "by device"])
def test_a_layer_is_made_on_the_gpu_of_a_capture_that_its_maker_names(device):
    with kda.simulator.capture(arch="sm_90a"):
        layer = KimiDeltaAttention(64, 1, head_dim=32, device=device)
        assert all(each.is_cuda for each in layer.parameters())
