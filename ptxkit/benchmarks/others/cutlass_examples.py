"""CuTe DSL examples: block-scaled products, whose factors and layouts are NVIDIA's."""

from __future__ import annotations

import importlib
import sys

import torch

import ptxkit

from .cases import case


def _nvfp4(m, n, k):
    """Return A, B, their factors in NVIDIA's blocks of 128 x 4, an empty C, and the product."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    a, b = (torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8) for rows in (m, n))
    factors = [(torch.randint(1, 6, (rows, k // 16)) / 4).to(torch.float8_e4m3fn) for rows in (m, n)]
    blocked = [
        f.view(torch.uint8).view(-1, 4, 32, k // 64, 4).permute(0, 3, 2, 1, 4).contiguous() for f in factors
    ]
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
        with ptxkit.capture(arch="sm_100a") as session:
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

        with ptxkit.capture(arch="sm_120a") as session:
            call(*_pointers(tensors), CUstream(0))
        return torch.equal(tensors[-1], wanted), session.runs


of_geforce("dense_blockscaled_gemm_persistent_cooperative", (128, 128, 256))
of_geforce("dense_blockscaled_gemm_persistent_pingpong", (256, 128, 256))
