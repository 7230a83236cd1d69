"""Rows of o of tokens that belong to no sequence: a warp sets a row of one head to zero at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from .copies import store
from .tile import WARP_ROWS


@cute.jit
def clear_row(x, V: cutlass.Constexpr, token, head):
    lane_columns = V // 32
    row = x.o + (Int64(token) * x.HV + head) * V
    store(row + cute.arch.lane_idx() * lane_columns, [Float32(0.0)] * lane_columns)


@cute.jit
def clear_chunk(x, V: cutlass.Constexpr, begin, tokens, head, warp):
    """Clear rows of one head of a chunk's tokens; warp `warp` of a CTA that has a chunk clears those that it makes."""
    for r in cutlass.range_constexpr(WARP_ROWS):
        row = warp * WARP_ROWS + r
        if row < tokens:
            clear_row(x, V, begin + row, head)


@cute.jit
def clear_tokens(x, V: cutlass.Constexpr, first, warps, head, heads):
    """Clear rows of some heads, from `head` on, of every `warps`-th token from `first` to the last of all."""
    for token in cutlass.range(first, x.T, warps, unroll=1):
        for h in cutlass.range(head, head + heads, unroll=1):
            clear_row(x, V, token, h)
