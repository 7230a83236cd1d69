"""FLA's layer on a CPU, whose calls come to kda: without its convolution, and with its norm in torch."""

import warnings

import pytest
import torch
from naive import distance

import kda
from kda.notices import KdaNotice

pytest.importorskip("fla.layers", reason="needs flash-linear-attention, see tests/peers/conftest.py")

from fla.layers import KimiDeltaAttention
from fla.models.utils import Cache

pytestmark = pytest.mark.peers

LIMIT = 100 * torch.finfo(torch.float32).eps             # for sums in another order


class Norm(torch.nn.Module):
    """The norm with a gate, for FLA's has no code for a CPU."""

    def __init__(self, old):
        super().__init__()
        self.weight, self.eps = old.weight, old.eps

    def forward(self, x, gate):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight * gate.sigmoid()


def layer(**options):
    torch.manual_seed(0)
    theirs = KimiDeltaAttention(hidden_size=32, head_dim=8, num_heads=2, use_short_conv=False, layer_idx=0, **options)
    theirs.o_norm = Norm(theirs.o_norm)
    return theirs


LAYERS = {
    "as it comes": {},
    "more value heads": {"num_v_heads": 4},
    "a bounded gate": {"safe_gate": True, "lower_bound": -5.0},
    "negative eigenvalues and wider values": {"allow_neg_eigval": True, "expand_v": 2},
}


@pytest.fixture(autouse=True)
def nothing_is_declined(in_fla):
    with warnings.catch_warnings():
        warnings.simplefilter("error", KdaNotice)
        yield


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_tokens_one_by_one_from_a_cache_give_what_the_whole_gives(options):
    decoder, x = layer(**options).eval(), torch.randn(2, 80, 32)
    with torch.no_grad():
        whole = decoder(x)[0]                            # in chunks, for it is longer than 64
        cache = Cache()
        pieces = [decoder(x[:, :70], past_key_values=cache, use_cache=True)[0]]
        pieces += [decoder(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in range(70, 80)]
    assert distance(torch.cat(pieces, 1), whole) < LIMIT
    assert distance(torch.cat([*pieces[:-1], pieces[-2]], 1), whole) > 1000 * LIMIT


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_every_parameter_has_its_gradient(options, monkeypatch):
    trained, calls, real = layer(**options), [], kda.calls.api.chunk_kda
    monkeypatch.setattr(kda.calls.api, "chunk_kda", lambda **arguments: calls.append(arguments) or real(**arguments))
    trained(torch.randn(2, 20, 32))[0].square().sum().backward()
    assert len(calls) == 1 and calls[0]["use_gate_in_kernel"] and calls[0]["state_v_first"]
    assert [name for name, p in trained.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []


def test_a_padded_row_gives_what_it_gives_alone():
    padded, x = layer().eval(), torch.randn(2, 70, 32)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :30] = 0
    with torch.no_grad():
        both, alone = padded(x, attention_mask=mask)[0], padded(x[:1, 30:])[0]
    assert distance(both[:1, 30:], alone) < LIMIT
