"""kda.hf.use(): models of transformers, small and random, whose layers call kda, beside their own torch code."""

import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, as in tests/peers/requirements.txt")

from small_models import FUNCTIONS, MODELS, distance, in_torch, model_of, module_of

import kda
from kda import hf
from kda.notices import KdaNotice

pytestmark = pytest.mark.peers

ROUNDINGS = 300 * torch.finfo(torch.float32).eps
every = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(autouse=True)
def put_back():
    hf.disable()
    yield
    hf.disable()


@pytest.fixture
def calls(monkeypatch):
    """What kda was called for, by name of the function."""
    names = []
    for name, ours in hf.FUNCTIONS.items():

        def counted(*args, _ours=ours, **keywords):
            names.append(_ours.__name__)
            return _ours(*args, **keywords)

        counted.__signature__ = inspect.signature(ours)
        counted.__name__ = ours.__name__
        monkeypatch.setitem(hf.FUNCTIONS, name, counted)
    return names


def ids(T=70, B=2):
    return torch.randint(3, 90, (B, T), generator=torch.Generator().manual_seed(1))


def outputs(model, *args, **keywords):
    out = model(*args, **keywords)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def trained(model):
    model.zero_grad()
    y = outputs(model, ids())
    (y * y.detach().roll(1, 1)).mean().backward()
    return {"y": y.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@every
def test_outputs_and_gradients_are_those_of_transformers(model, calls):
    whole = model_of(model)
    with in_torch(model):
        theirs = trained(whole)
        assert hf.use(model) == (model,)
        mine = trained(whole)
    assert calls == ["chunk_kda"]
    far = {name: d for name, x in theirs.items() if x.norm() > 1e-6 and (d := distance(mine[name], x)) > ROUNDINGS}
    assert mine.keys() == theirs.keys() and far == {}


def test_disabling_leaves_a_function_that_somebody_else_has_put_there_since():
    module = module_of("kimi_linear")
    ours = module.chunk_kimi_delta_attention
    hf.use("kimi_linear")
    module.chunk_kimi_delta_attention = theirs = object()
    try:
        hf.disable()
        assert module.chunk_kimi_delta_attention is theirs
    finally:
        module.chunk_kimi_delta_attention = ours


@pytest.mark.parametrize("model", ["kimi_linear", "bailing_hybrid"])
def test_generated_tokens_are_those_of_transformers(model, calls):
    whole = model_of(model).eval()
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    with in_torch(model), torch.no_grad():
        theirs = whole.generate(ids(20), attention_mask=mask, **options)
        hf.use(model)
        mine = whole.generate(ids(20), attention_mask=mask, **options)
    assert torch.equal(mine, theirs)
    assert calls == ["chunk_kda", *["fused_recurrent_kda"] * 11]


@every
def test_packed_sequences_are_kept_apart(model, calls):
    """The offsets that a collator packs for attention separate them; transformers' own torch code ignores them here."""
    whole, x = model_of(model).eval(), torch.randn(1, 50, 32, generator=torch.Generator().manual_seed(2))
    layer = getattr(whole, "model", whole).layers[0].self_attn
    offsets = torch.tensor([0, 20, 50], dtype=torch.int32)
    with in_torch(model), torch.no_grad():
        alone = torch.cat([layer(x[:, :20]), layer(x[:, 20:])], 1)
        mixed = layer(x, cu_seq_lens_q=offsets)
        hf.use(model)
        assert distance(layer(x, cu_seq_lens_q=offsets), alone) <= ROUNDINGS
        assert distance(layer(x, cu_seqlens=offsets), alone) <= ROUNDINGS
    assert distance(mixed, alone) > 1000 * ROUNDINGS


def test_ten_steps_of_training_have_the_losses_of_transformers():
    def losses():
        whole, found = model_of("kimi_linear"), []
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
        for _ in range(10):
            loss = whole(ids(), labels=ids()).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    with in_torch("kimi_linear"):
        theirs = losses()
        hf.use("kimi_linear")
        mine = losses()
    assert theirs[-1] < 0.9 * theirs[0] and distance(mine, theirs) <= ROUNDINGS


@every
def test_it_compiles_without_a_graph_break(model):
    whole = model_of(model).eval()
    layer, x = getattr(whole, "model", whole).layers[0].self_attn, torch.randn(2, 20, 32)
    with in_torch(model), torch.no_grad():
        hf.use(model)
        found = torch.compile(layer, backend="eager", fullgraph=True)(x)
        assert distance(found, layer(x)) <= ROUNDINGS


def test_disable_puts_the_old_functions_back():
    old = {(name, f): getattr(module_of(name), f) for name in MODELS for f in FUNCTIONS}
    assert hf.in_use() == ()
    assert hf.use() == hf.use() == MODELS == hf.in_use()
    assert getattr(module_of("kimi_linear"), FUNCTIONS[0]) is not old["kimi_linear", FUNCTIONS[0]]
    hf.disable()
    assert hf.in_use() == ()
    assert all(getattr(module_of(name), f) is function for (name, f), function in old.items())


def heads(K):
    x = [torch.randn(1, 5, 1, K, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    return (*x, -torch.rand(1, 5, 1, K), torch.rand(1, 5, 1))


def test_a_call_that_is_declined_goes_to_transformers_and_says_why_once():
    q, k, v, g, beta = heads(300)
    with in_torch("kimi_linear"):
        hf.use("kimi_linear")
        chunk = module_of("kimi_linear").chunk_kimi_delta_attention
        with pytest.warns(KdaNotice, match=r"transformers runs this call.*K <= 256; found K=300"):
            o, _ = chunk(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again, _ = chunk(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert torch.equal(o, again)


def test_arguments_by_place_are_declined_as_their_places_differ():
    q, k, v, g, beta = heads(16)
    with in_torch("kimi_linear"):
        hf.use("kimi_linear")
        with pytest.warns(KdaNotice, match="2 positional"):
            module_of("kimi_linear").chunk_kimi_delta_attention(q, k, v, g, beta)


def test_a_packed_call_that_is_declined_is_an_error_and_no_wrong_answer():
    q, k, v, g, beta = heads(300)
    with in_torch("kimi_linear"):
        hf.use("kimi_linear")
        with pytest.raises(kda.InputError, match="K <= 256"):
            module_of("kimi_linear").chunk_kimi_delta_attention(
                q, k, v, g=g, beta=beta, cu_seq_lens_q=torch.tensor([0, 2, 5]))


def test_an_unknown_model_and_an_absent_one_are_named(monkeypatch):
    with pytest.raises(kda.InputError, match="among kimi_linear, glm5_next, bailing_hybrid; found 'kimi'"):
        hf.use("kimi")
    monkeypatch.setitem(sys.modules, "transformers.models.glm5_next.modeling_glm5_next", None)
    with pytest.warns(KdaNotice, match="glm5_next does not call kda"):
        assert hf.use() == ("kimi_linear", "bailing_hybrid")
    with pytest.raises(ImportError, match="transformers must be installed"):
        hf.use("glm5_next")


def test_without_transformers_the_reason_is_given_once(monkeypatch):

    def absent(name):
        raise ModuleNotFoundError("No module named 'transformers'")

    monkeypatch.setattr(hf.importlib, "import_module", absent)
    reason = "kimi_linear, glm5_next, bailing_hybrid: ModuleNotFoundError: No module named 'transformers'"
    with pytest.raises(ImportError, match=f"found none \\({reason}\\)"):
        hf.use()


def test_without_fla_a_model_calls_kda():
    """The process cannot import FLA, whether it is installed or not."""
    code = """
import sys
sys.modules["fla"] = None
import torch, kda.hf
from small_models import model_of
seen = []
ours = kda.hf.FUNCTIONS["chunk_kimi_delta_attention"]
def spy(q, k, v, **keywords): seen.append(1); return ours(q, k, v, **keywords)
import inspect
spy.__signature__ = inspect.signature(ours)
kda.hf.FUNCTIONS["chunk_kimi_delta_attention"] = spy
print(kda.hf.use("kimi_linear"))
model = model_of("kimi_linear")
model(torch.arange(20)[None] + 3).logits.sum().backward()
print(len(seen))
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                         env=os.environ | {"PYTHONPATH": path})
    assert ran.stdout.split("\n")[:2] == ["('kimi_linear',)", "1"], ran.stderr
