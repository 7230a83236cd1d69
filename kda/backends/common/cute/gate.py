"""A chunk's rows in registers, by the eight warps that make it (tile.py): a warp has WARP_ROWS rows, a lane K / 32
channels of them.

  g2 = log2 decay, of a bounded, softplus or given gate;  gc = cumsum(g2) over the chunk
  qn = scale q / |q|,  kn = k / |k|  (or without the norms);  rows of no token are zero, and decay nothing

Registers hold gc as a sum over the warp's own rows.  What the rows of the warps before add to it is in shared memory,
`sums` (WARPS + 2, K) float32: row w is the sum before warp w, row WARPS g2 of the chunk's first row, row WARPS + 1
gc_last.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from . import fast
from .copies import floats, load, load_one, store
from .fragments import sum_over_lanes
from .tile import WARP_ROWS, WARPS


class HeadRows(NamedTuple):
    """Where the rows of one value head begin, and what its gate is made with."""

    q: Any
    k: Any
    g: Any
    beta: Any
    rate: Any                                # e^A_log
    bias: Any                                # dt_bias, `gate_width` elements
    scale: Any
    lower_bound: Any


class Gate:
    def __init__(self, config, team):
        self.c, self.team = config, team

    def rows_of_head(self, x, token, head):
        """HeadRows from a token on."""
        K, of_q = self.c.K, head
        if self.c.grouped:
            of_q = head // (x.HV // x.H)
        rate = Float32(1.0)
        if self.c.rate:
            rate = fast.finite(fast.exp2(load_one(x.A_log + head) * Float32(fast.LOG2_E)))
        q, k = x.q + (token * x.H + of_q) * K, x.k + (token * x.H + of_q) * K
        g, beta = x.g + (token * x.HV + head) * self.c.gate_width, x.beta + (token * x.HV + head)
        return HeadRows(q, k, g, beta, rate, x.dt_bias + head * self.c.gate_width, x.scale, x.lower_bound)

    @cute.jit
    def load_rows(self, head_rows, tokens, H, HV):
        """Return scale qn, kn and gc, summed over the warp's rows, of a chunk with so many tokens."""
        K, E = self.c.K, self.c.K // 32
        first, d = WARP_ROWS * self.team.warp(), E * cute.arch.lane_idx()
        raw_q, raw_k, raw_g, weight = [], [], [], []
        for r in cutlass.range_constexpr(WARP_ROWS):
            row = self.row_within(first + r, tokens)                           # past the end: the last row,
            raw_q.append(self.load_floats(head_rows.q + (row * (H * K) + d)))
            raw_k.append(self.load_floats(head_rows.k + (row * (H * K) + d)))
            raw_g.append(self.load_of_gate(head_rows.g, row * (HV * self.c.gate_width), d))
            weight.append(Float32(1.0) if first + r < tokens else Float32(0.0))    # without weight
        gc = self.sum_of_decays(raw_g, weight, head_rows, d)
        qs, ks = [Float32(1.0)] * WARP_ROWS, [Float32(1.0)] * WARP_ROWS
        if cutlass.const_expr(self.c.norm):
            qs, ks = self.norms(raw_q, raw_k)
        qn, kn = [], []
        for r in cutlass.range_constexpr(WARP_ROWS):
            of_q, of_k = qs[r] * (head_rows.scale * weight[r]), ks[r] * weight[r]
            qn.append(self.times(raw_q[r], of_q))
            kn.append(self.times(raw_k[r], of_k))
        return qn, kn, gc

    def row_within(self, row, tokens):
        return cutlass.min(row, tokens - 1)

    def sum_of_decays(self, raw_g, weight, head_rows, d):
        """g2 of the warp's rows, summed up to each of them."""
        c, bias = self.c, head_rows.bias
        if c.bias:
            bias = self.load_of_gate(head_rows.bias, 0, d)
        gc = []
        for r in range(WARP_ROWS):
            row = []
            for e in range(len(raw_g[r])):
                logit = raw_g[r][e]
                if c.bias:
                    logit += bias[e]
                g2 = self.log2_decay(logit, head_rows, weight[r])
                row.append(g2 + gc[r - 1][e] if r > 0 else g2)
            gc.append(row)
        return [row * (c.K // 32 // len(row)) for row in gc]

    @cute.jit
    def log2_decay(self, logit, head_rows, weight):
        """g2 of a logit (with its bias), or of a given decay; 0 in a row without weight."""
        gate = self.c.gate
        if cutlass.const_expr(gate == "bounded"):
            decay = fast.reciprocal(Float32(1.0) + fast.exp2(logit * (Float32(-fast.LOG2_E) * head_rows.rate)))
            decay = (Float32(fast.LOG2_E) * head_rows.lower_bound * weight) * decay
            return decay if cutlass.const_expr(self.c.one_product) else fast.at_least(decay, fast.FLOOR)
        if cutlass.const_expr(gate == "softplus"):
            logit = -(head_rows.rate * fast.softplus(logit))
        decay = fast.at_least(Float32(fast.LOG2_E) * logit, fast.FLOOR)
        return decay if weight != Float32(0.0) else Float32(0.0)

    def norms(self, raw_q, raw_k):
        """1 / |q| and 1 / |k| of the warp's rows."""
        squares = []
        for rows in (raw_q, raw_k):
            for r in range(WARP_ROWS):
                squares.append(self.square(rows[r]))
        total = sum_over_lanes(squares)
        found = fast.rsqrt(total + Float32(fast.NORM_EPS))
        each = [cute.arch.shuffle_sync(found, 4 * i) for i in range(2 * WARP_ROWS)]
        return each[:WARP_ROWS], each[WARP_ROWS:]

    def load_of_gate(self, pointer, row, d):
        """Return what a row of g or of dt_bias has for the lane's channels, which begin at `d`: a number for each of
        them, or one for all."""
        return [load_one(pointer + row).to(Float32)] if self.c.per_head else self.load_floats(pointer + (row + d))

    def load_floats(self, pointer):
        return floats(load(pointer, self.c.K // 32))

    def times(self, row, x):
        """Multiply each element of a row by a number."""
        return [element * x for element in row]

    def square(self, row):
        total = Float32(0.0)
        for e in range(self.c.K // 32):
            total += row[e] * row[e]
        return total

    @cute.jit
    def sum_over_warps(self, gc, sums, d):
        """Fills `sums` from the warps' own sums."""
        K, thread, warp = self.c.K, self.team.thread(), self.team.warp()
        store(sums + (warp * K + d), gc[WARP_ROWS - 1])
        if warp == 0:
            store(sums + (WARPS * K + d), gc[0])
        self.team.meet()                                                       # the sums of each warp's rows are there
        if thread < K:                                                         # a channel: sums before each warp
            total = Float32(0.0)
            for w in cutlass.range_constexpr(WARPS):
                if cutlass.const_expr(w == WARPS // 2):
                    # redundant: it keeps ptxas from loading all sums first, which needs too many registers
                    cute.arch.sync_warp()
                of_warp = load_one(sums + (w * K + thread))
                store(sums + (w * K + thread), [total])
                total += of_warp
            store(sums + ((WARPS + 1) * K + thread), [total])
        self.team.meet()                                                       # the sums before each warp are there

    def sums_of_chunk(self, sums, d):
        """The sum before this warp's rows, g2 of the chunk's first row, and gc_last."""
        return [load(sums + (row * self.c.K + d), self.c.K // 32) for row in (self.team.warp(), WARPS, WARPS + 1)]


@cute.jit
def beta_of_row(beta, kind: cutlass.Constexpr, tokens, HV, row):
    """beta, or of a logit; 0 where there is no token."""
    b = load_one(beta + cutlass.min(row, tokens - 1) * HV).to(Float32)
    if cutlass.const_expr(kind != "given"):
        b = fast.sigmoid(b) * Float32(2.0 if kind == "2*sigmoid" else 1.0)
    return b if row < tokens else Float32(0.0)
