"""Products of a chunk's rows with each other, under the decay between them, and the operands that meet the state: made
by the eight warps that have the rows in registers (gate.py).

  [A_kk / b; A_qk] = [kn 2^x; scale qn 2^x] @ (kn 2^-x)^T
                     `one_product`: x = gc - anchor, an integer near gc_first - half of the bits that a bounded gate
                     lets 31 rows lose, so that bfloat16 holds both factors
                     `by_halving`, any other gate: five products of factors that are at most 1
  kE = kn 2^gc, qg = scale qn 2^gc, kg = kn 2^(gc_last - gc)   from the same two exponentials of an element

  warps  do
  0-7    operands
  0-3    the product;  warps 0, 1 hold A_kk / b, warps 2, 3 A_qk

An arch's team meets for a product (`meet_for_product`), and its `tensor_core` makes it:

  accumulator()                        registers of warps 0 to 3 for [A_kk / b; A_qk], as fragments.accumulator_places
  one_product(acc, X, Y, phase)        acc = [2 C rows at X] @ [C rows at Y]^T, by warps 0 to 3
  level(acc, X, level, phase)          the product of one level of halving, added to acc now or in `levels`
  levels(acc)                          adds what `level` has not
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32

from . import fast
from .copies import load, store, words_of
from .fragments import accumulator_places, sum_over_lanes, times
from .tile import HALF, LEVELS, PITCH_A, WARP_ROWS, WARPS, C, decay_index, row_below, swizzle_128B

ACROSS = 3                                   # a `number` of `counts`: both products of rows.py across blocks


class PairMaker:
    def __init__(self, config, team, gate, tensor_core, tile, buffers: int):
        self.c, self.team, self.gate, self.tensor_core = config, team, gate, tensor_core
        self.tile = tile                     # Struct with KG and decay; kE and qg are its first 2 C rows
        self.buffers = buffers               # buffers of X for the products by halving

    def one_product(self, qn, kn, gc, sums, X, Y, lower_bound, of_k, put):
        """Operands of the one product to X and Y, and from them those of the state, as words, to `put`, which also gets
        their place in the tile, in bytes; kg times `of_k`, a number for each of the warp's rows, or None."""
        E, d, first = self.c.K // 32, self.c.K // 32 * cute.arch.lane_idx(), WARP_ROWS * self.team.warp()
        before, row0, last = self.gate.sums_of_chunk(sums, d)
        half = lower_bound * Float32(-0.5 * fast.LOG2_E * (C - 1))
        # 2^gc = 2^x 2^anchor, an exact product; 2^(gc_last - gc) = 2^-x 2^(gc_last - anchor)
        anchor = [fast.whole(row0[e] - half) for e in range(E)]
        to_x = [before[e] - anchor[e] for e in range(E)]
        from_zero = words_of([fast.exp2(anchor[e]) for e in range(E)])
        to_last = [fast.exp2(last[e] - anchor[e]) for e in range(E)]
        of_both, of_one = swizzle_128B(first, d, 2 * C), swizzle_128B(first, d, C)
        for r in range(WARP_ROWS):
            ka, qa, kb = self.under_decay(qn[r], kn[r], gc[r], to_x)
            in_both, in_one = row_below(of_both, r), row_below(of_one, r)
            for words, to in ((words_of(ka), 0), (words_of(qa), C * 128)):
                store(cute.recast_ptr(X, dtype=Uint32) + (in_both + to) // 4, words)
                put(in_both + to, [fast.times_pair(words[w], from_zero[w]) for w in range(E // 2)])
            store(Y + in_one // 2, kb)
            if of_k is not None:
                kb = self.gate.times(kb, of_k[r])
            put(self.tile.KG.offset + in_one, words_of(times(kb, to_last)))

    def meet_for_product(self):
        cute.arch.fence_proxy("async.shared", space="cta")
        self.team.meet_for_product()                                           # both operands are there

    def under_decay(self, qn, kn, gc, to_x):
        """kn 2^x, qn 2^x and kn 2^-x."""
        ka, qa, kb = [], [], []
        for e in range(self.c.K // 32):
            x = gc[e] + to_x[e]
            up, down = fast.exp2(x), fast.exp2(-x)
            ka.append(kn[e] * up)
            qa.append(qn[e] * up)
            kb.append(kn[e] * down)
        return ka, qa, kb

    @cute.jit
    def by_halving(self, qn, kn, gc, sums, X, A_kk, tile, acc, phase, of_k=None):
        """No exponent above 0: for blocks of 2S rows, S = 16 .. 1, a product of rows under the decay to or from the
        block's cut, of which the pairs across it count.  Each row's product with itself is `qk_diagonal`; kg is times
        `of_k`, as above."""
        E, d, first = self.c.K // 32, self.c.K // 32 * cute.arch.lane_idx(), WARP_ROWS * self.team.warp()
        operands = cute.recast_ptr(tile, dtype=BFloat16)
        before, _, last = self.gate.sums_of_chunk(sums, d)
        of_both, of_one = swizzle_128B(first, d, 2 * C), swizzle_128B(first, d, C)
        for r in cutlass.range_constexpr(WARP_ROWS):
            in_both, in_one = row_below(of_both, r) // 2, row_below(of_one, r) // 2
            from_zero = [fast.exp2(gc[r][e] + before[e]) for e in range(E)]
            to_last = [fast.exp2(last[e] - (gc[r][e] + before[e])) for e in range(E)]
            store(operands + in_both, times(kn[r], from_zero))
            store(operands + (in_both + C * HALF), times(qn[r], from_zero))
            kb = kn[r]
            if cutlass.const_expr(of_k is not None):
                kb = [x * of_k[r] for x in kb]
            store(operands + (in_one + self.tile.KG.offset // 2), times(kb, to_last))
        self.store_decay(tile, sums)
        acc.fill(0.0)
        for step in cutlass.range_constexpr(LEVELS):
            level = LEVELS - 1 - step
            buffer = X + step % self.buffers * (2 * C * self.c.K)
            if cutlass.const_expr(self.buffers == 1 and step > 0):
                self.team.meet()                                               # the buffer was read
            cut = self.cut_between_warps(before, sums, level, d)
            for r in cutlass.range_constexpr(WARP_ROWS):
                decay = self.decay_to_cut(gc, cut, r, level)
                in_both = row_below(of_both, r) // 2
                store(buffer + in_both, times(kn[r], decay))
                store(buffer + (in_both + C * HALF), times(qn[r], decay))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.team.meet_for_product()                                       # it is filled; the other one was read
            if self.team.warp() < 4:
                self.tensor_core.level(acc, buffer, level, phase ^ step & 1)
        if self.team.warp() < 4:
            self.tensor_core.levels(acc)
            if self.team.warp() >= 2:
                places = accumulator_places(self.team.thread())
                diagonal = [A_kk[(places[2 * r][0] - C) * PITCH_A + C] for r in range(2)]  # a thread has two rows
                for i in cutlass.range_constexpr(cute.size(acc)):
                    row, column = places[i]
                    acc[i] = diagonal[i // 2 % 2] if column == row - C else acc[i]

    @cute.jit
    def qk_diagonal(self, qn, kn, A_kk):
        """A_qk of each row with itself, into the padding of A_kk: column C."""
        products = []
        for r in cutlass.range_constexpr(WARP_ROWS):
            total = Float32(0.0)
            for e in cutlass.range_constexpr(self.c.K // 32):
                total += qn[r][e] * kn[r][e]
            products.append(total)
        total, each = sum_over_lanes(products), 32 // WARP_ROWS
        lane = cute.arch.lane_idx()
        if lane % each == 0:
            A_kk[(WARP_ROWS * self.team.warp() + lane // each) * PITCH_A + C] = total

    @cute.jit
    def cut_between_warps(self, before, sums, level: cutlass.Constexpr, d):
        """1 in the second half of a block of 2^(level+1) rows, -1 in the first, and the product of that with the sum
        from the cut to the warp's rows; nothing where the cut is among the warp's own."""
        if cutlass.const_expr(level < 2):
            return None
        warps = 1 << level - 2                                                 # warps of a half
        end = load(sums + ((self.team.warp() & -2 * warps) + warps) * self.c.K + d, self.c.K // 32)
        sign = Float32(1.0) if self.team.warp() & warps else Float32(-1.0)
        return sign, [(before[e] - end[e]) * sign for e in range(self.c.K // 32)]

    def decay_to_cut(self, gc, cut, r: int, level: int):
        """2^(gc - gc_cut) of a row in the second half, 2^(gc_cut - gc) of one in the first, gc_cut of the first half's
        last row."""
        E = self.c.K // 32
        if level < 2:
            end = gc[r & 2] if level == 0 else gc[1]
            later, earlier = (gc[r], end) if r >> level & 1 else (end, gc[r])
            return [fast.exp2(later[e] - earlier[e]) for e in range(E)]
        sign, from_cut = cut
        return [fast.exp2(gc[r][e] * sign + from_cut[e]) for e in range(E)]

    @cute.jit
    def store_decay(self, tile, sums):
        """2^gc_last to the tile, by the warp that has the least to do."""
        if self.team.warp() == WARPS - 1:
            d = self.c.K // 32 * cute.arch.lane_idx()
            last = load(sums + ((WARPS + 1) * self.c.K + d), self.c.K // 32)
            decay = [fast.exp2(last[e]) for e in range(self.c.K // 32)]
            for e in cutlass.range_constexpr(0, self.c.K // 32, 2):
                to = cute.recast_ptr(tile + self.tile.decay.offset, dtype=Float32) + decay_index(d + e)
                store(to, decay[e : e + 2])


@cute.jit
def add_level(acc, found, level: cutlass.Constexpr, thread):
    """What counts of a level's product: pairs in one block and different halves of it."""
    places = accumulator_places(thread)
    for i in cutlass.range_constexpr(cute.size(acc)):
        row, column = places[i]
        counts = ((row & C - 1) ^ column) >> level == 1
        acc[i] = acc[i] + (found[i] if counts else Float32(0.0))


@cute.jit
def keep_blocks(acc, found, number: cutlass.Constexpr, places):
    """Copies what counts of a product of rows.py to acc; `places` are those of its elements.  Number 0: pairs within
    blocks of 8 rows, all others are cleared;  1 and 2: those across blocks of 8 and of 16 rows, all others stay."""
    for i in cutlass.range_constexpr(C // 2):
        row, column = places[i]
        other = acc[i] if cutlass.const_expr(number > 0) else Float32(0.0)
        acc[i] = found[i] if counts(row, column, number) else other


def counts(row, column, number: int):
    """Whether a pair counts in that product of rows.py: within blocks of 8 rows (0), across those of 8 (1), of 16 (2),
    across either (ACROSS); None: everything does."""
    apart = (row & C - 1 ^ column) >> 3                                        # blocks of 8 rows, bit by bit
    if number is None:
        return True
    if number == ACROSS:
        return apart != 0
    return apart >> number - 1 == 1 if number > 0 else apart == 0


@cute.jit
def store_A_kk(acc, A_kk, b, thread, on_keys: cutlass.Constexpr = False, number: cutlass.Constexpr = None):
    """A_kk below its diagonal to shared memory, by warps 0 and 1; b of its rows, or (`on_keys`) of its columns; what
    counts of product `number`."""
    places = accumulator_places(thread)
    of_rows = [b[places[2 * r][0]] for r in range(2)]                          # a thread has two rows
    for i in cutlass.range_constexpr(0, cute.size(acc), 2):
        row, column = places[i]
        of_pair = [of_rows[i // 2 % 2]] * 2
        if cutlass.const_expr(on_keys):
            of_pair = [b[column], b[column + 1]]
        pair = [acc[i] * of_pair[0] if column < row else Float32(0.0),
                acc[i + 1] * of_pair[1] if column + 1 < row else Float32(0.0)]
        if counts(row, column, number):
            store(A_kk + (row * PITCH_A + column), pair)


@cute.jit
def causal_pair(acc, places, i: cutlass.Constexpr):
    """Elements i and i + 1 of A_qk: zero for keys of later tokens."""
    row, column = places[i]
    row = row - C
    return [acc[i] if column <= row else Float32(0.0), acc[i + 1] if column < row else Float32(0.0)]
