"""(I + A)^-1 of a strictly lower triangular A (C, C) in memory, by substitution in float32.

A thread owns a column of a diagonal block of 16 rows; then blocks are joined: X10 = -X11 @ A10 @ X00.
"""

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(16)


@triton.jit
def solve_diagonal(A, stride, rows, C: tl.constexpr):
    """Diagonal blocks of I + A, of which rows below `rows` are there, to their inverses, in place."""
    c = tl.arange(0, C)                                                        # a column: its block's, and its own
    first, column = c // BLOCK * BLOCK, c % BLOCK
    found = ()
    for i in tl.static_range(BLOCK):
        x = tl.where(column == i, 1.0, 0.0)
        for j in tl.static_range(i):
            x -= tl.load(A + (first + i) * stride + first + j, mask=first + i < rows, other=0.0) * found[j]
        found = found + (x,)
    tl.debug_barrier()                                                         # all of A was read
    for i in tl.static_range(BLOCK):
        tl.store(A + (first + i) * stride + c, found[i], mask=first + i < rows)


@triton.jit
def joined(X, A, at, rows, S: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of diagonal blocks of S rows to those of 2S rows."""
    i = tl.arange(0, C)
    half = i // S
    first = tl.where((half % 2 == 1) & (i < rows), half - 1, -1)
    A10 = tl.load(A + at, mask=first[:, None] == half[None, :], other=0.0)
    return X - tl.dot(X, tl.dot(A10, X, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def inverse(A, stride, rows, C: tl.constexpr, PRECISION: tl.constexpr):
    """Row i of A begins at A + i * stride.  A is written; only its first `rows` are there, the rest of I + A is I."""
    solve_diagonal(A, stride, rows, C)
    tl.debug_barrier()                                                         # the blocks are there
    i = tl.arange(0, C)
    at = i[:, None] * stride + i[None, :]
    block = tl.where(i < rows, i // BLOCK, -1)
    X = tl.load(A + at, mask=block[:, None] == (i // BLOCK)[None, :], other=0.0)
    X = tl.where((i[:, None] == i[None, :]) & (i >= rows)[:, None], 1.0, X)
    for k in tl.static_range(2):
        if 32 << k <= C:
            X = joined(X, A, at, rows, 16 << k, C, PRECISION)
    return X
