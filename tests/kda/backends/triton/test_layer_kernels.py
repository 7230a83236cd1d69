"""The layer's convolution and norm in Triton, run on the CPU from their PTX, both ways, against torch in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from triton_calls import building_here

from kda import nn
from kda.backends.triton.layer import launch
from kda.nn import convolution
from kda.nn.sequences import Sequences
from ptxkit import capture

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]

C = 40                                       # one block of channels that is not full
OFFSETS = [0, 7, 7, 9, 10, 75, 90]           # an empty sequence, some shorter than the convolution, a padded tail
archs = pytest.mark.parametrize(
    "arch", ["sm90", *(pytest.param(a, marks=pytest.mark.exhaustive) for a in ("sm80", "sm100"))]
)
T = 100                                      # more than one run of tokens


@pytest.fixture(autouse=True)
def built_in_this_process(monkeypatch):
    with building_here(monkeypatch):
        yield


def trained(function, dtype, *tensors):
    """Return the output and the gradients of a function, with its first tensor in a dtype."""
    given = [x.detach().to(dtype if i == 0 or dtype == torch.float64 else x.dtype).requires_grad_()
             for i, x in enumerate(tensors)]
    y = function(*given)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    return [y.detach(), *(x.grad for x in given)]


def compare(function, arch, dtype, *tensors, names=("y", "dx", "dw", "dbias", "dstate"), sms=None):
    """Check that no result is further off than twice torch's own in this dtype, or a few roundings of the largest."""
    tensors = [tensors[0].to(dtype), *tensors[1:]]
    exact, rounded = trained(function, torch.float64, *tensors), trained(function, dtype, *tensors)
    with capture(arch=arch, sms=sms) as session:
        found = trained(function, dtype, *tensors)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    for name, a, b, c in zip(names, exact, rounded, found):
        limit = 2 * (b - a).abs().max() + 8 * torch.finfo(c.dtype).eps * a.abs().max()
        assert (c - a).abs().max() <= limit, f"{name} is {(c - a).abs().max():.3g} off, {limit:.3g} allowed"
    return session


def inputs(rows, N, seed=0):
    torch.manual_seed(seed)
    B, tokens = rows
    return torch.randn(B, tokens, C), torch.randn(C, 1, 4), torch.randn(C), torch.randn(N, 3, C)


def offsets():
    return Sequences.of_offsets(torch.tensor(OFFSETS), T, torch.device("cpu"))


@archs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_convolution_of_packed_sequences_that_go_on_from_states(arch, dtype):
    s = offsets()
    session = compare(lambda x, w, b, state: nn.short_convolution(x, w, b, state, s), arch, dtype, *inputs((1, T), s.N))
    assert [run.kernel for run in session.runs] == ["convolve", "convolve_bwd", "convolve_state_bwd"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.exhaustive),
                                   pytest.param(torch.float16, marks=pytest.mark.exhaustive)], ids=str)
def test_a_convolution_of_rows_from_zeros_without_a_bias(dtype):
    compare(nn.short_convolution, "sm90", dtype, *inputs((2, 23), 2)[:2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 65])
def test_a_convolution_of_rows_that_go_on_from_states(tokens):
    compare(nn.short_convolution, "sm90", torch.float32, *inputs((3, tokens), 3))


@archs
@pytest.mark.parametrize("dtype, V", [
    (torch.bfloat16, 128),
    pytest.param(torch.float32, 24, marks=pytest.mark.exhaustive),
    pytest.param(torch.float16, 256, marks=pytest.mark.exhaustive),
], ids=str)
def test_a_gated_norm(arch, dtype, V):
    """The backward has more tiles than programs."""
    torch.manual_seed(0)
    x, gate, weight = torch.randn(3, 57, 2, V), torch.randn(3, 57, 2, V).to(dtype), torch.randn(V)
    session = compare(lambda *given: nn.gated_rms_norm(*given, 1e-3), arch, dtype, x, gate, weight,
                      names=("y", "dx", "dgate", "dw"), sms=1)
    forward, backward = (launched.grid[0] for launched in session.launches)
    assert forward > backward
    assert [run.kernel for run in session.runs] == ["norm_gate", "norm_gate_bwd"]


def test_a_token_that_sees_its_neighbours_sequence_is_noticed():
    """The budget of these tests can fail."""
    s, wrong = offsets(), Sequences.of_offsets(torch.tensor([0, 7, 7, 9, 75, 75, 90]), T, torch.device("cpu"))

    def convolve(x, w, b, state):
        simulated = x.dtype != torch.float64 and convolution.takes_kernels(x)
        return nn.short_convolution(x, w, b, state, wrong if simulated else s)

    with pytest.raises(AssertionError, match=r"y is .* off"):
        compare(convolve, "sm90", torch.bfloat16, *inputs((1, T), s.N))


def test_what_no_kernel_takes_goes_to_torch():
    x, weight = torch.randn(1, 9, C), torch.randn(C, 1, 3)
    with capture(arch="sm90") as session:
        y = nn.short_convolution(x, weight)
        (reason,) = launch.convolution_refused(x.dtype, 3, "cpu")
    assert reason == "layer.width: needs a convolution over 4 tokens, got 3"
    assert not session.runs and torch.equal(y, nn.short_convolution(x, weight))


def test_two_runs_agree_bit_for_bit():
    def once():
        with capture(arch="sm90"):
            return trained(nn.short_convolution, torch.bfloat16, *inputs((2, 23), 2)[:2])

    assert all(torch.equal(a, b) for a, b in zip(once(), once()))


# the whole layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)], ids=str)
def test_a_token_of_the_layer_is_one_kernel_and_what_the_parts_give(dtype, monkeypatch):
    """A step in the simulator beside the layer in float64 on a CPU; the state is updated in place."""

    torch.manual_seed(0)
    layer = nn.KimiDeltaAttention(32, 2, 16, lower_bound=-5.0, layer_idx=0, dtype=dtype)
    exact = nn.KimiDeltaAttention(32, 2, 16, lower_bound=-5.0, layer_idx=0, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, 32).to(dtype)
    cache, wide = nn.Cache(), nn.Cache()
    with building_here(monkeypatch), torch.no_grad():
        layer(x[:, :5], cache=cache)
        exact(x[:, :5].double(), cache=wide)
        with capture(arch="sm90") as session:
            found = [layer(x[:, t : t + 1], cache=cache) for t in (5, 6)]
        expected = [exact(x[:, t : t + 1].double(), cache=wide) for t in (5, 6)]
    assert not session.findings and [run.kernel for run in session.runs] == ["decode_step"] * 2
    for a, b in zip((*found, cache[0].recurrent), (*expected, wide[0].recurrent)):
        assert (a - b).abs().max() <= 8 * torch.finfo(dtype).eps * b.abs().max()
