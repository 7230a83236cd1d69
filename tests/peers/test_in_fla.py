"""kda in FLA's own registry, with the real FLA."""

import inspect
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from naive import DIFFERENTIABLE, definition, distance, make

import kda
from kda.notices import KdaNotice

pytest.importorskip("fla", reason="needs fla-core, see tests/peers/conftest.py")

import fla.backends
import fla.ops.kda
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla.ops.kda.gate import fused_kda_gate
from fla.ops.kda.naive import naive_recurrent_kda

pytestmark = pytest.mark.peers

FELL_THROUGH = "active drivers"                          # what Triton says where there is no GPU

CALLS = {
    "precomputed gates, as transformers calls it": make(B=2, T=70, dtype=torch.float32),
    "everything in the kernel, as FLA's layer calls it": make(
        T=70, HV=4, gate="softplus", beta="sigmoid", state_v_first=True, dtype=torch.float32),
    "a bounded gate without A_log": make(T=33, gate="bounded", A_log=False, beta="2*sigmoid", dtype=torch.float32),
    "packed sequences": make(lengths=[40, 0, 25], tail=3, dtype=torch.float32),
    "what a CUDA graph asks for": make(lengths=[40, 25], dtype=torch.float32, use_graph=True, max_num_seqs=2),
    "nothing recomputed": make(T=40, dtype=torch.float32, disable_recompute=True),
    "bfloat16": make(T=40, dtype=torch.bfloat16),
}


def run(function, call):
    """Outputs and gradients."""
    call = call.requiring_grad()
    o, ht = function(**call.arguments, output_final_state=True)
    loss = (o.float() * call.do.float()).sum() + (ht * call.dht).sum()
    names = [name for name in DIFFERENTIABLE if name in call.tensors]
    return {"o": o, "ht": ht} | dict(zip(names, torch.autograd.grad(loss, [call.tensors[n] for n in names])))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_of_fla_gives_the_bits_of_kda_and_its_gradients(in_fla, call):
    with warnings.catch_warnings():
        warnings.simplefilter("error", KdaNotice)
        theirs, ours = run(chunk_kda, call), run(kda.chunk_kda, call)
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(theirs[name], ours[name])] == []


def test_fla_and_its_definition_agree_with_kda_in_fla(in_fla):
    call = make(T=50, dtype=torch.float32, l2norm=False)
    x = call.tensors
    o, ht = chunk_kda(**call.arguments, output_final_state=True)
    theirs, their_state = naive_recurrent_kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["initial_state"], output_final_state=True,
    )
    exact, exact_state = definition(call)
    for ours, other, exactly in ((o, theirs, exact), (ht, their_state, exact_state)):
        assert distance(ours, exactly) <= 2 * distance(other, exactly) + 1e-7
    assert distance(o.roll(1, 1), exact) > 0.1           # tokens in the wrong order are far off


def test_the_intermediate_states_come_too(in_fla):
    call = make(T=70, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs, ours = (f(**call.arguments, return_intermediate_states=True) for f in (chunk_kda, kda.chunk_kda))
    assert theirs[2].shape == (1, 3, 2, 5, 3) and torch.equal(theirs[2], ours[2]) and theirs[2].dtype == torch.bfloat16


def test_the_recurrence_is_ours(in_fla):
    call = make(T=9, gate="softplus", beta="sigmoid", state_v_first=True, dtype=torch.float32)
    del call.options["chunk_size"]
    theirs = fused_recurrent_kda(**call.arguments, output_final_state=True)
    ours = kda.fused_recurrent_kda(**call.arguments, output_final_state=True)
    assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])


def test_the_inner_recurrence_accepts_its_arguments_in_order_and_writes_a_pool(in_fla):
    x = make(lengths=[2, 1], dtype=torch.float32, l2norm=False).tensors
    slots, pool = torch.tensor([[3, 1], [0, 2]]), torch.randn(4, 2, 5, 3)
    results = []
    for function in (fused_recurrent_kda_fwd, kda.fused_recurrent_kda_fwd):
        states = pool.clone()
        o, final = function(x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, states, 0.25, False, True, False,
                            x["cu_seqlens"], slots)
        assert final is states and not torch.equal(states, pool)
        results.append((o, states))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_the_gate_alone_is_ours_on_a_cpu(in_fla):
    g, A_log, dt_bias = torch.randn(2, 7, 3, 5), torch.randn(3), torch.randn(15)
    for bound in (None, -5.0):
        assert torch.equal(fused_kda_gate(g, A_log, dt_bias, bound), kda.fused_kda_gate(g, A_log, dt_bias, bound))


def test_the_gate_alone_is_left_to_fla_on_a_gpu(in_fla):
    class OnGpu:
        is_cuda = True

    assert in_fla._Backend().verify("fused_kda_gate", OnGpu())[0] is False


DECLINED = {
    "an unknown keyword": ({"chunk_indices": None}, "keyword.unknown", RuntimeError, FELL_THROUGH),
    "a chunk size": ({"chunk_size": 16}, "chunk_size.value", ValueError, "must be either 32 or 64"),
    "a rate beside given gates": ({"A_log": torch.zeros(2)}, "A_log.unused", RuntimeError, FELL_THROUGH),
    "a backend that is not for it": ({"backend": "sm90"}, "sm90.", RuntimeError, FELL_THROUGH),
}


@pytest.mark.parametrize(("options", "why", "error", "says"), DECLINED.values(), ids=DECLINED)
def test_a_declined_call_goes_to_fla_and_says_why_once(in_fla, options, why, error, says):
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        for T in (20, 30):                               # another size is no other reason
            call = make(T=T, dtype=torch.float32)
            with pytest.raises(error, match=says):
                chunk_kda(**call.arguments | options)
    (notice,) = [w for w in notices if w.category is KdaNotice]
    assert "FLA runs this call of chunk_kda" in str(notice.message) and why in str(notice.message)
    assert notice.filename == __file__


def test_each_reason_is_said(in_fla):
    call = make(T=20, dtype=torch.float32)
    with pytest.warns(KdaNotice) as notices:
        for options in ({"chunk_indices": None}, {"A_log": torch.zeros(2)}, {"chunk_indices": None}):
            with pytest.raises(RuntimeError, match=FELL_THROUGH):
                chunk_kda(**call.arguments | options)
    assert len([w for w in notices if w.category is KdaNotice]) == 2


class Next(fla.backends.BaseBackend):
    """Another backend in the registry, behind kda."""

    backend_type = "next"
    priority = 2

    def chunk_kda(self, *args, **keywords):
        return "next"


@pytest.fixture
def one_more_backend():
    fla.backends.register(fla.ops.kda.chunk.chunk_kda)(Next)
    yield
    fla.backends._function_registries[inspect.unwrap(chunk_kda)]._backends.pop("next")


def test_disable_takes_kda_out_and_leaves_the_others_and_use_puts_it_back(in_fla, one_more_backend):
    call = make(T=20, dtype=torch.float32)
    assert in_fla.asked() == {
        "chunk_kda": ["kda", "next"], "fused_recurrent_kda_fwd": ["kda"], "fused_kda_gate": ["kda"],
    }
    assert in_fla.in_use() == in_fla.FUNCTIONS
    in_fla.disable()
    assert in_fla.asked() == {"chunk_kda": ["next"], "fused_recurrent_kda_fwd": [], "fused_kda_gate": []}
    assert in_fla.in_use() == ()
    assert chunk_kda(**call.arguments) == "next"
    with pytest.raises(RuntimeError, match=FELL_THROUGH):
        fused_recurrent_kda(*(call.tensors[name] for name in ("q", "k", "v", "g", "beta")))
    in_fla.disable()                                     # again, without effect
    in_fla.use()
    assert chunk_kda(**call.arguments)[0].shape == (1, 20, 2, 3)


def test_a_notice_comes_again_after_disable_and_use(in_fla):
    call = make(T=20, dtype=torch.float32)
    for _ in range(2):
        in_fla.disable()
        in_fla.use()
        with pytest.warns(KdaNotice), pytest.raises(RuntimeError, match=FELL_THROUGH):
            chunk_kda(**call.arguments, chunk_indices=None)


def test_the_switch_of_the_environment_is_read_at_every_call(in_fla, monkeypatch):
    call = make(T=20, dtype=torch.float32)
    monkeypatch.setenv("FLA_KDA", "0")
    assert in_fla.asked()["chunk_kda"] == []
    with pytest.raises(RuntimeError, match=FELL_THROUGH):
        chunk_kda(**call.arguments)
    monkeypatch.delenv("FLA_KDA")
    assert chunk_kda(**call.arguments)[0].shape == (1, 20, 2, 3)


def test_flash_kda_comes_after_kda(in_fla):
    from fla.ops.kda.backends.flash_kda import FlashKDABackend

    assert in_fla._Backend.priority < FlashKDABackend.priority


def test_inside_a_compiled_function_the_graph_breaks_and_the_numbers_stay(in_fla):
    call = make(T=20, dtype=torch.float32)

    def layer(scale):
        return chunk_kda(**call.tensors, **call.options)[0] * scale

    assert torch.equal(torch.compile(layer, backend="eager")(2.0), layer(2.0))


def positions(function):
    """Names and defaults, without the tail of further keywords."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize(("theirs", "ours"), [
    (chunk_kda, kda.chunk_kda), (fused_recurrent_kda, kda.fused_recurrent_kda),
    (fused_recurrent_kda_fwd, kda.fused_recurrent_kda_fwd), (fused_kda_gate, kda.fused_kda_gate),
], ids=lambda f: f.__name__)
def test_the_arguments_of_fla_are_ours_in_order_with_the_same_defaults(theirs, ours):
    assert positions(theirs) == positions(ours)


def test_an_fla_without_the_registry_or_with_other_arguments_is_refused(in_fla, monkeypatch):
    for name, other in (("_fla", None), ("_fla", fla), ("_differs", lambda chunk: True)):
        with monkeypatch.context() as patch:
            patch.setattr(in_fla, name, other)
            with pytest.raises(kda.PackageError, match=r"found \d+\.\d+.*pip install"):
                in_fla.use()
    assert in_fla._differs(lambda q, k, v, beta, g: None) and not in_fla._differs(lambda q, k, v, **more: None)


@pytest.mark.exhaustive                                  # fla is imported anew
def test_an_fla_that_asks_no_backend_is_reported_and_changes_nothing():
    code = "import kda.fla; print(kda.fla.asked()); kda.fla.disable()"
    env = {**os.environ, "FLA_DISABLE_BACKEND_DISPATCH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert ran.stdout.strip() == "{}", ran.stderr
    assert re.search(r"KdaNotice: kda.fla: FLA_DISABLE_BACKEND_DISPATCH=1 was set", ran.stderr)
