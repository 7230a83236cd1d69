"""kda.nn.KimiDeltaAttention beside FLA's own layer, with its weights, on a CPU.

FLA's convolution, norm and KDA are Triton kernels, which no CPU runs: torch's and kda's stand in for them here, so that
what is compared is the layer around them: names, shapes, order, options.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("fla.layers", reason="needs flash-linear-attention, as in tests/peers/requirements.txt")

import fla.layers.kda as theirs_module
from small_models import distance

import kda
from kda.nn import KimiDeltaAttention, layout_of

pytestmark = pytest.mark.peers

ROUNDINGS = 100 * torch.finfo(torch.float32).eps
KINDS = {
    "Kimi-Linear's": {},
    "bounded": {"lower_bound": -5.0, "safe_gate": True},
    "all options": {"num_v_heads": 4, "expand_v": 0.5, "allow_neg_eigval": True, "conv_bias": True, "conv_size": 3},
}


def convolve(x, module):
    W = module.weight.shape[-1]
    return F.silu(F.conv1d(x.mT, module.weight, module.bias, padding=W - 1, groups=x.shape[-1])[..., : x.shape[1]]).mT


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def pair(request, monkeypatch):
    """FLA's layer, and ours with its weights."""
    options = request.param
    torch.manual_seed(0)
    theirs = theirs_module.KimiDeltaAttention(32, head_dim=16, num_heads=2, layer_idx=0, **options)
    with torch.no_grad():
        theirs.A_log.normal_()
        theirs.o_norm.weight.normal_()
    for conv in (theirs.q_conv1d, theirs.k_conv1d, theirs.v_conv1d):
        conv.forward = lambda x, conv=conv, **_: (convolve(x, conv), None)
    norm = theirs.o_norm
    norm.forward = lambda x, gate: F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps) * torch.sigmoid(gate)
    monkeypatch.setattr(theirs_module, "chunk_kda", kda.chunk_kda)
    of_gate = {"lower_bound": options.get("lower_bound"), "allow_neg_eigval": options.get("allow_neg_eigval", False)}
    ours = KimiDeltaAttention.from_checkpoint(theirs.state_dict(), norm_eps=norm.eps, layer_idx=0, **of_gate)
    return theirs, ours


def test_outputs_and_all_gradients_are_those_of_fla(pair):
    results, x = [], torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(1))
    for layer in pair:
        y = layer(x)
        y = y if isinstance(y, torch.Tensor) else y[0]
        (y * x.roll(1, 1)).sum().backward()
        results.append((y, {name: p.grad for name, p in layer.named_parameters()}))
    (y, theirs), (mine, ours) = results
    assert distance(mine, y) <= ROUNDINGS
    for name, p in pair[1].named_parameters():
        p.data = ours[name]
    gradients = pair[1].to_checkpoint("fla")
    assert gradients.keys() == theirs.keys()
    assert {name: d for name, g in theirs.items() if (d := distance(gradients[name], g)) > ROUNDINGS} == {}


def test_a_state_dict_goes_there_and_back_bit_for_bit(pair):
    theirs, ours = pair
    state = theirs.state_dict()
    back = ours.to_checkpoint("fla")
    assert back.keys() == state.keys() and layout_of(state) == "fla"
    assert all(torch.equal(x, state[name]) for name, x in back.items())
    theirs.load_state_dict(back)                                               # strict


def test_a_checkpoint_without_the_bias_of_flas_gate_loads_into_fla(pair):
    """The bias that FLA has and checkpoints have not is written as zeros."""
    torch.manual_seed(1)
    theirs = theirs_module.KimiDeltaAttention(32, head_dim=16, num_heads=2)
    ours = KimiDeltaAttention(32, 2, 16)
    theirs.load_state_dict(ours.to_checkpoint("fla"))
    assert not theirs.g_proj[1].bias.any() and torch.equal(theirs.f_proj[0].weight, ours.f_a_proj.weight)
