"""The layer on a GPU, by its kernels: beside the same layer in float64, in every way to call it."""

import pytest
import torch
from on_a_gpu import DEVICE, nothing_waits

pytest.importorskip("triton", reason="needs triton")

from kda.nn import Cache, KimiDeltaAttention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_memory_is_poisoned")]

HIDDEN, HEADS, HEAD_DIM, T = 256, 2, 128, 200
CLOSE = 4e-2                                 # relative, in the norm: bfloat16 rounds in each of ten steps
KINDS = {"Kimi-Linear": {}, "Kimi-K3": {"lower_bound": -5.0, "gate_rank": None}}
PADDED = torch.ones(2, T)
PADDED[0, :30], PADDED[1, -50:] = 0, 0
CALLS = {
    "rows": {},
    "padded": {"attention_mask": PADDED},
    "packed": {"cu_seqlens": torch.tensor([0, 1, 1, 130, T])},
}
kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
calls = pytest.mark.parametrize("words", CALLS.values(), ids=CALLS)


def layers(dtype=torch.bfloat16, **options):
    """A layer on the GPU, and the same weights in float64 on the CPU."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM, layer_idx=0, **options).to(dtype)
    exact = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM, layer_idx=0, **options).double()
    exact.load_state_dict(layer.state_dict())
    return layer.to(DEVICE), exact


def hidden(B=2, tokens=T):
    return torch.randn(B, tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


def on_the_gpu(words):
    return {name: x.to(DEVICE) for name, x in words.items()}


def trained(layer, x, **words):
    """y and all gradients, by name."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x, **words)
    weights = torch.linspace(-1, 1, HIDDEN, dtype=torch.float64).to(y.device, y.dtype)
    (y * weights).sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def too_far(found, exact, limit=CLOSE):
    """What is further from float64 than rounding explains, and how far."""
    apart = {name: (found[name].cpu().double() - y).norm().item() / y.norm().item() for name, y in exact.items()}
    return {name: error for name, error in apart.items() if not error <= limit}


@calls
@kinds
def test_outputs_and_gradients_are_those_of_float64(options, words):
    layer, exact = layers(**options)
    x = hidden(B=1 if "cu_seqlens" in words else 2)
    expected = trained(exact, x.double(), **words)
    assert too_far(trained(layer, x.to(DEVICE), **on_the_gpu(words)), expected) == {}
    wrong = {name: y + 0.1 * y.norm() / y.numel() ** 0.5 for name, y in expected.items()}
    assert too_far(wrong, expected).keys() == expected.keys()


@kinds
@torch.no_grad()
def test_a_prompt_and_tokens_through_a_cache_are_the_whole_and_wait_for_nothing(options):
    layer, exact = layers(**options)
    x, cache, first = hidden(), Cache(), 0
    expected, found = exact(x.double()), []
    for length in (100, 1, 3, *[1] * 6, 90):                                   # kernels are built
        layer(x[:, :length].to(DEVICE), cache=Cache())
    moved = x.to(DEVICE)
    with nothing_waits():
        for length in (100, 1, 3, *[1] * 6, 90):
            found.append(layer(moved[:, first : first + length], cache=cache))
            first += length
    assert first == T and too_far({"y": torch.cat(found, 1)}, {"y": expected}) == {}


@calls
def test_a_compiled_layer_is_one_graph_with_the_same_results(words):
    layer, exact = layers()
    x = hidden(B=1 if "cu_seqlens" in words else 2)
    expected = trained(exact, x.double(), **words)
    layer.compile(fullgraph=True)
    assert too_far(trained(layer, x.to(DEVICE), **on_the_gpu(words)), expected) == {}


def test_autocast_computes_a_float32_layer_in_bfloat16():
    layer, exact = layers(torch.float32)
    x = hidden()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = trained(layer, x.float().to(DEVICE))
    assert too_far(found, trained(exact, x.double())) == {}


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "padded"])
def test_torch_func_has_the_gradients_of_autograd(masked):
    layer, _ = layers(lower_bound=-5.0)
    x, mask = hidden().to(DEVICE), PADDED.to(DEVICE) if masked else None
    several = torch.stack([x, -x, 2 * x])

    def loss(x):
        return layer(x, attention_mask=mask).float().square().sum()

    each = torch.stack([torch.autograd.grad(loss(y), y)[0] for y in several.clone().requires_grad_()])
    exact = {"x": each.cpu().double()}
    assert too_far({"x": torch.stack([torch.func.grad(loss)(y) for y in several])}, exact, 1e-2) == {}
    assert too_far({"x": torch.func.vmap(torch.func.grad(loss))(several)}, exact, 1e-2) == {}
