"""torch.ops.kda: what PyTorch expects of an operator, and the ways in which models call one."""

import copy

import pytest
import torch
from naive import distance, make
from torch.library import opcheck

import kda
from kda.calls import autograd
from kda.model.bundles import OpaqueSaved, Save
from kda.model.problem import Options


def arguments(call, names, options):
    given = {n: call.options.get(n, Options._field_defaults.get(n)) for n in options}
    given["scale"] = call.options.get("scale") or call.tensors["q"].shape[-1] ** -0.5
    return *(call.tensors.get(n) for n in names), *given.values()


CALLS = {
    "plain": dict(B=2, T=40),
    "everything": dict(lengths=[0, 33, 1], HV=4, gate="softplus", beta="2*sigmoid", tail=3, output_final_state=True),
    "gate per head": dict(lengths=[33, 4], gate="softplus", per_head=True),
    "states (V, K)": dict(
        lengths=[5], gate="bounded", state_v_first=True, output_final_state=True, initial_state=False
    ),
}
SAVES = [save.value for save in Save if save.kind is not OpaqueSaved]                    # what any backend knows
every_call = pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)


@pytest.mark.spread(every=2)
@every_call
@pytest.mark.parametrize("save", SAVES)
def test_opcheck_of_the_forward(options, save):
    call = make(dtype=torch.float32, disable_recompute=save == "all", **options).requiring_grad()
    opcheck(torch.ops.kda.chunk_forward.default, (*arguments(call, autograd.INPUTS, autograd.OPTIONS), save))


def test_a_backend_that_keeps_nothing_of_its_own_is_not_asked_to():
    call = make(dtype=torch.float32, T=5)
    with pytest.raises(kda.KdaError, match="reference keeps nothing of its own"):
        torch.ops.kda.chunk_forward(*arguments(call, autograd.INPUTS, autograd.OPTIONS), "own")


def test_opcheck_of_what_is_saved_in_two_dtypes():
    call = make([0, 33, 1], dtype=torch.bfloat16, gate="softplus", disable_recompute=True)
    opcheck(torch.ops.kda.chunk_forward.default, (*arguments(call, autograd.INPUTS, autograd.OPTIONS), "all"))


@pytest.mark.spread(every=2)
@every_call
@pytest.mark.parametrize("save", SAVES)
def test_opcheck_of_the_backward(options, save):
    call = make(dtype=torch.float32, disable_recompute=save == "all", **options)
    args = arguments(call, autograd.INPUTS, autograd.OPTIONS)
    saved = torch.ops.kda.chunk_forward(*args, save)[3]
    opcheck(torch.ops.kda.chunk_backward.default, (*args, call.do, call.dht, saved))


def test_opcheck_of_intermediate_states():
    for options in (dict(B=2, T=40), dict(lengths=[33, 0, 7])):
        call = make(dtype=torch.float32, return_intermediate_states=True, **options)
        opcheck(torch.ops.kda.chunk_forward.default, (*arguments(call, autograd.INPUTS, autograd.OPTIONS), "nothing"))


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_a_call_on_a_gpu_compiles_and_records_gradients(options, monkeypatch):
    """The test pretends to be on a GPU, where the backend says what a recorded forward keeps before anything runs."""
    monkeypatch.setattr(kda.calls.api, "_on_gpu", lambda q: True)
    call = make(dtype=torch.float32, **options).requiring_grad()
    compiled = torch.compile(kda.chunk_kda, backend="aot_eager", fullgraph=True)
    o = compiled(**call.tensors, **call.options)[0]
    assert distance(o, kda.chunk_kda(**call.tensors, **call.options)[0]) < 1e-6
    o.backward(torch.ones_like(o))
    assert all(x.grad is not None for x in (call.tensors[name] for name in ("q", "v", "beta")))


def test_opcheck_of_the_recurrence():
    call = make([3, 0, 2], dtype=torch.float32, gate="softplus", output_final_state=True)
    opcheck(torch.ops.kda.recurrent.default, arguments(call, autograd.RECURRENT_INPUTS, autograd.RECURRENT_OPTIONS))
    opcheck(torch.ops.kda.recurrent_.default, arguments(call, autograd.RECURRENT_INPUTS, autograd.RECURRENT_OPTIONS))
    call.tensors |= {"ssm_state_indices": torch.tensor([1, -1, 0])}
    opcheck(torch.ops.kda.recurrent_.default, arguments(call, autograd.RECURRENT_INPUTS, autograd.RECURRENT_OPTIONS))


def test_opcheck_of_a_call_with_a_pool():
    call = make([33, 0, 2], dtype=torch.float32)
    indices = {"ssm_state_indices": torch.tensor([1, -1, 0]), "initial_state_indices": torch.tensor([2, -1, -1])}
    offsets, slots = torch.zeros(3, 1, dtype=torch.int64), torch.full((3, 1), -1)
    call.tensors |= indices | {"checkpoint_offsets": offsets, "checkpoint_indices": slots}
    opcheck(torch.ops.kda.chunk_forward_.default, arguments(call, autograd.POOL_INPUTS, autograd.POOL_OPTIONS))


def test_opcheck_of_the_gate():
    g, A_log, dt_bias = torch.randn(2, 3, 4, requires_grad=True), torch.zeros(3, requires_grad=True), torch.zeros(12)
    opcheck(torch.ops.kda.gate.default, (g, A_log, dt_bias, None, torch.float32))
    opcheck(torch.ops.kda.gate.default, (g, None, None, -5.0, torch.bfloat16))
    opcheck(torch.ops.kda.gate_backward.default, (torch.randn(2, 3, 4), g.detach(), A_log.detach(), dt_bias, None))


class Layer(torch.nn.Module):
    """A small version of what a model has around chunk_kda."""

    def __init__(self, width=12, H=2, HV=4, K=5, V=3, **options):
        super().__init__()
        self.sizes, self.options = (H, HV, K, V), options
        self.project = torch.nn.Linear(width, 2 * H * K + HV * (V + K + 1))
        self.A_log = torch.nn.Parameter(torch.rand(HV))
        self.dt_bias = torch.nn.Parameter(torch.rand(HV * K))
        self.out = torch.nn.Linear(HV * V, width)

    def forward(self, x, cu_seqlens=None):
        H, HV, K, V = self.sizes
        q, k, v, g, beta = self.project(x).split([H * K, H * K, HV * V, HV * K, HV], -1)
        o, _ = kda.chunk_kda(
            q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), g.unflatten(-1, (HV, K)), beta,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias, cu_seqlens=cu_seqlens, chunk_size=32, **self.options,
        )
        return self.out(o.flatten(-2))


def train(layer, model, x, *args, steps=3):
    """Return the losses of a few steps, and the parameters after them."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(x, *args).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.cat([p.detach().flatten() for p in layer.parameters()])


def layer_and_input(seed=0, T=70, **options):
    torch.manual_seed(seed)
    return Layer(**options), torch.randn(1, T, 12)


@pytest.mark.spread(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"disable_recompute": True, "lower_bound": -5.0}], ids=["plain", "saving"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_module_trains_to_the_same_numbers(options, dynamic):
    torch._dynamo.reset()
    layer, x = layer_and_input(**options)
    offsets = torch.tensor([0, 33, 33, 60])
    eager = train(twin := copy.deepcopy(layer), twin, x, offsets)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    losses, parameters = train(layer, compiled, x, offsets)
    assert distance(losses, eager[0]) < 1e-6 and distance(parameters, eager[1]) < 1e-6
    assert distance(compiled(x[:, :40], torch.tensor([0, 40])), twin(x[:, :40], torch.tensor([0, 40]))) < 1e-6


@pytest.mark.exhaustive
@pytest.mark.slow
def test_inductor_compiles_it_in_one_graph():
    torch._dynamo.reset()
    layer, x = layer_and_input()
    eager = train(twin := copy.deepcopy(layer), twin, x)
    losses, parameters = train(layer, torch.compile(layer, fullgraph=True), x)
    assert distance(losses, eager[0]) < 1e-6 and distance(parameters, eager[1]) < 1e-6


def test_compiled_decoding_writes_its_state_in_place():
    torch._dynamo.reset()
    call = make(B=2, T=1, dtype=torch.float32, gate="softplus", chunk_size=None)
    eager, compiled = call.tensors["initial_state"].clone(), call.tensors["initial_state"].clone()

    def step(state):
        arguments = call.arguments | {"initial_state": state}
        return kda.fused_recurrent_kda(**arguments, inplace_final_state=True)[0]

    with torch.no_grad():
        o = step(eager)
        compiled_o = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(o, compiled_o) and torch.equal(eager, compiled)


def test_a_compiled_call_meets_the_same_checks():
    torch._dynamo.reset()
    call = make(B=1, T=3)
    call.tensors["k"] = call.tensors["k"][..., :2]
    with pytest.raises(Exception, match=r"k must be \[B=1, T=3, H=2, K=5\]"):
        torch.compile(lambda: kda.chunk_kda(**call.arguments), fullgraph=True, backend="aot_eager")()


@pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_a_compiled_call_with_a_misspelt_keyword_names_the_nearest(function):
    torch._dynamo.reset()
    call = make(B=1, T=3, chunk_size=None)

    def misspelt():
        return function(**call.arguments, output_final_stat=True)

    with pytest.raises(Exception, match="Did you mean 'output_final_state'"):
        torch.compile(misspelt, fullgraph=True, backend="aot_eager")()
    with pytest.raises(kda.InputTypeError, match="Did you mean 'output_final_state'"):
        torch.compile(misspelt, backend="aot_eager")()


def test_use_backend_within_a_compiled_function_leaves_the_graph_or_says_so():
    torch._dynamo.reset()
    call = make(B=1, T=3)

    def named(name):
        with kda.use_backend(name):
            return kda.chunk_kda(**call.arguments)[0]

    with pytest.raises(Exception, match="use_backend must be entered outside code that"):
        torch.compile(named, fullgraph=True, backend="aot_eager")("reference")
    compiled = torch.compile(named, backend="aot_eager")
    assert torch.equal(compiled("reference"), named("reference"))
    with pytest.raises(kda.NoBackendError, match=r"use_backend\('sm90'\) does not accept"):
        compiled("sm90")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_q_k_v_alone(dtype):
    call = make([40, 3], dtype=torch.float32, gate="softplus", beta="sigmoid").requiring_grad()
    with torch.autocast("cpu", dtype=dtype):
        o, ht = kda.chunk_kda(**call.arguments, output_final_state=True)
        cast = {n: x.to(dtype) if n in ("q", "k", "v") else x for n, x in call.tensors.items()}
    expected = kda.chunk_kda(**cast, **call.options, output_final_state=True)
    assert o.dtype == dtype and torch.equal(o, expected[0]) and torch.equal(ht, expected[1])
    o.sum().backward()
    assert all(call.tensors[n].grad.dtype == torch.float32 for n in ("q", "k", "v", "g", "A_log"))


def test_autocast_leaves_float64_alone():
    call = make(B=1, T=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kda.chunk_kda(**call.arguments)[0], kda.chunk_kda(**call.arguments)[0])
        assert kda.chunk_kda(**call.arguments)[0].dtype == torch.float64


def test_a_layer_under_autocast_trains():
    layer, x = layer_and_input()
    expected, _ = train(twin := copy.deepcopy(layer), twin, x)

    def model(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    losses, _ = train(layer, model, x)
    assert distance(losses, expected) < 2**-6


def test_inference_mode_gives_the_same_bits():
    call = make([40, 3], gate="bounded").requiring_grad()
    o, _ = kda.chunk_kda(**call.arguments)
    with torch.inference_mode():
        inferred, _ = kda.chunk_kda(**call.arguments)
    assert inferred.is_inference() and not inferred.requires_grad and torch.equal(o.detach(), inferred)


@every_call
@pytest.mark.parametrize("keep", [False, True])
def test_a_watched_call_goes_through_operators_and_trains_to_the_same_bits(options, keep):
    def trained():
        call = make(dtype=torch.float32, disable_recompute=keep, **options).requiring_grad()
        o, ht = kda.chunk_kda(**call.arguments)
        leaves = {n: x for n, x in call.tensors.items() if x.requires_grad}
        grads = torch.autograd.grad(o.sum() if ht is None else o.sum() + ht.sum(), list(leaves.values()))
        return [o.grad_fn.name(), o, *grads]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        (operator, *expected) = trained()
    seen = {event.name for event in watched.events()}
    function, *found = trained()
    assert {"kda::chunk_forward", "kda::chunk_backward"} <= seen and operator != function == "ChunkKdaBackward"
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(reentrant):
    layer, x = layer_and_input(disable_recompute=True)
    x.requires_grad_()
    layer(x).square().mean().backward()
    expected = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).square().mean().backward()
    assert all(torch.equal(p.grad, expected[n]) for n, p in layer.named_parameters())


def test_functional_call_takes_other_parameters():
    layer, x = layer_and_input()
    other, _ = layer_and_input(seed=1)
    called = torch.func.functional_call(layer, dict(other.named_parameters()), (x,))
    assert torch.equal(called, other(x))
    grads = torch.autograd.grad(called.square().mean(), list(other.parameters()))
    assert all(g.isfinite().all() for g in grads)


def test_an_exported_program_runs():
    layer, x = layer_and_input()
    program = torch.export.export(layer, (x,))
    assert any("kda.chunk_forward" in str(node.target) for node in program.graph.nodes)
    assert distance(program.module()(x), layer(x)) < 1e-6


EXPORTED = {
    "chunk_kda": lambda: Layer(H=2, HV=2),
    "a layer with gradients": lambda: kda.nn.KimiDeltaAttention(12, 2, 6),
    "a layer in chunks": lambda: kda.nn.KimiDeltaAttention(12, 2, 6, mode="chunk").requires_grad_(False),
}


@pytest.mark.parametrize("layer", EXPORTED.values(), ids=EXPORTED)
def test_an_exported_program_takes_any_number_of_tokens(layer):
    layer, x = layer(), torch.randn(3, 70, 12)
    sizes = {0: torch.export.Dim("B", min=1, max=9), 1: torch.export.Dim("T", min=1, max=999)}
    run = torch.export.export(layer, (x,), dynamic_shapes={"x": sizes}).module()
    for y in (x[:2, :1], x[:1, :2], x[:, :66]):                                # T = HV is one of them
        assert distance(run(y), layer(y)) < 1e-6


class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = kda.nn.KimiDeltaAttention(12, 2, 6)

    def forward(self, x, offsets):
        return self.layer(x, cu_seqlens=offsets)


def test_an_exported_program_takes_any_number_of_packed_sequences():
    layer, x, Dim = Packed(), torch.randn(1, 70, 12), torch.export.Dim
    sizes = {"x": {1: Dim("T", min=1, max=999)}, "offsets": {0: Dim("offsets", min=2, max=99)}}
    run = torch.export.export(layer, (x, torch.tensor([0, 30, 50, 70])), dynamic_shapes=sizes).module()
    for offsets in ([0, 70], [0, 66], [0, 0, 5, 5, 70]):
        y, offsets = x[:, : offsets[-1]], torch.tensor(offsets)
        assert distance(run(y, offsets), layer(y, offsets)) < 1e-6


def test_a_second_derivative_is_refused():
    call = make(B=1, T=3, gate="softplus").requiring_grad()
    o, _ = kda.chunk_kda(**call.arguments)
    (grad,) = torch.autograd.grad(o.sum(), call.tensors["q"], create_graph=True)
    with pytest.raises(kda.KdaError, match="no second derivative"):
        grad.sum().backward()
    g = call.tensors["g"]
    (grad,) = torch.autograd.grad(kda.fused_kda_gate(g, call.tensors["A_log"]).sum(), g, create_graph=True)
    with pytest.raises(kda.KdaError, match="no second derivative"):
        grad.sum().backward()


def test_an_error_about_a_missing_derivative_names_the_operator_that_was_called():
    call = make(B=1, T=4, gate="softplus").requiring_grad()
    g, A_log = call.tensors["g"], call.tensors["A_log"]
    for operator, arguments_of_call in (
        (torch.ops.kda.recurrent, arguments(call, autograd.RECURRENT_INPUTS, autograd.RECURRENT_OPTIONS)),
        (torch.ops.kda.chunk_backward, (*arguments(call, autograd.INPUTS, autograd.OPTIONS), call.do, None, [])),
        (torch.ops.kda.gate_backward, (torch.ones_like(g), g, A_log, None, None)),
    ):
        found = operator(*arguments_of_call)[0].sum()
        with pytest.raises(kda.KdaError, match=rf"torch\.ops\.{operator}\b"):
            found.backward()


def test_meta_tensors_have_shapes():
    call = make(B=2, T=40, gate="softplus")
    meta = {n: x.to("meta") for n, x in call.tensors.items()}
    o, ht = kda.chunk_kda(**meta, **call.options, output_final_state=True)
    assert o.shape == (2, 40, 2, 3) and ht.shape == (2, 2, 5, 3) and o.device.type == "meta"


def test_a_compiled_scale_may_be_any_number_but_no_bool():
    call = make(B=1, T=3, dtype=torch.float32)
    compiled = torch.compile(lambda scale: kda.chunk_kda(**call.arguments, scale=scale)[0], fullgraph=True,
                             backend="aot_eager")
    for scale in (0.5, 0.25, 1, 2):
        assert torch.equal(compiled(scale), kda.chunk_kda(**call.arguments, scale=scale)[0])
    with pytest.raises(Exception, match=r"must be numbers|Observed exception"):
        compiled(True)
