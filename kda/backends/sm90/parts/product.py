"""Products of a warpgroup, and of a warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def accumulator(mma, shape: cutlass.Constexpr):
    return cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)


@cute.jit
def queue(mma, acc, a, b, accumulate: cutlass.Constexpr):
    """acc (+)= a @ b^T, both as the product takes them; wait_group says that it is done."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    for step in cutlass.range_constexpr(cute.size(b, mode=[2])):
        cute.gemm(mma, acc, a[None, None, step], b[None, None, step], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def tf32s(*values):
    """Operands of mma_tf32, to nearest: the product alone would cut them off."""
    return [
        cute.arch.inline_ptx("cvt.rna.tf32.f32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x])
        for x in values
    ]


@cute.jit
def mma_tf32(acc, a, b):
    """acc + a @ b, (16, 8) = (16, 8) @ (8, 8), as lanes of a warp hold them."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4, read_only_args=[*a, *b, *acc],
    )  # fmt: skip
