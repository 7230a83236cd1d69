"""A call in a capture takes the way through host code that it takes on a GPU, eagerly and in a CUDA graph."""

import contextlib
import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed")

import kda
from kda.tools.verify.cases import Spec, make
from ptxkit import capture

pytestmark = pytest.mark.simulated

NODE, OPERATOR = "ChunkKdaBackward", "GeneratedBackwardFor_kda_chunk_forward"
SPEC = Spec(T=70, H=1, K=64, V=64, dtype="float32")


class Another(TorchDispatchMode):
    """A mode of the program."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def session():
    with capture(arch="sm89") as session:
        yield session
    assert not session.findings, "\n".join(map(str, session.findings[:3]))


def on_gpu(seed=0):
    return make(dataclasses.replace(SPEC, seed=seed)).map(lambda x: x.to("cuda"))


def tensors_of(case):
    return [x for x in (*case.keywords.values(), case.do, case.dht) if isinstance(x, torch.Tensor)]


def step(case):
    """Return o, ht and the gradients of all inputs, and the node that autograd recorded."""
    leaves = {name: x.detach().requires_grad_() for name, x in case.keywords.items() if isinstance(x, torch.Tensor)}
    o, ht = kda.chunk_kda(**case.keywords | leaves)
    found = torch.autograd.grad((o, ht), list(leaves.values()), (case.do, case.dht))
    return [o, ht, *found], o.grad_fn.name()


def test_a_recorded_call_is_one_node_as_on_a_gpu():
    assert NODE in step(on_gpu())[1]


def test_a_mode_of_the_program_sees_the_operators():
    with Another():
        assert OPERATOR in step(on_gpu())[1]
    assert NODE in step(on_gpu())[1]


def test_other_code_counts_all_modes():
    assert torch._C._len_torch_dispatch_stack() > 0


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Another], ids=["one node", "operators"])
def test_a_step_in_a_graph_has_the_bits_of_an_eager_one(mode):
    given, static, graph = on_gpu(1), on_gpu(2), torch.cuda.CUDAGraph()
    wanted, _ = step(given)
    with torch.cuda.graph(graph), mode():
        found, _ = step(static)
    for old, new in zip(tensors_of(static), tensors_of(given)):
        old.copy_(new)
    graph.replay()
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
