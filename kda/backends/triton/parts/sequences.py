"""Where chunks and segments of the sequences lie, worked out on the GPU.

Packed sequences [cu_seqlens[n], cu_seqlens[n+1]) are cut into pieces of `rows` tokens.  `tables` writes

  first (N+1)       the number of the first piece of each sequence; first[N] is how many there are
  owner (pieces)    the sequence of each piece

for chunks and for segments in one launch; every sequence has a segment, an empty one too.  No length is read by the
host: grids cover the most pieces there can be.  B rows of T tokens are the same without tables.
"""

import triton
import triton.language as tl


@triton.jit
def cut(cu_seqlens, first, owner, N, rows, LEAST: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """Program p writes the owners of pieces RUN*p .. RUN*p + RUN-1 of every sequence; program 0 writes `first`."""
    p = tl.program_id(0)
    before = tl.zeros((), tl.int32)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        real = n < N
        start = tl.load(cu_seqlens + n, mask=real, other=0)
        length = tl.load(cu_seqlens + n + 1, mask=real, other=0) - start
        pieces = tl.where(real, tl.maximum((length + rows - 1) // rows, LEAST), 0).to(tl.int32)
        begin = before + tl.cumsum(pieces, 0) - pieces
        if p == 0:
            tl.store(first + n, begin, mask=real)
        most = tl.minimum(tl.max(pieces, 0), RUN * p + RUN)
        for j in range(RUN * p, most):
            tl.store(owner + begin + j, n, mask=j < pieces)
        before += tl.sum(pieces, 0)
    if p == 0:
        tl.store(first + N, before)


@triton.jit
def tables(cu_seqlens, bounds, first_chunk, chunk_owner, first_segment, segment_owner, N, C, segment_rows,
           BLOCK: tl.constexpr, RUN: tl.constexpr):  # fmt: skip
    """`bounds` are the cu_seqlens as int64."""
    cut(cu_seqlens, first_chunk, chunk_owner, N, C, 0, BLOCK, RUN)
    cut(cu_seqlens, first_segment, segment_owner, N, segment_rows, 1, BLOCK, RUN)
    if tl.program_id(0) == 0:
        for n0 in range(0, N + 1, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            tl.store(bounds + n, tl.load(cu_seqlens + n, mask=n <= N, other=0).to(tl.int64), mask=n <= N)


@triton.jit
def clear(x, begin, end, width, BLOCK: tl.constexpr):
    """Zero in `width` elements of each of the tokens from begin to end."""
    for at in range(begin * width, end * width, BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(x + i, tl.zeros((BLOCK,), x.dtype.element_ty), mask=i < end * width)


@triton.jit
def piece(p, cu_seqlens, first, owner, T, rows, pieces, PACKED: tl.constexpr):
    """(n, its number in sequence n, first token, tokens, end of the sequence) of piece p.

    A row of T tokens has `pieces` of them.  Packed, p is one of those that exist.
    """
    if PACKED:
        n = tl.load(owner + p)
        start = tl.load(cu_seqlens + n).to(tl.int64)
        end = tl.load(cu_seqlens + n + 1).to(tl.int64)
        i = p - tl.load(first + n)
    else:
        n = p // pieces
        i = p % pieces
        start = n.to(tl.int64) * T
        end = start + T
    begin = start + i.to(tl.int64) * rows
    return n, i, begin, tl.minimum(end - begin, rows).to(tl.int32), end
