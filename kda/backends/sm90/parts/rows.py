"""Rows of one chunk, or of two, with each other: [k; q] @ k^T, 2 C rows with C, both from shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from . import fast
from .copies import load_one
from .product import queue
from .tile import C

PAIRS = (2 * C, C)                           # rows of [k; q] and of k


@cute.jit
def product():
    source, along_K = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(BFloat16, Float32, (*PAIRS, 16), source, along_K, along_K))


@cute.jit
def places(thread):
    """(row of [k; q], row of k) of what a thread holds of the product, in pairs of neighbours."""
    part = product().get_slice(thread)
    return part.partition_C(cute.make_identity_tensor(PAIRS))


@cute.jit
def multiply(acc, x, y):
    """acc = x @ y^T."""
    mma = product()
    part = mma.get_slice(0)
    queue(mma, acc, mma.make_fragment_A(part.partition_A(x)), mma.make_fragment_B(part.partition_B(y)), False)
    warpgroup.wait_group(0)


@cute.jit
def step_size(beta, kind: cutlass.Constexpr, begin, rows, head, HV, row):
    """b of a row; 0 where there is no token."""
    x = load_one(beta + (begin + cutlass.min(row, rows - 1)) * HV + head).to(Float32)
    if cutlass.const_expr(kind != "given"):
        x = fast.sigmoid(x) * Float32(2.0 if kind == "2*sigmoid" else 1.0)
    return x if row < rows else Float32(0.0)
