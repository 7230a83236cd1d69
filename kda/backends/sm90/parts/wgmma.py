"""Products of a warpgroup, and parts of a tile as their operands."""

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from ...common.cute.tile import C


def accumulator(mma, shape: tuple):
    return cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)


def issue(mma, acc, a, b, accumulate: bool, fenced: bool = False, steps=None):
    """acc (+)= a @ b^T, both as the product reads them, in no group yet.  `fenced`: since the last fence, nothing but
    products has touched the registers of acc and a.  `steps`: those blocks of 16 columns of a and b, or all."""
    if not fenced:
        warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    for step in steps or range(cute.size(b, mode=[2])):
        cute.gemm(mma, acc, a[None, None, step], b[None, None, step], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)


def view(pointer, kind, shape: tuple, order):
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, BFloat16), shape, order=order)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=BFloat16), layout.outer)


def wide_view(pointer, rows: int, K: int):
    """(rows, K), contiguous along K: rows of 128 bytes, halves of K one after the other."""
    return view(pointer, SmemLayoutAtomKind.K_SW128, (rows, K), (0, 1))


def standing_view(pointer, K: int):
    """(K, C): the transpose of C rows."""
    return view(pointer, SmemLayoutAtomKind.MN_SW128, (K, C), (1, 0))


def narrow_view(pointer, rows: int = C):
    """(rows, C) in rows of 64 bytes."""
    return view(pointer, SmemLayoutAtomKind.K_SW64, (rows, C), (0, 1))


def narrow_standing_view(pointer):
    """The transpose of such a (C, C)."""
    return view(pointer, SmemLayoutAtomKind.MN_SW64, (C, C), (1, 0))
