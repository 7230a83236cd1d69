"""fwd/state and fwd/output: chunks of one sequence in turn, one value head, BV columns of the state.

  v_new = u - w @ h;  o = scale qg @ h + A_qk @ v_new;  next h = 2^gc_last h + kg^T @ v_new

h (K, BV) stays in registers, float32, in slices of BK rows; it enters products in the dtype of q.  A program walks a
segment of a sequence: the whole of it, or, where few heads would leave the chip idle, a run of chunks.  Then `state`
without outputs first gives what each segment adds to a state of zero, `transition` the matrix that it multiplies a
state by, and `compose` chains these to the states that enter the segments.
"""

import triton
import triton.language as tl

from ..parts.fast import exp2
from ..parts.memory import load_rows, load_start, load_state, state_at, store_state
from ..parts.sequences import walk_place


@triton.jit
def state(
    A_qk, w, u, qg, kg, gc_last, h0, o, v_new, h, ht, pool, place, segment_table, T, chunks, pieces, segment, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    START: tl.constexpr, FINISH: tl.constexpr, V_FIRST: tl.constexpr, OUTPUT: tl.constexpr, STORE_H: tl.constexpr,
    STORE_V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """Walks one segment of `segment` chunks.  A row of T tokens has `pieces` segments and `chunks` chunks.

    START   "zero", "sequence" (h0 of each sequence) or "segment" (h0 of each segment)
    FINISH  "none", "sequence" (ht of each) or "segment" (ht of each but the last of a sequence)
    STORE_H "none", or the layout of h entering each chunk, "kv" or "vk"
    STORE_V v_new
    place   where in `pool` h entering each chunk goes, in the layout of h0; -1: nowhere
    """
    tile, head, p, n, number, begin, left, chunk = walk_place(segment_table, T, C, segment, chunks, pieces, HV, V, BV)
    if segment_table is not None and n < 0:
        return
    tokens = tl.minimum(left, segment * C)
    if FINISH == "segment":
        if tokens == left:
            return
    DOT: tl.constexpr = w.dtype.element_ty
    i, e = tl.arange(0, C), tile * BV + tl.arange(0, BV)
    S = load_start(h0, START, p, n, head, HV, e, K, V, BK, V_FIRST)
    if segment_table is not None:
        if tokens == 0:                                                        # tcgen05 would have no S without a step
            if FINISH == "sequence":
                store_state(ht, n * HV + head, S, e, K, V, BK, V_FIRST)
            return
    for c in tl.range(0, tl.cdiv(tokens, C), num_stages=STAGES):
        valid = c * C + i < tokens
        row = (begin + c * C + i) * HV + head
        at_v, v_real = row[:, None] * V + e[None, :], valid[:, None] & (e < V)[None, :]
        at_chunk = (chunk + c) * HV + head
        if STORE_H != "none":
            store_state(h, at_chunk, S, e, K, V, BK, STORE_H == "vk")
        if place is not None:
            to = tl.load(place + chunk + c)
            if to >= 0:
                store_state(pool + to, head, S, e, K, V, BK, V_FIRST)
        x = tl.zeros((C, BV), tl.float32)
        for s in tl.static_range(len(S)):
            d = s * BK + tl.arange(0, BK)
            w_ = load_rows(w, row, valid, d, K)
            x = tl.dot(w_, S[s].to(DOT), x, input_precision=PRECISION)
        x = (tl.load(u + at_v, mask=v_real, other=0.0).to(tl.float32) - x).to(DOT)
        if STORE_V:
            tl.store(v_new + at_v, x, mask=v_real)
        if OUTPUT:
            y = tl.zeros((C, BV), tl.float32)
            for s in tl.static_range(len(S)):
                d = s * BK + tl.arange(0, BK)
                q_ = load_rows(qg, row, valid, d, K)
                y = tl.dot(q_, S[s].to(DOT), y, input_precision=PRECISION)
            a = tl.load(A_qk + row[:, None] * C + i[None, :], mask=valid[:, None], other=0.0)
            tl.store(o + at_v, tl.dot(a, x, scale * y, input_precision=PRECISION).to(DOT), mask=v_real)
        next_S = ()
        for s in tl.static_range(len(S)):
            d = s * BK + tl.arange(0, BK)
            decay = exp2(tl.load(gc_last + at_chunk.to(tl.int64) * K + d, mask=d < K, other=0.0))
            k_ = load_rows(kg, row, valid, d, K)
            next_S = next_S + (tl.dot(tl.trans(k_), x, S[s] * decay[:, None], input_precision=PRECISION),)
        S = next_S
    if FINISH == "sequence":
        if tokens == left:
            store_state(ht, n * HV + head, S, e, K, V, BK, V_FIRST)
    elif FINISH == "segment":
        store_state(ht, p * HV + head, S, e, K, V, BK, False)


@triton.jit
def transition(
    w, kg, gc_last, M, segment_table, T, chunks, pieces, segment, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes BV columns of M (K, K) of one segment: the product of its chunks' Diag(2^gc_last) - kg^T @ w."""
    tile, head, p, n, number, begin, left, chunk = walk_place(segment_table, T, C, segment, chunks, pieces, HV, K, BV)
    if segment_table is not None and n < 0:
        return
    tokens = tl.minimum(left, segment * C)
    if (number == 0) & (tokens == left):                                       # the only one of its sequence
        return
    DOT: tl.constexpr = w.dtype.element_ty
    i, e = tl.arange(0, C), tile * BV + tl.arange(0, BV)
    X = ()
    for d0 in tl.static_range(0, K, BK):
        X = X + (tl.where((d0 + tl.arange(0, BK))[:, None] == e[None, :], 1.0, 0.0),)
    for c in tl.range(0, tl.cdiv(tokens, C), num_stages=STAGES):
        valid = c * C + i < tokens
        row, at_chunk = (begin + c * C + i) * HV + head, (chunk + c) * HV + head
        y = tl.zeros((C, BV), tl.float32)
        for s in tl.static_range(len(X)):
            d = s * BK + tl.arange(0, BK)
            w_ = load_rows(w, row, valid, d, K)
            y = tl.dot(w_, X[s].to(DOT), y, input_precision=PRECISION)
        next_X = ()
        for s in tl.static_range(len(X)):
            d = s * BK + tl.arange(0, BK)
            decay = exp2(tl.load(gc_last + at_chunk.to(tl.int64) * K + d, mask=d < K, other=0.0))
            k_ = load_rows(kg, row, valid, d, K)
            product = tl.dot(tl.trans(k_), (-y).to(DOT), X[s] * decay[:, None], input_precision=PRECISION)
            next_X = next_X + (product,)
        X = next_X
    store_state(M, p * HV + head, X, e, K, K, BK, False)


@triton.jit
def compose(
    M, added, h0, edge, first_segment, pieces, HV,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Computes the states at the edges of a sequence's segments: edge[p] = h entering p; next h = M[p] @ h + added[p].

    REVERSE: the gradient of the state leaving p; next dh = M[p]^T @ dh + added[p].  BK columns of M at a time meet as
    many rows of h, from memory, where it was just stored; ROWS is K as a power of 2.
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile, head, n = tl.program_id(0) % tiles, tl.program_id(0) // tiles % HV, tl.program_id(0) // tiles // HV
    if first_segment is not None:
        begin, end = tl.load(first_segment + n), tl.load(first_segment + n + 1)
    else:
        begin, end = n * pieces, n * pieces + pieces
    d, e = tl.arange(0, ROWS), tile * BV + tl.arange(0, BV)
    real = (d < K)[:, None] & (e < V)[None, :]
    (S,) = load_state(h0, n * HV + head, e, K, V, ROWS, V_FIRST)
    for j in tl.range(0, end - begin, num_stages=1):
        p = begin + j
        if REVERSE:
            p = end - 1 - j
        tl.store(state_at(edge, p * HV + head, d, e, K, V, False), S, mask=real)
        if j < end - begin - 1:
            tl.debug_barrier()                                                 # h is there
            S = tl.load(state_at(added, p * HV + head, d, e, K, V, False), mask=real, other=0.0)
            for k0 in tl.range(0, K, BK, num_stages=1):
                f = k0 + tl.arange(0, BK)
                real_m = (d < K)[:, None] & (f < K)[None, :]
                m = tl.load(state_at(M, p * HV + head, d, f, K, K, REVERSE), mask=real_m, other=0.0)
                real_h = (f < K)[:, None] & (e < V)[None, :]
                h = tl.load(state_at(edge, p * HV + head, f, e, K, V, False), mask=real_h, other=0.0)
                S = tl.dot(m, h, S, input_precision=PRECISION)
