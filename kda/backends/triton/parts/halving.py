"""Decays between the rows of one chunk, without an exponent above zero.

  A[i, j] = sum_K x_i y_j 2^(gc_i - gc_j)        i > j

Cut a block of 2S rows in halves: for i in the second half and j in the first, the decay is that from the cut to i
times that from j to the cut, both in [0, 1], so this quarter of A is a product of two decayed matrices.  S = 2^level =
1 .. C/2 covers every pair once, whatever the gates are.  All blocks of one S go through one product of C rows; what
lies between two blocks is finite and is masked by `quarters`.

gc_cut is the last row of the first half.  For float32 problems gc is float64: then a difference of long sums keeps the
small decays that follow a large one.

Where a gate has a bound, diagonal blocks of SPAN rows need no halving: every row of a block has a factor 2^x and one
2^-x, and both stay within what bfloat16 holds.  x = gc - gc_first + half, with half of what the bound lets a block
decay by: no later token has a part in it, not even in the rounding of an earlier token's output or gradient.
"""

import triton
import triton.language as tl

from .fast import exp2
from .gate import LOG2_E
from .memory import load_columns


@triton.jit
def quarters(i, level):
    """Returns whether [i, j]: i and j lie in different halves of one block of 2^(level+1) rows."""
    half = i >> level
    return (half ^ 1)[:, None] == half[None, :]


@triton.jit
def cut_of(i, level, rows):
    """Returns the row before the cut of row i's block; in a chunk of `rows` rows a row that is there."""
    return tl.minimum((i >> (level + 1) << (level + 1)) + (1 << level) - 1, rows - 1)


@triton.jit
def decay_to_cut(gc, i, level, d, rows, K: tl.constexpr, BK: tl.constexpr):
    """Returns 2^(gc - gc_cut) of rows i in second halves, 2^(gc_cut - gc) of those in first ones."""
    cut, second = cut_of(i, level, rows), (i >> level) % 2 == 1
    later, earlier = tl.where(second, i, cut)[:, None] * K + d, tl.where(second, cut, i)[:, None] * K + d
    return exp2((load_columns(gc + later, d, K, BK) - load_columns(gc + earlier, d, K, BK)).to(tl.float32))


@triton.jit
def decay_to_middle(gc, i, d, rows, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Returns what decay_to_cut does at the last level, bit for bit; all rows have one cut there, loaded once."""
    cut = load_columns(gc + tl.minimum(C // 2 - 1, rows - 1) * K + d, d, K, BK)
    x = (load_columns(gc + i[:, None] * K + d, d, K, BK) - cut).to(tl.float32)
    return exp2(tl.where((i >= C // 2)[:, None], x, -x))


@triton.constexpr_function
def LEVELS(C):
    return C.bit_length() - 1


@triton.constexpr_function
def FIRST(SPAN):
    """Returns the first level, of blocks of 2 SPAN rows."""
    return SPAN.bit_length() - 1


@triton.jit
def since(gc, row, d, i, K: tl.constexpr, BK: tl.constexpr):
    """Returns gc of rows i less that of `row`, one for each."""
    before = load_columns(gc + row[:, None] * K + d, d, K, BK)
    return (load_columns(gc + i[:, None] * K + d, d, K, BK) - before).to(tl.float32)


@triton.jit
def half_of_bound(lower_bound, SPAN: tl.constexpr):
    """Returns half of the bits by which a gate with this bound lets the rows of a block of SPAN decay."""
    return lower_bound * (-0.5 * LOG2_E * (SPAN - 1))


@triton.jit
def from_first(gc, half, d, rows, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr):
    """Returns 2^x and 2^-x, x = gc - gc_first + half; gc_first of the first row of a diagonal block of SPAN rows."""
    i = tl.minimum(tl.arange(0, C), rows - 1)
    x = since(gc, i // SPAN * SPAN, d, i, K, BK) + half
    return exp2(x), exp2(-x)
