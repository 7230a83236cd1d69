"""Runs kernels of public projects, unmodified, under the simulator, checks their results, and writes a page.

    python benchmarks/kernels_of_others.py --sources FOLDER [--only TEXT] [--page docs/results/kernels_of_others.md]

FOLDER holds checkouts, which are cloned there where they are missing: `cuda-samples`, `cutlass`; and `liger`, where
Liger-Kernel is installed with `pip install --target FOLDER/liger --no-deps liger-kernel==0.6.4`. The CUDA samples need
nvcc. Each case calls a project's kernel or its host function on CPU tensors and compares the result with torch's.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import math
import pathlib
import subprocess
import sys
import time
import traceback

import torch
import torch.nn.functional as F

import kda.simulator

PROJECTS = {  # name -> (title, version, where it is from)
    "cuda-samples": ("CUDA samples", "c94ff366aed1", "https://github.com/NVIDIA/cuda-samples"),
    "cutlass": ("CUTLASS, CuTe DSL examples", "7107b05535f8", "https://github.com/NVIDIA/cutlass"),
    "liger": ("Liger-Kernel (Triton)", "0.6.4", ""),
}
CASES: list = []  # (project, kernel, arch, function of the sources' folder: (correct, findings))
COPIES = "harmless: warps that hold copies of a block read it, and do not store"
VERDICTS = {  # (part of a kernel's name, finding, or "NO": a wrong result) -> what reading the kernel says
    ("fp16ScalarProduct", "NO"): "the kernel starts at threadIdx + blockDim + blockIdx, where * is meant",
    ("simple_wmma_bf16gemm", "NO"): "the kernel takes tile (k, n) of B where (n, k) is meant",
    ("MultiStageLargeChunk", "NO"): "the kernel reads B by A's offsets: its own test has constant matrices",
    ("MultiStageLargeChunk", "race-write-write"): "true: `<=` starts a fifth copy into four buffers",
    ("MultiStageLargeChunk", "race-read-write"): "true, for the same reason",
    ("reduceSinglePass<", "race-write-read"): "true by the memory model: no fence between the ticket and the reads",
    ("reduceSinglePass<", "race-write-write"): "true by the memory model, for the same reason",
    ("cross_entropy", "race-read-write"): COPIES,
    ("rope", "race-read-write"): COPIES,
    ("rope", "race-write-read"): COPIES,
}


def case(project, kernel, arch):
    def add(function):
        CASES.append((project, kernel, arch, function))
        return function

    return add


# ---- CUDA samples: one launch, by kda.simulator.run


def sample(path, kernel, arch, grid, block, make, **options):
    """make(): (arguments, a function that says whether they are right after the launch)."""

    @case("cuda-samples", f"{path.split('/')[-2]}: {options.pop('title', kernel)}", arch)
    def launched(folder):
        root = folder / "cuda-samples"
        arguments, correct = make()
        run = kda.simulator.run(
            root / "Samples" / path, kernel, arch=arch, compiler="nvcc", grid=grid, block=block, args=arguments,
            include=[root / "Common"], **options,
        )  # fmt: skip
        return correct(), [run]


def _close(got, wanted, **how):
    return lambda: torch.allclose(got, wanted, **how)


def _equal(got, wanted):
    return lambda: torch.equal(got, wanted)


def _vector_add():
    a, b, c = torch.randn(1000), torch.randn(1000), torch.zeros(1000)
    return [a, b, c, 1000], _equal(c, a + b)


def _matmul(m=64, n=96, k=128):
    a, b, c = torch.randn(m, k), torch.randn(k, n), torch.zeros(m, n)
    return [c, a, b, k, n], _close(c, a @ b, rtol=1e-4, atol=1e-4)


def _halves():
    a, b, out = torch.randn(512).half(), torch.randn(512).half(), torch.zeros(4)
    return [a, b, out, 256], lambda: math.isclose(out.sum(), (a.float() * b.float()).sum(), abs_tol=0.5)


def _scan():
    x, out = torch.randint(0, 100, (4, 512), dtype=torch.int32), torch.zeros(4, 512, dtype=torch.int32)
    return [out, x, 512], _equal(out, (x.cumsum(1) - x).int())


def _shuffled_scan():
    x = torch.randint(0, 100, (512,), dtype=torch.int32)
    wanted, sums = x.view(2, 256).cumsum(1).int().flatten(), torch.zeros(2, dtype=torch.int32)
    return [x, 32, sums], lambda: torch.equal(x, wanted) and torch.equal(sums, wanted.view(2, 256)[:, -1])


def _sort(dtype=torch.int32, ups=(1,)):
    keys = torch.randint(0, 10_000, (2, 512), dtype=dtype)
    values = torch.arange(1024, dtype=dtype).view(2, 512)
    to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)

    def correct():
        return torch.equal(to_keys, keys.sort(1).values) and torch.equal(keys.flatten()[to_values.long()], to_keys)

    return [to_keys, to_values, keys, values, 512, *ups], correct


def _scalar_products():
    a, b, c = torch.randn(8, 512), torch.randn(8, 512), torch.zeros(8)
    return [c, a, b, 8, 512], _close(c, (a * b).sum(1), rtol=1e-4, atol=1e-4)


def _reduction():
    x, out = torch.randn(2048), torch.zeros(64)
    return [x, out, 2048], lambda: math.isclose(out[0], x.sum(), abs_tol=1e-2)


def _wmma(dtype, d_dtype):
    def make():
        whole = dtype in (torch.uint8,)
        a, b = (torch.randint(0, 3, (64, 64)) if whole else torch.randn(64, 64) for _ in range(2))
        a, b = a.to(dtype), b.to(dtype)  # B by columns
        c = torch.randint(0, 9, (64, 64)).to(d_dtype) if whole else torch.randn(64, 64).to(d_dtype)
        d = torch.zeros(64, 64, dtype=d_dtype)
        wanted = (2 * (a.double() @ b.double().T) + 3 * c.double()).to(d_dtype)
        tolerance = 1e-3 if dtype == torch.float32 else 1e-10 if dtype == torch.float64 else 1e-4
        return [a, b, c, d, 64, 64, 64, 2, 3], lambda: torch.allclose(d, wanted, rtol=tolerance, atol=30 * tolerance)

    return make


def _atomics():
    out, n = torch.zeros(11, dtype=torch.int32), 4 * 128
    out[8] = 0xFF
    return [out], lambda: out[:2].tolist() == [10 * n, -10 * n] and out[3:5].tolist() == [n - 1, 0]


def _lanes():
    out = torch.zeros(100, dtype=torch.int32)
    return [out, 100], _equal(out, (torch.arange(100) % 32).int())


def _transposed():
    x, out = torch.randn(64, 64), torch.zeros(64, 64)
    return [out, x, 64, 64], _equal(out, x.T.contiguous())


def _histogram():
    x, out = torch.randint(0, 256, (8192,), dtype=torch.uint8), torch.zeros(2, 256, dtype=torch.int32)
    return [out, x, 2048], lambda: torch.equal(out.sum(0), torch.bincount(x.long(), minlength=256))


def _walsh():
    x, out = torch.randint(-9, 9, (2, 256)).float(), torch.zeros(2, 256)
    h = torch.ones(1, 1)
    while len(h) < 256:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return [out, x, 8], _equal(out, x @ h)


def _black_scholes():
    n = 256
    price, strike, years = torch.rand(n) * 25 + 5, torch.rand(n) * 99 + 1, torch.rand(n) * 9.75 + 0.25
    call, put, r, v = torch.zeros(n), torch.zeros(n), 0.02, 0.3
    d1 = ((price / strike).log() + (r + v * v / 2) * years) / (v * years.sqrt())
    d2, cdf = d1 - v * years.sqrt(), lambda x: (1 + torch.erf(x / 2**0.5)) / 2
    wanted = price * cdf(d1) - strike * (-r * years).exp() * cdf(d2)
    parity = wanted - price + strike * (-r * years).exp()
    right = lambda: torch.allclose(call, wanted, atol=1e-3) and torch.allclose(put, parity, atol=1e-3)  # noqa: E731
    return [call, put, price, strike, years, r, v, n], right


def _filtered():
    x = torch.randint(-50, 50, (1000,), dtype=torch.int32)
    out, count = torch.zeros(1000, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    wanted = x[x > 0].sort().values
    return [out, count, x, 1000], lambda: torch.equal(out[: int(count)].sort().values, wanted)


def _odd_and_even():
    x, odds, sums = torch.randint(0, 50, (512,), dtype=torch.int32), *torch.zeros(2, 2, dtype=torch.int32)
    odd = x[x % 2 == 1]
    return [x, odds, sums, 512], lambda: (odds[0], *sums) == (len(odd), odd.sum(), x.sum() - odd.sum())


INTRO, CONCEPTS, FEATURES = "0_Introduction", "2_Concepts_and_Techniques", "3_CUDA_Features"
sample(f"{INTRO}/vectorAdd/vectorAdd.cu", "vectorAdd", "sm_80", 4, 256, _vector_add)
sample(f"{INTRO}/matrixMul/matrixMul.cu", "_Z13MatrixMulCUDAILi16EEvPfS0_S0_ii", "sm_80", (6, 4), (16, 16), _matmul,
       title="MatrixMulCUDA<16>")  # fmt: skip
for name in ("intrinsics", "native"):
    sample(f"{INTRO}/fp16ScalarProduct/fp16ScalarProduct.cu", f"scalarProductKernel_{name}", "sm_80", 4, 128, _halves)
sample(f"{INTRO}/simpleAtomicIntrinsics/simpleAtomicIntrinsics.cu", "testKernel", "sm_80", 4, 128, _atomics)
sample(f"{CONCEPTS}/scan/scan.cu", "scanExclusiveShared", "sm_80", 2, 256, _scan)
sample(f"{CONCEPTS}/shfl_scan/shfl_scan.cu", "shfl_scan_test", "sm_80", 2, 256, _shuffled_scan, dynamic_shared=32)
sample(f"{CONCEPTS}/sortingNetworks/bitonicSort.cu", "bitonicSortShared", "sm_80", 1, 512, _sort)
sample(f"{INTRO}/mergeSort/mergeSort.cu", "_Z21mergeSortSharedKernelILj1EEvPjS0_S0_S0_j", "sm_80", 1, 512,
       lambda: _sort(ups=()), title="mergeSortSharedKernel<1>")  # fmt: skip
sample(f"{CONCEPTS}/scalarProd/scalarProd.cu", "scalarProdGPU", "sm_80", 2, 256, _scalar_products)
for kernel in ("reduceMultiPass", "reduceSinglePass"):
    sample(f"{CONCEPTS}/threadFenceReduction/threadFenceReduction.cu", f"_Z{len(kernel)}{kernel}ILj128ELb1EEvPKfPfj",
           "sm_80", 1 if "Multi" in kernel else 8, 128, _reduction, dynamic_shared=512,
           title=f"{kernel}<128, true>")  # fmt: skip
sample(f"{CONCEPTS}/reductionMultiBlockCG/reductionMultiBlockCG.cu", "reduceSinglePassMultiBlockCG", "sm_80", 4, 128,
       _reduction, dynamic_shared=1024)  # fmt: skip
sample(f"{CONCEPTS}/histogram/histogram256.cu", "histogram256Kernel", "sm_80", 2, 192, _histogram)
sample(f"{CONCEPTS}/inlinePTX/inlinePTX.cu", "sequence_gpu", "sm_80", 1, 128, _lanes)
for name, (kernel, types) in {
    "cudaTensorCoreGemm": ("simple_wmma_gemm", (torch.float16, torch.float32)),
    "bf16TensorCoreGemm": ("simple_wmma_bf16gemm", (torch.bfloat16, torch.float32)),
    "tf32TensorCoreGemm": ("simple_wmma_tf32gemm", (torch.float32, torch.float32)),
    "immaTensorCoreGemm": ("simple_wmma_gemm_imma", (torch.uint8, torch.int32)),
    "dmmaTensorCoreGemm": ("simple_wmma_gemm", (torch.float64, torch.float64)),
}.items():
    grid = (2, 2) if "dmma" in name else (1, 1)
    sample(f"{FEATURES}/{name}/{name}.cu", kernel, "sm_80", grid, (128, 4), _wmma(*types))
sample(f"{FEATURES}/globalToShmemAsyncCopy/globalToShmemAsyncCopy.cu",
       "_Z38MatrixMulAsyncCopyMultiStageLargeChunkILi16EEvPfPKfS2_ii", "sm_80", (6, 4), (16, 16), _matmul,
       title="MatrixMulAsyncCopyMultiStageLargeChunk<16>")  # fmt: skip
sample(f"{FEATURES}/globalToShmemAsyncCopy/globalToShmemAsyncCopy.cu",
       "_Z29MatrixMulAsyncCopySingleStageILi16EEvPfPKfS2_ii", "sm_80", (6, 4), (16, 16), _matmul,
       title="MatrixMulAsyncCopySingleStage<16>")  # fmt: skip
sample(f"{FEATURES}/warpAggregatedAtomicsCG/warpAggregatedAtomicsCG.cu", "filter_arr", "sm_80", 2, 256, _filtered)
sample(f"{FEATURES}/binaryPartitionCG/binaryPartitionCG.cu", "oddEvenCountAndSumCG", "sm_80", 2, 128, _odd_and_even)
sample("5_Domain_Specific/BlackScholes/BlackScholes.cu", "BlackScholesGPU", "sm_80", 1, 128, _black_scholes)
sample("5_Domain_Specific/fastWalshTransform/fastWalshTransform.cu", "fwtBatch1Kernel", "sm_80", 2, 64, _walsh,
       dynamic_shared=1024)  # fmt: skip
for kernel in ("transposeNaive", "transposeCoalesced", "transposeNoBankConflicts", "transposeDiagonal"):
    sample("6_Performance/transpose/transpose.cu", kernel, "sm_80", (2, 2), (32, 16), _transposed)


# ---- Liger-Kernel: its host functions on CPU tensors, their Triton kernels captured


def liger(kernel, arch="sm_90a"):
    def add(function):
        @case("liger", kernel, arch)
        def captured(folder):
            if str(folder / "liger") not in sys.path:
                sys.path.insert(0, str(folder / "liger"))
            with kda.simulator.capture(arch=arch) as session:
                correct = function(lambda name: importlib.import_module(f"liger_kernel.ops.{name}"))
            return correct, session.runs

        return function

    return add


def _agree(*pairs, tolerance=1e-4):
    return all(torch.allclose(got.float(), wanted.float(), rtol=tolerance, atol=tolerance) for got, wanted in pairs)


@liger("rms_norm, forward and backward")
def _(ops):
    x, w, dy = torch.randn(8, 256, requires_grad=True), torch.randn(256, requires_grad=True), torch.randn(8, 256)
    y = ops("rms_norm").LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)
    y.backward(dy)
    got = y.detach(), x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    wanted = F.rms_norm(x, (256,), w, 1e-6)
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, x.grad, w.grad)))


@liger("layer_norm, forward and backward")
def _(ops):
    x, dy = torch.randn(8, 256, requires_grad=True), torch.randn(8, 256)
    w, b = torch.randn(256, requires_grad=True), torch.randn(256, requires_grad=True)
    y = ops("layer_norm").LigerLayerNormFunction.apply(x, w, b, 1e-6)
    y.backward(dy)
    got = y.detach(), x.grad.clone(), w.grad.clone(), b.grad.clone()
    x.grad = w.grad = b.grad = None
    wanted = F.layer_norm(x, (256,), w, b, 1e-6)
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, x.grad, w.grad, b.grad)))


@liger("softmax, forward and backward")
def _(ops):
    x, dy = torch.randn(8, 300, requires_grad=True), torch.randn(8, 300)
    y = ops("softmax").LigerSoftmaxFunction.apply(x)
    y.backward(dy)
    got = y.detach(), x.grad.clone()
    x.grad = None
    wanted = x.softmax(-1)
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, x.grad)))


@liger("swiglu, forward and backward")
def _(ops):
    a, b, dy = torch.randn(8, 256, requires_grad=True), torch.randn(8, 256, requires_grad=True), torch.randn(8, 256)
    y = ops("swiglu").LigerSiLUMulFunction.apply(a.clone(), b.clone())  # the backward overwrites them
    y.backward(dy.clone())
    got = y.detach().clone(), a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    wanted = F.silu(a) * b
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, a.grad, b.grad)))


@liger("geglu, forward and backward")
def _(ops):
    a, b, dy = torch.randn(8, 256, requires_grad=True), torch.randn(8, 256, requires_grad=True), torch.randn(8, 256)
    y = ops("geglu").LigerGELUMulFunction.apply(a.clone(), b.clone())
    y.backward(dy.clone())
    got = y.detach().clone(), a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    wanted = F.gelu(a, approximate="tanh") * b
    wanted.backward(dy)
    return _agree(*zip(got, (wanted, a.grad, b.grad)), tolerance=1e-3)


@liger("cross_entropy, forward and backward")
def _(ops):
    x, target = torch.randn(8, 500, requires_grad=True), torch.randint(0, 500, (8,))
    given = x.detach().clone().requires_grad_()
    loss, *_ = ops("cross_entropy").LigerCrossEntropyFunction.apply(given, target, None)
    loss.backward()
    wanted = F.cross_entropy(x, target)
    wanted.backward()
    return _agree((loss.detach(), wanted), (given.grad, x.grad))


@liger("rope, forward and backward")
def _(ops):
    q, k = torch.randn(1, 2, 16, 64), torch.randn(1, 1, 16, 64)
    angles = torch.arange(16.0)[:, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None] for f in (torch.cos, torch.sin))
    turned = lambda x: x * cos[:, None] + torch.cat([-x[..., 32:], x[..., :32]], -1) * sin[:, None]  # noqa: E731
    wanted = turned(q), turned(k)
    return _agree(*zip(ops("rope").LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin), wanted))


@liger("kl_div, forward and backward")
def _(ops):
    x = torch.randn(8, 300).log_softmax(-1).requires_grad_()
    target = torch.randn(8, 300).softmax(-1)
    loss = ops("kl_div").LigerKLDivLossFunction.apply(x, target, "batchmean", False, 1e-10)
    loss.backward()
    got = loss.detach(), x.grad.clone()
    x.grad = None
    wanted = F.kl_div(x, target, reduction="batchmean")
    wanted.backward()
    return _agree(*zip(got, (wanted, x.grad)))


@liger("group_norm, forward")
def _(ops):
    x, w, b = torch.randn(2, 8, 40), torch.randn(8), torch.randn(8)
    got = ops("group_norm").LigerGroupNormFunction.apply(x, w, b, 8, 2, 1e-6)
    return _agree((got, F.group_norm(x, 2, w, b, 1e-6)))


@liger("dyt, forward")
def _(ops):
    x, alpha, gamma, beta = torch.randn(8, 256), torch.rand(1), torch.randn(256), torch.randn(256)
    got = ops("dyt").LigerDyTFunction.apply(x, alpha, gamma, beta)
    return _agree((got, gamma * (alpha * x).tanh() + beta))


@liger("fused_add_rms_norm, forward")
def _(ops):
    x, r, w = torch.randn(8, 256), torch.randn(8, 256), torch.randn(256)
    y, s = ops("fused_add_rms_norm").LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)
    return _agree((s, x + r), (y, F.rms_norm(x + r, (256,), w, 1e-6)))


@liger("tvd, forward and backward")
def _(ops):
    p, q = torch.randn(8, 300).softmax(-1), torch.randn(8, 300).softmax(-1)
    got = ops("tvd").LigerTVDLossFunction.apply(p, q, None, "batchmean")
    return _agree((got, 0.5 * (p - q).abs().sum(-1).mean()))


# ---- CuTe DSL examples: block-scaled products, whose factors and layouts are NVIDIA's


def _nvfp4(m, n, k):
    """A, B, their factors in NVIDIA's blocks of 128 x 4, an empty C, and the product."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    a, b = (torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8) for rows in (m, n))
    factors = [(torch.randint(1, 6, (rows, k // 16)) / 4).to(torch.float8_e4m3fn) for rows in (m, n)]
    blocked = [
        f.view(torch.uint8).view(-1, 4, 32, k // 64, 4).permute(0, 3, 2, 1, 4).contiguous() for f in factors
    ]  # fmt: skip
    wide = [
        torch.stack([table[(x & 15).long()], table[(x >> 4).long()]], -1).flatten(1)
        * f.float().repeat_interleave(16, 1)
        for x, f in zip((a, b), factors)
    ]
    return a, b, *blocked, torch.zeros(m, n, dtype=torch.float16), (wide[0] @ wide[1].T).half()


def _pointers(tensors):
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    types = [*(cutlass.Float4E2M1FN,) * 2, *(cutlass.Float8E4M3FN,) * 2, cutlass.Float16]
    return [make_ptr(d, t.data_ptr(), cute.AddressSpace.gmem, assumed_align=32) for d, t in zip(types, tensors)]


def _example(folder, path, name):
    where = str(folder / "cutlass" / "examples" / "python" / "CuTeDSL" / path)
    if where not in sys.path:
        sys.path.insert(0, where)
    return importlib.import_module(name)


def nvfp4(name, mnk):
    @case("cutlass", f"tutorial_gemm/{name}: Sm100BlockScaledDenseGemmKernel", "sm_100a")
    def captured(folder):
        from cuda.bindings.driver import CUstream

        example = _example(folder, "", f"cute.blackwell.tutorial.tutorial_gemm.{name}")
        *tensors, wanted = _nvfp4(*mnk)
        with kda.simulator.capture(arch="sm_100a") as session:
            example.Sm100BlockScaledDenseGemmKernel()(*_pointers(tensors), (*mnk, 1), CUstream(0))
        return torch.equal(tensors[-1], wanted), session.runs


nvfp4("nvfp4_gemm_0", (128, 256, 512))
nvfp4("nvfp4_gemm_1", (256, 256, 512))


def of_geforce(name, mnk):
    @case("cutlass", f"blackwell_geforce/{name}: Sm120BlockScaledGemmKernel", "sm_120a")
    def captured(folder):
        from cuda.bindings.driver import CUstream
        from cutlass import Float32, cute

        example = _example(folder, "cute/blackwell_geforce/kernel/blockscaled_gemm", name)
        gemm = example.Sm120BlockScaledGemmKernel(Float32, 16, (128, 128, 128), (128, 128))
        *tensors, wanted = _nvfp4(*mnk)
        m, n, k = mnk

        @cute.jit
        def call(a, b, sa, sb, c, stream):
            shapes = ((m, k, 1), (n, k, 1), (m * k // 16,), (n * k // 16,), (m, n, 1))
            strides = ((k, 1, m * k), (k, 1, n * k), (1,), (1,), (n, 1, m * n))
            layouts = [cute.make_layout(s, stride=t) for s, t in zip(shapes, strides)]
            gemm(*[cute.make_tensor(p, layout) for p, layout in zip((a, b, sa, sb, c), layouts)], 1, stream)

        with kda.simulator.capture(arch="sm_120a") as session:
            call(*_pointers(tensors), CUstream(0))
        return torch.equal(tensors[-1], wanted), session.runs


of_geforce("dense_blockscaled_gemm_persistent_cooperative", (128, 128, 256))
of_geforce("dense_blockscaled_gemm_persistent_pingpong", (256, 128, 256))


# ---- the page


def fetched(folder, project):
    title, version, url = PROJECTS[project]
    if not (folder / project).exists():
        if not url:
            at = folder / project
            raise SystemExit(f"{title} is missing: pip install --no-deps --target {at} {project}-kernel=={version}")
        subprocess.run(["git", "clone", url, folder / project], check=True)
        subprocess.run(["git", "-C", folder / project, "checkout", version], check=True)


def outcome(project, kernel, arch, function, folder):
    """(correct?, findings by kind, warp instructions, seconds)."""
    torch.manual_seed(0)
    began = time.time()
    try:
        correct, runs = function(folder)
    except Exception as error:
        traceback.print_exc()
        return f"did not run: {str(error).splitlines()[0][:120]}", {}, 0, 0.0
    kinds = collections.Counter(f.kind for r in runs for f in r.findings)
    instructions = sum(r.counters["warp_instructions"] for r in runs)
    return "yes" if correct else "NO", dict(kinds), instructions, time.time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--page", type=pathlib.Path)
    asked = parser.parse_args()
    rows = []
    for project, kernel, arch, function in CASES:
        if asked.only not in f"{project} {kernel}":
            continue
        fetched(asked.sources, project)
        correct, kinds, instructions, seconds = outcome(project, kernel, arch, function, asked.sources)
        said = "; ".join(f"{kind}: {verdict(kernel, kind)}" for kind in kinds) or "none"
        if correct == "NO":
            correct = f"no: {verdict(kernel, 'NO')}"
        rows.append((project, f"| {kernel} | {arch} | {correct} | {instructions:,} | {said} |"))
        print(f"{project:13} {kernel:60} {arch:8} {correct:4} {said}  {seconds:.1f} s", flush=True)
    if asked.page:
        asked.page.write_text(page(rows))


def verdict(kernel, what):
    return next((said for (part, kind), said in VERDICTS.items() if part in kernel and kind == what), "not read yet")


def page(rows):
    lines = ["# Kernels by others, under the simulator", "", INTRODUCTION]
    for project, (title, version, _) in PROJECTS.items():
        own = [line for p, line in rows if p == project]
        if own:
            lines += ["", f"## {title}, {version}", "", "| kernel | arch | correct | warp instructions | findings |"]
            lines += ["|---|---|---|---|---|", *own]
    return "\n".join(lines) + "\n"


INTRODUCTION = """Written by `benchmarks/kernels_of_others.py`. The kernels are unmodified; the script calls them on CPU
tensors of small sizes and compares the results with torch's. "Correct" means that they agree. A finding has the
verdict of a person who read the kernel: an error of the kernel that hardware may mask, or what else it is."""

if __name__ == "__main__":
    main()
