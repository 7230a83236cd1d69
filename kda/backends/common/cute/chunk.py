"""One chunk of C = 32 rows and one value head, by eight warps: what fwd/prepare of Hopper and fwd/fused of both archs
are made of.

  gc = cumsum(g2);  x = gc - anchor,  an integer near gc_first - half of the bits that a bounded gate lets 31 rows lose
  [A_kk / b; A_qk] = [kn 2^x; scale qn 2^x] @ (kn 2^-x)^T      one product, both factors within what bfloat16 holds
                     other gates: by halving, five products    of factors that are at most 1 (`by_halving`)
  TB = (I + A_kk)^-1 b                                         by substitution, float32, and TF32
  kn 2^gc, scale qn 2^gc, kn 2^(gc_last - gc)                  out of the same two exponentials of an element

  warps  do
  0-7    warp w owns rows 4w .. 4w+3, a lane K / 32 channels: gate, sums, norms, decays, operands
  0-3    the product;  warps 0, 1 hold A_kk, warps 2, 3 A_qk
  0      the inverse, a lane a column

An arch says in its subclass where a product is made (`products`) and how warps meet.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32

from . import fast
from .copies import floats, load, load_one, store, words_of
from .tile import HALF, LEVELS, PAD, PITCH_X, ROWS, WARPS, C, Tile, in_decays, in_narrow_rows, in_wide_rows, row_below


class ChunkRows:
    BUFFERS = 2                              # of operands, by halving
    PARTED = ROWS                            # before which row `keep_last` is: its branch keeps apart what ptxas mixes

    def __init__(self, config):
        self.c = config
        self.tile = Tile(config.K)

    # What an arch adds:
    #   products(acc, x, y, rows_of_y, phase)   acc = [2 C rows at x] @ [C rows at y, of so many]^T, by warps 0 to 3, as
    #                                           `places` has it; `phase` of products, one after the other
    #   accumulator()                           of that
    #   meet(), meet_first()                    all eight warps; warps 0 to 3, where A_qk is for others to read
    #   until_free(...)                         the tile is nobody else's
    #   from_shared(...)                        after the inverse, by warp 0

    @cute.jit
    def thread(self):
        """Of the eight warps that make a chunk."""
        return cute.arch.thread_idx()[0]

    @cute.jit
    def warp(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx())

    @cute.jit
    def in_TB(self, column, row):
        """Bytes to an element of TB, transposed."""
        return in_narrow_rows(column, row)

    @cute.jit
    def until_free(self):
        """Nobody else has the tile."""

    @cute.jit
    def of_head(self, q, k, g, beta, A_log, dt_bias, begin, head, H, HV):
        """Where a token's rows of one value head are, its rate and where its bias is."""
        K, of_q = self.c.K, head
        if cutlass.const_expr(self.c.grouped):
            of_q = head // (HV // H)
        rate = Float32(1.0)
        if cutlass.const_expr(self.c.rate):
            rate = fast.finite(fast.exp2(load_one(A_log + head) * Float32(fast.LOG2_E)))
        q, k = q + (begin * H + of_q) * K, k + (begin * H + of_q) * K
        return q, k, g + (begin * HV + head) * K, beta + (begin * HV + head), rate, dt_bias + head * K

    @cute.jit
    def rows(self, q, k, g, rate, bias, rows, H, HV, scale, lower_bound):
        """scale qn, kn and the sums of g2 up to each, of this lane's channels in the warp's rows of those that begin at
        q, k and g."""
        K, E = self.c.K, self.c.K // 32
        first, d = ROWS * self.warp(), E * cute.arch.lane_idx()
        raw_q, raw_k, raw_g, weight = [], [], [], []
        for r in cutlass.range_constexpr(ROWS):
            row = cutlass.min(first + r, rows - 1)                             # rows that are not there: the last one,
            raw_q.append(floats(load(q + (row * (H * K) + d), E)))
            raw_k.append(floats(load(k + (row * (H * K) + d), E)))
            raw_g.append(floats(load(g + (row * (HV * K) + d), E)))
            weight.append(Float32(1.0) if first + r < rows else Float32(0.0))  # without weight
        gc = self.decays(raw_g, weight, rate, bias, d, lower_bound)
        qs, ks = [Float32(1.0)] * ROWS, [Float32(1.0)] * ROWS
        if cutlass.const_expr(self.c.norm):
            qs, ks = self.norms(raw_q, raw_k)
        qn, kn = [], []
        for r in cutlass.range_constexpr(ROWS):
            of_q, of_k = qs[r] * (scale * weight[r]), ks[r] * weight[r]
            qn.append([x * of_q for x in raw_q[r]])
            kn.append([x * of_k for x in raw_k[r]])
        return qn, kn, gc

    @cute.jit
    def at_once(self, qn, kn, gc, sums, rows_of_x, rows_of_y, tile, lower_bound, *free):
        """Operands of the one product of a bounded gate, and from them those of the chain."""
        E, d, first = self.c.K // 32, self.c.K // 32 * cute.arch.lane_idx(), ROWS * self.warp()
        self.over_warps(gc, sums, d)
        self.until_free(*free)
        before, row0, last = self.of_all(sums, d)
        half = lower_bound * Float32(-0.5 * fast.LOG2_E * (C - 1))
        # 2^gc = 2^x 2^anchor, an exact product; 2^(gc_last - gc) = 2^-x 2^(gc_last - anchor)
        anchor = [fast.whole(row0[e] - half) for e in range(E)]
        to_x = [before[e] - anchor[e] for e in range(E)]
        from_zero = words_of([fast.exp2(anchor[e]) for e in range(E)])
        to_last = [fast.exp2(last[e] - anchor[e]) for e in range(E)]
        of_both, of_one = in_wide_rows(first, d, 2 * C), in_wide_rows(first, d, C)
        for r in cutlass.range_constexpr(ROWS):
            if cutlass.const_expr(r == self.PARTED):
                self.keep_last(tile, last, d)
            ka, qa, kb = [], [], []
            for e in cutlass.range_constexpr(E):
                x = gc[r][e] + to_x[e]
                up, down = fast.exp2(x), fast.exp2(-x)
                ka.append(kn[r][e] * up)
                qa.append(qn[r][e] * up)
                kb.append(kn[r][e] * down)
            in_both, in_one = row_below(of_both, r), row_below(of_one, r)
            for words, to in ((words_of(ka), 0), (words_of(qa), C * 128)):
                store(cute.recast_ptr(rows_of_x, dtype=Uint32) + (in_both + to) // 4, words)
                kept = [fast.times_pair(words[w], from_zero[w]) for w in range(E // 2)]
                store(cute.recast_ptr(tile, dtype=Uint32) + (in_both + to) // 4, kept)
            store(rows_of_y + in_one // 2, kb)
            store(cute.recast_ptr(tile + self.tile.KG, dtype=BFloat16) + in_one // 2, times(kb, to_last))
        if cutlass.const_expr(self.PARTED == ROWS):
            self.keep_last(tile, last, d)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()

    @cute.jit
    def by_halving(self, qn, kn, gc, sums, rows_of_x, A_kk, tile, acc, phase, *free):
        """Any gate, no exponent above 0: for blocks of 2S rows, S = 16 .. 1, a product of rows under the decay to or
        from the block's cut, of which the pairs across it count.  Rows with themselves are sums over channels."""
        E, d, first = self.c.K // 32, self.c.K // 32 * cute.arch.lane_idx(), ROWS * self.warp()
        operands = cute.recast_ptr(tile, dtype=BFloat16)
        self.with_themselves(qn, kn, A_kk)
        self.over_warps(gc, sums, d)
        self.until_free(*free)
        before, _, last = self.of_all(sums, d)
        of_both, of_one = in_wide_rows(first, d, 2 * C), in_wide_rows(first, d, C)
        for r in cutlass.range_constexpr(ROWS):
            in_both, in_one = row_below(of_both, r) // 2, row_below(of_one, r) // 2
            from_zero = [fast.exp2(gc[r][e] + before[e]) for e in range(E)]
            to_last = [fast.exp2(last[e] - (gc[r][e] + before[e])) for e in range(E)]
            store(operands + in_both, times(kn[r], from_zero))
            store(operands + (in_both + C * HALF), times(qn[r], from_zero))
            store(operands + (in_one + self.tile.KG // 2), times(kn[r], to_last))
        self.keep_last(tile, last, d)
        acc.fill(0.0)
        for step in cutlass.range_constexpr(LEVELS):
            level = LEVELS - 1 - step
            buffer = rows_of_x + step % self.BUFFERS * (2 * C * self.c.K)
            if cutlass.const_expr(self.BUFFERS == 1 and step > 0):
                self.meet()                                                    # it was read
            for r in cutlass.range_constexpr(ROWS):
                decay = self.to_cut(gc, before, sums, r, level, d)
                in_both = row_below(of_both, r) // 2
                store(buffer + in_both, times(kn[r], decay))
                store(buffer + (in_both + C * HALF), times(qn[r], decay))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet()                                                        # the other buffer was read, too
            if self.warp() < 4:
                self.of_level(acc, buffer, level, phase ^ step & 1)
        if self.warp() < 4:
            self.of_levels(acc)
            if self.warp() >= 2:
                at = places(self.thread())
                own = [A_kk[(at[2 * r][0] - C) * PAD + C] for r in range(2)]   # a thread has two rows
                for i in cutlass.range_constexpr(cute.size(acc)):
                    row, column = at[i]
                    acc[i] = own[i // 2 % 2] if column == row - C else acc[i]

    @cute.jit
    def of_level(self, acc, x, level: cutlass.Constexpr, phase):
        """A level's product, by warps 0 to 3."""
        found = self.accumulator()
        self.products(found, x, x, 2 * C, phase)
        self.add_level(acc, found, level)

    @cute.jit
    def of_levels(self, acc):
        """What was not added by then."""

    @cute.jit
    def add_level(self, acc, found, level: cutlass.Constexpr):
        """What counts of a product: pairs in one block and different halves of it."""
        at = places(self.thread())
        for i in cutlass.range_constexpr(cute.size(acc)):
            row, column = at[i]
            counts = ((row & C - 1) ^ column) >> level == 1
            acc[i] = acc[i] + (found[i] if counts else Float32(0.0))

    @cute.jit
    def with_themselves(self, qn, kn, A_kk):
        """A_qk of each row with itself, to what a row of A_kk has behind its end."""
        pairs = []
        for r in cutlass.range_constexpr(ROWS):
            total = Float32(0.0)
            for e in cutlass.range_constexpr(self.c.K // 32):
                total += qn[r][e] * kn[r][e]
            pairs.append(total)
        total, each = over_lanes(pairs), 32 // ROWS
        lane = cute.arch.lane_idx()
        if lane % each == 0:
            A_kk[(ROWS * self.warp() + lane // each) * PAD + C] = total

    @cute.jit
    def to_cut(self, gc, before, sums, r: cutlass.Constexpr, level: cutlass.Constexpr, d):
        """2^-|gc - gc_cut| of a row, gc_cut of the last row of the first half of its block of 2^(level+1) rows."""
        E = self.c.K // 32
        if cutlass.const_expr(level < 2):                                      # among the warp's own rows
            cut = gc[r & 2] if cutlass.const_expr(level == 0) else gc[1]
            return [fast.exp2(fast.distance(gc[r][e], cut[e])) for e in range(E)]
        warps = 1 << level - 2                                                 # of a half
        end = load(sums + ((self.warp() & -2 * warps) + warps) * self.c.K + d, E)
        return [fast.exp2(fast.distance(gc[r][e], end[e] - before[e])) for e in range(E)]

    @cute.jit
    def keep_last(self, tile, last, d):
        if self.warp() == WARPS - 1:                                           # others have more to do
            decay = [fast.exp2(last[e]) for e in range(self.c.K // 32)]
            for e in cutlass.range_constexpr(0, self.c.K // 32, 2):
                store(cute.recast_ptr(tile + self.tile.DECAY, dtype=Float32) + in_decays(d + e), decay[e : e + 2])

    @cute.jit
    def decays(self, raw_g, weight, rate, bias, d, lower_bound):
        """Sums of g2 over the warp's rows up to each of them."""
        c, E = self.c, self.c.K // 32
        if cutlass.const_expr(c.bias):
            bias = load(bias + d, E)
        gc = []
        for r in cutlass.range_constexpr(ROWS):
            row = []
            for e in cutlass.range_constexpr(E):
                x = raw_g[r][e]
                if cutlass.const_expr(c.bias):
                    x += bias[e]
                g2 = self.log2_decay(x, rate, lower_bound, weight[r])
                row.append(g2 + gc[r - 1][e] if cutlass.const_expr(r > 0) else g2)
            gc.append(row)
        return gc

    @cute.jit
    def log2_decay(self, x, rate, lower_bound, weight):
        """g2 of logits (bias added), or of given decays; 0 in a row without weight."""
        gate = self.c.gate
        if cutlass.const_expr(gate == "bounded"):
            decay = fast.reciprocal(Float32(1.0) + fast.exp2(x * (Float32(-fast.LOG2_E) * rate)))
            decay = (Float32(fast.LOG2_E) * lower_bound * weight) * decay
            return decay if cutlass.const_expr(self.c.block) else fast.at_least(decay, fast.FLOOR)
        if cutlass.const_expr(gate == "softplus"):
            x = -(rate * fast.softplus(x))
        decay = fast.at_least(Float32(fast.LOG2_E) * x, fast.FLOOR)
        return decay if weight != Float32(0.0) else Float32(0.0)

    @cute.jit
    def over_warps(self, gc, sums, d):
        """Sums of decays before each warp, g2 of row 0 and gc_last, in `sums`."""
        K, thread, warp = self.c.K, self.thread(), self.warp()
        store(sums + (warp * K + d), gc[ROWS - 1])
        if warp == 0:
            store(sums + (WARPS * K + d), gc[0])
        self.meet()
        if thread < K:                                                         # a channel: sums before each warp
            total = Float32(0.0)
            for w in cutlass.range_constexpr(WARPS):
                if cutlass.const_expr(w == WARPS // 2):
                    cute.arch.sync_warp()                                      # else all are loaded first: registers
                own = load_one(sums + (w * K + thread))
                store(sums + (w * K + thread), [total])
                total += own
            store(sums + ((WARPS + 1) * K + thread), [total])
        self.meet()

    @cute.jit
    def of_all(self, sums, d):
        """The sums of the warps before this one, g2 of row 0, and gc_last."""
        return [load(sums + (row * self.c.K + d), self.c.K // 32) for row in (self.warp(), WARPS, WARPS + 1)]

    @cute.jit
    def norms(self, raw_q, raw_k):
        """1 / |q|, 1 / |k| of the warp's rows."""
        squares = []
        for rows in (raw_q, raw_k):
            for r in cutlass.range_constexpr(ROWS):
                total = Float32(0.0)
                for e in cutlass.range_constexpr(self.c.K // 32):
                    total += rows[r][e] * rows[r][e]
                squares.append(total)
        total = over_lanes(squares)
        found = fast.rsqrt(total + Float32(fast.NORM_EPS))
        each = [cute.arch.shuffle_sync(found, 4 * i) for i in range(2 * ROWS)]
        return each[:ROWS], each[ROWS:]

    @cute.jit
    def matrices(self, acc, A_kk, b, tile, A_qk, rows, stride):
        """A_kk to shared memory, A_qk to the tile, and to where it is kept."""
        if self.warp() < 2:
            self.A_kk_to_shared(acc, A_kk, b)
        else:
            to, at = cute.recast_ptr(tile + self.tile.A_qk, dtype=BFloat16), places(self.thread())
            for i in cutlass.range_constexpr(0, cute.size(acc), 2):
                row, column = at[i]
                row, pair = row - C, self.without_later(acc, at, i)
                store(to + in_narrow_rows(row, column) // 2, pair)
                if cutlass.const_expr(self.c.keep):
                    if row < rows:
                        store(A_qk + (row * stride + column), pair)

    @cute.jit
    def A_kk_to_shared(self, acc, A_kk, b):
        """By warps 0 and 1."""
        at = places(self.thread())
        of_rows = [b[at[2 * r][0]] for r in range(2)]                          # a thread has two rows
        for i in cutlass.range_constexpr(0, cute.size(acc), 2):
            row, column = at[i]
            of_row = of_rows[i // 2 % 2]
            pair = [acc[i] * of_row if column < row else Float32(0.0),
                    acc[i + 1] * of_row if column + 1 < row else Float32(0.0)]  # fmt: skip
            store(A_kk + (row * PAD + column), pair)

    @cute.jit
    def without_later(self, acc, at, i: cutlass.Constexpr):
        """Elements i and i + 1 of A_qk: nothing of tokens after a row's own."""
        row, column = at[i]
        row = row - C
        return [acc[i] if column <= row else Float32(0.0), acc[i + 1] if column < row else Float32(0.0)]

    @cute.jit
    def inverse(self, A_kk, columns, TB, whole, b, tile, A_inv, rows, stride):
        """(I + A_kk)^-1 b, transposed, of one warp: blocks of 8 rows by substitution, a lane a column; then pairs of
        them as [X 0; -Y A X, Y], and the two of 16 rows.  Without b in `whole`, and from there to where it is kept."""
        lane = cute.arch.lane_idx()
        block, column = lane >> 3, lane & 7
        x = []
        for i in cutlass.range_constexpr(8):
            parts = [Float32(1.0) if column == i else Float32(0.0), Float32(0.0)]
            for j in cutlass.range_constexpr(0, i, 4):
                a = load(A_kk + (block * (8 * PAD + 8) + (i * PAD + j)), 4)
                for s in cutlass.range_constexpr(min(4, i - j)):
                    parts[s % 2] = parts[s % 2] - a[s] * x[j + s]
            x.append(parts[0] + parts[1])
        for i in cutlass.range_constexpr(0, 8, 4):
            store(columns + (lane * PITCH_X + (lane & 8) + i), x[i : i + 4])
        self.put(TB, whole, b, lane, block * 8, x)
        if cutlass.const_expr(self.c.keep):
            for above in cutlass.range_constexpr(3):
                if above < block:
                    self.keep_column(whole, lane, above * 8, [Float32(0.0)] * 8)
        cute.arch.sync_warp()
        self.merge_pairs(A_kk, columns, TB, whole, b)
        cute.arch.sync_warp()
        self.merge(A_kk, columns, TB, whole, b)
        cute.arch.sync_warp()
        self.from_shared(TB, whole, tile, A_inv, rows, stride)

    # Both merges make Y A first: its rows come out as columns of the other operand of X^T (Y A)^T, where columns of
    # Y A, that is rows of X, are counted in pairs.

    @cute.jit
    def merge_pairs(self, A_kk, columns, TB, whole, b):
        """-Y A X of 8 rows each: the upper 8 rows of products are of the first pair, the lower 8 of the second."""
        row, k = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        of_Y = columns + ((8 + k) * PITCH_X + 8 + row)
        y = tf32s(*[load_one(of_Y + at) for at in (0, 16 * PITCH_X, 4 * PITCH_X, 20 * PITCH_X)])
        of_X = [load(columns + ((row + 16 * p) * PITCH_X + 2 * k), 2) for p in range(2)]
        x = tf32s(of_X[0][0], of_X[1][0], of_X[0][1], of_X[1][1])
        for p in cutlass.range_constexpr(2):
            of_A = A_kk + ((16 * p + 8 + k) * PAD + 16 * p + row)
            YA = mma_tf32([Float32(0.0)] * 4, y, tf32s(load_one(of_A), load_one(of_A + 4 * PAD)))
            found = mma_tf32([Float32(0.0)] * 4, x, tf32s(-YA[2 * p], -YA[2 * p + 1]))[2 * p : 2 * p + 2]
            store(columns + ((16 * p + row) * PITCH_X + 8 + 2 * k), found)
            self.put(TB, whole, b, 16 * p + row, 16 * p + 8 + 2 * k, found)

    @cute.jit
    def merge(self, A_kk, columns, TB, whole, b):
        """The same of 16 rows."""
        row, k = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        YA, found = [[Float32(0.0)] * 4, [Float32(0.0)] * 4], [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for step in cutlass.range_constexpr(0, 16, 8):
            of_Y = columns + ((16 + step + k) * PITCH_X + row)
            y = tf32s(*[load_one(of_Y + at) for at in (0, 8, 4 * PITCH_X, 4 * PITCH_X + 8)])
            for n in cutlass.range_constexpr(2):
                of_A = A_kk + ((16 + step + k) * PAD + 8 * n + row)
                YA[n] = mma_tf32(YA[n], y, tf32s(load_one(of_A), load_one(of_A + 4 * PAD)))
        for step in cutlass.range_constexpr(2):
            upper, lower = [load(columns + ((row + r) * PITCH_X + 8 * step + 2 * k), 2) for r in (0, 8)]
            x = tf32s(upper[0], lower[0], upper[1], lower[1])
            for n in cutlass.range_constexpr(2):
                found[n] = mma_tf32(found[n], x, tf32s(-YA[step][2 * n], -YA[step][2 * n + 1]))
        for n in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                self.put(TB, whole, b, row + 8 * r, 16 + 8 * n + 2 * k, found[n][2 * r : 2 * r + 2])

    @cute.jit
    def put(self, TB, whole, b, column, row, values):
        """Of a column of the inverse, some rows."""
        of_column = b[column]
        store(TB + self.in_TB(column, row) // 2, [x * of_column for x in values])
        if cutlass.const_expr(self.c.keep):
            self.keep_column(whole, column, row, values)

    @cute.jit
    def keep_column(self, whole, column, row, values):
        for i in cutlass.range_constexpr(len(values)):
            whole[in_narrow_rows(row + i, column) // 2] = values[i].to(BFloat16)

    @cute.jit
    def zeros(self, columns, TB):
        """What is zero in every inverse, by one warp: above the blocks of 8 rows."""
        lane, zero = cute.arch.lane_idx(), [Float32(0.0)] * 8
        for above in cutlass.range_constexpr(3):
            if above < lane >> 3:
                store(TB + self.in_TB(lane, above * 8) // 2, zero)
        if lane & 8 != 0:
            for i in cutlass.range_constexpr(0, 8, 4):
                store(columns + (lane * PITCH_X + i), zero[:4])


@cute.jit
def places(thread):
    """(row of [k; q], row of k) of what a thread of the first four warps holds of their product."""
    warp, lane = thread >> 5, thread & 31
    return [(16 * warp + (lane >> 2) + i // 2 % 2 * 8, (lane & 3) * 2 + i // 4 * 8 + i % 2) for i in range(C // 2)]


@cute.jit
def over_lanes(values):
    """Sums over the lanes of a warp, the i-th in lanes 32 / n * i and on: lanes share them out, halving what each goes
    on with, then hand them round."""
    lane = cute.arch.lane_idx()
    for far in (16, 8, 4, 2, 1):
        width, upper, mine = len(values) // 2, lane & far, []
        for i in cutlass.range_constexpr(width):
            low, high = values[i], values[i + width]
            kept, sent = (high if upper != 0 else low), (low if upper != 0 else high)
            mine.append(kept + cute.arch.shuffle_sync_bfly(sent, far))
        values = mine if width else [values[0] + cute.arch.shuffle_sync_bfly(values[0], far)]
    return values[0]


@cute.jit
def times(x, y):
    return [a * b for a, b in zip(x, y)]


@cute.jit
def step_size(beta, kind: cutlass.Constexpr, rows, HV, row):
    """b of a row of those that begin at beta; 0 where there is no token."""
    x = load_one(beta + cutlass.min(row, rows - 1) * HV).to(Float32)
    if cutlass.const_expr(kind != "given"):
        x = fast.sigmoid(x) * Float32(2.0 if kind == "2*sigmoid" else 1.0)
    return x if row < rows else Float32(0.0)


@cute.jit
def tf32s(*values):
    """Operands of mma_tf32, to nearest: the product alone would cut them off."""
    return [
        cute.arch.inline_ptx("cvt.rn.tf32.f32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x])
        for x in values
    ]


@cute.jit
def mma_tf32(acc, a, b):
    """acc + a @ b, (16, 8) = (16, 8) @ (8, 8), as lanes of a warp hold them."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4, read_only_args=[*a, *b, *acc],
    )  # fmt: skip
