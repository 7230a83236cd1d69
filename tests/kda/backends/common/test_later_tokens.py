"""Neither outputs nor gradients of a token depend on later tokens that the loss does not read, on any backend."""

import dataclasses

import pytest
import torch
from cute_calls import ANYWHERE, TOKENS, called_by_door, changed

from kda.tools.verify.cases import make_inputs

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "libnvrtc", "kernels_built_here")]

# In the first half of a block of 32 rows, in the second, and between two blocks and two chunks.  Gradients of float32
# gates show every rounding.
PLACES = [
    ("bounded", 46, "as q"), ("bounded", 46, "float32"), ("softplus", 46, "as q"), ("bounded", 9, "float32"),
    ("bounded", 57, "float32"), ("bounded", 64, "as q"), ("softplus", 64, "as q"),
]
CASES = [(backend, *place) for backend in ANYWHERE for place in PLACES]


def trained(case, backend):
    """Return o and the gradients of q, k, v, g and beta, by name."""
    found, _ = called_by_door(case, backend)
    return {name: found[name] for name in ("o", *(f"d{name}" for name in TOKENS))}


@pytest.mark.spread(every=len(PLACES))
@pytest.mark.parametrize(("backend", "gate", "t", "gates"), CASES)
def test_nothing_depends_on_later_tokens_that_the_loss_does_not_read(backend, gate, t, gates):
    """The later tokens of the second call forget nearly all, and are larger."""
    case = make_inputs(**dict(T=70, H=1, gate=gate) | ANYWHERE[backend])
    if gates == "float32":
        case = changed(case, g=torch.Tensor.float)
    case = dataclasses.replace(case, do=case.do.index_fill(1, torch.arange(t, 70), 0.0), dht=torch.zeros_like(case.dht))
    later = dict.fromkeys(TOKENS, lambda x: torch.cat((x[:, :t], 3 * x[:, t:].flip(1)), 1))
    later["g"] = lambda x: x.index_fill(1, torch.arange(t, 70), 20.0)
    found, expected = trained(changed(case, **later), backend), trained(case, backend)
    assert not [name for name in found if not torch.equal(found[name][:, :t], expected[name][:, :t])]
    assert all(expected[name][:, :t].any() for name in expected)
    assert not torch.equal(found["o"][:, t:], expected["o"][:, t:])
