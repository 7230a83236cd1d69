"""llm.c: kernels of its training loop (the headers in llmc/), one launch each, by ptxkit.run, with nvcc."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .cases import agree, launch_of_nvcc

N, C = 8, 512  # rows, channels
CUDA13 = """#include <cuda_runtime.h>
#undef cudaCpuDeviceId
#define cudaCpuDeviceId cudaMemLocation{cudaMemLocationTypeHost, 0}
"""  # for a host function of a header, written against the cudaMemAdvise of CUDA 12


def kernel(header, name, grid, block, make, **options):
    title, instance = options.pop("title", name), options.pop("instance", "")
    text = f'{CUDA13}#include "{header}"\n{instance}\n'
    launch_of_nvcc(
        "llm.c", f"{header}: {title}", "sm_80", lambda root: text, name, "llmc", make, grid=grid, block=block,
        options=["-std=c++17"], **options,
    )


def _bf16(*shape):
    return torch.randn(*shape).bfloat16()


def _layernorm():
    x, w, b = _bf16(N, C), _bf16(C), _bf16(C)
    y, mean, rstd = torch.zeros_like(x), torch.zeros(N), torch.zeros(N)
    wanted = F.layer_norm(x.float(), (C,), w.float(), b.float()), x.float().mean(1)
    return [y, mean, rstd, x, w, b, N, C], lambda: agree((y, wanted[0]), (mean, wanted[1]), tolerance=2e-2)


def _residual_and_norm():
    x, r, w, b = _bf16(N, C), _bf16(N, C), _bf16(C), _bf16(C)
    s, y, mean, rstd = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(N), torch.zeros(N)
    total = x + r
    wanted = F.layer_norm(total.float(), (C,), w.float(), b.float())
    return [s, y, mean, rstd, x, r, w, b, N, C], lambda: torch.equal(s, total) and agree((y, wanted), tolerance=2e-2)


def _layernorm_backward():
    rows = 48  # for 2 CTAs of 16 warps: a multiple of 16, as the loop over rows has barriers
    x, w, b = (t.float().requires_grad_() for t in (_bf16(rows, C), _bf16(C), _bf16(C)))
    dy = _bf16(rows, C)
    F.layer_norm(x, (C,), w, b).backward(dy.float())
    dx, dw, db = torch.zeros(rows, C).bfloat16(), torch.zeros(C).bfloat16(), torch.zeros(C).bfloat16()
    mean, rstd = x.detach().mean(1), (x.detach().var(1, unbiased=False) + 1e-5).rsqrt()
    scratch = torch.zeros(32 + 2 * 2 * C)
    arguments = [dx, dw, db, scratch, dy, x.detach().bfloat16(), w.detach().bfloat16(), mean, rstd, 1, rows, C]
    return arguments, lambda: agree((dx, x.grad), (dw, w.grad), (db, b.grad), tolerance=4e-2)


def _gelu():
    x = _bf16(8 * 256)
    y = torch.zeros_like(x)
    return [y, x], lambda: agree((y, F.gelu(x.float(), approximate="tanh")), tolerance=1e-2)


def _gelu_backward():
    x, dy = _bf16(8 * 256).float().requires_grad_(), _bf16(8 * 256)
    F.gelu(x, approximate="tanh").backward(dy.float())
    dx = dy.clone()
    return [dx, x.detach().bfloat16()], lambda: agree((dx, x.grad), tolerance=2e-2)


def _classifier():
    v, padded, dloss = 1003, 1008, 0.125  # its loop does not end where v < 8 * threads: (i + 1) * size is unsigned
    x, targets = _bf16(N, padded), torch.randint(0, v, (N,), dtype=torch.int32)
    given, losses = x[:, :v].float().requires_grad_(), torch.zeros(N)
    wanted = F.cross_entropy(given, targets.long(), reduction="none")
    (wanted * dloss).sum().backward()

    def correct():
        return agree((losses, wanted.detach())) and torch.allclose(x[:, :v].float(), given.grad, rtol=2e-2, atol=1e-6)

    return [x, losses, 0, dloss, targets, 1, N, v, padded, 0], correct


def _encoder():
    tokens, table, places = torch.randint(0, 50, (2, 16), dtype=torch.int32), _bf16(50, C), _bf16(16, C)
    out = torch.zeros(2, 16, C).bfloat16()
    return [out, tokens, table, places, 2, 16, C], lambda: torch.equal(out, table[tokens.long()] + places)


def _squared_norm():
    x, out = torch.randn(5000), torch.zeros(4)
    return [out, x, 5000, 0], lambda: agree((out.sum(), x.square().sum()), tolerance=1e-3)


def _adamw():
    n, lr, b1, b2, eps, decay = 1000, 1e-2, 0.9, 0.95, 1e-8, 0.1
    p, g, m, v = torch.randn(n), torch.randn(n), torch.randn(n) / 10, torch.rand(n)
    wanted_m, wanted_v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    mine = p - lr * (wanted_m / (1 - b1) / ((wanted_v / (1 - b2)).sqrt() + eps) + decay * p)
    arguments = [p, 0, g, m, v, n, 0, 0, 0, lr, b1, b2, 1 - b1, 1 - b2, eps, decay, 1.0, 7]
    return arguments, lambda: agree((p, mine), (m, wanted_m), (v, wanted_v), tolerance=1e-4)


def _residual():
    a, b, out = _bf16(2048), _bf16(2048), torch.zeros(2048).bfloat16()
    return [out, a, b], lambda: torch.equal(out, a + b)


kernel("layernorm.cuh", "layernorm_forward_kernel3", 2, 128, _layernorm)
kernel("layernorm.cuh", "layernorm_forward_kernel6", 2, (32, 4), _layernorm, dynamic_shared=(2 + 4) * C * 2)
kernel("layernorm.cuh", "fused_residual_forward_kernel5", 2, (32, 4), _residual_and_norm,
       dynamic_shared=(2 + 4) * C * 2)
kernel("layernorm.cuh", "residual_forward_kernel", 1, 256, _residual)
kernel("layernorm.cuh", "layernorm_backward_kernel10", 2, 512, _layernorm_backward,
       dynamic_shared=(2 * C + 2 * (512 - 32) * 4) * 4)
kernel("gelu.cuh", "gelu_forward_kernel2", 2, 128, _gelu)
kernel("gelu.cuh", "gelu_backward_inplace_kernel", 2, 128, _gelu_backward)
kernel("fused_classifier.cuh", "fused_classifier_kernel5", N, 64, _classifier, title="fused_classifier_kernel5<true>",
       instance="template __global__ void fused_classifier_kernel5<true, false>(floatX*, float*, floatX*, const float, "
       "const int*, int, int, int, int, std::bool_constant<true>);")
kernel("encoder.cuh", "encoder_forward_kernel3", 8, 256, _encoder)
kernel("global_norm.cuh", "global_norm_squared_kernel", 4, 512, _squared_norm,
       title="global_norm_squared_kernel<float>",
       instance="template __global__ void global_norm_squared_kernel<float>(float*, const float*, size_t, "
       "ptrdiff_t);")
kernel("adamw.cuh", "adamw_kernel3", 4, 256, _adamw, title="adamw_kernel3<float, float>",
       instance="template __global__ void adamw_kernel3<float, float>(float*, float*, float*, float*, float*, size_t, "
       "ptrdiff_t, ptrdiff_t, ptrdiff_t, float, float, float, float, float, float, float, float, "
       "unsigned);")
