"""Rows of one chunk, or of two, with each other: [k; q] @ k^T, 2 C rows with C, both from shared memory."""

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...common.cute.tile import C
from .product import queue

PAIRS = (2 * C, C)                           # rows of [k; q] and of k


@cute.jit
def product():
    source, along_K = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(BFloat16, Float32, (*PAIRS, 16), source, along_K, along_K))


@cute.jit
def multiply(acc, x, y):
    """acc = x @ y^T."""
    mma = product()
    part = mma.get_slice(0)
    queue(mma, acc, mma.make_fragment_A(part.partition_A(x)), mma.make_fragment_B(part.partition_B(y)), False)
    warpgroup.wait_group(0)
