"""A call in C++, node.cpp, is the call in Python: results, gradients, what is saved, and what is refused."""

import ctypes
import dataclasses
import gc
import threading
import weakref

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed")

import kda
from kda.calls import known, node
from kda.model.host import host_of, standing_in
from kda.tools.verify.cases import Spec, make
from ptxkit import capture
from ptxkit.compile import c_compiler, driver

pytestmark = pytest.mark.simulated

SPEC = Spec(T=9, H=1, K=64, V=64, dtype="float32")
WAYS = ("C++", "Python")


@pytest.fixture
def session():
    with capture(arch="sm89") as session:
        yield session
    assert not session.findings, "\n".join(map(str, session.findings[:3]))


@pytest.fixture
def take(monkeypatch):
    """Lets calls from now on run in C++, or in Python."""
    if c_compiler.path(c_compiler.CPP) is None:
        pytest.skip("needs a C++ compiler")
    module = node.wait()
    assert module is not None, node.why_not()

    def run_in(way):
        known.CALLS.clear()
        state = {"thread": threading.current_thread()}
        state |= {"module": module} if way == "C++" else {"why": "a test wants Python"}
        monkeypatch.setattr(node, "_state", state)

    return run_in


@pytest.fixture(params=WAYS)
def way(request, take, session):
    take(request.param)
    return request.param


def leaves_of(case):
    return {name: x.detach().requires_grad_() for name, x in case.keywords.items()
            if isinstance(x, torch.Tensor) and x.is_floating_point()}


def forward(case, leaves, **options):
    o, ht = kda.chunk_kda(**case.keywords | leaves | options)
    return [(y, dy) for y, dy in ((o, case.do), (ht, case.dht)) if y is not None]


def step(case, **options):
    """Return the outputs and the gradients of all leaves."""
    leaves = leaves_of(case)
    outputs, given = zip(*forward(case, leaves, **options))
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), given)]


def in_cpp(o):
    return o.grad_fn.name() == "torch::autograd::CppNode<ChunkKdaBackward>"


def equal(some, others):
    return len(some) == len(others) and all(torch.equal(x, y) for x, y in zip(some, others))


def test_a_call_is_a_node_in_cpp_unless_python_has_to_run_it(way):
    (o, _), _ = forward(case := make(SPEC), leaves_of(case))
    assert in_cpp(o) == (way == "C++")


CALLS = {
    "a batch": dict(B=2, T=66),
    "two value heads": dict(HV=2),
    "packed": dict(lengths=(3, 0, 9), padding=5),
    "softplus": dict(gate="softplus"),
    "given decays": dict(gate="given"),
    "no states": dict(initial_state=False),
    "no tokens": dict(T=0),
}
BUILT_FOR_IT = ("a batch", "two value heads", "softplus", "given decays")  # kernels that no other test here needs


@pytest.mark.parametrize("call", [
    pytest.param(words, id=name, marks=(pytest.mark.exhaustive, pytest.mark.commit) if name in BUILT_FOR_IT else ())
    for name, words in CALLS.items()
])
def test_outputs_and_gradients_have_the_bits_of_python(call, take, session):
    case, found = make(dataclasses.replace(SPEC, **call)), {}
    for way in WAYS:
        take(way)
        found[way] = step(case)
        with torch.no_grad():
            found[way] += [y for y in kda.chunk_kda(**case.keywords) if y is not None]
    assert equal(found["C++"], found["Python"])


def test_tensors_that_kernels_cannot_read_as_they_lie_are_copied(take, session):
    case = make(dataclasses.replace(SPEC, lengths=(3, 5)))
    plain = step(case)
    words = case.keywords
    words["q"] = words["q"].transpose(1, 2).contiguous().transpose(1, 2)       # not contiguous
    words["v"] = torch.cat([words["v"].flatten()[:1], words["v"].flatten()])[1:].view_as(words["v"])  # at 4 bytes
    words["k"] = torch.complex(torch.zeros_like(words["k"]), -words["k"]).conj().imag                 # negated
    words["A_log"], words["dt_bias"] = (words[name].double() for name in ("A_log", "dt_bias"))
    assert words["k"].is_neg() and words["v"].data_ptr() % 16
    take("C++")
    again = step(case)
    assert equal(again[:2], plain[:2])
    assert all(torch.allclose(x, y.to(x.dtype), rtol=1e-6) for x, y in zip(again[2:], plain[2:]))
    assert [x.dtype for x in again[2:]].count(torch.float64) == 2


def test_an_input_that_needs_no_gradient_gets_none(way):
    leaves = leaves_of(case := make(SPEC))
    leaves["q"].requires_grad_(False)
    leaves["beta"].requires_grad_(False)
    for o, do in forward(case, leaves)[:1]:
        o.backward(do)
    assert [name for name, x in leaves.items() if x.grad is None] == ["q", "beta"]


@pytest.mark.parametrize("which", [0, 1])
def test_one_output_alone_may_have_a_gradient(which, take, session):
    case, found = make(SPEC), {}
    for way in WAYS:
        take(way)
        leaves = leaves_of(case)
        y, dy = forward(case, leaves)[which]
        found[way] = torch.autograd.grad(y, [leaves[name] for name in "kvg"], dy)
    assert equal(found["C++"], found["Python"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("way", WAYS)
def test_a_nested_tensor_has_no_key(way, take):
    """It has no sizes, which torch refuses to say; the checks of inputs name it."""
    take(way)
    plain = torch.zeros(3, 2)
    nested = torch.nested.nested_tensor([plain, plain])
    assert node.outlines((plain,) * 8) is not None
    assert node.outlines((nested, *(plain,) * 7)) is None and node.outlines((*(plain,) * 7, nested)) is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn], ids=["sparse", "of oneDNN"])
def test_a_tensor_of_another_layout_has_no_key(other, way, take):
    """Its shape and dtype are those of a dense one, which a call may know; the checks of inputs name it."""
    take(way)
    plain = torch.zeros(3, 2)
    for key in (node.outlines, node.layouts):
        assert key((plain, *(None,) * 7)) is not None
        assert key((other(plain), *(None,) * 7)) is None and key((*(None,) * 7, other(plain))) is None


def test_a_second_backward_is_refused_and_runs_if_the_graph_is_kept(way):
    leaves = leaves_of(case := make(SPEC))
    (o, do), _ = forward(case, leaves)
    first = torch.autograd.grad(o, leaves["k"], do, retain_graph=True)
    assert equal(first, torch.autograd.grad(o, leaves["k"], do))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o, leaves["k"], do)


def test_a_second_derivative_is_refused(way):
    leaves = leaves_of(case := make(SPEC))
    (o, do), _ = forward(case, leaves)
    (dk,) = torch.autograd.grad(o, leaves["k"], do, create_graph=True)
    with pytest.raises(kda.KdaError, match="no second derivative"):
        dk.sum().backward()


def test_an_input_that_was_changed_in_place_is_noticed(way):
    leaves = leaves_of(case := make(SPEC))
    (o, do), _ = forward(case, leaves)
    with torch.no_grad():
        leaves["v"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.backward(do)


def test_hooks_see_what_is_saved(way):
    packed, case = [], make(SPEC)
    plain = step(case)

    def pack(x):
        packed.append(x.shape)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        assert equal(step(case), plain)
    assert len(packed) >= sum(isinstance(x, torch.Tensor) for x in case.keywords.values())


def test_a_backward_may_be_mapped_over(way):
    leaves = leaves_of(case := make(SPEC))
    (o, do), _ = forward(case, leaves)
    several = torch.stack([do, -do])
    (together,) = torch.autograd.grad(o, leaves["k"], several, retain_graph=True, is_grads_batched=True)
    alone = [torch.autograd.grad(o, leaves["k"], each, retain_graph=True)[0] for each in several]
    assert equal(together.unbind(), alone)


def test_a_checkpoint_computes_the_call_again(way):
    case = make(SPEC)
    plain, leaves = step(case), leaves_of(case)
    outputs = torch.utils.checkpoint.checkpoint(
        lambda: kda.chunk_kda(**case.keywords | leaves), use_reentrant=False, determinism_check="none")
    assert equal(torch.autograd.grad(outputs, list(leaves.values()), (case.do, case.dht)), plain[2:])


def test_a_call_that_is_forgotten_ends(way):
    case = make(SPEC)
    leaves = leaves_of(case)
    outputs = forward(case, leaves)
    (call,) = map(weakref.ref, known.CALLS.values())
    known.CALLS.clear()
    assert call() is None or way == "Python"
    outputs[0][0].backward(outputs[0][1])                                      # its graph holds what it needs
    del outputs
    gc.collect()
    assert call() is None and leaves["q"].grad is not None


# ---- what the driver answers


ANSWER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)


@pytest.fixture
def answers(monkeypatch, take):
    """A driver that gives these answers one after the other, then success; it counts launches."""
    given, launched = [], []

    def answer(*arguments):
        launched.append(None)
        return given.pop(0) if given else 0

    function = ANSWER(answer)
    monkeypatch.setattr(driver, "function_that_launches", lambda: ctypes.cast(function, ctypes.c_void_p).value)
    take("C++")
    host = dataclasses.replace(host_of("sm89"), name="a GPU that answers")
    with driver.pretended(), standing_in(host):
        yield given, launched, host


def test_a_launch_that_the_driver_refuses_is_an_error_in_both_directions(answers, monkeypatch):
    given, launched, _ = answers

    def check(code, doing):
        if code:
            raise kda.KdaError(f"{doing}: {code}")

    monkeypatch.setattr(driver, "check", check)
    case = make(dataclasses.replace(SPEC, T=71))                               # lists of launches of its own
    leaves = leaves_of(case)
    (o, do), _ = forward(case, leaves)
    done = len(launched)
    assert done and in_cpp(o)
    given += [0, 700]
    with pytest.raises(kda.KdaError, match=r"launching .*: 700"):
        forward(case, leaves)
    given += [0, 700]
    with pytest.raises(kda.KdaError, match=r"launching .*: 700"):
        o.backward(do)


def test_a_thread_without_a_context_gets_one_and_launches_what_is_left(answers, monkeypatch):
    given, launched, _ = answers
    devices = []
    monkeypatch.setattr(driver, "make_current", devices.append)
    case = make(dataclasses.replace(SPEC, T=72))
    leaves = leaves_of(case)
    forward(case, leaves)
    whole = len(launched)
    launched.clear()
    given += [0, driver.NO_CONTEXT]
    forward(case, leaves)
    assert devices == [driver.PRETENDED] and len(launched) == whole + 1


def test_threads_may_share_a_call(answers):
    _, launched, host = answers
    case = make(dataclasses.replace(SPEC, T=73))
    step(case)
    whole, failed = len(launched), []
    launched.clear()

    def run():
        try:
            with standing_in(host):
                for _ in range(5):
                    step(case)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(launched) == 15 * whole
    assert len(known.CALLS) == 1


# ---- without C++


@pytest.fixture
def unbuilt(take, monkeypatch):
    monkeypatch.setattr(node, "_state", {})
    known.CALLS.clear()


def test_without_a_compiler_calls_run_in_python_and_doctor_can_say_why(unbuilt, session, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert node.wait() is None
    assert "C++ compiler" in node.why_not() and "CXX" in node.why_not()
    (o, _), _ = forward(case := make(SPEC), leaves_of(case))
    assert not in_cpp(o)


def test_until_it_is_built_calls_run_in_python(unbuilt, session, monkeypatch):
    goes_on, module = threading.Event(), node._module
    monkeypatch.setattr(node, "_module", lambda: (goes_on.wait(), module())[1])
    leaves = leaves_of(case := make(SPEC))
    assert not in_cpp(forward(case, leaves)[0][0])
    goes_on.set()
    assert node.wait() is not None
    assert in_cpp(forward(case, leaves)[0][0])
