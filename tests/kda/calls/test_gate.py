"""fused_kda_gate: the gate as a function of its own."""

import pytest
import torch
from versions import compiles_named_tuples

from kda import fused_kda_gate


def inputs(*leading, HV=3, K=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return rand(*leading, HV, K), rand(HV), rand(HV * K)


def written_out(g, A_log, dt_bias, lower_bound):
    x = g + (0 if dt_bias is None else dt_bias.view(g.shape[-2:]))
    rate = 1 if A_log is None else A_log.exp().view(-1, 1)
    return -rate * torch.log1p(x.exp()) if lower_bound is None else lower_bound / (1 + (-rate * x).exp())


CASES = [(True, True, None), (True, False, None), (True, True, -5.0), (False, True, -5.0), (False, False, -1.5)]


@pytest.mark.parametrize("leading", [(), (4,), (2, 3), (2, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("with_A,with_bias,bound", CASES)
def test_it_is_the_formula_with_any_leading_axes(leading, with_A, with_bias, bound):
    g, A_log, dt_bias = inputs(*leading)
    A_log, dt_bias = A_log if with_A else None, dt_bias if with_bias else None
    y = fused_kda_gate(g, A_log, dt_bias, bound, torch.float64)
    torch.testing.assert_close(y, written_out(g, A_log, dt_bias, bound), rtol=1e-13, atol=1e-15)
    assert (y <= 0).all()


@pytest.mark.parametrize("with_A,with_bias,bound", CASES)
def test_gradcheck(with_A, with_bias, bound):
    g, A_log, dt_bias = inputs(2, 2)
    arguments = (g, A_log if with_A else None, dt_bias if with_bias else None, bound, torch.float64)
    assert torch.autograd.gradcheck(fused_kda_gate, arguments)


def test_dtypes():
    g, A_log, dt_bias = inputs(7, dtype=torch.bfloat16)
    y = fused_kda_gate(g, A_log, dt_bias)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert g.grad.dtype == A_log.grad.dtype == dt_bias.grad.dtype == torch.bfloat16


def test_the_sum_of_the_bias_gradient_is_rounded_last():
    g = torch.zeros(4096, 1, 1, dtype=torch.bfloat16).requires_grad_()
    dt_bias = torch.zeros(1, dtype=torch.float32).requires_grad_()
    fused_kda_gate(g, torch.zeros(1), dt_bias).sum().backward()
    assert dt_bias.grad.item() == -2048.0


def test_parameters_of_any_shape():
    g, A_log, dt_bias = inputs(2)
    y = fused_kda_gate(g, A_log.view(1, 1, 3, 1), dt_bias.view(3, 5))
    assert torch.equal(y, fused_kda_gate(g, A_log, dt_bias))


def test_precomputed_and_in_kernel_gates_agree():
    import kda

    g, A_log, dt_bias = inputs(1, 40, HV=2)
    q, k, v = (torch.randn(1, 40, 2, 5, dtype=torch.float64) for _ in range(3))
    beta = torch.rand(1, 40, 2, dtype=torch.float64)
    a, _ = kda.chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    b, _ = kda.chunk_kda(q, k, v, fused_kda_gate(g, A_log, dt_bias, output_dtype=torch.float64), beta)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@compiles_named_tuples
def test_it_compiles_in_one_graph():
    torch._dynamo.reset()
    g, A_log, dt_bias = inputs(2)
    compiled = torch.compile(fused_kda_gate, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(g, A_log, dt_bias), fused_kda_gate(g, A_log, dt_bias))


def test_a_compiled_gate_takes_any_number_of_tokens():
    torch._dynamo.reset()
    compiled = torch.compile(lambda g: fused_kda_gate(g, lower_bound=-5.0), fullgraph=True, backend="eager")
    for T in (3, 5, 8):
        g = torch.randn(1, T, 2, 4)
        assert torch.equal(compiled(g), fused_kda_gate(g, lower_bound=-5.0))
