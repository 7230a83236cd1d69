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
from cutlass import Float32, Uint32

from . import fast
from .copies import floats, floats_of, in_global, load, load_one, store
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


def rows_behind(head_rows, name, rows, size):
    """The pointer of that name, so many rows of so many elements further on."""
    pointer = getattr(head_rows, name)
    return in_global(fast.row(pointer.toint(), rows, size * (pointer.dtype.width // 8)), pointer.dtype)


class Gate:
    def __init__(self, config, team):
        self.c, self.team = config, team

    def rows_of_head(self, x, token, head, of_gate: bool = True):
        """HeadRows from a token on; without `of_gate`, for who only copies them, the gate's rate is 1."""
        K, of_q = self.c.K, head
        if self.c.grouped:
            of_q = head // (x.HV // x.H)
        rate = Float32(1.0)
        if self.c.rate and of_gate:
            rate = fast.finite(fast.exp2(load_one(x.A_log + head) * Float32(fast.LOG2_E)))
        q, k = x.q + (token * x.H + of_q) * K, x.k + (token * x.H + of_q) * K
        g, beta = x.g + (token * x.HV + head) * self.c.gate_width, x.beta + (token * x.HV + head)
        return HeadRows(q, k, g, beta, rate, x.dt_bias + head * self.c.gate_width, x.scale, x.lower_bound)

    def later(self, head_rows, tokens, H, HV):
        """HeadRows from so many tokens further on: one instruction each, as a compiler would not have it."""
        width = self.c.gate_width
        sizes = dict(q=H * self.c.K, k=H * self.c.K, g=HV * width, beta=HV)
        return head_rows._replace(**{name: rows_behind(head_rows, name, tokens, sizes[name]) for name in sizes})

    def load_rows(self, head_rows, tokens, H, HV):
        """Return scale qn, kn and gc, summed over the warp's rows, of a chunk with so many tokens."""
        return self.prepare(*self.fetch(head_rows, tokens, H, HV), head_rows, tokens)

    def fetch(self, head_rows, tokens, H, HV):
        """What memory has of the warp's rows of q, k and g, for the lane; past the end, of the last row."""
        K, first, d = self.c.K, WARP_ROWS * self.team.warp(), self.c.K // 32 * cute.arch.lane_idx()
        raw_q, raw_k, raw_g = [], [], []
        for r in range(WARP_ROWS):
            row = self.row_within(first + r, tokens)
            raw_q.append(self.load_words(head_rows.q + (row * (H * K) + d)))
            raw_k.append(self.load_words(head_rows.k + (row * (H * K) + d)))
            raw_g.append(self.load_words_of_gate(head_rows.g, row * (HV * self.c.gate_width), d))
        return raw_q, raw_k, raw_g

    @cute.jit
    def prepare(self, raw_q, raw_k, raw_g, head_rows, tokens):
        """What `load_rows` returns, of what `fetch` does."""
        first, d = WARP_ROWS * self.team.warp(), self.c.K // 32 * cute.arch.lane_idx()
        is_token = [first + r < tokens for r in range(WARP_ROWS)]
        unit = Float32(fast.LOG2_E) * head_rows.lower_bound if self.c.gate == "bounded" else Float32(1.0)
        units = [unit if counts else Float32(0.0) for counts in is_token]
        raw_q, raw_k = [floats_of(words) for words in raw_q], [floats_of(words) for words in raw_k]
        gc = self.sum_of_decays([self.floats_of_gate(words) for words in raw_g], units, head_rows, d)
        qs, ks = [Float32(1.0)] * WARP_ROWS, [Float32(1.0)] * WARP_ROWS
        if cutlass.const_expr(self.c.norm):
            qs, ks = self.norms(raw_q, raw_k)
        qn, kn = [], []
        for r in cutlass.range_constexpr(WARP_ROWS):
            scale = head_rows.scale if is_token[r] else Float32(0.0)
            of_k = ks[r] if is_token[r] else Float32(0.0)
            qn.append(self.times(raw_q[r], qs[r] * scale))
            kn.append(self.times(raw_k[r], of_k))
        return qn, kn, gc

    def row_within(self, row, tokens):
        return cutlass.min(row, tokens - 1)

    def sum_of_decays(self, raw_g, units, head_rows, d):
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
                g2 = self.log2_decay(logit, head_rows, units[r])
                row.append(g2 + gc[r - 1][e] if r > 0 else g2)
            gc.append(row)
        return [row * (c.K // 32 // len(row)) for row in gc]

    @cute.jit
    def log2_decay(self, logit, head_rows, unit):
        """g2 of a logit (with its bias), or of a given decay.  `unit`: of a bounded gate its bound in units of log2, of
        others 1; 0 in a row of no token."""
        gate = self.c.gate
        if cutlass.const_expr(gate == "bounded"):
            decay = fast.reciprocal(Float32(1.0) + fast.exp2(logit * (Float32(-fast.LOG2_E) * head_rows.rate)))
            decay = unit * decay
            return decay if cutlass.const_expr(self.c.one_product) else fast.at_least(decay, fast.FLOOR)
        if cutlass.const_expr(gate == "softplus"):
            logit = -(head_rows.rate * fast.softplus(logit))
        decay = fast.at_least(Float32(fast.LOG2_E) * logit, fast.FLOOR)
        return decay if unit != Float32(0.0) else Float32(0.0)

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

    def load_words(self, pointer):
        """What memory has for the lane's channels of a row: words of two bfloat16, or of float32."""
        words = load(cute.recast_ptr(pointer, dtype=Uint32), self.c.K // 32 * pointer.dtype.width // 32)
        return [words[i] for i in range(cute.size(words))]

    def load_words_of_gate(self, pointer, row, d):
        return [load_one(pointer + row)] if self.c.per_head else self.load_words(pointer + (row + d))

    def floats_of_gate(self, words):
        if self.c.per_head:
            return [words[0].to(Float32)]
        return floats_of(words) if self.c.g_dtype == "bfloat16" else [word.bitcast(Float32) for word in words]

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
    return beta_from(load_beta(beta, tokens, HV, row), kind, tokens, row)


def load_beta(beta, tokens, HV, row):
    """What memory has for a row; past the end, for the last one."""
    return load_one(beta + cutlass.min(row, tokens - 1) * HV)


@cute.jit
def beta_from(loaded, kind: cutlass.Constexpr, tokens, row):
    """`beta_of_row` of what memory has for it."""
    b = loaded.to(Float32)
    if cutlass.const_expr(kind != "given"):
        b = fast.sigmoid(b) * Float32(2.0 if kind == "2*sigmoid" else 1.0)
    return b if row < tokens else Float32(0.0)
