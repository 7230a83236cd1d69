"""Kernels of the CuTe DSL, compiled for fake tensors and run on the CPU from their PTX, against torch."""

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cute_kernels as kernels  # noqa: E402
from cuda.bindings.driver import CUstream  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402

from kda.compile import cutedsl  # noqa: E402
from kda.simulator import capture  # noqa: E402

TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
SCHEDULES = [dict(), dict(early=True), dict(schedule=1), dict(schedule=2)]


def fake(x):
    """What a matrix looks like to the compiler: its shape, and which mode is contiguous."""
    order = (1, 0) if x.stride(1) == 1 else (0, 1)
    return make_fake_compact_tensor(TYPES[x.dtype], tuple(x.shape), stride_order=order, assumed_align=128)


def build(target, host, *args):
    known = [fake(x) if isinstance(x, torch.Tensor) else x for x in args]
    return cutedsl.compile(host, *known, make_fake_stream(), target=target)


def sessions(target, host, *args):
    """Runs one build under every schedule, and yields after each; constants are no arguments of what was built."""
    built = build(target, host, *args)
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    for options in SCHEDULES:
        with capture(arch=built.target.spelling, **options) as session:
            built(*tensors, CUstream(0))
        yield session


def matrix(rows, columns, contiguous="K", dtype=torch.bfloat16):
    x = torch.randn(rows, columns).to(dtype)
    return x if contiguous == "K" else x.T.contiguous().T


def assert_products(target, host, a, b, *constants):
    """C = A B^T as in float64, within what fp32 loses along k; nothing found."""
    c = torch.empty(len(a), len(b))
    exact = a.double() @ b.double().T
    allowed = 2**-23 * a.shape[1] * (a.double().abs() @ b.double().abs().T)
    c.fill_(float("nan"))
    for session in sessions(target, host, a, b, c, *constants):
        assert session.findings == [] and len(session.runs) == 1
        assert ((c - exact).abs() <= allowed).all()
        c.fill_(float("nan"))


@pytest.mark.parametrize("majors", ["KK", "KN", "MK", "MN"])
@pytest.mark.parametrize(("m", "n"), [(128, 64), (128, 128), (64, 64), (64, 96)])
def test_a_product_of_tcgen05_from_shared_memory(m, n, majors):
    assert_products("sm100", kernels.umma, matrix(m, 64, majors[0]), matrix(n, 64, majors[1]), True)
