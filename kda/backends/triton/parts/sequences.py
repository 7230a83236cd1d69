"""Where chunks and segments of the sequences lie, worked out on the GPU.

Packed sequences [cu_seqlens[n], cu_seqlens[n+1]) are cut into chunks of C tokens, and into segments of some chunks; an
empty sequence has no chunk and one segment.  `tables` writes what a program of one has to know, so that it waits once:

  chunk_table (.., 2)      its first token and its tokens; n <= 0 tokens: no chunk, but -n tokens of no sequence
  segment_table (.., 5)    its sequence (-1: no segment), which one it is there, its first token, the tokens from there
                           to the end of the sequence, its first chunk
  first_segment (N+1)      that of each sequence; first_segment[N] is how many there are
  taken (1)                tokens of sequences

No length is read by the host: grids cover the most pieces there can be.  B rows of T tokens need no tables.
"""

import triton
import triton.language as tl


@triton.jit
def tables(
    cu_seqlens, chunk_table, segment_table, first_segment, taken, T, N, C, segment, chunk_entries, segment_entries,
    BLOCK: tl.constexpr, RUN: tl.constexpr,
):
    """Program p writes pieces RUN*p .. RUN*p + RUN-1 of every sequence."""
    p = tl.program_id(0)
    end = tl.load(cu_seqlens + N).to(tl.int64)
    chunks = tl.zeros((), tl.int32)
    segments = tl.zeros((), tl.int32)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        real = n < N
        start = tl.load(cu_seqlens + n, mask=real, other=0).to(tl.int64)
        length = tl.load(cu_seqlens + n + 1, mask=real, other=0).to(tl.int64) - start
        counts = tl.cdiv(length, C).to(tl.int32)
        segment_counts = tl.where(real, tl.maximum(tl.cdiv(counts, segment), 1), 0)
        chunk = chunks + tl.cumsum(counts, 0) - counts
        first = segments + tl.cumsum(segment_counts, 0) - segment_counts
        for j in range(RUN * p, tl.minimum(tl.max(counts, 0), RUN * p + RUN)):
            entry = chunk_table + (chunk + j) * 2
            tl.store(entry, start + j * C, mask=j < counts)
            tl.store(entry + 1, tl.minimum(length - j * C, C), mask=j < counts)
        for j in range(RUN * p, tl.minimum(tl.max(segment_counts, 0), RUN * p + RUN)):
            entry, real_segment, skipped = segment_table + (first + j) * 5, j < segment_counts, j * segment * C
            tl.store(entry, n, mask=real_segment)
            tl.store(entry + 1, j, mask=real_segment)
            tl.store(entry + 2, start + skipped, mask=real_segment)
            tl.store(entry + 3, length - skipped, mask=real_segment)
            tl.store(entry + 4, chunk + j * segment, mask=real_segment)
        if p == 0:
            tl.store(first_segment + n, first, mask=real)
        chunks += tl.sum(counts, 0)
        segments += tl.sum(segment_counts, 0)
    if p == 0:
        tl.store(first_segment + N, segments)
        tl.store(taken, end)
    idle = tl.maximum(chunk_entries - chunks, segment_entries - segments)
    for i0 in range(BLOCK * p, idle, BLOCK * tl.num_programs(0)):
        i = i0 + tl.arange(0, BLOCK)
        begin, entry = tl.minimum(end + i.to(tl.int64) * C, T), chunk_table + (chunks + i) * 2
        tl.store(entry, begin, mask=chunks + i < chunk_entries)
        tl.store(entry + 1, begin - tl.minimum(begin + C, T), mask=chunks + i < chunk_entries)
        tl.store(segment_table + (segments + i) * 5, -1, mask=segments + i < segment_entries)


@triton.jit
def clear_rows(x, begin, rows, head, heads, d, D: tl.constexpr, C: tl.constexpr):
    """Stores zeros in columns d of up to C rows of one head; x (tokens, heads, D)."""
    i = tl.arange(0, C)
    offset = ((begin + i) * heads + head)[:, None] * D + d[None, :]
    zero = tl.zeros((C, d.shape[0]), x.dtype.element_ty)
    tl.store(x + offset, zero, mask=(i < rows)[:, None] & (d < D)[None, :])


@triton.jit
def clear_kept(
    A_qk, A_inv, w, qg, kg, v_new, h, gc_last, chunk_table, chunk_bound, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):
    """Stores zeros where no token and no chunk is, in what a packed forward keeps for anyone to see."""
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    begin, rows = chunk_place(chunk, chunk_table, 0, C, 0)
    if rows > 0:
        return
    clear_rows(A_qk, begin, -rows, head, HV, tl.arange(0, C), C, C)
    clear_rows(A_inv, begin, -rows, head, HV, tl.arange(0, C), C, C)
    for d0 in tl.range(0, K, BLOCK):
        d = d0 + tl.arange(0, BLOCK)
        clear_rows(w, begin, -rows, head, HV, d, K, C)
        clear_rows(qg, begin, -rows, head, HV, d, K, C)
        clear_rows(kg, begin, -rows, head, HV, d, K, C)
    for e0 in tl.range(0, V, BLOCK):
        clear_rows(v_new, begin, -rows, head, HV, e0 + tl.arange(0, BLOCK), V, C)
    if chunk < chunk_bound:
        for d0 in tl.range(0, K, BLOCK):
            clear_rows(gc_last, chunk.to(tl.int64), 1, head, HV, d0 + tl.arange(0, BLOCK), K, 1)
        for row in tl.range(0, K, C):
            for e0 in tl.range(0, V, BLOCK):
                clear_rows(h, (chunk.to(tl.int64) * HV + head) * K + row, K - row, 0, 1, e0 + tl.arange(0, BLOCK), V, C)


@triton.jit
def chunk_place(p, chunk_table, T, C, chunks):
    """Returns (first token, tokens) of chunk p.  Without a table a row of T tokens has `chunks` of them."""
    if chunk_table is None:
        skipped = p % chunks * C
        begin, rows = (p // chunks).to(tl.int64) * T + skipped, T - skipped
    else:
        entry = chunk_table + p * 2
        begin, rows = tl.load(entry), tl.load(entry + 1).to(tl.int32)
    return begin, tl.minimum(rows, C)


@triton.jit
def segment_place(p, segment_table, T, C, segment, chunks, pieces):
    """Returns (sequence, number, first token, tokens from there, first chunk) of segment p, of `segment` chunks.

    Without a table a row of T tokens has `pieces` segments and `chunks` chunks.
    """
    if segment_table is None:
        n, number = p // pieces, p % pieces
        skipped = number * segment * C
        begin, left, chunk = n.to(tl.int64) * T + skipped, T - skipped, n * chunks + number * segment
    else:
        entry = segment_table + p * 5
        n, number, begin = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32), tl.load(entry + 2)
        left, chunk = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    return n, number, begin, left, chunk


@triton.jit
def walk_place(segment_table, T, C, segment, chunks, pieces, HV, V: tl.constexpr, BV: tl.constexpr):
    """Returns (tile of BV columns, head, segment, `segment_place` of that) of a program that walks a segment."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile, head, p = tl.program_id(0) % tiles, tl.program_id(0) // tiles % HV, tl.program_id(0) // tiles // HV
    n, number, begin, left, chunk = segment_place(p, segment_table, T, C, segment, chunks, pieces)
    return tile, head, p, n, number, begin, left, chunk
