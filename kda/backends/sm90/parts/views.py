"""Parts of a tile as operands of wgmma."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from ...common.cute.tile import C


@cute.jit
def view(pointer, kind: cutlass.Constexpr, shape: cutlass.Constexpr, order: cutlass.Constexpr):
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, BFloat16), shape, order=order)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=BFloat16), layout.outer)


@cute.jit
def wide_view(pointer, rows: cutlass.Constexpr, K: cutlass.Constexpr):
    """(rows, K), contiguous along K: rows of 128 bytes, halves of K one after the other."""
    return view(pointer, SmemLayoutAtomKind.K_SW128, (rows, K), (0, 1))


@cute.jit
def standing_view(pointer, K: cutlass.Constexpr):
    """(K, C): the transpose of C rows."""
    return view(pointer, SmemLayoutAtomKind.MN_SW128, (K, C), (1, 0))


@cute.jit
def narrow_view(pointer, rows: cutlass.Constexpr = C):
    """(rows, C) in rows of 64 bytes."""
    return view(pointer, SmemLayoutAtomKind.K_SW64, (rows, C), (0, 1))


@cute.jit
def narrow_standing_view(pointer):
    """The transpose of such a (C, C)."""
    return view(pointer, SmemLayoutAtomKind.MN_SW64, (C, C), (1, 0))
