"""Where sequences and their segments lie."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...common.cute.copies import load_one
from ...common.cute.tile import C


@cute.jit
def place(packed: cutlass.Constexpr, cu_seqlens, n, T):
    """First token of a sequence, and tokens."""
    begin, tokens = Int64(n) * T, T
    if cutlass.const_expr(packed):
        begin = load_one(cu_seqlens + n).to(Int64)
        tokens = Int32(load_one(cu_seqlens + n + 1).to(Int64) - begin)
    return begin, tokens


@cute.jit
def segment(begin, tokens, piece, pieces):
    """The same of one of a sequence's segments, that have so many chunks each, or less."""
    length = (chunks_of(tokens) + pieces - 1) // pieces * C
    first = cutlass.min(piece * length, tokens)
    return begin + first, cutlass.min(tokens - first, length)


@cute.jit
def chunks_of(tokens):
    return tokens + C - 1 >> C.bit_length() - 1
