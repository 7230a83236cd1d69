"""(I + A)^-1 of a strictly lower triangular A (C, C) in memory, by substitution in float32.

A thread owns a column of a diagonal block of 16 rows; then blocks are joined: X10 = -X11 @ A10 @ X00.
"""

import triton
import triton.language as tl

from .fast import in_two, load_float

BLOCK: tl.constexpr = tl.constexpr(16)


@triton.jit
def solve_diagonal(A, C: tl.constexpr):
    """Turns diagonal blocks of I + A into their inverses, in place."""
    c = tl.arange(0, C)                                                        # a column: its block's, and its own
    first, column = c // BLOCK * BLOCK, c % BLOCK
    rows = ()
    for i in tl.static_range(BLOCK):
        x = tl.where(column == i, 1.0, 0.0)
        for j in tl.static_range(i):
            x -= load_float(A + (first + i) * C + first + j) * rows[j]
        rows = rows + (x,)
    tl.debug_barrier()                                                         # all of A was read
    for i in tl.static_range(BLOCK):
        tl.store(A + (first + i) * C + c, rows[i])


@triton.jit
def joined(X, A, S: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr):
    """Turns inverses of diagonal blocks of S rows into those of 2S rows."""
    i = tl.arange(0, C)
    half = i // S
    first = tl.where(half % 2 == 1, half - 1, -1)
    A10 = tl.load(A + i[:, None] * C + i[None, :], mask=first[:, None] == half[None, :], other=0.0)
    if PRECISION != "tf32":
        X -= tl.dot(X, tl.dot(A10, X, input_precision=PRECISION), input_precision=PRECISION)
    elif UNIT:
        x = X.to(tl.float16)
        X -= tl.dot(x, tl.dot(A10.to(tl.float16), x).to(tl.float16))
    else:
        a, b = in_two(A10, tl.bfloat16)
        x, y = in_two(X, tl.bfloat16)
        a, b = in_two(tl.dot(b, x, tl.dot(a, y, tl.dot(a, x))), tl.bfloat16)
        X -= tl.dot(y, a, tl.dot(x, b, tl.dot(x, a)))
    return X


@triton.jit
def inverse(A, C: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr):
    """Returns (I + A)^-1; A is overwritten.  In place of tf32, whose operands must lie transposed, operands are float16
    if no element of A or its inverse is above 2 (UNIT), else two bfloat16 each."""
    solve_diagonal(A, C)
    tl.debug_barrier()                                                         # the blocks are there
    i = tl.arange(0, C)
    same = (i // BLOCK)[:, None] == (i // BLOCK)[None, :]
    X = tl.load(A + i[:, None] * C + i[None, :], mask=same, other=0.0)
    for k in tl.static_range(2):
        if 32 << k <= C:
            X = joined(X, A, 16 << k, C, PRECISION, UNIT)
    return X
