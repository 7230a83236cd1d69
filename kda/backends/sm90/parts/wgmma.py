"""Products of a warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def accumulator(mma, shape: cutlass.Constexpr):
    return cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)


@cute.jit
def issue(mma, acc, a, b, accumulate: cutlass.Constexpr, fenced: cutlass.Constexpr = False):
    """acc (+)= a @ b^T, both as the product reads them, in no group yet.  `fenced`: since the last fence, nothing but
    products has touched the registers of acc and a."""
    if not fenced:
        warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    for step in cutlass.range_constexpr(cute.size(b, mode=[2])):
        cute.gemm(mma, acc, a[None, None, step], b[None, None, step], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
