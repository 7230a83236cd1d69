"""torch.func, forward-mode AD, and what has no derivative in them."""

import contextlib
import importlib

import pytest
import torch
from naive import DIFFERENTIABLE, OPTIONS, definition, distance, gradients, make
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import kda


def outputs(call, names):
    """Return o and the final states as a function of the tensors called `names`."""
    rest = {n: x for n, x in call.tensors.items() if n not in names} | call.options
    return lambda *tensors: kda.chunk_kda(**dict(zip(names, tensors)), **rest, output_final_state=True)


def exact_outputs(call, names):
    return lambda *tensors: definition(type(call)(call.tensors | dict(zip(names, tensors)), call.options))


def differentiable(call):
    names = [n for n in DIFFERENTIABLE if n in call.tensors]
    generator = torch.Generator().manual_seed(3)
    tensors = tuple(call.tensors[n] for n in names)
    return names, tensors, tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in tensors)


def pushed(function, tensors, tangents):
    """Return the tangents of a function's results, by dual tensors."""
    with forward_ad.dual_level():
        found = function(*map(forward_ad.make_dual, tensors, tangents))
        return [forward_ad.unpack_dual(y).tangent for y in found]


SMALL = make(B=1, T=5)


def loss(q):
    """Return a number that depends on q."""
    return kda.chunk_kda(**SMALL.arguments | {"q": q})[0].square().sum()


def q_and_tangent():
    return SMALL.tensors["q"].clone(), SMALL.tensors["k"]


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("watched", [False, True], ids=["plain", "profiled"])
def test_tangents_are_those_of_the_definition(options, watched):
    call = make([0, 1, 34], **options)
    names, tensors, tangents = differentiable(call)
    _, exact = jvp(exact_outputs(call, names), tensors, tangents)
    with torch.profiler.profile() if watched else contextlib.nullcontext():
        found = pushed(outputs(call, names), tensors, tangents)
        _, transformed = jvp(outputs(call, names), tensors, tangents)
    for x, y, z in zip(exact, found, transformed, strict=True):
        assert distance(y, x) < 1e-12 and torch.equal(y, z)


def test_one_tangent_is_enough_and_none_gives_none():
    call = make(B=2, T=9, gate="softplus")
    names, tensors, tangents = differentiable(call)
    for name, x, tangent in zip(names, tensors, tangents):
        _, exact = jvp(exact_outputs(call, [name]), (x,), (tangent,))
        assert all(distance(y, e) < 1e-12 for y, e in zip(pushed(outputs(call, [name]), (x,), (tangent,)), exact))
    with forward_ad.dual_level():
        o, ht = outputs(call, names)(*tensors)
        assert forward_ad.unpack_dual(o).tangent is None and forward_ad.unpack_dual(ht).tangent is None


def test_tangents_of_intermediate_states_and_of_what_requires_a_gradient():
    call = make(B=1, T=40)
    names, tensors, tangents = differentiable(call)
    with torch.no_grad():
        states = outputs(call.with_options(return_intermediate_states=True), names)
        ahead, behind = (states(*(x + s * t for x, t in zip(tensors, tangents)))[2] for s in (1e-6, -1e-6))
        assert distance(pushed(states, tensors, tangents)[2], (ahead - behind) / 2e-6) < 1e-7
    expected = pushed(outputs(call, names), tensors, tangents)
    found = pushed(outputs(call, names), [x.clone().requires_grad_() for x in tensors], tangents)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_the_two_jacobians_agree():
    call = make([1, 4], H=1, gate="bounded", beta="sigmoid")
    names, tensors, _ = differentiable(call)
    numbers = tuple(range(len(names)))
    forward = jacfwd(outputs(call, names), argnums=numbers)(*tensors)
    reverse = jacrev(outputs(call, names), argnums=numbers)(*tensors)
    exact = jacrev(exact_outputs(call, names), argnums=numbers)(*tensors)
    for ours in (forward, reverse):
        for of_output, exact_of_output in zip(ours, exact):
            assert all(distance(x, y) < 1e-11 for x, y in zip(of_output, exact_of_output))


def test_vjp_gives_all_gradients():
    call = make([0, 33, 1], HV=4, gate="softplus", beta="2*sigmoid", tail=3)
    names, tensors, _ = differentiable(call)
    _, pull = vjp(outputs(call, names), *tensors)
    exact = gradients(call)
    assert all(distance(x, exact[n]) < 1e-12 for n, x in zip(names, pull((call.do, call.dht))))


def test_grad_keeps_what_disable_recompute_keeps():
    call = make(B=1, T=40, disable_recompute=True)
    names, tensors, _ = differentiable(call)

    def number(*tensors):
        o, ht = outputs(call, names)(*tensors)
        return (o * call.do).sum() + (ht * call.dht).sum()

    exact = gradients(call)
    found = grad(number, argnums=tuple(range(len(names))))(*tensors)
    assert all(distance(x, exact[n]) < 1e-12 for n, x in zip(names, found))


def test_vmap_is_a_loop_over_calls():
    q, tangent = q_and_tangent()
    several = torch.stack([q, q + tangent, 2 * q], 1)
    assert torch.equal(vmap(loss, in_dims=1)(several), torch.stack([loss(x) for x in several.unbind(1)]))
    each = torch.stack([grad(loss)(x) for x in several.unbind(1)])
    assert torch.equal(vmap(grad(loss), in_dims=1)(several), each)
    assert torch.equal(grad(lambda x: vmap(loss, in_dims=1)(x).sum())(several), each.movedim(0, 1))
    along = torch.stack([jvp(loss, (x,), (tangent,))[1] for x in several.unbind(1)])
    assert torch.equal(vmap(lambda x: jvp(loss, (x,), (tangent,))[1], in_dims=1)(several), along)


def test_vmap_of_the_recurrence_and_of_a_backward():
    call = make(B=1, T=4, chunk_size=None)

    def recurrent(q):
        return kda.fused_recurrent_kda(**call.arguments | {"q": q}, output_final_state=True)

    def backward(do):
        return kda.chunk_kda_bwd(**call.arguments, do=do)[:5]

    q, do = call.tensors["q"], call.do
    for function, x in ((recurrent, q), (backward, do)):
        found = vmap(function)(torch.stack([x, -x]))
        for both, one, other in zip(found, function(x), function(-x)):
            assert torch.equal(both, torch.stack([one, other]))


@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_gate_has_all_of_it(bound):
    g, A_log, dt_bias = torch.randn(4, 3, 5).double(), torch.randn(3).double(), torch.randn(15).double()

    def gate(g, A_log, dt_bias):
        return kda.fused_kda_gate(g, A_log, dt_bias, bound, torch.float64)

    def exact(g, A_log, dt_bias):
        x, rate = g + dt_bias.view(3, 5), A_log.exp().view(3, 1)
        return -rate * torch.log1p(x.exp()) if bound is None else bound / (1 + (-rate * x).exp())

    x = g, A_log, dt_bias
    tangents = tuple(map(torch.randn_like, x))
    along = jvp(exact, x, tangents)[1]
    # exp(y) multiplies a rounding of y by |y|; eight of them is twice what a gradient has
    largest = (A_log.exp().view(3, 1) * (g + dt_bias.view(3, 5))).abs().max().item()
    budget = 8 * torch.finfo(torch.float64).eps * max(1.0, largest)
    assert distance(jvp(gate, x, tangents)[1], along) < budget
    assert distance(pushed(lambda *x: (gate(*x),), x, tangents)[0], along) < budget
    for transform in (jacfwd, jacrev):
        found, expected = (transform(function, argnums=(0, 1, 2))(*x) for function in (gate, exact))
        assert all(distance(y, e) < budget for y, e in zip(found, expected))
    assert torch.equal(vmap(gate, in_dims=(0, None, None))(*x), torch.stack([gate(row, A_log, dt_bias) for row in g]))


SECOND = {
    "grad of grad": lambda f, x, t: grad(lambda q: (grad(f)(q) * t).sum())(x),
    "jvp of grad": lambda f, x, t: jvp(grad(f), (x,), (t,)),
    "grad of jvp": lambda f, x, t: grad(lambda q: jvp(f, (q,), (t,))[1])(x),
    "jvp of jvp": lambda f, x, t: jvp(lambda q: jvp(f, (q,), (t,))[1], (x,), (t,)),
    "hessian": lambda f, x, t: hessian(f)(x),
    "the gradient of a tangent": lambda f, x, t: pushed(lambda q: (f(q),), [x.requires_grad_()], [t])[0].backward(),
}


@pytest.mark.parametrize("twice", SECOND.values(), ids=SECOND)
def test_a_second_derivative_is_refused_in_every_mode(twice):
    with pytest.raises(kda.KdaError, match="chunk_kda has no second derivative"):
        twice(loss, *q_and_tangent())
    with pytest.raises(kda.KdaError, match="fused_kda_gate has no second derivative"):
        twice(lambda g: kda.fused_kda_gate(g, torch.zeros(2), output_dtype=g.dtype).sum(), *q_and_tangent())


def test_a_tangent_of_a_backward_is_refused():
    call = make(B=1, T=4)
    with pytest.raises(kda.KdaError, match="chunk_kda has no second derivative"):
        jvp(lambda do: kda.chunk_kda_bwd(**call.arguments, do=do).dq, (call.do,), (call.do,))


FIRST = {
    "grad": lambda f, x, t: grad(f)(x),
    "jvp": lambda f, x, t: jvp(f, (x,), (t,)),
    "a dual tensor": lambda f, x, t: pushed(lambda q: (f(q),), [x], [t]),
}


@pytest.mark.parametrize("once", FIRST.values(), ids=FIRST)
def test_the_recurrence_has_no_derivative_in_any_mode(once):
    call = make(B=1, T=5, chunk_size=None)

    def recurrent(q):
        return kda.fused_recurrent_kda(**call.arguments | {"q": q})[0].sum()

    with pytest.raises(kda.KdaError, match="Train with chunk_kda"):
        once(recurrent, *q_and_tangent())


def test_an_operator_itself_refuses_tangents():
    g = torch.randn(2, 3)
    with forward_ad.dual_level(), pytest.raises(kda.KdaError, match="tangents would be lost"):
        torch.ops.kda.gate(forward_ad.make_dual(g, g), None, None, -5.0, torch.float32)


@pytest.mark.parametrize("function", [loss, lambda q: kda.fused_kda_gate(q, None, None, -5.0).sum()])
def test_a_compiled_call_refuses_tangents(function):
    torch._dynamo.reset()
    q, tangent = q_and_tangent()
    compiled = torch.compile(lambda q: jvp(function, (q,), (tangent,))[1], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"was requested inside of torch\.compile"):
        compiled(q)


def arguments_of(schema):
    """Return a value for every argument of an operator."""
    values = {"Tensor": torch.zeros(1, 2, 1, 4), "float": 1.0, "bool": False, "int": 0, "SymInt": 0, "str": "nothing",
              "List[Tensor]": [], "number": 1.0}
    return [None if str(a.type).startswith("Optional") else values[str(a.type)] for a in schema.arguments]


def operators():
    importlib.import_module("kda.nn")
    importlib.import_module("kda.parallel")

    return {s.name: s for s in torch._C._jit_get_all_schemas() if s.name.startswith("kda::")}


def test_every_registered_operator_refuses_tangents():
    assert len(operators()) >= 17
    for name, schema in operators().items():
        operator = getattr(torch.ops.kda, name.removeprefix("kda::"))
        with forward_ad.dual_level(), pytest.raises(kda.KdaError, match="forward-mode AD must not be used"):
            operator(*arguments_of(schema))


def step_of_one_token():
    q, k, v, g = torch.randn(4, 1, 1, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    given = dict(q=q, k=k, g=g, beta=q[..., 0], lower_bound=-5.0, backend="reference")
    return lambda v: kda.decode_step(**given, v=v, states=torch.zeros(1, 1, 4, 4, dtype=torch.float64)), v


def test_decode_step_refuses_forward_mode_instead_of_losing_tangents():
    step, v = step_of_one_token()
    with pytest.raises(kda.KdaError, match="decode_step: forward-mode AD"):
        jvp(step, (v,), (torch.ones_like(v),))
    with forward_ad.dual_level(), pytest.raises(kda.KdaError, match="decode_step: forward-mode AD"):
        step(forward_ad.make_dual(v, torch.ones_like(v)))
    with pytest.raises(kda.KdaError):
        grad(lambda v: step(v).sum())(v)


def test_a_step_of_the_layer_has_the_tangent_of_its_parts():
    torch.manual_seed(0)
    layer = kda.nn.KimiDeltaAttention(32, 2, 8, layer_idx=0, backend="reference").double()
    x = torch.randn(1, 12, 32, dtype=torch.float64)
    cache = kda.nn.Cache()
    with torch.no_grad():
        layer(x[:, :10], cache=cache)
        layer(x[:, 10:11], cache=cache)

        def step(token):
            return layer(token, cache=cache.copy())

        tangent = torch.ones_like(x[:, 11:])
        _, found = jvp(step, (x[:, 11:],), (tangent,))
        exact = (step(x[:, 11:] + 1e-6 * tangent) - step(x[:, 11:] - 1e-6 * tangent)) / 2e-6
    assert distance(found, exact) < 1e-7 and exact.abs().max() > 0.1


def of_v(function):
    """Return a function of v alone."""
    q, k, g, beta = (SMALL.tensors[n] for n in ("q", "k", "g", "beta"))
    return lambda v: function(q, k, v, g, beta).sum()


def test_a_forward_without_autograd_has_its_gradient_in_torch_func_and_a_backward_refuses_a_second_one():
    v = SMALL.tensors["v"]
    found = grad(of_v(lambda *x: kda.chunk_kda_fwd(*x).o))(v)
    assert torch.equal(found, grad(of_v(lambda *x: kda.chunk_kda(*x)[0]))(v)) and found.any()
    with pytest.raises(kda.KdaError, match=r"its backward \(chunk_kda_bwd"):
        grad(of_v(lambda *x: kda.chunk_kda_bwd(*x, do=torch.ones_like(v)).dq))(v)


def test_functions_without_autograd_serve_an_autograd_function_of_others():
    class Others(torch.autograd.Function):
        @staticmethod
        def forward(*x):
            return kda.chunk_kda_fwd(*x).o

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, do):
            return kda.chunk_kda_bwd(*ctx.saved_tensors, do=do)[:5]

    v = SMALL.tensors["v"]
    assert torch.equal(grad(of_v(Others.apply))(v), grad(of_v(lambda *x: kda.chunk_kda(*x)[0]))(v))


def test_vmap_over_a_batch_of_none():
    q = SMALL.tensors["q"]
    rest = SMALL.arguments
    found = vmap(lambda q: kda.chunk_kda(**rest | {"q": q})[0])(q.new_zeros(0, *q.shape))
    assert found.shape == (0, *SMALL.tensors["v"].shape)


def test_gradients_of_a_batch_of_outputs_are_those_one_by_one():
    call = make([3, 4], H=1, gate="bounded", beta="sigmoid")
    names, tensors, _ = differentiable(call)
    tensors = [x.clone().requires_grad_() for x in tensors]
    o, ht = outputs(call, names)(*tensors)
    do, dht = torch.randn(3, *o.shape, dtype=o.dtype), torch.randn(3, *ht.shape, dtype=o.dtype)
    many = torch.autograd.grad((o, ht), tensors, (do, dht), is_grads_batched=True, retain_graph=True)
    for i in range(3):
        one = torch.autograd.grad((o, ht), tensors, (do[i], dht[i]), retain_graph=True)
        assert all(torch.equal(x[i], y) for x, y in zip(many, one))
    jacobian = torch.autograd.functional.jacobian(loss, SMALL.tensors["q"], vectorize=True)
    assert torch.equal(jacobian, grad(loss)(SMALL.tensors["q"]))


def test_torch_func_inside_of_torch_compile_runs_in_eager_mode_or_says_why_not():
    q = SMALL.tensors["q"]
    compiled = torch.compile(lambda q: grad(loss)(q), backend="eager")
    assert torch.equal(compiled(q), grad(loss)(q))
    torch._dynamo.reset()
    several = torch.stack([q, 2 * q])
    assert torch.equal(torch.compile(lambda q: vmap(loss)(q), backend="eager")(several), vmap(loss)(several))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"torch\.func was requested inside of torch\.compile"):
        torch.compile(lambda q: grad(loss)(q), backend="eager", fullgraph=True)(q)
    torch._dynamo.reset()
