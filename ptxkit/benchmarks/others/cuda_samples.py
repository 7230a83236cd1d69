"""CUDA samples: one launch each, by ptxkit.run, with nvcc."""

from __future__ import annotations

import math

import torch

from .cases import launch_of_nvcc


def sample(path, kernel, arch, grid, block, make, **options):
    launch_of_nvcc(
        "cuda-samples", f"{path.split('/')[-2]}: {options.pop('title', kernel)}", arch,
        lambda root: root / "Samples" / path, kernel, "Common", make, grid=grid, block=block, **options,
    )


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
       title="MatrixMulCUDA<16>")
for name in ("intrinsics", "native"):
    sample(f"{INTRO}/fp16ScalarProduct/fp16ScalarProduct.cu", f"scalarProductKernel_{name}", "sm_80", 4, 128, _halves)
sample(f"{INTRO}/simpleAtomicIntrinsics/simpleAtomicIntrinsics.cu", "testKernel", "sm_80", 4, 128, _atomics)
sample(f"{CONCEPTS}/scan/scan.cu", "scanExclusiveShared", "sm_80", 2, 256, _scan)
sample(f"{CONCEPTS}/shfl_scan/shfl_scan.cu", "shfl_scan_test", "sm_80", 2, 256, _shuffled_scan, dynamic_shared=32)
sample(f"{CONCEPTS}/sortingNetworks/bitonicSort.cu", "bitonicSortShared", "sm_80", 1, 512, _sort)
sample(f"{INTRO}/mergeSort/mergeSort.cu", "_Z21mergeSortSharedKernelILj1EEvPjS0_S0_S0_j", "sm_80", 1, 512,
       lambda: _sort(ups=()), title="mergeSortSharedKernel<1>")
sample(f"{CONCEPTS}/scalarProd/scalarProd.cu", "scalarProdGPU", "sm_80", 2, 256, _scalar_products)
for kernel in ("reduceMultiPass", "reduceSinglePass"):
    sample(f"{CONCEPTS}/threadFenceReduction/threadFenceReduction.cu", f"_Z{len(kernel)}{kernel}ILj128ELb1EEvPKfPfj",
           "sm_80", 1 if "Multi" in kernel else 8, 128, _reduction, dynamic_shared=512,
           title=f"{kernel}<128, true>")
sample(f"{CONCEPTS}/reductionMultiBlockCG/reductionMultiBlockCG.cu", "reduceSinglePassMultiBlockCG", "sm_80", 4, 128,
       _reduction, dynamic_shared=1024)
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
       title="MatrixMulAsyncCopyMultiStageLargeChunk<16>")
sample(f"{FEATURES}/globalToShmemAsyncCopy/globalToShmemAsyncCopy.cu",
       "_Z29MatrixMulAsyncCopySingleStageILi16EEvPfPKfS2_ii", "sm_80", (6, 4), (16, 16), _matmul,
       title="MatrixMulAsyncCopySingleStage<16>")
sample(f"{FEATURES}/warpAggregatedAtomicsCG/warpAggregatedAtomicsCG.cu", "filter_arr", "sm_80", 2, 256, _filtered)
sample(f"{FEATURES}/binaryPartitionCG/binaryPartitionCG.cu", "oddEvenCountAndSumCG", "sm_80", 2, 128, _odd_and_even)
sample("5_Domain_Specific/BlackScholes/BlackScholes.cu", "BlackScholesGPU", "sm_80", 1, 128, _black_scholes)
sample("5_Domain_Specific/fastWalshTransform/fastWalshTransform.cu", "fwtBatch1Kernel", "sm_80", 2, 64, _walsh,
       dynamic_shared=1024)
for kernel in ("transposeNaive", "transposeCoalesced", "transposeNoBankConflicts", "transposeDiagonal"):
    sample("6_Performance/transpose/transpose.cu", kernel, "sm_80", (2, 2), (32, 16), _transposed)
