"""The layer's decoding steps by `kda.decode_step`: the same as by its parts, in place, and why not where it is not."""

import copy
import io
import pickle

import layers
import pytest
import torch
from layers import hidden, of_kinds

import kda
from kda.nn import Cache, step

kinds = of_kinds("Ling")


def make(dtype=torch.float64, backend="reference", **options):
    return layers.make(dtype=dtype, backend=backend, **options)


def close(a, b, tolerance=1e-12):
    return (a - b).abs().max() <= tolerance * max(1, b.abs().max())


@pytest.fixture
def steps(monkeypatch):
    """Return a list that gets the calls of decode_step."""
    lengths = []
    monkeypatch.setattr(step, "decode_step", lambda *a, **k: lengths.append(a[0].shape[1]) or kda.decode_step(*a, **k))
    return lengths


def by_parts(monkeypatch):
    monkeypatch.setattr(step, "refusal", lambda c: "the parts are wanted")


@kinds
def test_tokens_one_by_one_and_a_few_at_once_are_the_whole_call(options, steps):
    layer, x = make(**options), hidden(40)
    whole, cache, found, first = layer(x), Cache(), [], 0
    with torch.no_grad():
        for length in (20, 1, 1, 4, 8, 1, 5):
            found.append(layer(x[:, first : first + length], cache=cache))
            first += length
    assert first == 40 and close(torch.cat(found, 1), whole)
    assert steps == [1, 1, 4, 8, 1, 5]


@kinds
@pytest.mark.parametrize("T", [1, 3])
def test_a_step_leaves_what_the_parts_leave(options, T, steps, monkeypatch):
    layer, x, caches = make(**options), hidden(10 + T), [Cache(), Cache()]
    with torch.no_grad():
        for cache in caches:
            layer(x[:, :10], cache=cache)
        y = layer(x[:, 10:], cache=caches[0])
        by_parts(monkeypatch)
        assert close(y, layer(x[:, 10:], cache=caches[1]))
    a, b = (cache[0] for cache in caches)
    assert steps == [T] and close(a.recurrent, b.recurrent) and all(map(torch.equal, a.conv, b.conv))
    assert (a.recurrent.dtype, *(each.dtype for each in a.conv)) == (b.recurrent.dtype, *(e.dtype for e in b.conv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_of_16_bits_is_as_close_to_the_exact_one_as_its_parts(dtype, steps, monkeypatch):
    """Both dtypes behave alike; the parts round between convolution, recurrence and norm, one kernel does not."""
    layer, x = make(dtype, lower_bound=-5.0), hidden(9, dtype=dtype)
    exact = make(lower_bound=-5.0)
    exact.load_state_dict(layer.state_dict())

    def last(layer, x):
        cache = Cache()
        with torch.no_grad():
            layer(x[:, :8], cache=cache)
            return layer(x[:, 8:], cache=cache)

    y = last(layer, x)
    assert steps == [1] and y.dtype == dtype
    by_parts(monkeypatch)
    expected = last(exact, x.double())
    allowed = 2 * (last(layer, x) - expected).abs().max() + 2 * torch.finfo(dtype).eps * expected.abs().max()
    assert (y - expected).abs().max() <= allowed


def test_states_are_updated_in_place_where_nobody_else_holds_them(steps):
    layer, x, cache = make(), hidden(16), Cache()
    with torch.no_grad():
        layer(x[:, :8], cache=cache)
        held = cache[0]
        kept = held.recurrent.clone(), held.conv[0].clone()
        layer(x[:, 8:9], cache=cache)
        assert torch.equal(held.recurrent, kept[0]) and torch.equal(held.conv[0], kept[1])
        place = [t.data_ptr() for t in cache.in_place(0, torch.float64)]
        layer(x[:, 9:10], cache=cache)
        assert [t.data_ptr() for t in cache.in_place(0, torch.float64)] == place

        before = cache.copy()
        expected = layer(x[:, 10:11], cache=before.copy())
        assert torch.equal(layer(x[:, 10:11], cache=cache), expected)
        assert torch.equal(layer(x[:, 10:11], cache=before), expected)
        chosen = cache.select(torch.tensor([1, 0, 1]))
        y = layer(x[:, 11:12], cache=cache)
        assert close(layer(x[[1, 0, 1], 11:12], cache=chosen), y[[1, 0, 1]])
    assert len(steps) == 7


def saved_and_loaded(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "torch.save": saved_and_loaded,
          "copy.deepcopy": copy.deepcopy, "copy.copy": copy.copy}
WAYS = {"chunks": ("chunk", 3), "token by token": ("auto", 9), "packed": ("auto", 3)}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_cache_goes_on_as_the_original_does(copied, way, steps):
    layer, x, cache = make(), hidden(24, B=1), Cache()
    mode, T = WAYS[way]
    with torch.no_grad():
        layer(x[:, :10], cache=cache)
        layer(x[:, 10:11], cache=cache)
        other = copied(cache)
        for each in (cache, other):                                            # a step each, then by the parts
            layer.mode = "auto"
            layer(x[:, 11:12], cache=each)
            layer.mode = mode
            offsets = torch.tensor([0, T]) if way == "packed" else None
            y = layer(x[:, 12 : 12 + T], cache=each, cu_seqlens=offsets)
            assert close(y, layer(x[:, : 12 + T])[:, 12:])
    assert steps == [1, 1, 1] and len(copied(Cache())) == 0


@pytest.mark.parametrize("selected", [False, True], ids=["its own", "selected"])
def test_steps_in_inference_mode_go_on_outside_of_it(selected, steps):
    layer, x, cache = make(), hidden(14), Cache()
    with torch.inference_mode():
        layer(x[:, :10], cache=cache)
        layer(x[:, 10:11], cache=cache)
        cache = cache.select([0, 1]) if selected else cache
    with torch.no_grad():
        y = [layer(x[:, t : t + 1], cache=cache) for t in (11, 12)]
        place = cache.in_place(0, torch.float64)[0].data_ptr()
        y.append(layer(x[:, 13:], cache=cache))
        assert close(torch.cat(y, 1), layer(x)[:, 11:])
    assert steps == [1] * 4 and cache.in_place(0, torch.float64)[0].data_ptr() == place


def test_a_padded_batch_steps_over_its_padding(steps):
    layer, x, cache = make(), hidden(12), Cache()
    mask = torch.ones(2, 12)
    mask[0, 9] = mask[1, 11] = 0
    with torch.no_grad():
        found = [layer(x[:, :8], mask[:, :8], cache=cache)]
        found += [layer(x[:, t : t + 1], mask[:, : t + 1], cache=cache) for t in range(8, 12)]
        assert close(torch.cat(found, 1), layer(x, mask)) and len(steps) == 4
    assert not found[2][0].any() and not found[4][1].any()


def test_a_compiled_layer_steps_alike(steps):
    torch._dynamo.reset()
    layer, x, cache = make(torch.float32), hidden(8, dtype=torch.float32), Cache()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = [compiled(x[:, :4], cache=cache)] + [compiled(x[:, t : t + 1], cache=cache) for t in range(4, 8)]
        assert close(torch.cat(found, 1), layer(x), 1e-5)


def test_autocast_steps_in_its_dtype(steps):
    layer, x, cache = make(torch.float32), hidden(5, dtype=torch.float32), Cache()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(x[:, :4], cache=cache)
        y = layer(x[:, 4:], cache=cache)
    assert y.dtype == torch.bfloat16 and close(y[:, 0].float(), layer(x)[:, 4], 0.05) and steps == [1]


def state(layer, tokens=8):
    cache = Cache()
    with torch.no_grad():
        layer(hidden(tokens), cache=cache)
    return cache


REFUSED = {
    "state": (lambda: make(), dict(cache=Cache()), "a cache with a state"),
    "mode": (lambda: make(mode="chunk"), {}, "got 'chunk'"),
    "tokens": (lambda: make(), dict(x=hidden(9)), "needs 1 to 8 tokens, got 9"),
    "packed": (lambda: make(), dict(x=hidden(2, B=1), cu_seqlens=torch.tensor([0, 1, 2])), "a row of its own"),
    "mask": (lambda: make(), dict(x=hidden(2), attention_mask=torch.ones(2, 2)), "needs one token"),
    "width": (lambda: make(conv_size=9), {}, "at most 8 tokens, got 9"),
    "backend": (lambda: make(backend=None), {}, "backend='reference'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_a_rule_refuses_runs_by_its_parts_and_says_why(name, steps):
    make_layer, given, words = REFUSED[name]
    layer = make_layer()
    call = dict(x=hidden(1), cache=state(layer)) | given
    with torch.no_grad():
        said = layer.explain(**call)
        assert said.startswith(f"the layer does not use kda.decode_step: nn.step.{name}: ") and words in said
        layer(**call)
    assert steps == []


def test_a_call_that_records_gradients_runs_by_its_parts(steps):
    layer = make()
    cache = state(layer)
    assert "nn.step.gradients" in layer.explain(hidden(1), cache=cache)
    assert layer(hidden(1), cache=cache).requires_grad and steps == []
    with torch.no_grad():
        assert layer.explain(hidden(1), cache=state(layer)) == "the layer uses kda.decode_step"


def test_a_call_under_forward_mode_runs_by_its_parts(steps):
    layer = make()
    cache = state(layer)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        assert "nn.step.transforms" in layer.explain(hidden(1), cache=cache)
        layer(hidden(1), cache=cache)
    assert steps == []


def test_every_rule_has_a_call_that_it_refuses():
    elsewhere = {"nn.step.gradients", "nn.step.transforms"}
    assert {f"nn.step.{name}" for name in REFUSED} | elsewhere == {rule.id for rule in step.RULES}


def test_a_step_whose_tails_stay_behind_is_noticed(monkeypatch):
    """The first test can fail."""
    def forgetful(*args, conv_states, **words):
        return kda.decode_step(*args, conv_states=conv_states.clone(), **words)

    layer, x, cache = make(), hidden(12), Cache()
    monkeypatch.setattr(step, "decode_step", forgetful)
    with torch.no_grad():
        found = [layer(x[:, :8], cache=cache)] + [layer(x[:, t : t + 1], cache=cache) for t in range(8, 12)]
        assert not close(torch.cat(found, 1), layer(x), 1e-3)
