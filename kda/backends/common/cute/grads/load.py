"""LOAD of bwd/grads: four warps bring values and rows of tokens one item ahead of MATH, with norms and beta, and take
results away.  The first thread says where items lie; those of tokens outside every sequence MATH never has.

  values     do, dv, r, h and dh: one buffer, filled again when all products have read it
  rows       q, k and g: two buffers, in which dq, dk and dg come back
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from .. import fast
from ..async_copies import arrive_when_copied, bulk_copy, copy_16_bytes_later, discard
from ..configs import ChunkTable
from ..copies import copy_16_bytes, copy_16_bytes_out, floats, in_global, load, load_one, store
from ..tile import BF16
from ..training import LOAD, LOADERS, PLACE, PLACES, TOKEN_FACTORS, TOKENS, GradsOptions
from .places import SMALLEST_B, B, last_token, position


LINE = 128                                   # bytes that L2 discards at a time


def tile_at(pointer, elements):
    """A pointer to the start of a swizzle pattern."""
    return cute.make_ptr(BFloat16, (pointer + elements).toint(), pointer.memspace, assumed_align=1024)


class Loader:
    """LOAD: four warps; a thread moves pieces of 16 bytes of tokens that are `apart`.  K = V."""

    def __init__(self, config: GradsOptions):
        self.c = config
        self.pieces = config.pieces                                            # how many a row has at a time
        self.parts = config.K // 8 // self.pieces                              # as many of a row, one after the other
        self.apart = LOADERS // self.pieces
        self.passes = TOKENS // self.apart

    def thread(self):
        return cute.arch.thread_idx()[0] - 32 * self.c.math_warps

    def thread_again(self):
        """The thread, where LOAD has so few registers that what follows from it is computed for each tensor."""
        return fast.again(self.thread()) if self.c.few_registers else self.thread()

    @cute.jit
    def run(self, x, s):
        """Brings values and rows of items one ahead of MATH, and takes results away, until no item is left."""
        items, i = self.items(x), Int32(0)
        self.place(x, s, i, items)
        more = there_is(s, i)
        if more:
            self.load_values(x, s, place_of(s, i))
            self.load_rows(x, s, place_of(s, i), i)
        while more:
            if i > 0:
                self.store_results(x, s, place_of(s, i - 1), i - 1)
            self.place(x, s, i + 1, items)
            more = there_is(s, i + 1)
            if more:
                self.load_following(x, s, place_of(s, i + 1), i)
            i += 1
        if cutlass.const_expr(self.c.packed):
            self.clear_outside(x, self.first_outside(x, i, items))             # while MATH has its last item
        if i > 0:
            self.store_results(x, s, place_of(s, i - 1), i - 1)

    def items(self, x):
        """Return how many items there may be, beside those of tokens outside every sequence."""
        return x.items

    def item(self, x, i, items):
        """Return the number of item i of this CTA, at least `items` if there is none."""
        return cute.arch.block_idx()[0] + i * cute.arch.grid_dim()[0]

    def first_outside(self, x, i, items):
        """Return the first item of this CTA of tokens outside every sequence, which are the last; it had i others."""
        return self.item(x, i, items)

    @cute.jit
    def place(self, x, s, i, items):
        """The first thread says where item i of this CTA lies, or that there is none."""
        if self.thread() == 0:
            item = self.item(x, i, items)
            chunk, *rest = place_of_item(self.c, x, cutlass.min(item, x.items - 1))
            number = chunk if item < items and rest[-1] > 0 else Int32(-1)
            store(s.places + (i & PLACES - 1) * PLACE, [Int64(y) for y in (number, *rest)])
            cute.arch.mbarrier_arrive(s.placed + (i & 1))
        cute.arch.sync_warp()

    @cute.jit
    def clear_outside(self, x, first):
        """Zeros for tokens outside every sequence, in this CTA's items from `first` on.  The loop counts as many items
        as a CTA may have: if it ended with its items, ptxas would move what repeats each wait behind all roles, and
        plan MATH worse."""
        for n in cutlass.range((x.items - 1) // cute.arch.grid_dim()[0] + 1, unroll=1):
            item = first + n * cute.arch.grid_dim()[0]
            if item < x.items:
                chunk, head, begin, tokens = place_of_item(self.c, x, item)
                self.clear(x, begin, -tokens, head)
                self.clear_shares(x, chunk, head)

    def load_following(self, x, s, place, i):
        """The item after item i, which MATH has."""
        self.ask_for_rows(x, s, place, i + 1)
        cute.arch.mbarrier_wait(s.values_empty, i & 1)
        if self.c.spares_L2:
            self.forget_states(x, s, place_of(s, i))
        self.load_values(x, s, place)
        cute.arch.cp_async_wait_group(1)
        self.make_factors(x, s, place, i + 1)

    def load_rows(self, x, s, place, i):
        self.ask_for_rows(x, s, place, i)
        cute.arch.cp_async_wait_group(0)
        self.make_factors(x, s, place, i)

    @cute.jit
    def load_values(self, x, s, place):
        chunk, head, begin, tokens = place
        K, V = self.c.K, self.c.V
        for source, to, name in ((x.do, s.do, "do"), (x.dv, s.dv, "dv"), (x.r, s.r, "r")):
            rows = self.c.rows_of_values[name]
            self.load_tokens(source, (begin * x.HV + head) * V, x.HV * V, tokens, to, rows)
        if self.thread() == 0:
            # redundant: its release, not the arrival; this thread's copies arrive by themselves
            cute.arch.mbarrier_arrive_and_expect_tx(s.values_full, 2 * BF16 * V * K)
            of_state = (Int64(chunk) * x.HV + head) * (K * V)
            for source, to in self.states(x, s):
                bulk_copy(to, source + of_state, BF16 * V * K, s.values_full, self.c.spares_L2)
            self.load_other_states(x, s, chunk, head)
        arrive_when_copied(s.values_full)
        # redundant: except in the loop; before it, all groups are waited for
        cute.arch.cp_async_commit_group()

    def forget_states(self, x, s, place):
        """dh of an item that all products have read."""
        chunk, head, _, _ = place
        self.discard(x.dh + (Int64(chunk) * x.HV + head) * (self.c.K * self.c.V), BF16 * self.c.V * self.c.K)

    def discard(self, first, size: int):
        """So many bytes, by all threads."""
        address = first.toint() + self.thread_again() * LINE
        for n in range(size // (LINE * LOADERS)):
            discard(address + n * (LINE * LOADERS))

    def states(self, x, s):
        """Return the states that lie item by item, and where they come to."""
        return (x.h, s.h), (x.dh, s.dh)

    def load_other_states(self, x, s, chunk, head):
        """The first thread brings those that do not."""

    def load_tokens(self, source, first, stride, tokens, to, rows: int = TOKENS):
        """64 rows, into panels of so many rows; past the end the last one again."""
        thread = self.thread_again()
        for j in range(self.passes):
            row = last_token(thread // self.pieces + self.apart * j, tokens)
            address = fast.row((source + first).toint() + (thread & self.pieces - 1) * 16, row, stride * Int32(2))
            place = to + self.place_of_piece(thread, j, rows)
            copy_16_bytes_later(address, place, self.c.spares_L2)
            for n in range(1, self.parts):
                copy_16_bytes_later(address + n * self.pieces * 16, place + n * (rows * 64), self.c.spares_L2)

    def place_of_piece(self, thread, j: int, rows: int = TOKENS):
        """Elements to a thread's piece of its j-th token, in panels of so many rows; those of further parts of the row
        are in the panels behind it."""
        piece, first = thread & self.pieces - 1, thread >> self.pieces.bit_length() - 1
        row = position(first) + position(self.apart * j)
        return (piece >> 3) * (rows * 64) + row * 64 + (piece & 7 ^ row & 7) * 8

    def ask_for_rows(self, x, s, place, i):
        _, head, begin, tokens = place
        K = self.c.K
        of_q = head // (x.HV // x.H) if self.c.grouped else head
        rows = self.rows_at(s, i)
        for source, heads, source_head, field in (
            (x.q, x.H, of_q, "q"), (x.k, x.H, of_q, "k"), (x.g, x.HV, head, "g"),
        ):
            if field in self.c.rows.fields:
                self.load_tokens(source, (begin * heads + source_head) * K, heads * K, tokens, self.field(rows, field))
        # redundant: except for the first item and for q; everything MATH reads also arrives with the values
        cute.arch.cp_async_commit_group()

    def rows_at(self, s, i):
        return s.rows + (i & 1) * self.c.rows.bytes

    def field(self, rows, name: str):
        return tile_at(cute.recast_ptr(rows, dtype=BFloat16), getattr(self.c.rows, name).offset // 2)

    @cute.jit
    def make_factors(self, x, s, place, i):
        """1 / |q|, 1 / |k| and b of each token, 0 where there is none; the rows were waited for."""
        _, head, begin, tokens = place
        thread, token = self.thread(), self.thread() & TOKENS - 1
        real = token < tokens
        of_tokens = s.of_tokens + (i & 1) * (TOKEN_FACTORS * TOKENS)
        if thread < TOKENS:
            beta = load_one(x.beta + (begin + last_token(token, tokens)) * x.HV + head).to(Float32)
            if cutlass.const_expr(self.c.beta != "given"):
                beta = fast.sigmoid(beta) * Float32(2.0 if self.c.beta == "2*sigmoid" else 1.0)
            else:
                beta = Float32(SMALLEST_B) if beta * beta <= SMALLEST_B**2 else beta               # a nan stays
            of_tokens[B * TOKENS + token] = beta if real else Float32(0.0)
        if cutlass.const_expr("g" in self.c.rows.fields):
            if tokens < TOKENS:
                self.end_gates(self.field(self.rows_at(s, i), "g"), tokens)
        LOAD.sync()                                                            # all threads' rows are there
        self.make_norms(s, i, of_tokens, tokens)
        cute.arch.mbarrier_arrive(s.rows_full + (i & 1))

    @cute.jit
    def make_norms(self, s, i, of_tokens, tokens):
        """1 / |q| and 1 / |k| of each token."""
        thread, token = self.thread(), self.thread() & TOKENS - 1
        factor = Float32(1.0)
        if cutlass.const_expr(self.c.norm):
            row, total = position(token), [Float32(0.0)] * 4
            rows = self.field(self.rows_at(s, i), "q") + (thread >> 6) * (TOKENS * self.c.K) + row * 64
            for piece in cutlass.range_constexpr(self.c.K // 8):
                each = floats(load(rows + ((piece >> 3) * (TOKENS * 64) + (piece & 7 ^ row & 7) * 8), 8))
                for e in cutlass.range_constexpr(8):
                    total[e % 4] = total[e % 4] + each[e] * each[e]
            factor = fast.rsqrt((total[0] + total[1]) + (total[2] + total[3]) + Float32(fast.NORM_EPS))
        of_tokens[thread] = factor if token < tokens else Float32(0.0)

    @cute.jit
    def end_gates(self, rows, tokens):
        """Rows of g of no token, over this thread's copies: MATH need not know where tokens end."""
        thread = self.thread_again()
        for j in cutlass.range_constexpr(self.passes):
            if thread // self.pieces + self.apart * j >= tokens:
                for n in cutlass.range_constexpr(self.parts):
                    store(rows + self.place_of_piece(thread, j) + n * (TOKENS * 64), [Float32(self.c.of_no_token)] * 8)

    @cute.jit
    def store_results(self, x, s, place, i):
        """dq, dk and dg of an item, out of the place of its rows."""
        _, head, begin, tokens = place
        cute.arch.mbarrier_wait(s.rows_done + (i & 1), i >> 1 & 1)
        rows, copy = self.rows_at(s, i), copy_16_bytes_out if self.c.spares_L2 else copy_16_bytes
        for to, field in ((x.dq, "q"), (x.dk, "k"), (x.dg, "g")):
            thread = self.thread_again()
            for j in cutlass.range_constexpr(self.passes if field in self.c.rows.fields else 0):
                row = thread // self.pieces + self.apart * j
                if row < tokens:
                    source = self.field(rows, field) + self.place_of_piece(thread, j)
                    target = self.row_of(to, begin, head, row, x.HV)
                    copy(source, target)
                    for n in cutlass.range_constexpr(1, self.parts):
                        copy(source + n * (TOKENS * 64), target + n * self.pieces * 8)

    def row_of(self, to, begin, head, row, HV):
        """A thread's piece of a row of a result."""
        address = to + (begin * HV + head) * self.c.K + (self.thread() & self.pieces - 1) * 8
        size = to.dtype.width // 8
        return in_global(fast.row(address.toint(), row, HV * Int32(size * self.c.K)), to.dtype)

    @cute.jit
    def clear(self, x, begin, tokens, head):
        """Zeros for tokens outside every sequence, as far as one item has them."""
        thread, zero = self.thread(), Float32(0.0)
        for to in (x.dq, x.dk, x.dv) if self.c.per_head else (x.dq, x.dk, x.dv, x.dg):
            for j in cutlass.range_constexpr(self.passes):
                row = thread // self.pieces + self.apart * j
                if row < tokens:
                    for n in cutlass.range_constexpr(self.parts):
                        store(self.row_of(to, begin, head, row, x.HV) + n * self.pieces * 8, [zero] * 8)
        if thread < tokens:
            store(x.dbeta + (begin + thread) * x.HV + head, [zero])
            if cutlass.const_expr(self.c.per_head):
                store(x.dg + (begin + thread) * x.HV + head, [zero])

    @cute.jit
    def clear_shares(self, x, chunk, head):
        """Nothing for dA_log and ddt_bias."""
        element = (Int64(chunk) * x.HV + head) * self.c.share_pitch + self.thread()
        if self.thread() < self.c.K:
            for to, wanted in ((x.of_A_log, self.c.rate), (x.of_dt_bias, self.c.bias)):
                if cutlass.const_expr(wanted):
                    store(to + element, [Float32(0.0)])


def there_is(s, i):
    """Wait until it is known where item i of this CTA lies, and return whether there is one."""
    cute.arch.mbarrier_wait(s.placed + (i & 1), i >> 1 & 1)
    return load_one(s.places + (i & PLACES - 1) * PLACE) >= 0


def place_of(s, i):
    """Return the chunk of item i, its value head, first token and tokens."""
    chunk, head, begin, tokens = [load_one(s.places + ((i & PLACES - 1) * PLACE + n)) for n in range(PLACE)]
    return chunk.to(Int32), head.to(Int32), begin, tokens.to(Int32)


def place_of_item(c, x, item):
    """Chunk, value head, first token and tokens of an item: heads of one chunk lie together."""
    chunk, head = item // x.HV, item % x.HV
    begin, tokens = Int64(0), Int32(0)
    if c.packed:
        begin = load_one(x.chunk_table + ChunkTable.WIDTH * chunk + ChunkTable.TOKEN)
        tokens = Int32(load_one(x.chunk_table + ChunkTable.WIDTH * chunk + ChunkTable.TOKENS))
    else:
        n = chunk // x.chunks
        number = chunk - n * x.chunks
        begin, tokens = Int64(n) * x.T + number * TOKENS, cutlass.min(x.T - number * TOKENS, TOKENS)
    return chunk, head, begin, tokens
