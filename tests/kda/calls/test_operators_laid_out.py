"""What an operator tells torch.compile of its results - shapes, strides, dtypes - is what its kernels return."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from triton_calls import built_here

from kda import nn
from kda.backends.common import triton_launch
from kda.backends.triton.layer import launch
from kda.calls.autograd import INPUTS, OPTIONS, RECURRENT_INPUTS, RECURRENT_OPTIONS
from kda.model.bundles import Save
from kda.model.problem import Options
from kda.nn.sequences import Sequences
from kda.tools.verify.cases import make_inputs
from ptxkit import capture

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]

PACKED = dict(lengths=(33, 0, 1), gate="softplus")
BACKENDS = {"triton": "sm90", "sm90": "sm90", "sm89": "sm89", "sm100": "sm100"}   # and the GPU that it runs on


def outlines(results):
    """Return shape, strides and dtype of each tensor in nested results."""
    if isinstance(results, torch.Tensor):
        return [(tuple(results.shape), results.stride(), results.dtype)]
    return [outline for each in results for outline in outlines(each)]


def assert_told(operator, arguments, arch):
    """Check that results are laid out as declared to fake tensors, and return them."""
    with torch._subclasses.FakeTensorMode() as mode:
        def fake(x):
            return mode.from_tensor(x) if isinstance(x, torch.Tensor) else x

        declared = operator(*([*map(fake, x)] if isinstance(x, list) else fake(x) for x in arguments))
    with capture(arch=arch) as session:
        found = operator(*arguments)
    assert session.runs and not session.findings
    assert outlines(found) == outlines(declared)
    return found


def convolution():
    T, C, offsets = 100, 40, torch.tensor([0, 7, 7, 9, 75, 90])
    s = Sequences.of_offsets(offsets, T, torch.device("cpu"))
    x, weight, bias, state = (torch.randn(*n).bfloat16() for n in ((1, T, C), (C, 4), (C,), (s.N, 3, C)))
    return (x, weight, bias, state, s.starts, s.numbers), (s.cu_seqlens, torch.randn_like(x))


def norm():
    x, gate, weight = torch.randn(3, 5, 2, 24), torch.randn(3, 5, 2, 24), torch.randn(24)
    return (x, gate, weight, 1e-3), (torch.randn_like(x),)


@pytest.mark.parametrize("name, arguments", [("convolve", convolution), ("norm_gate", norm)])
def test_of_the_layer(name, arguments, monkeypatch):
    monkeypatch.setattr(triton_launch, "fetch", built_here)
    assert nn.KimiDeltaAttention                                               # defines the operators
    given, more = arguments()
    assert_told(getattr(torch.ops.kda, name), given, "sm90")
    assert_told(getattr(torch.ops.kda, f"{name}_bwd"), (*given, *more), "sm90")


def test_other_strides_are_noticed(monkeypatch):
    """A gradient of the weights as its kernel sums it, a column per channel."""
    monkeypatch.setattr(triton_launch, "fetch", built_here)
    plain = launch.convolve_bwd

    def by_columns(*arguments):
        dx, dweight, *others = plain(*arguments)
        return dx, dweight.T.contiguous().T, *others

    monkeypatch.setattr(launch, "convolve_bwd", by_columns)
    given, more = convolution()
    with pytest.raises(AssertionError, match=r"\(1, 40\)"):
        assert_told(torch.ops.kda.convolve_bwd, (*given, *more), "sm90")


@pytest.mark.exhaustive
@pytest.mark.parametrize("v_first", [False, True], ids=["K by V", "V by K"])
@pytest.mark.parametrize("words", [dict(T=40), PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_backend_both_ways(backend, words, v_first):
    if backend in ("sm90", "sm100"):
        pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    D = 128 if backend == "sm100" else 64
    case = make_inputs(**dict(H=1, K=D, V=D, dtype="float32" if backend == "sm89" else "bfloat16") | words)
    given = {name: case.keywords.get(name) for name in (*INPUTS, *OPTIONS) if name in case.keywords}
    options = {name: value for name, value in given.items() if name in OPTIONS} | dict(
        scale=D**-0.5, backend=backend, output_final_state=True, state_v_first=v_first)
    states = {"initial_state": given["initial_state"], "dht": case.dht}
    inputs = given | {name: x.mT.contiguous() if v_first else x for name, x in states.items()}
    arguments = (*(inputs.get(name) for name in INPUTS), *(getattr(Options(**options), name) for name in OPTIONS))
    saved = assert_told(torch.ops.kda.chunk_forward, (*arguments, Save.NOTHING.value), BACKENDS[backend])[3]
    assert_told(torch.ops.kda.chunk_backward, (*arguments, case.do, inputs["dht"], saved), BACKENDS[backend])


@pytest.mark.exhaustive
@pytest.mark.parametrize("v_first", [False, True], ids=["K by V", "V by K"])
@pytest.mark.parametrize("words", [dict(B=2, T=2), dict(lengths=(3, 0, 1))], ids=["rows", "packed"])
def test_of_the_recurrence(words, v_first):
    case = make_inputs(**dict(H=1, K=16, V=24) | words)
    named = {name: case.keywords[name] for name in RECURRENT_OPTIONS if name in case.keywords}
    named |= {"scale": 0.25, "backend": "triton", "output_final_state": True, "state_v_first": v_first}
    options = Options(**named)
    given = case.keywords | {"initial_state": case.dht.mT.contiguous() if v_first else case.dht}
    arguments = (*map(given.get, RECURRENT_INPUTS), *(getattr(options, name) for name in RECURRENT_OPTIONS))
    assert_told(torch.ops.kda.recurrent, arguments, "sm90")
