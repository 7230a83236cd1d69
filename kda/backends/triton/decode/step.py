"""A token, or some, of every running sequence: all that a layer does between its projections, in one launch.

  z[t]  = bias + sum_j w[W - 1 - j] x[t - j];  q, k, v = z sigmoid(z)      x: what the projections of q, k and v made
  q, k  = q / |q|, k / |k|;  D = 2^g2;  b = sigmoid(beta)
  S <- D S;  c = b (v - S k);  S <- S + c k^T;  o = scale (S q before c + (q k) c)
  y     = o / sqrt(mean(o^2) + eps) w sigmoid(gate)

A CTA owns a q/k head of one sequence and walks over the value heads that read it, with one state (V, K) at a time in
registers.  So it sees the whole row that the norm sums, and no other CTA reads or writes the inputs of the convolution
that it reads and writes: they are updated in place without a race.  In every model so far a q/k head has one value
head.  What a CTA moves at K = V = 128: states of 64 KiB (float32) in and out, rows of 1.5 KiB, tails of 2.3 KiB in and
out.  4 warps hold a float32 state at 128 registers a thread: two CTAs share an SM, one loads while one computes.
One of 16 bits is kept as its pool has it, at 64 registers, and is computed with in blocks of ROWS rows, AHEAD of which
are loaded before the first is worked on: four CTAs share an SM.  Rows know nothing of each other before the norm, so
blocks change no bits.

A state lies in registers in pieces of PIECE channels of K: a warp reads whole pieces, the sum over pieces takes no
shuffle, that within a piece as many levels as a piece has lanes.

More tokens.  The rows of a token are requested before the one ahead of it is worked on, in a line; the inputs of its
convolution are those of the token before, moved on by one.  In a tree they are looked up again for each token.

Drafts.  The state behind the first token of a call is stored, and of each later token what brings a state to the next:
k, D and c, 2 K + V numbers where a state has K V.  The next call brings the stored state to the last accepted token by
the very operations that made it, so it finds the same bits.  A token of a tree that does not follow the one before
finds its state in the same way, from the stored state and the records of this call.

Positions count from the first token of a call; negative ones are inputs before it, of which `accepted` says where they
lie.  Products and sums are rounded as they are written (enable_fp_fusion is off), for lanes that hold the same sum.
"""

import triton
import triton.language as tl

from ..parts.gate import at_most, inverse_norm, log2_decay, rate_of, sigmoid, step_size
from .kernel import decay_of


@triton.jit
def fetch(pointers, real, FULL: tl.constexpr):
    """Loads what is `real`, which is everything if FULL."""
    if FULL:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=real, other=0.0)
    return x


@triton.jit
def put(pointers, x, real, FULL: tl.constexpr):
    if FULL:
        tl.store(pointers, x.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=real)


@triton.jit
def state_of(state, state_k, state_v, first, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
             PIECE: tl.constexpr, ORDER: tl.constexpr):
    """Returns the addresses (P * ROWS, PIECE) of the rows of a state from `first` on, and where it has elements.

    Rows of one piece of K come before those of the next.

    Of two axes Triton knows which one a warp reads along; of three, its versions differ.
    """
    row = tl.arange(0, BK // PIECE * ROWS)[:, None]
    e, d = first + row % ROWS, row // ROWS * PIECE + tl.arange(0, PIECE)[None, :]
    if ORDER == "vk":
        pointers = state + (e * K + d)
    elif ORDER == "kv":
        pointers = state + (d * V + e)
    else:
        pointers = state + (e * state_v + d * state_k)
    return pointers, (d < K) & (e < V)


@triton.jit
def block_of(j, state, state_k, state_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
             PIECE: tl.constexpr, ORDER: tl.constexpr):
    """Loads block j of a state, ROWS rows, in the dtype of its pool."""
    pointers, real = state_of(state, state_k, state_v, j * ROWS, K, V, BK, ROWS, PIECE, ORDER)
    return fetch(pointers, real, K == BK and V % ROWS == 0)


@triton.jit
def blocks_of(N: tl.constexpr, state, state_k, state_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
              ROWS: tl.constexpr, PIECE: tl.constexpr, ORDER: tl.constexpr):
    """Loads the first N blocks."""
    blocks = ()
    for j in tl.static_range(N):
        blocks = blocks + (block_of(j, state, state_k, state_v, K, V, BK, ROWS, PIECE, ORDER),)
    return blocks


@triton.jit
def put_block(S, j, state, state_k, state_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
              PIECE: tl.constexpr, ORDER: tl.constexpr):
    pointers, real = state_of(state, state_k, state_v, j * ROWS, K, V, BK, ROWS, PIECE, ORDER)
    put(pointers, S, real, K == BK and V % ROWS == 0)


@triton.jit
def put_blocks(blocks, state, state_k, state_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
               ROWS: tl.constexpr, PIECE: tl.constexpr, ORDER: tl.constexpr):
    for j in tl.static_range(len(blocks)):
        put_block(blocks[j], j, state, state_k, state_v, K, V, BK, ROWS, PIECE, ORDER)


@triton.jit
def in_float32(S, ROWS: tl.constexpr):
    """Returns (P, ROWS, PIECE) of a block."""
    return tl.reshape(S, (S.shape[0] // ROWS, ROWS, S.shape[1])).to(tl.float32)


@triton.jit
def updated(S, k, change, KEPT: tl.constexpr):
    """Returns S + change k^T as a block."""
    S = tl.fma(k[:, None, :], change[None, :, None], S).to(KEPT)
    return tl.reshape(S, (S.shape[0] * S.shape[1], S.shape[2]))


@triton.jit
def two_sums(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def three_sums(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def over_channels(S, k, q):
    """Returns S k and S q (BV), whose shuffles go together: over the pieces first, which one thread holds."""
    k, q = tl.sum(S * k[:, None, :], 0), tl.sum(S * q[:, None, :], 0)
    return tl.reduce((k, q), 1, two_sums)


@triton.jit
def advanced(block, D, k, q, qk, v, beta, scale, ROWS: tl.constexpr, BETA: tl.constexpr):
    """Returns the block behind a token, the change of v in its rows, and their o."""
    S = in_float32(block, ROWS) * D[:, None, :]
    recalled, seen = over_channels(S, k, q)
    change = step_size(beta, BETA) * (v - recalled)
    return updated(S, k, change, block.dtype), change, scale * tl.fma(qk, change, seen)


@triton.jit
def replayed(blocks, k, D, change, ROWS: tl.constexpr):
    """Returns all blocks behind a token of which there is a record."""
    result, changes = (), cut(change, len(blocks))
    for j in tl.static_range(len(blocks)):
        S = in_float32(blocks[j], ROWS) * D[:, None, :]
        result = result + (updated(S, k, changes[j], blocks[j].dtype),)
    return result


@triton.jit
def cut(x, N: tl.constexpr):
    """Returns N tensors, a power of 2, which lie one behind the other in x."""
    pieces = (x,)
    for _level in tl.static_range(N.bit_length() - 1):
        halves = ()
        for i in tl.static_range(len(pieces)):
            a, b = tl.split(tl.trans(tl.reshape(pieces[i], (2, pieces[i].shape[0] // 2))))
            halves = halves + (a, b)
        pieces = halves
    return pieces


@triton.jit
def joined(parts):
    """Joins parts that were cut."""
    for _level in tl.static_range(len(parts).bit_length() - 1):
        pairs = ()
        for i in tl.static_range(0, len(parts), 2):
            pair = tl.trans(tl.join(parts[i], parts[i + 1]))
            pairs = pairs + (tl.reshape(pair, (2 * pair.shape[1],)),)
        parts = pairs
    return parts[0]


@triton.jit
def products(q, k):
    """Returns q q, k k and q k of (P, PIECE)."""
    a, b, c = tl.sum(q * q, 0), tl.sum(k * k, 0), tl.sum(q * k, 0)
    return tl.reduce((a, b, c), 0, three_sums)


@triton.jit
def narrow(x):
    """Returns (BV) of COPIES equal rows."""
    first = tl.arange(0, x.shape[0])[:, None] == 0
    return tl.sum(tl.where(first, x, 0.0), 0)


@triton.jit
def row_of(position, accepted, path, W: tl.constexpr):
    """Returns the row of the tail of an input before this call: the first W - 1 end with token 0 of the last call."""
    i = accepted + position
    if path is not None:
        known = (i > 0) & (position < 0)
        i = tl.where(known, tl.load(path + i, mask=known, other=0).to(tl.int32), i)
    return W - 2 + i


@triton.jit
def input_at(position, x, x_t, tail, tail_l, accepted, path, T, L, real, FULL: tl.constexpr, W: tl.constexpr,
             NEW: tl.constexpr, OLD: tl.constexpr):
    """Loads what the convolution was given at a position, as a tail holds it; NEW, OLD: whether it may be a token of
    this call, one before it."""
    dtype: tl.constexpr = tail.dtype.element_ty
    if not OLD:
        value = fetch(x + position * x_t, real, FULL).to(dtype)
    else:
        row = tl.minimum(tl.maximum(row_of(position, accepted, path, W), 0), L - 1)
        if not NEW:
            value = fetch(tail + row * tail_l, real, FULL)
        else:
            new = tl.load(x + position * x_t, mask=real & (position >= 0), other=0.0).to(dtype)
            old = tl.load(tail + row * tail_l, mask=real & (position < 0), other=0.0)
            value = tl.where(position >= 0, new, old)
    return value


@triton.jit
def before(position, parents):
    """Returns the position that a position follows."""
    if parents is not None:
        position = tl.where(position > 0, parent_of(position, parents), position - 1)
    else:
        position = position - 1
    return position


@triton.jit
def parent_of(t, parents):
    parent = tl.load(parents + t, mask=t > 0, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(parent, 0), tl.maximum(t - 1, 0))


@triton.jit
def taps_of(t, x, x_t, tail, tail_l, accepted, path, parents, T, L, real, FULL: tl.constexpr, W: tl.constexpr,
            ONE: tl.constexpr):
    """Returns the inputs that token t sees, its own first; without a convolution its own alone."""
    if W == 0:
        taps = (fetch(x + t * x_t, real, FULL),)
    else:
        taps = (input_at(t, x, x_t, tail, tail_l, accepted, path, T, L, real, FULL, W, True, False),)
        position = t
        for _j in tl.static_range(1, W):
            position = before(position, parents)
            taps = taps + (
                input_at(position, x, x_t, tail, tail_l, accepted, path, T, L, real, FULL, W, not ONE, True),
            )
    return taps


@triton.jit
def shifted(new, taps):
    """Returns the inputs that the next token sees."""
    result = (new.to(taps[0].dtype),)
    for j in tl.static_range(len(taps) - 1):
        result = result + (taps[j],)
    return result


@triton.jit
def logits_of(t, g, g_t, beta, beta_t, gate, gate_t, real_k, real_w, FULL_K: tl.constexpr, FULL_V: tl.constexpr):
    """Loads what token t has: g, beta, and the gate of the norm if there is one."""
    logits = (fetch(g + t * g_t, real_k, FULL_K), tl.load(beta + t * beta_t))
    if gate is not None:
        logits = logits + (fetch(gate + t * gate_t, real_w, FULL_V),)
    return logits


@triton.jit
def weights_of(weight, bias, c, real, FULL: tl.constexpr, W: tl.constexpr):
    """Loads the bias of channels c, and their taps' weights, the newest first; four of 16 bits are loaded as one."""
    b = 0.0
    w = ()
    if W > 0:
        if bias is not None:
            b = fetch(bias + c, real, FULL)
        if W == 4 and weight.dtype.element_ty.primitive_bitwidth == 16:
            w = (fetch(weight.to(tl.pointer_type(tl.int64)) + c, real, FULL),)
        else:
            for j in tl.static_range(W):
                w = w + (fetch(weight + c * W + (W - 1 - j), real, FULL),)
    return b, w


@triton.jit
def convolved(taps, weights, weight, W: tl.constexpr):
    """Returns a row in float32, convolved and with SiLU; without a convolution, the row as it is."""
    if W == 0:
        y = taps[0].to(tl.float32)
    else:
        b, w = weights
        z = tl.zeros(taps[0].shape, tl.float32)
        for j in tl.static_range(W):
            if len(w) == W:
                wj = w[j].to(tl.float32)
            else:
                wj = (w[0] >> (16 * (W - 1 - j))).to(tl.int16).to(weight.dtype.element_ty, bitcast=True).to(tl.float32)
            z += wj * taps[j].to(tl.float32)
        z += b
        y = z * sigmoid(z)
    return y


@triton.jit
def store_taps(tail, tail_l, taps, real, FULL: tl.constexpr, W: tl.constexpr):
    """Stores the tail behind one token; all threads have read the old one."""
    for r in tl.static_range(W - 1):
        put(tail + r * tail_l, taps[W - 2 - r], real, FULL)


@triton.jit
def store_tail(x, x_t, tail, tail_l, accepted, path, T, L, real, FULL: tl.constexpr, W: tl.constexpr):
    """Stores the tail behind this call: all threads have read the old one before any writes the new one."""
    rows = ()
    for r in tl.static_range(W - 1):
        position = T - L + r
        old = tl.minimum(tl.maximum(row_of(position, accepted, path, W), 0), L - 1)
        rows = rows + (tl.load(tail + old * tail_l, mask=real & (position < 0), other=0.0),)
    tl.debug_barrier()
    for r in tl.static_range(W - 1):
        tl.store(tail + r * tail_l, rows[r], mask=real & (T - L + r < 0))
    for t in range(tl.maximum(T - L, 0), T):
        put(tail + (t - T + L) * tail_l, fetch(x + t * x_t, real, FULL), real, FULL)


@triton.jit
def read_record(record, d, e, real_k, real_v, K: tl.constexpr, FULL_K: tl.constexpr, FULL_V: tl.constexpr):
    """Returns k, D and c of a token."""
    k, D = fetch(record + d, real_k, FULL_K), fetch(record + K + d, real_k, FULL_K)
    return k, D, fetch(record + 2 * K + e, real_v, FULL_V)


@triton.jit
def decode_step(
    q, k, v, g, beta, states, A_log, dt_bias, slots, conv_states, conv_weight, conv_bias, norm_gate, norm_weight,
    records, accepted, path, parents, out,
    scale, lower_bound, norm_eps, pool, first_slot, T, L, H, group,
    q_n, q_t, q_h, k_n, k_t, k_h, v_n, v_t, v_h, g_n, g_t, g_h, beta_n, beta_t, beta_h, norm_gate_n, norm_gate_t,
    norm_gate_h, states_n, states_h, states_v, states_k, conv_states_n, conv_states_l, conv_states_c, slots_n,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    ORDER: tl.constexpr, ONE: tl.constexpr, SINGLE: tl.constexpr, WARPS: tl.constexpr, GATES: tl.constexpr,
):
    """x_n, x_t, x_h: strides of x by sequence, token and head, channels lie next to each other; tensors that a call has
    not are None.  ONE: T = 1; SINGLE: a q/k head has one value head; EARLY: tails are written before the state is
    worked on; ORDER: of the elements of a state without gaps, "vk" or "kv", or "any" with any strides;
    GATES: numbers that g has for a token and head, 1 or K.

    Slots, counts, paths and parents are numbers on the GPU that were not checked: whatever they are, no memory
    outside the tensors is touched.
    """
    EARLY: tl.constexpr = W > 0 and ONE and SINGLE
    LINE: tl.constexpr = parents is None
    COPIES: tl.constexpr = 32 * WARPS // BV if 32 * WARPS > BV else 1
    h, n = tl.program_id(0) % H, (tl.program_id(0) // H).to(tl.int64)
    d = tl.arange(0, BK // PIECE)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    e = tl.arange(0, BV)
    copy, wide = tl.arange(0, COPIES)[:, None], tl.arange(0, COPIES)[:, None] * 0 + e[None, :]
    real_k, real_v = d < K, e < V
    real_w = wide < V
    first = real_w & (copy == 0)
    FULL_K: tl.constexpr = K == BK
    FULL_V: tl.constexpr = V == BV
    BLOCKS: tl.constexpr = BV // ROWS
    tokens, heads = T, group
    if ONE:
        tokens = 1
    if SINGLE:
        heads = 1
    HV = H * group
    slot = n
    if slots is not None:
        slot = tl.load(slots + n * slots_n).to(tl.int64)
    live = (slot >= first_slot) & (slot < pool)
    q += n * q_n + h * q_h + d
    k += n * k_n + h * k_h + d
    out += n * T * HV * V

    if not live:
        for i in range(heads):
            for t in range(tokens):
                put(out + (t * HV + h * group + i) * V + wide, tl.zeros((COPIES, BV), tl.float32), first, False)
    else:
        holds, way, tree = 1, None, None
        if accepted is not None:
            holds = tl.minimum(tl.maximum(tl.load(accepted + n).to(tl.int32), 1), T)
            if path is not None:
                way = path + n * T
            if parents is not None:
                tree = parents + n * T
        c_q, c_k = h * K + d, (H + h) * K + d
        tail_q, tail_k = None, None
        if W > 0:
            conv_states += slot * conv_states_n
            tail_q, tail_k = conv_states + c_q * conv_states_c, conv_states + c_k * conv_states_c
        states += slot * states_n

        for i in range(heads):
            head = h * group + i
            state = states + head * states_h
            held = ()
            if not ONE:
                held = blocks_of(BLOCKS, state, states_k, states_v, K, V, BK, ROWS, PIECE, ORDER)
            v_at, c_v = v + n * v_n + head * v_h + wide, 2 * H * K + head * V + wide
            tail_v = None
            if W > 0:
                tail_v = conv_states + c_v * conv_states_c
            gates = d if GATES == K else d * 0
            g_at = g + n * g_n + head * g_h + gates
            bias = tl.zeros((BK // PIECE, PIECE), tl.float32)
            if dt_bias is not None:
                bias = fetch(dt_bias + head * GATES + gates, real_k, FULL_K).to(tl.float32)
            rate = rate_of(A_log, head, A_log is not None)
            beta_at, gate_at = beta + n * beta_n + head * beta_h, None
            if norm_weight is not None:
                gate_at = norm_gate + n * norm_gate_n + head * norm_gate_h + wide
            if LINE:
                taps_q = taps_of(0, q, q_t, tail_q, conv_states_l, holds, way, tree, T, L, real_k, FULL_K, W, True)
                taps_k = taps_of(0, k, k_t, tail_k, conv_states_l, holds, way, tree, T, L, real_k, FULL_K, W, True)
                taps_v = taps_of(0, v_at, v_t, tail_v, conv_states_l, holds, way, tree, T, L, real_w, FULL_V, W, True)
            weights_q = weights_of(conv_weight, conv_bias, c_q, real_k, FULL_K, W)
            weights_k = weights_of(conv_weight, conv_bias, c_k, real_k, FULL_K, W)
            weights_v = weights_of(conv_weight, conv_bias, c_v, real_w, FULL_V, W)
            if LINE:
                logits = logits_of(0, g_at, g_t, beta_at, beta_t, gate_at, norm_gate_t, real_k, real_w, FULL_K, FULL_V)
            if norm_weight is not None:
                wt = fetch(norm_weight + wide, real_w, FULL_V)
            record = None
            if records is not None:
                record = records + (slot * (T - 1) * HV + head) * (2 * K + V)
                for j in range(1, holds):
                    r = j
                    if way is not None:
                        r = tl.minimum(tl.maximum(tl.load(way + j).to(tl.int32), 1), T - 1)
                    kr, Dr, cr = read_record(record + (r - 1) * HV * (2 * K + V), d, e, real_k, real_v, K,
                                             FULL_K, FULL_V)
                    held = replayed(held, kr, Dr, cr, ROWS)
                tl.debug_barrier()   # all have read what is written over; redundant where layouts are converted

            for t in range(tokens):
                # All loads of rows first, that of the state then: what is computed of rows goes on while it comes.
                if not LINE:
                    taps_q = taps_of(t, q, q_t, tail_q, conv_states_l, holds, way, tree, T, L, real_k, FULL_K, W, ONE)
                    taps_k = taps_of(t, k, k_t, tail_k, conv_states_l, holds, way, tree, T, L, real_k, FULL_K, W, ONE)
                    taps_v = taps_of(t, v_at, v_t, tail_v, conv_states_l, holds, way, tree, T, L, real_w, FULL_V, W,
                                     ONE)
                    logits = logits_of(t, g_at, g_t, beta_at, beta_t, gate_at, norm_gate_t, real_k, real_w, FULL_K,
                                       FULL_V)
                elif not ONE:
                    later = tl.minimum(t + 1, T - 1)
                    new_q, new_k = fetch(q + later * q_t, real_k, FULL_K), fetch(k + later * k_t, real_k, FULL_K)
                    new_v = fetch(v_at + later * v_t, real_w, FULL_V)
                    new_logits = logits_of(later, g_at, g_t, beta_at, beta_t, gate_at, norm_gate_t, real_k, real_w,
                                           FULL_K, FULL_V)
                blocks = held
                if ONE:
                    blocks = blocks_of(AHEAD, state, states_k, states_v, K, V, BK, ROWS, PIECE, ORDER)
                qt = convolved(taps_q, weights_q, conv_weight, W)
                kt = convolved(taps_k, weights_k, conv_weight, W)
                vt = narrow(convolved(taps_v, weights_v, conv_weight, W))
                if EARLY:
                    tl.debug_barrier()         # all have read the old tails; redundant where layouts are converted
                    store_taps(tail_q, conv_states_l, taps_q, real_k, FULL_K, W)
                    store_taps(tail_k, conv_states_l, taps_k, real_k, FULL_K, W)
                    store_taps(tail_v, conv_states_l, taps_v, first, False, W)
                qq, kk, qk = products(qt, kt)
                if NORM:
                    q_norm, k_norm = inverse_norm(qq), inverse_norm(kk)
                    qt, kt, qk = qt * q_norm, kt * k_norm, qk * (q_norm * k_norm)
                g2 = log2_decay(logits[0].to(tl.float32) + bias, rate, lower_bound, GATE)
                if GATE == "given":
                    g2 = at_most(g2, 128.0)
                D = decay_of(g2)
                if tree is not None:
                    parent = parent_of(t, tree)
                    if (t > 0) & (parent != t - 1):
                        tl.debug_barrier()     # records of this call are there; redundant where layouts are converted
                        passed = tl.zeros((), tl.int64)
                        while parent > 0:
                            passed |= tl.full((), 1, tl.int64) << parent
                            parent = parent_of(parent, tree)
                        blocks = blocks_of(BLOCKS, state, states_k, states_v, K, V, BK, ROWS, PIECE, ORDER)
                        for j in range(1, t):
                            if (passed >> j) & 1 != 0:
                                kr, Dr, cr = read_record(record + (j - 1) * HV * (2 * K + V), d, e, real_k, real_v, K,
                                                      FULL_K, FULL_V)
                                blocks = replayed(blocks, kr, Dr, cr, ROWS)
                bt = logits[1].to(tl.float32)
                rows, after, changes, o = cut(vt, BLOCKS), (), (), ()
                for m in tl.static_range(BLOCKS):
                    if ONE and m + AHEAD < BLOCKS:
                        ahead = block_of(m + AHEAD, state, states_k, states_v, K, V, BK, ROWS, PIECE, ORDER)
                        blocks = blocks + (ahead,)
                    S, change, part = advanced(blocks[m], D, kt, qt, qk, rows[m], bt, scale, ROWS, BETA)
                    if ONE and BLOCKS > 1:
                        put_block(S, m, state, states_k, states_v, K, V, BK, ROWS, PIECE, ORDER)
                    after, changes, o = after + (S,), changes + (change,), o + (part,)
                o = joined(o)
                if not ONE:
                    held = after
                if record is not None:
                    if t == 0:
                        put_blocks(held, state, states_k, states_v, K, V, BK, ROWS, PIECE, ORDER)
                    else:
                        new = record + (t - 1) * HV * (2 * K + V)
                        put(new + d, kt, real_k, FULL_K)
                        put(new + K + d, D, real_k, FULL_K)
                        put(new + 2 * K + e, joined(changes), real_v, FULL_V)
                y = o[None, :] + tl.zeros((COPIES, BV), tl.float32)
                if norm_weight is not None:
                    y *= tl.rsqrt(tl.sum(y * y, 1) / V + norm_eps)[:, None]
                    y *= wt.to(tl.float32) * sigmoid(logits[2].to(tl.float32))
                put(out + (t * HV + head) * V + wide, y, first, False)
                if ONE and BLOCKS == 1:
                    put_blocks(after, state, states_k, states_v, K, V, BK, ROWS, PIECE, ORDER)
                if LINE and not ONE:
                    taps_q, taps_k, taps_v = shifted(new_q, taps_q), shifted(new_k, taps_k), shifted(new_v, taps_v)
                    logits = new_logits

            if not ONE and records is None:
                put_blocks(held, state, states_k, states_v, K, V, BK, ROWS, PIECE, ORDER)
            if W > 0 and not EARLY:
                store_tail(v_at, v_t, tail_v, conv_states_l, holds, way, T, L, first, False, W)
        if W > 0 and not EARLY:
            store_tail(q, q_t, tail_q, conv_states_l, holds, way, T, L, real_k, FULL_K, W)
            store_tail(k, k_t, tail_k, conv_states_l, holds, way, T, L, real_k, FULL_K, W)
