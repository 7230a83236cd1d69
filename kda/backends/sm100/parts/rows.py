"""A chunk's rows of a bounded gate and l2norms, from memory to the operands of products, two channels at a time: what
common/cute/gate.py and pairs.py do where one product makes the pairs.

A lane has CHANNELS channels of two neighbouring rows; the lower half of a warp has the first two of its rows, the upper
half the other two.  Such a pair of rows is a group of the chunk.

  s = 1 / (1 + 2^-(rate' (g + bias)))       gc = unit cumsum(s), unit = log2(e) lower_bound;  s = 0 in rows of no token
  x = gc - anchor                           anchor, an integer of a channel, as in common/cute/pairs.py
  X = [kn 2^x; scale qn 2^x]  Y = kn 2^-x   operands of the product
  kE = kn 2^gc, qg = scale qn 2^gc          X times a power of two, exact
  kg = kn 2^(gc_last - gc)                  times b of the row, if it is on the side of keys

`sums` (SUMS, K) float32 in shared memory; a channel is where `place` says:

  0 .. GROUPS - 1    a group's sum of s, then to_x: x less what the group's own rows add
  TO_LAST            s of the chunk's first row, then 2^(gc_last - anchor)
  FROM_ZERO          2^anchor, bfloat16
  BIAS               rate' bias
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, Uint32

from ...common.cute import fast
from ...common.cute.copies import in_global, load, load_one, store
from ...common.cute.fragments import sum_over_lanes
from ...common.cute.tile import HALF, WARPS, C, decay_index, row_below, swizzle_128B
from ..configs import BIAS, CHANNELS, FROM_ZERO, GROUP_ROWS, ROW_GROUPS, TO_LAST, K
from .packed import both, each, from_bf16, fused, logistic, plus, powers, sum_of, times, to_bf16

PAIRS = CHANNELS // 2
LANES = K // CHANNELS                        # of a row
IDLEST = WARPS - 1                           # the warp that has the least to do


class Rows:
    def __init__(self, config, team, tile, negated_kE: bool = False):
        self.c, self.team = config, team
        self.tile = tile                     # Struct with KG and decay; kE and qg are its first 2 C rows
        self.negated_kE = negated_kE         # -kE in its place

    @cute.jit
    def half(self):
        return cute.arch.lane_idx() // LANES

    @cute.jit
    def first_row(self):
        return (2 * self.team.warp() + self.half()) * GROUP_ROWS

    @cute.jit
    def first_channel(self):
        return cute.arch.lane_idx() % LANES * CHANNELS

    @cute.jit
    def rate(self, at):
        """By which logits are multiplied for 2^x."""
        return Float32(-fast.LOG2_E) * at.rate

    @cute.jit
    def store_bias(self, at, sums):
        """dt_bias of a head, by 128 threads; they meet before it is loaded."""
        if cutlass.const_expr(self.c.bias):
            channel = self.team.thread()
            if channel < K:
                value = load_one(at.bias + channel) * self.rate(at)
                store(sums + (BIAS * K + place_of_channel(channel)), [value])

    @cute.jit
    def fetch(self, at, tokens, H, HV):
        """The lane's rows of q, k and g, of a chunk with so many tokens."""
        raw_q, raw_k, raw_g = [], [], []
        for r in cutlass.range_constexpr(GROUP_ROWS):
            row = cutlass.min(self.first_row() + r, tokens - 1)                # past the end: the last row
            raw_q.append(self.load_row(at.q, row, H))
            raw_k.append(self.load_row(at.k, row, H))
            raw_g.append(self.load_row(at.g, row, HV))
        return raw_q, raw_k, raw_g

    @cute.jit
    def prepare(self, raw_q, raw_k, raw_g, tokens, at, sums):
        """scale qn and kn of these rows, and s summed over them."""
        s = self.sums_of_rows(raw_g, tokens, at, sums)
        of_q, of_k = self.norms(raw_q, raw_k, tokens, at.scale)
        qn, kn = [], []
        for r in cutlass.range_constexpr(GROUP_ROWS):
            qn.append([times(x, of_q[r]) for x in raw_q[r]])
            kn.append([times(x, of_k[r]) for x in raw_k[r]])
        return qn, kn, s

    @cute.jit
    def load_row(self, pointer, row, heads):
        dtype = pointer.dtype
        address = fast.row((pointer + self.first_channel()).toint(), row, heads * (K * dtype.width // 8))
        if cutlass.const_expr(dtype is BFloat16):
            words = load(in_global(address, Uint32), PAIRS)
            return [from_bf16(words[i]) for i in range(PAIRS)]
        found = []
        for i in cutlass.range_constexpr(0, PAIRS, 2):
            two = load(in_global(address + 8 * i, Int64), 2)
            found += [two[0], two[1]]
        return found

    @cute.jit
    def sums_of_rows(self, raw_g, tokens, at, sums):
        """s summed over the lane's rows, up to each of them."""
        rate = both(self.rate(at))
        bias, s = [rate] * PAIRS, []
        if cutlass.const_expr(self.c.bias):
            bias = self.load_channels(sums, BIAS)
        for r in cutlass.range_constexpr(GROUP_ROWS):
            # 1 / (inf + ..): a row of no token decays nothing
            one = Float32(1.0) if self.first_row() + r < tokens else Float32(float("inf"))
            row = []
            for i in cutlass.range_constexpr(PAIRS):
                x = fused(raw_g[r][i], rate, bias[i]) if self.c.bias else times(raw_g[r][i], rate)
                found = logistic(x, one)
                row.append(plus(s[r - 1][i], found) if cutlass.const_expr(r > 0) else found)
            s.append(row)
        return s

    @cute.jit
    def norms(self, raw_q, raw_k, tokens, scale):
        """scale / |q| and 1 / |k| of the lane's rows, 0 in rows of no token; pairs of twice the same."""
        squares = []
        for row in (*raw_q, *raw_k):
            total = times(row[0], row[0])
            for x in row[1:]:
                total = fused(x, x, total)
            squares.append(sum_of(total))
        apart = LANES // len(squares)                                          # lanes of a sum
        number = cute.arch.lane_idx() % LANES // apart
        factor = scale if number < GROUP_ROWS else Float32(1.0)
        factor = factor if self.first_row() + number % GROUP_ROWS < tokens else Float32(0.0)
        found = fast.rsqrt(sum_over_lanes(squares, LANES) + Float32(fast.NORM_EPS)) * factor
        within = (32 - LANES) << 8 | 31                                        # lanes of this half
        found = [both(cute.arch.shuffle_sync(found, apart * i, mask_and_clamp=within)) for i in range(len(squares))]
        return found[:GROUP_ROWS], found[GROUP_ROWS:]

    @cute.jit
    def load_channels(self, sums, row):
        """Pairs of the lane's channels."""
        found = []
        for part in cutlass.range_constexpr(CHANNELS // 4):
            two = load(cute.recast_ptr(sums + (row * K + place(part)), dtype=Int64), 2)
            found += [two[0], two[1]]
        return found

    @cute.jit
    def store_channels(self, sums, row, pairs):
        for part in cutlass.range_constexpr(CHANNELS // 4):
            store(cute.recast_ptr(sums + (row * K + place(part)), dtype=Int64), pairs[2 * part : 2 * part + 2])

    @cute.jit
    def sum_over_groups(self, s, sums, lower_bound):
        """Fills `sums` from the groups' own sums."""
        group = 2 * self.team.warp() + self.half()
        self.store_channels(sums, group, s[GROUP_ROWS - 1])
        if group == 0:
            self.store_channels(sums, TO_LAST, s[0])
        self.team.meet()                                                       # the sums of each group are there
        if self.team.warp() < K // 64:
            self.sum_of_channels(sums, 2 * (self.team.thread() % (K // 2)), lower_bound)
        self.team.meet()                                                       # what groups begin with is there

    @cute.jit
    def sum_of_channels(self, sums, at, lower_bound):
        """Of two channels."""
        unit, half = self.unit(lower_bound), lower_bound * Float32(-0.5 * fast.LOG2_E * (C - 1))
        first = load_one(self.pair_at(sums, TO_LAST, at))
        anchor = each("cvt.rni.ftz.f32.f32", fused(first, unit, both(Float32(0.0) - half)))
        of_both = cute.recast_ptr(sums + FROM_ZERO * K, dtype=Uint32) + at // 2
        store(of_both, [to_bf16(each("ex2.approx.ftz.f32", anchor))])
        x = each("neg.ftz.f32", anchor)
        for group in cutlass.range_constexpr(ROW_GROUPS):
            if cutlass.const_expr(group % 8 == 0 and group > 0):
                # redundant: it keeps ptxas from loading all sums first, which needs too many registers
                cute.arch.sync_warp()
            to = self.pair_at(sums, group, at)
            own = load_one(to)
            store(to, [x])
            x = fused(own, unit, x)
        store(self.pair_at(sums, TO_LAST, at), [each("ex2.approx.ftz.f32", x)])

    @cute.jit
    def pair_at(self, sums, row, at):
        return cute.recast_ptr(sums + (row * K + at), dtype=Int64)

    @cute.jit
    def unit(self, lower_bound):
        return both(Float32(fast.LOG2_E) * lower_bound)

    @cute.jit
    def operands(self, qn, kn, s, sums, X, Y, tile, lower_bound, of_k=None):
        """Operands of the one product to X and Y, and those of the state to the tile; kg times `of_k`, a number for
        each of the lane's rows."""
        first, d = self.first_row(), self.first_channel()
        group, unit = 2 * self.team.warp() + self.half(), self.unit(lower_bound)
        to_x, to_last, from_zero = self.load_channels(sums, group), self.load_channels(sums, TO_LAST), []
        for part in cutlass.range_constexpr(CHANNELS // 4):
            words = load(cute.recast_ptr(sums + FROM_ZERO * K, dtype=Uint32) + place(part) // 2, 2)
            from_zero += [words[0], words[1]]
        of_kE = from_zero
        if cutlass.const_expr(self.negated_kE):
            of_kE = [word ^ Uint32(0x80008000) for word in from_zero]
        of_both, of_one = swizzle_128B(first, d, 2 * C), swizzle_128B(first, d, C)
        for r in cutlass.range_constexpr(GROUP_ROWS):
            if cutlass.const_expr(r > 0):
                self.store_decay(tile, from_zero, to_last, d)                  # its branch keeps ptxas from mixing rows
            in_both, in_one = row_below(of_both, r), row_below(of_one, r)
            ka, qa, kb, kg = [], [], [], []
            for i in cutlass.range_constexpr(PAIRS):
                up, down = powers(fused(s[r][i], unit, to_x[i]))
                ka.append(to_bf16(times(kn[r][i], up)))
                qa.append(to_bf16(times(qn[r][i], up)))
                k = times(kn[r][i], down)
                kb.append(to_bf16(k))
                if cutlass.const_expr(of_k is not None):
                    k = times(k, both(of_k[r]))
                kg.append(to_bf16(times(k, to_last[i])))
            for words, factors, to in ((ka, of_kE, 0), (qa, from_zero, C * 2 * HALF)):
                put(X, in_both + to, words)
                put(tile, in_both + to, [fast.times_pair(words[i], factors[i]) for i in range(PAIRS)])
            put(Y, in_one, kb)
            put(tile, in_one + self.tile.KG.offset, kg)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.team.meet_for_product()                                           # both operands are there

    @cute.jit
    def store_decay(self, tile, from_zero, to_last, d):
        """2^gc_last to the tile, by the warp that has the least to do."""
        if self.team.warp() == IDLEST and self.half() == 0:
            for i in cutlass.range_constexpr(PAIRS):
                to = cute.recast_ptr(tile + self.tile.decay.offset, dtype=Float32) + decay_index(d + 2 * i)
                store(cute.recast_ptr(to, dtype=Int64), [times(from_bf16(from_zero[i]), to_last[i])])


@cute.jit
def put(pointer, offset, words):
    """16 bytes, so many bytes behind a pointer."""
    store(cute.recast_ptr(pointer, dtype=Uint32) + offset // 4, words)


@cute.jit
def place(part: cutlass.Constexpr):
    """Where four of the lane's channels lie in a row of `sums`: those of neighbouring lanes lie together."""
    return part * (4 * LANES) + cute.arch.lane_idx() % LANES * 4


@cute.jit
def place_of_channel(channel):
    return (channel >> 2 & 1) * (4 * LANES) + (channel >> 3) * 4 + (channel & 3)
