"""Kernels that Triton compiles, run on the CPU from their PTX, against torch."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")

import triton_kernels as kernels

from ptxkit import capture
from ptxkit.compile import triton as door

pytestmark = pytest.mark.simulated

every = pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
SEEDS = range(1, 4)
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}


def run(fn, arch, grid, arguments, constants, options=None, schedules=(0,), **compiling):
    """Compile fn for the types of its arguments and run it under each schedule; no run may find anything wrong."""
    signature = {name: TYPES[x.dtype] if isinstance(x, torch.Tensor) else "i32" for name, x in arguments.items()}
    divisible = [name for name, x in arguments.items() if isinstance(x, torch.Tensor)]
    built = door.compile(fn, signature, constants, target=arch, divisible=divisible, **compiling)
    if os.environ.get("KDA_ON_SILICON"):
        import silicon

        silicon.triton(built, grid, arguments)
    for seed in schedules:
        with capture(arch=built.target.spelling, schedule=seed, **(options or {})) as session:
            built.launch(grid, *arguments.values())
        assert not session.findings, f"schedule {seed}:\n" + "\n".join(map(str, session.findings[:5]))
    return session.runs[-1]


def empty(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)


@pytest.mark.spread(every=5)
@every
@pytest.mark.parametrize("shape", [(16, 16, 16), (64, 64, 64), (128, 64, 128), (32, 128, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_product_is_that_of_torch(arch, shape, dtype):
    M, N, K = shape
    a, b, c = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype), empty(M, N)
    constants = dict(M=M, N=N, K=K, BK=min(K, 64), A_T=False, B_T=False, TF32=True)
    run(kernels.dot, arch, 1, dict(a=a, b=b, c=c), constants)
    tolerance = 2e-3 if dtype == torch.float32 else 1e-5  # tf32 keeps 10 bits of the inputs
    expected = a.double() @ b.double()
    assert (c - expected).abs().max() <= tolerance * (a.double().abs() @ b.double().abs()).max()


@pytest.mark.spread(every=5)
@every
@pytest.mark.parametrize("transposed", [(True, False), (False, True), (True, True)], ids=["A", "B", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operands_may_lie_transposed(arch, transposed, dtype):
    M, N, K = 64, 64, 64
    a, b, c = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype), empty(M, N)
    tensors = dict(a=a.T.contiguous() if transposed[0] else a, b=b.T.contiguous() if transposed[1] else b, c=c)
    constants = dict(M=M, N=N, K=K, BK=32, A_T=transposed[0], B_T=transposed[1], TF32=True)
    run(kernels.dot, arch, 1, tensors, constants)
    tolerance = 2e-3 if dtype == torch.float32 else 1e-5
    assert (c - a.double() @ b.double()).abs().max() <= tolerance * (a.double().abs() @ b.double().abs()).max()


@every
def test_a_result_may_be_an_operand(arch):
    a, b, c = (torch.randn(64, 64).bfloat16() / 8 for _ in range(3))
    out = empty(64, 64)
    run(kernels.chained_dots, arch, 1, dict(a=a, b=b, c=c, out=out), dict(N=64), schedules=(0, *SEEDS))
    between = (a.double() @ b.double()).bfloat16().double()
    assert (out - between @ c.double()).abs().max() <= 1e-2


@every
@pytest.mark.parametrize("num_warps", [1, 4])
def test_reductions_over_rows(arch, num_warps):
    x = torch.randn(50, 128)
    sums, maxima, indices = empty(50), empty(50), empty(50, dtype=torch.int32)
    arguments = dict(x=x, sums=sums, maxima=maxima, indices=indices, rows=50)
    run(kernels.reductions, arch, 4, arguments, dict(COLUMNS=128, ROWS=16), schedules=(0, *SEEDS), num_warps=num_warps)
    assert torch.equal(maxima, x.max(dim=1).values) and torch.equal(indices.long(), x.argmax(dim=1))
    assert torch.allclose(sums, x.sum(dim=1), atol=1e-4)


@every
def test_softmax(arch):
    x = 4 * torch.randn(6, 200)
    y = empty(6, 200)
    run(kernels.softmax, arch, 6, dict(x=x, y=y, columns=200), dict(BLOCK=256), schedules=(0, *SEEDS))
    assert torch.allclose(y, torch.softmax(x, dim=1), atol=1e-6)


@every
def test_scans_along_both_axes(arch):
    x = 1 + torch.randn(64, 32) / 16
    sums, products = empty(64, 32), empty(64, 32)
    run(kernels.scans, arch, 1, dict(x=x, sums=sums, products=products), dict(T=64, K=32), schedules=(0, *SEEDS))
    assert torch.allclose(sums, x.cumsum(0), atol=1e-4)
    assert torch.allclose(products, x.cumprod(1), atol=1e-4)


@every
def test_atomics_from_all_programs(arch):
    x = torch.randint(0, 10, (1000,), dtype=torch.int32)
    counts, total = torch.zeros(10, dtype=torch.int32), torch.zeros(1)
    run(kernels.histogram, arch, 4, dict(x=x, counts=counts, total=total, n=1000), dict(BLOCK=256))
    assert torch.equal(counts.long(), torch.bincount(x, minlength=10))
    assert total.item() == x.sum().item()


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensor_descriptors_made_on_the_device(arch, dtype):
    x = torch.randn(100, 64).to(dtype)
    y = torch.zeros_like(x)
    arguments = dict(x=x, y=y, rows=100, columns=64)
    run(kernels.descriptor_copy, arch, (4, 2), arguments, dict(R=32, C=32), schedules=(0, *SEEDS))
    assert torch.equal(y, x * 2)


@every
def test_a_sort(arch):
    x = torch.randn(3, 128)
    y = empty(3, 128)
    run(kernels.sort_rows, arch, 3, dict(x=x, y=y), dict(N=128), schedules=(0, *SEEDS))
    assert torch.equal(y, x.sort(dim=1).values)
