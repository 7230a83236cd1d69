"""A chunk's rows from memory to the operands of products, two channels at a time.

K is 64 or 128.  A lane has K / LANES channels of two neighbouring rows; the lower half of a warp has the first two of
its rows, the upper half the other two.  Such a pair of rows is a group of the chunk.

`one_product`, of a bounded gate with l2norms, whose 31 rows lose so many bits that bfloat16 holds both factors:

  s = 1 / (1 + 2^-(rate' (g + bias)))       gc = unit cumsum(s), unit = log2(e) lower_bound;  s = 0 in rows of no token
  x = gc - anchor                           anchor, an integer of a channel: near gc_first - half of those bits
  X = [kn 2^x; scale qn 2^x]  Y = kn 2^-x   operands of the product
  kE = kn 2^gc, qg = scale qn 2^gc          X times a power of two, exact
  kg = kn 2^(gc_last - gc)                  times b of the row, if it is on the side of keys

Any other gate: pairs in blocks of 8 rows by one product, and those across blocks of 8 and of 16 rows by one each, of
rows under the decay to or from the cut between them:

  s = log2 decay, at least fast.FLOOR       gc = cumsum(s)
  y = 98 + sum of max(s, -28)               over the rows of a block of 8 behind its first up to this one: |y| <= 98,
                                            and no word depends on later rows;  what a decay below 2^-28 hides,
                                            leaks 2^-28
  X = [kn 2^y; scale qn 2^y]  Y = kn 2^-y
  z = gc - b, b' - gc                       b, b', integers of a channel: near gc before the block, and at its end;
                                            z is at most a half
  kn 2^z, scale qn 2^z                      times 2^(b - cut) or 2^(cut - b'), exact: operands at a cut, q behind it
  kE = kn 2^gc, qg = scale qn 2^gc          the same words times 2^b, exact
  kg = kn 2^(b' - gc) 2^(gc_last - b')

`of_blocks`, OF_BLOCKS rows of bfloat16 in shared memory, may be where Y was, once that was read.  A block's rows there:

  WHOLE              b' - b, float32
  FROM_END           2^(gc_last - b'), float32
  OF_BLOCK           2^b
  FURTHER            a power of two from the cut of 8 rows to that of 16, or 1

`sums` (SUMS, K) float32 in shared memory (in blocks of 8 rows SUMS_OF_BLOCKS rows); a channel is where `place` says:

  0 .. GROUPS - 1    a group's sum of s, then what precedes it: x, or z, less what the group's own rows add
  DECAY              2^gc_last
  BIAS               rate' bias, or bias
  TO_LAST            s of the chunk's first row, then 2^(gc_last - anchor)
  FROM_ZERO          2^anchor, bfloat16
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, Uint16, Uint32

from . import fast
from .copies import in_global, load, load_one, store
from .fragments import sum_over_lanes
from .packed import (
    at_least,
    both,
    constant,
    constants_of_softplus,
    each,
    exp2,
    from_bf16,
    fused,
    logistic,
    pair,
    plus,
    powers,
    softplus,
    sum_of,
    times,
    to_bf16,
    whole,
)
from .tile import (
    BIAS,
    BLOCKS,
    DECAY,
    FROM_ZERO,
    GROUP_ROWS,
    HALF,
    LEAST_BUSY,
    ROW_GROUPS,
    SUM_CHANNELS,
    TO_LAST,
    WARPS,
    C,
    decay_index,
    row_below,
    swizzle_128B,
)

LANES = 16                                   # lanes of a row
CAP, TOP = -28.0, 98.0                       # constants for blocks of 8 rows
WHOLE, FROM_END = 0, BLOCKS                  # rows of float32 in `of_blocks`
OF_BLOCK, FURTHER = 4 * BLOCKS, 5 * BLOCKS   # rows of bfloat16, behind those


class Rows:
    """`tensor_core` (parts/pairs.py) makes products; `tile` is a Struct with KG and decay, whose first 2 C rows are kE
    and qg, and `negated_kE` has -kE there."""

    def __init__(self, config, team, tensor_core, tile, negated_kE: bool = False):
        self.c, self.team, self.tensor_core = config, team, tensor_core
        self.tile, self.negated_kE = tile, negated_kE
        self.channels = config.K // LANES                                      # channels of a lane's rows,
        self.pairs, self.parts = self.channels // 2, self.channels // 4        # by two and by four
        self.sum_warps = config.K // SUM_CHANNELS

    def half(self):
        return cute.arch.lane_idx() // LANES

    def first_row(self):
        return (2 * self.team.warp() + self.half()) * GROUP_ROWS

    def place_of_rows(self):
        """Bytes to the lane's first row and channel in a tile of 2 C rows."""
        return swizzle_128B(self.first_row(), self.first_channel(), 2 * C)

    def first_channel(self):
        return cute.arch.lane_idx() % LANES * self.channels

    def rate(self, head_rows):
        """Return the factor of the logits; that of a bounded gate also has -log2(e), for 2^x."""
        return Float32(-fast.LOG2_E) * head_rows.rate if self.c.gate == "bounded" else Float32(1.0)

    @cute.jit
    def store_bias(self, head_rows, sums):
        """dt_bias of a head, by K threads; they meet before it is loaded."""
        channel = self.team.thread()
        if channel < self.c.K:
            to = sums + (BIAS * self.c.K + self.place_of_channel(channel))
            element = 0 if cutlass.const_expr(self.c.per_head) else channel
            store(to, [load_one(head_rows.bias + element) * self.rate(head_rows)])

    def place_of_channel(self, channel):
        """Where one channel lies in a row of `sums`."""
        lane, part = channel >> self.channels.bit_length() - 1, channel >> 2 & self.parts - 1
        return part * (4 * LANES) + lane * 4 + (channel & 3)

    def fetch(self, head_rows, tokens, H, HV):
        """The lane's rows of q, k and g, of a chunk with so many tokens."""
        raw_q, raw_k, raw_g = [], [], []
        for r in range(GROUP_ROWS):
            row = self.row_within(self.first_row() + r, tokens)                # past the end: the last row
            raw_q.append(self.load_row(head_rows.q, row, H))
            raw_k.append(self.load_row(head_rows.k, row, H))
            raw_g.append((self.load_number if self.c.per_head else self.load_row)(head_rows.g, row, HV))
        return raw_q, raw_k, raw_g

    def row_within(self, row, tokens):
        return cutlass.min(row, tokens - 1)

    def load_row(self, pointer, row, heads):
        dtype = pointer.dtype
        address = fast.row((pointer + self.first_channel()).toint(), row, heads * (self.c.K * dtype.width // 8))
        if dtype is BFloat16:
            words = load(in_global(address, Uint32), self.pairs)
            return [words[i] for i in range(self.pairs)]
        found = []
        for i in range(0, self.pairs, 2):
            two = load(in_global(address + 8 * i, Int64), 2)
            found += [two[0], two[1]]
        return found

    def load_number(self, pointer, row, heads):
        """Return the number that all channels of a row have, twice: one word or pair."""
        dtype = pointer.dtype
        address = fast.row(pointer.toint(), row, heads * (dtype.width // 8))
        if dtype is BFloat16:
            return [load_one(in_global(address, Uint16)).to(Uint32) * Uint32(0x10001)]
        return [both(load_one(in_global(address, Float32)))]

    @cute.jit
    def prepare(self, raw_q, raw_k, raw_g, tokens, head_rows, sums):
        """scale qn and kn of these rows, and s summed over them."""
        if cutlass.const_expr(self.c.g_dtype == "bfloat16"):
            low = fast.FLOOR / fast.LOG2_E if cutlass.const_expr(self.c.gate == "given") else None
            raw_g = [[from_bf16(word, low) for word in row] for row in raw_g]
        s = self.decays(raw_g, tokens, head_rows, sums)
        self.keep_apart(1)
        raw_q, raw_k = [[[from_bf16(word) for word in row] for row in rows] for rows in (raw_q, raw_k)]
        if cutlass.const_expr(self.c.norm):
            of_q, of_k = self.norms(raw_q, raw_k, tokens, head_rows.scale)
        else:
            of_k = [both(Float32(1.0) if self.has_token(r, tokens) else Float32(0.0)) for r in range(GROUP_ROWS)]
            of_q = [times(x, both(head_rows.scale)) for x in of_k]
        qn, kn = [], []
        for r in cutlass.range_constexpr(GROUP_ROWS):
            qn.append([times(x, of_q[r]) for x in raw_q[r]])
            kn.append([times(x, of_k[r]) for x in raw_k[r]])
        return qn, kn, s

    def has_token(self, r, tokens):
        return self.first_row() + r < tokens

    @cute.jit
    def decays(self, raw_g, tokens, head_rows, sums):
        """s of the lane's rows, `one_product` summed up to each of them."""
        c = self.c
        bounded, rate = cutlass.const_expr(c.gate == "bounded"), both(self.rate(head_rows))
        bias, s = [None] * self.pairs, []
        if cutlass.const_expr(c.bias):
            bias = self.load_channels(sums, BIAS)
        if cutlass.const_expr(c.gate == "softplus"):
            constants, minus_rate = constants_of_softplus(), both(Float32(0.0) - head_rows.rate)
        for r in cutlass.range_constexpr(GROUP_ROWS):
            row, has_token = [], self.has_token(r, tokens)
            # 1 / (inf + ..): a row of no token decays nothing
            one = Float32(1.0) if has_token else Float32(float("inf"))
            unit = self.unit(head_rows.lower_bound) if bounded else both(
                Float32(fast.LOG2_E) if has_token else Float32(0.0))
            for i in cutlass.range_constexpr(len(raw_g[r])):               # one of all channels, or of each two
                x = raw_g[r][i]
                if cutlass.const_expr(bounded):
                    x = logistic(fused(x, rate, bias[i]) if c.bias else times(x, rate), one)
                elif cutlass.const_expr(c.gate == "softplus"):
                    x = times(softplus(plus(x, bias[i]) if c.bias else x, constants), minus_rate)
                if cutlass.const_expr(c.one_product):
                    row.append(plus(s[r - 1][i], x) if cutlass.const_expr(r > 0) else x)
                elif cutlass.const_expr(bounded):
                    row.append(at_least(times(x, unit), fast.FLOOR))
                else:                                                          # 0 in rows of no token, whatever x is
                    if cutlass.const_expr(c.gate == "softplus" or c.g_dtype != "bfloat16"):
                        x = at_least(x, fast.FLOOR / fast.LOG2_E)
                    row.append(times(x, unit))
            s.append(row)
        return [row * (self.pairs // len(row)) for row in s]

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
        factor = factor if self.has_token(number % GROUP_ROWS, tokens) else Float32(0.0)
        found = fast.rsqrt(sum_over_lanes(squares, LANES) + Float32(fast.NORM_EPS)) * factor
        within = (32 - LANES) << 8 | 31                                        # lanes of this half
        found = [both(cute.arch.shuffle_sync(found, apart * i, mask_and_clamp=within)) for i in range(len(squares))]
        return found[:GROUP_ROWS], found[GROUP_ROWS:]

    def load_channels(self, sums, row):
        """Pairs of the lane's channels."""
        return [x for part in range(self.parts) for x in self.load_part(sums, row, part)]

    def load_part(self, sums, row, part: int):
        two = load(cute.recast_ptr(sums + (row * self.c.K + place(part)), dtype=Int64), 2)
        return [two[0], two[1]]

    def store_channels(self, sums, row, pairs):
        for part in range(self.parts):
            store(cute.recast_ptr(sums + (row * self.c.K + place(part)), dtype=Int64), pairs[2 * part : 2 * part + 2])

    def group(self):
        return 2 * self.team.warp() + self.half()

    @cute.jit
    def make_sums(self, s, sums, of_blocks, lower_bound):
        """From the groups' own; returns gc, in units of s, of the lane's rows less what precedes them."""
        if cutlass.const_expr(not self.c.one_product):
            s = [s[0], [plus(x, y) for x, y in zip(*s)]]
        group = self.group()
        self.store_channels(sums, group, s[GROUP_ROWS - 1])
        if cutlass.const_expr(self.c.one_product):
            if group == 0:
                self.store_channels(sums, TO_LAST, s[0])
            self.team.meet()                                                   # the sums of each group are there
        else:
            cute.arch.fence_proxy("async.shared", space="cta")
            self.team.meet_for_product()                                       # so are they, and operands of blocks
            self.tensor_core.issue_blocks()
        channel = 2 * (self.team.thread() % (self.c.K // 2))
        if cutlass.const_expr(self.c.one_product):
            if self.team.warp() < self.sum_warps:
                self.sum_of_channels(sums, channel, lower_bound)
        elif self.team.warp() >= WARPS - self.sum_warps:                       # Hopper's first four make the product
            self.sums_of_blocks(sums, of_blocks, channel)
        self.team.meet()                                                       # what groups begin with is there
        return s

    def sum_of_channels(self, sums, channel, lower_bound):
        """Add up the rows' sums of two channels."""
        total, unit, half = constant(0.0), self.unit(lower_bound), lower_bound * Float32(-0.5 * fast.LOG2_E * (C - 1))
        first = load_one(self.pair_at(sums, TO_LAST, channel))
        anchor = whole(fused(first, unit, both(Float32(0.0) - half)))
        store(cute.recast_ptr(sums + FROM_ZERO * self.c.K, dtype=Uint32) + channel // 2, [to_bf16(exp2(anchor))])
        minus_anchor = each("neg.ftz.f32", anchor)
        for group in range(ROW_GROUPS):
            self.keep_apart(group if group % 4 == 0 else 0)
            to = self.pair_at(sums, group, channel)
            of_group = load_one(to)
            # If the sum began near the anchor, 2^gc_last would have the rounding errors of exponents near 100.
            store(to, [plus(total, minus_anchor)])
            total = fused(of_group, unit, total)
        store(self.pair_at(sums, TO_LAST, channel), [exp2(plus(total, minus_anchor))])
        store(self.pair_at(sums, DECAY, channel), [exp2(total)])

    def sums_of_blocks(self, sums, of_blocks, channel):
        """Add up the rows' sums of two channels, in blocks of 8 rows."""
        minus, reference, x, wholes, of_block = constant(-1.0), constant(0.0), constant(0.0), [], []
        floats, words = self.floats_of(of_blocks), cute.recast_ptr(of_blocks, dtype=Uint32) + channel // 2
        one = Uint32(0x3F803F80)
        for block in range(BLOCKS):
            self.keep_apart(block)
            of_block.append(one if block == 0 else to_bf16(exp2(reference)))
            for group in range(4 * block, 4 * block + 4):
                to = self.pair_at(sums, group, channel)
                of_group = load_one(to)
                store(to, [x])
                x = plus(of_group, x)
            n = whole(x)
            x, reference = fused(n, minus, x), plus(reference, n)
            wholes.append(n)
        store(self.pair_at(sums, DECAY, channel), [exp2(plus(reference, x))])
        self.tensor_core.wait_until_read(0)                                    # X and Y
        for block in range(BLOCKS):
            store(words + (OF_BLOCK + block) * (self.c.K // 2), [of_block[block]])
            store(self.pair_at(floats, WHOLE + block, channel), [wholes[block]])
            if block in (1, 2):                                                # factors of the block on the other side
                store(words + (FURTHER + 3 * (block - 1)) * (self.c.K // 2), [to_bf16(exp2(wholes[block]))])
                store(words + (FURTHER + block) * (self.c.K // 2), [one])
        for step in range(BLOCKS):
            block = BLOCKS - 1 - step
            store(self.pair_at(floats, FROM_END + block, channel), [exp2(x)])
            x = plus(x, wholes[block])

    def pair_at(self, sums, row, channel):
        return cute.recast_ptr(sums + (row * self.c.K + channel), dtype=Int64)

    def unit(self, lower_bound):
        return both(Float32(fast.LOG2_E) * lower_bound)

    def operands(self, qn, kn, s, sums, X, Y, tile, lower_bound, of_k=None, acquire=None):
        """For products of pairs, which `tensor_core` knows how to find, and of the state, to the tile; kg times `of_k`,
        a number for each of the lane's rows.  `acquire` waits until the tile may be written; then the one product is
        issued before that."""
        if self.c.one_product:
            self.one_product(qn, kn, s, sums, X, Y, tile, lower_bound, of_k, acquire)
        else:
            if acquire is not None:
                acquire()
            self.across_blocks(qn, kn, s, sums, X, tile, Y, tile, of_k)
            # redundant: on Blackwell others follow on every way to a reader; the documented use is one per writer
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def one_product(self, qn, kn, s, sums, X, Y, tile, lower_bound, of_k, acquire):
        """Operands of the one product to X and Y, and those of the state to the tile."""
        unit, group = self.unit(lower_bound), self.group()
        ka, qa, kb, kE, qg, kg = [self.no_words() for _ in range(6)]
        for part in cutlass.range_constexpr(self.parts):
            self.keep_apart(part)
            to_x, to_last = self.load_part(sums, group, part), self.load_part(sums, TO_LAST, part)
            from_zero = load(cute.recast_ptr(sums + FROM_ZERO * self.c.K, dtype=Uint32) + place(part) // 2, 2)
            for r in cutlass.range_constexpr(GROUP_ROWS):
                for e in cutlass.range_constexpr(2):
                    i, of_kE = 2 * part + e, from_zero[e]
                    if cutlass.const_expr(self.negated_kE):
                        of_kE = of_kE ^ Uint32(0x80008000)
                    up, down = powers(fused(s[r][i], unit, to_x[e]))
                    ka[r].append(to_bf16(times(kn[r][i], up)))
                    qa[r].append(to_bf16(times(qn[r][i], up)))
                    kE[r].append(fast.times_pair(ka[r][i], of_kE))
                    qg[r].append(fast.times_pair(qa[r][i], from_zero[e]))
                    k = times(kn[r][i], down)
                    kb[r].append(to_bf16(k))
                    if cutlass.const_expr(of_k is not None):
                        k = times(k, both(of_k[r]))
                    kg[r].append(to_bf16(times(k, to_last[e])))
        self.put_rows(X, 0, 2 * C, ka)
        self.put_rows(X, C * 2 * HALF, 2 * C, qa)
        if cutlass.const_expr(acquire is not None):
            self.put_rows(Y, 0, C, kb)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.team.meet_for_product()                                       # operands of the product are there
            self.tensor_core.issue_blocks()
            acquire()
        if self.group() == 2 * LEAST_BUSY:                                         # a branch does the same
            self.store_decay(sums, tile)
        self.put_rows(tile, 0, 2 * C, kE)
        self.put_rows(tile, C * 2 * HALF, 2 * C, qg)
        if cutlass.const_expr(acquire is None):
            self.put_rows(Y, 0, C, kb)
        self.put_rows(tile, self.tile.KG.offset, C, kg)
        cute.arch.fence_proxy("async.shared", space="cta")
        if cutlass.const_expr(acquire is None):
            self.team.meet_for_product()                                       # both operands are there

    def keep_apart(self, number: int):
        """A part of the work from those before it: ptxas would mix them, and run out of registers."""
        if number > 0:
            # redundant: nothing is handed over
            cute.arch.sync_warp()

    def no_words(self):
        """Return an empty list of words for each of the lane's rows."""
        return [[] for _ in range(GROUP_ROWS)]

    def put_rows(self, to, begin: int, rows: int, words):
        """The lane's rows of a tile of so many rows, that begins so many bytes behind `to`."""
        for r in range(GROUP_ROWS):
            self.put_row(to, begin, rows, r, words[r])

    def put_row(self, to, begin: int, rows: int, r: int, words):
        place = row_below(self.place_of_rows(), r)
        if rows == C and self.c.K > HALF:                                      # halves of K are closer to each other
            place = place - (cute.arch.lane_idx() & LANES // 2) * (C * 2 * HALF // (LANES // 2))
        put(to, place + begin, words)

    @cute.jit
    def blocks(self, qn, kn, s, sums, X, Y):
        """Operands of the product within blocks of 8 rows, from s of each row."""
        upper, second = self.half() == 1, self.team.warp() & 1 == 1            # half of the warp, warp of the block
        of_first = both(Float32(0.0) if self.group() & 3 == 0 else Float32(1.0))
        top, minus_top, y = constant(TOP), constant(-TOP), [[], []]
        for i in cutlass.range_constexpr(self.pairs):
            h = times(at_least(s[0][i], CAP), of_first)
            of_both = plus(h, at_least(s[1][i], CAP))
            before = plus(top, of_lower_half(of_both, upper))                  # the sum of the warp's earlier rows
            y[0].append(plus(before, h))
            y[1].append(plus(before, of_both))
        of_block = self.group() | 3                                            # a row of the second warp, till its sum
        if upper and not second:
            self.store_channels(sums, of_block, y[1])
        self.team.meet()                                                       # the sums over first warps are there
        if second:
            of_warp = [plus(x, minus_top) for x in self.load_channels(sums, of_block)]
            y = [[plus(x, z) for x, z in zip(row, of_warp)] for row in y]
        # redundant: rows are kept apart below, for another reason
        cute.arch.sync_warp()                                                  # all lanes have read them
        for r in cutlass.range_constexpr(GROUP_ROWS):
            self.keep_apart(r)
            ka, qa, kb = [], [], []
            for i in cutlass.range_constexpr(self.pairs):
                up, down = powers(y[r][i])
                ka.append(to_bf16(times(kn[r][i], up)))
                qa.append(to_bf16(times(qn[r][i], up)))
                kb.append(to_bf16(times(kn[r][i], down)))
            self.put_row(X, 0, 2 * C, r, ka)
            self.put_row(X, C * 2 * HALF, 2 * C, r, qa)
            self.put_row(Y, 0, C, r, kb)

    @cute.jit
    def across_blocks(self, qn, kn, gc, sums, X, of_16, of_blocks, tile, of_k):
        """Operands of products across blocks of 8 rows, to X, and of 16; kg, kE and qg to the tile, where those of 16
        may lie, too."""
        minus, block = constant(-1.0), self.group() >> 2
        k_up, q_up, k_down, kg = [self.no_words() for _ in range(4)]
        for part in cutlass.range_constexpr(self.parts):
            self.keep_apart(part)
            before = self.load_part(sums, self.group(), part)
            whole, to_last = [self.load_part(self.floats_of(of_blocks), row + block, part) for row in (WHOLE, FROM_END)]
            for r in cutlass.range_constexpr(GROUP_ROWS):
                for e in cutlass.range_constexpr(2):
                    i = 2 * part + e
                    y = plus(gc[r][i], before[e])
                    up, k = exp2(y), times(kn[r][i], exp2(fused(y, minus, whole[e])))
                    k_up[r].append(to_bf16(times(kn[r][i], up)))
                    q_up[r].append(to_bf16(times(qn[r][i], up)))
                    k_down[r].append(to_bf16(k))
                    if cutlass.const_expr(of_k is not None):
                        k = times(k, both(of_k[r]))
                    kg[r].append(to_bf16(times(k, to_last[e])))
        self.put_rows(tile, self.tile.KG.offset, C, kg)
        if self.group() == 2 * LEAST_BUSY:
            self.store_decay(sums, tile)
        if block & 1 != 0:
            self.put_rows(X, 0, 2 * C, k_up)
            self.put_rows(X, C * 2 * HALF, 2 * C, q_up)
        else:
            self.put_rows(X, 0, 2 * C, k_down)                                 # behind it lies q of the block
        further = self.load_words(of_blocks, FURTHER + block)
        if block & 2 != 0:
            self.put_rows(of_16, 0, 2 * C, self.scaled(k_up, further))
            self.put_rows(of_16, C * 2 * HALF, 2 * C, self.scaled(q_up, further))
        else:
            self.put_rows(of_16, 0, 2 * C, self.scaled(k_down, further))
            self.put_rows(of_16, C * 2 * HALF, 2 * C, q_up)                     # does not count
        cute.arch.fence_proxy("async.shared", space="cta")
        self.team.meet()                                                       # the operands are there
        self.tensor_core.issue_across()
        of_kE = from_zero = self.load_words(of_blocks, OF_BLOCK + block)
        if cutlass.const_expr(self.negated_kE):
            of_kE = [word ^ Uint32(0x80008000) for word in from_zero]
        kE, qg = self.scaled(k_up, of_kE), self.scaled(q_up, from_zero)
        self.tensor_core.wait(1)                                               # their place was read
        self.put_rows(tile, 0, 2 * C, kE)
        self.put_rows(tile, C * 2 * HALF, 2 * C, qg)

    def scaled(self, rows, powers_of_two):
        """Words of the lane's rows times those of its channels, exact."""
        return [[fast.times_pair(x, y) for x, y in zip(row, powers_of_two)] for row in rows]

    def floats_of(self, of_blocks):
        return cute.recast_ptr(of_blocks, dtype=Float32)

    def load_words(self, of_blocks, row):
        """Pairs of bfloat16 of the lane's channels."""
        words = []
        for part in range(self.parts):
            two = load(cute.recast_ptr(of_blocks + (row * self.c.K + place(part)), dtype=Uint32), 2)
            words += [two[0], two[1]]
        return words

    def store_decay(self, sums, tile):
        """2^gc_last to the tile, by the warp that has the least to do."""
        decay = self.load_channels(sums, DECAY)
        for i in range(self.pairs):
            to = cute.recast_ptr(tile + self.tile.decay.offset, dtype=Float32)
            to = to + decay_index(self.first_channel() + 2 * i)
            store(cute.recast_ptr(to, dtype=Int64), [decay[i]])


def put(pointer, offset, words):
    """Words of a lane, so many bytes behind a pointer."""
    store(cute.recast_ptr(pointer, dtype=Uint32) + offset // 4, words)


@cute.jit
def of_lower_half(x, upper):
    """The pair that the lane of the lower half of the warp has; nothing for that half itself."""
    words = cute.arch.inline_ptx("mov.b64 {{$w0}, {$w1}}, {$r0};", write_only_types=[Uint32] * 2, read_only_args=[x])
    words = [cute.arch.shuffle_sync_bfly(word, LANES) for word in words]
    words = [word if upper else Uint32(0) for word in words]
    return pair("mov.b64 {$w0}, {{$r0}, {$r1}};", *words)


def place(part: int):
    """Where four of the lane's channels lie in a row of `sums`: those of neighbouring lanes lie together."""
    return part * (4 * LANES) + cute.arch.lane_idx() % LANES * 4
