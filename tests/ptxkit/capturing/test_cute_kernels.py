"""Kernels of the CuTe DSL, compiled for fake tensors and run on the CPU from their PTX, against torch."""

from pathlib import Path

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cute_kernels as kernels  # noqa: E402
from cuda.bindings.driver import CUstream  # noqa: E402
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402

from ptxkit import capture  # noqa: E402
from ptxkit.compile import cutedsl  # noqa: E402

pytestmark = pytest.mark.simulated

TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
SCHEDULES = [dict(), dict(early=True), dict(schedule=1), dict(schedule=2)]


def fake(x):
    """Return what a matrix looks like to the compiler: its shape, and which mode is contiguous."""
    order = (1, 0) if x.stride(1) == 1 else (0, 1)
    return make_fake_compact_tensor(TYPES[x.dtype], tuple(x.shape), stride_order=order, assumed_align=128)


def build(target, host, *args):
    known = [fake(x) if isinstance(x, torch.Tensor) else x for x in args]
    return cutedsl.compile(host, *known, make_fake_stream(), target=target)


def sessions(target, host, *args):
    """Run one build under every schedule, and yield after each; constants are no arguments of what was built."""
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
    """Check that C = A B^T as in float64, within what fp32 loses along k; nothing found."""
    c = torch.empty(len(a), len(b))
    exact = a.double() @ b.double().T
    allowed = 2**-23 * a.shape[1] * (a.double().abs() @ b.double().abs().T)
    c.fill_(float("nan"))
    for session in sessions(target, host, a, b, c, *constants):
        assert session.findings == [] and len(session.runs) == 1
        assert ((c - exact).abs() <= allowed).all()
        c.fill_(float("nan"))


@pytest.mark.spread(every=3)
@pytest.mark.parametrize(("m", "n", "majors"), [
    (128, 64, "KK"), (128, 64, "MN"), (128, 96, "KN"), (128, 128, "MK"),
    (64, 64, "KK"), (64, 64, "MN"), (64, 96, "MK"), (64, 128, "KN"),
])
def test_a_product_of_tcgen05_from_shared_memory(m, n, majors):
    assert_products("sm100", kernels.umma, matrix(m, 64, majors[0]), matrix(n, 64, majors[1]), "one", True)


@pytest.mark.parametrize("b_major", ["K", "N"])
def test_a_product_of_tcgen05_with_a_from_tensor_memory(b_major):
    assert_products("sm100", kernels.umma, matrix(128, 64), matrix(64, 64, b_major), "tmem", True)


@pytest.mark.spread(every=2)
@pytest.mark.parametrize(("m", "n", "majors"), [(256, 64, "KK"), (256, 128, "MN"), (128, 64, "KK")])
def test_a_product_of_tcgen05_by_a_pair_of_ctas(m, n, majors):
    assert_products("sm100", kernels.umma, matrix(m, 64, majors[0]), matrix(n, 64, majors[1]), "pair", True)


@pytest.mark.spread(every=2)
@pytest.mark.parametrize(("n", "majors"), [(64, "KK"), (96, "KN"), (64, "MN")])
def test_a_product_of_wgmma_from_shared_memory(n, majors):
    assert_products("sm90", kernels.wgmma, matrix(64, 64, majors[0]), matrix(n, 64, majors[1]), False, True)


@pytest.mark.parametrize("b_major", ["K", "N"])
def test_a_product_of_wgmma_with_a_from_registers(b_major):
    assert_products("sm90", kernels.wgmma, matrix(64, 64), matrix(64, 64, b_major), True, True)


@pytest.mark.spread(every=2)
@pytest.mark.parametrize(("from_registers", "b_major"), [(False, "K"), (False, "N"), (True, "K")])
def test_a_cluster_shares_an_operand_by_multicast(from_registers, b_major):
    assert_products("sm90", kernels.wgmma, matrix(128, 64), matrix(64, 64, b_major), from_registers, True)


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(("target", "m"), [("sm90", 64), ("sm90", 128), ("sm100", 128)])
def test_a_product_through_the_pipelines_of_the_dsl(target, m, steps):
    host = kernels.wgmma_pipelined if target == "sm90" else kernels.umma_pipelined
    assert_products(target, host, matrix(m, 64 * steps), matrix(64, 64 * steps, "N"))


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("majors", ["KK", "MN"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_product_of_tcgen05_in_other_types(dtype, majors):
    a, b = (matrix(rows, 128, contiguous) for rows, contiguous in zip((128, 64), majors))
    assert_products("sm100", kernels.umma_pipelined, a.to(dtype), b.to(dtype))      # every bf16 is exact in tf32


@pytest.mark.spread(every=5)
@pytest.mark.parametrize("target", ["sm90", "sm100"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["K_INTER", "K_SW32", "K_SW64", "K_SW128"])
def test_a_tile_goes_through_every_swizzle(kind, dtype, target):
    x = torch.randint(8, (16, 64)).to(dtype)
    y = torch.zeros_like(x)
    expected = x * torch.arange(1, 65).to(dtype) + torch.arange(16).to(dtype)[:, None]
    for session in sessions(target, kernels.through_shared, x, y, SmemLayoutAtomKind[kind], True):
        assert session.findings == [] and torch.equal(y, expected)
        y.zero_()


def source_line(place):
    """Return the text of the line of cute_kernels.py that a finding names."""
    file, line = place.source.split(" < ")[0].rsplit(":", 1)
    assert file == kernels.__file__
    return Path(file).read_text().splitlines()[int(line) - 1].strip()


GEMM = "cute.gemm(mma, acc, "
FAULTS = {
    "the products are not waited for": (
        ("sm100", kernels.umma, matrix(128, 64), matrix(64, 64), torch.empty(128, 64), "one", False),
        ("race-read-write", GEMM, "cute.copy(copy, mine.partition_S(tile"),
    ),
    "A's way to tensor memory is not waited for": (
        ("sm100", kernels.umma, matrix(128, 64), matrix(64, 64), torch.empty(128, 64), "tmem", False),
        ("race-write-read", GEMM, "cute.copy(copy, row, tmem_cells)"),
    ),
    "no wait_group before the sums are read": (
        ("sm90", kernels.wgmma, matrix(64, 64), matrix(64, 64), torch.empty(64, 64), False, False),
        ("register-in-flight", "cute.autovec_copy(acc, held_c)", ""),      # the DSL's .loc of a wgmma is off by lines
    ),
    "no fence between the threads' writes and the TMA store": (
        ("sm90", kernels.through_shared, matrix(16, 64), matrix(16, 64), SmemLayoutAtomKind.K_SW128, False),
        ("proxy", "cute.copy(store, inside, outside)", "shared[row, column] = "),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_where_it_is_in_the_source(fault):
    launched, (kind, place, other) = FAULTS[fault]
    for session in sessions(*launched):
        found = [f for f in session.findings if f.kind == kind and f.other]
        assert found, session.findings
        assert source_line(found[0].place).startswith(place)
        assert source_line(found[0].other).startswith(other)
