"""kda.nn.KimiDeltaAttention beside transformers' own layers of three models, with their weights, on a CPU."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, as in tests/peers/requirements.txt")

from small_models import MODELS, config_of, distance, in_torch, layer_of, model_of
from transformers import DynamicCache

from kda.nn import LAYOUTS, Cache, KimiDeltaAttention

pytestmark = pytest.mark.peers

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDINGS = 100 * torch.finfo(torch.float32).eps
every = pytest.mark.parametrize("model", MODELS)


@pytest.fixture
def theirs(model):
    """Their layer on their torch code, whatever else is installed."""
    with in_torch(model):
        yield layer_of(model)


def ours_of(layer, config, **options):
    return KimiDeltaAttention.from_checkpoint(layer.state_dict(), config=config, layer_idx=0, **options)


def hidden(T, B=2):
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(1))


@every
def test_outputs_and_all_gradients_are_those_of_transformers(model, theirs):
    layer, config = theirs
    ours, x = ours_of(layer, config), hidden(70)
    results = []
    for each in (layer, ours):
        given = x.clone().requires_grad_()
        y = each(given)
        (y * x.roll(1, 1)).sum().backward()
        results.append((y, given.grad, {name: p.grad for name, p in each.named_parameters()}))
    (y, dx, theirs_of), (mine, dmine, ours_by_name) = results
    assert distance(mine, y) <= ROUNDINGS and distance(dmine, dx) <= ROUNDINGS
    for name, p in ours.named_parameters():                                    # gradients under their names
        p.data = ours_by_name[name]
    gradients = ours.to_checkpoint(f"transformers.{model}")
    assert gradients.keys() == theirs_of.keys()
    assert {name: d for name, x in gradients.items() if (d := distance(x, theirs_of[name])) > ROUNDINGS} == {}


@every
def test_a_cache_gives_the_same_token_by_token(model, theirs):
    """A prefill, more of it, single tokens, more again, single tokens."""
    layer, config = theirs
    ours, x = ours_of(layer, config), hidden(90)
    cache, mine = DynamicCache(config=config), Cache()
    with torch.no_grad():
        first = 0
        for length in (3, 20, *[1] * 8, 40, *[1] * 5):
            piece = x[:, first : first + length]
            assert distance(ours(piece, cache=mine), layer(piece, cache_params=cache)) <= ROUNDINGS, first
            first += length
    assert distance(mine[0].recurrent.mT, cache.layers[0].recurrent_states[0]) <= ROUNDINGS


@every
def test_a_batch_padded_on_the_left_with_a_cache(model, theirs):
    layer, config = theirs
    ours, x = ours_of(layer, config), hidden(30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :11] = 0
    cache, mine = DynamicCache(config=config), Cache()
    with torch.no_grad():
        for start, end in ((0, 24), *((t, t + 1) for t in range(24, 30))):
            y = layer(x[:, start:end], cache_params=cache, attention_mask=mask[:, start:end])
            found = ours(x[:, start:end], mask[:, :end], cache=mine)
            real = mask[:, start:end].bool()
            assert distance(found[real], y[real]) <= ROUNDINGS
            assert not found[~real].any()


@every
def test_in_bfloat16_it_is_no_further_from_float32_than_transformers(model, theirs):
    layer, config = theirs
    x = hidden(70).bfloat16()
    with torch.no_grad():
        exact = layer(x.float())
        layer = layer.bfloat16()
        theirs_off, ours_off = (distance(each(x), exact) for each in (layer, ours_of(layer, config)))
    assert ours_off <= 1.2 * theirs_off


@every
def test_weights_in_memory_come_back_bit_for_bit(model, theirs):
    layer, config = theirs
    back = ours_of(layer, config).to_checkpoint(f"transformers.{model}")
    expected = layer.state_dict()
    assert back.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in back.items())


@every
def test_files_that_transformers_writes_load_and_come_back(model, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = model_of(model)
    whole.save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("A_log"))
    prefix = name.removesuffix("A_log")
    assert prefix.endswith("attention." if model == "bailing_hybrid" else "self_attn.")
    ours = KimiDeltaAttention.from_checkpoint(tensors, prefix, config=config_of(model))
    back = ours.to_checkpoint(model, prefix)
    assert back.keys() == {name for name in tensors if name.startswith(prefix)}
    assert all(torch.equal(x, tensors[name]) for name, x in back.items())
    with in_torch(model), torch.no_grad():
        base = getattr(whole, "model", whole)
        assert distance(ours(hidden(20)), base.layers[0].self_attn(hidden(20))) <= ROUNDINGS


@every
def test_every_layout_of_transformers_is_in_the_table(model):
    assert {model, f"transformers.{model}"} <= set(LAYOUTS)


@pytest.mark.parametrize("model", ["kimi_linear"])
def test_another_gate_is_noticed(theirs):
    """The comparisons can fail: with a lower bound Kimi-Linear's weights are another function."""
    layer, _ = theirs
    wrong = KimiDeltaAttention.from_checkpoint(layer.state_dict(), lower_bound=-5.0, norm_eps=1e-5)
    assert distance(wrong(hidden(20)), layer(hidden(20))) > 1000 * ROUNDINGS


def test_a_sharded_checkpoint_of_transformers_is_compared_whole_and_loads_again_after_it_was_rewritten(
        tmp_path, monkeypatch, capsys):
    """Rewritten in the layout that it had: transformers reads the folder, and its model has the same logits."""
    whole = model_of("kimi_linear").eval()
    whole.save_pretrained(tmp_path / "files", max_shard_size="20KB")
    assert len([*(tmp_path / "files").glob("*.safetensors")]) > 3
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("sys.argv", ["convert.py", str(tmp_path / "files"), "--to", "kimi_linear", "--out",
                                     str(tmp_path / "again")])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / "convert.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert left.value.code == 0 and said.count("the same bits") == said.count("outputs of 100 tokens beside") == 1
    again = type(whole).from_pretrained(tmp_path / "again").eval()
    tokens = torch.arange(60)[None] % 97
    with torch.no_grad():
        assert torch.equal(whole(tokens).logits, again(tokens).logits)


def test_a_config_that_transformers_refuses_ends_the_conversion_with_what_it_says():
    names = runpy.run_path(str(EXAMPLES / "convert.py"))
    layer = KimiDeltaAttention(64, 2, 32)
    with pytest.raises(SystemExit, match=r"config\.json: transformers makes no layer .*Error: .*hidden_size") as left:
        names["of_transformers"]({"model_type": "kimi_linear", "hidden_size": "wide"}, layer)
    assert "\n" not in left.value.code
