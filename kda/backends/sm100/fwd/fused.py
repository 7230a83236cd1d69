"""fwd/gate to fwd/output in one kernel: a cluster of two CTAs walks the chunks of C = 32 rows of one sequence and value
head after the other, each CTA with 64 columns of the state, and makes every second chunk's operands, for both.

  A1 = [TB; A_qk TB]                    TB = A_inv b, as all of a chunk's matrices: common/cute/chunk.py
  WQ = A1 @ kE + [0; -1] @ qg           [w; -Q]: what v_new and o take from the state, w = TB kE, Q = qg - A_qk w
  [v_new; o] = A1 @ v - WQ @ S
  S = 2^gc_last S + kg^T @ v_new

So two products stand between a state and the next one, and A1 @ v is queued before the state is there.

  warps  role     does
  0-3    CHAIN    has S (K, 64) in tensor memory, thread k row k.  warp 0: issues products; warps 0, 1: v_new, and rows
                  of v two chunks ahead; warps 2, 3: o, to global memory
  4-11   PREPARE  chunks 4 i + rank, into stage rank;  of the eight, warps 0-3: the product and A1 (warp 0 the inverse,
                  warps 2, 3 A_qk TB), warps 4-7: WQ, and the tile to both CHAINs
  12-19  PREPARE  chunks 4 i + 2 + rank, into stage 2 + rank

Where sequences are cut (`cut`), a cluster walks over a segment, and that twice: with v and from 0, the first segment
from the state that enters the sequence; and, but for the first segment, with v = 0 and from the identity.  What then
leaves the chain is `response`, the rows of o of a state that enters the segment, and M, by which it is multiplied.
common/cute/compose.py goes from state to state, fwd/join.py adds what o has of them.

Chunks are counted through all that a cluster walks over: chunk c lies in stage c mod 4, which group (c >> 1) & 1 of CTA
c & 1 makes.  PREPAREs of a cluster's next sequence do not wait for the end of the one before.

  pipeline     arrivals                                              says
  full         1, of a PREPARE's warp 4; in the neighbour with the   a tile is there: WQ, kg, 2^gc_last, A1
               bytes of the copy
  empty        8, a lane of each warp of both CHAINs, in the CTA     nobody reads the stage any more, in either CTA, and
               that makes the stage's tiles                          the copy is done
  out          1, a commit                                           [v_new; o] are there, S was read
  added        1, a commit                                           S has kg^T @ v_new; v_new and the tile were read
  made         1, a commit; two of each group                        its product is there; its WQ is
  barrier 1    128                                                   S is in shared memory, 2^gc_last S where it was
  barrier 2    64, warps 0 and 1                                     v_new is, and rows of v of the next chunk
  barrier 3    64, warps 2 and 3                                     o is
  barrier 4+   256, 128, 128; of each group                          all eight; warps 0-3; warps 4-7

  shared memory: configs.Shared;  tensor memory: configs.Columns, all there are, so that they begin at 0.  A product of
  M = 64 rows takes half the lanes of its columns.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from kda.compile import cutedsl
from kda.compile.target import Target

from ...common.cute import fast
from ...common.cute.async_copies import bulk_copy_to_neighbour, copy_16_bytes_later
from ...common.cute.chunk import ChunkRows, places, step_size
from ...common.cute.copies import TYPES, copy_16_bytes, load, load_one, pointers, store, words_of
from ...common.cute.tile import HALF, LEVELS, ROWS, WARPS, C, in_decays, in_wide_rows
from ..configs import AHEAD, COLUMNS, CTAS, GROUPS, ITEM, RING, TMEM, Columns, FusedConfig, K, Shared, Tile, V
from ..parts import umma
from ..parts.matrices import load_matrices, mma_bf16, store_matrices
from ..parts.segments import chunks_of, place, segment

FIRST = 4                                    # warp of the first group
LEAST = WARPS - 1                            # of a group's warps the one that has least to do
BARRIERS = 3                                 # of a group

PAIRS = umma.Product(2 * C, C, umma.along(2 * C), umma.along(C), range(K // 16))
HALVES = umma.Product(2 * C, C, umma.along(2 * C), umma.along(2 * C), range(K // 16))
ON_KE = umma.Product(2 * C, K, umma.across(C), umma.across(2 * C), range(C // 16))
ON_V = umma.Product(2 * C, COLUMNS, umma.across(C), umma.across(C), range(C // 16))
ON_STATE = umma.Product(2 * C, COLUMNS, umma.along(2 * C), umma.across(K), range(K // 16), negated=True)
ADDED = umma.Product(K, COLUMNS, umma.across(C), umma.across(C), range(C // 16))


class Producer(ChunkRows):
    """Eight of the CTA's warps, and a tile."""

    BUFFERS = 1
    PARTED = ROWS // 2

    def __init__(self, config: FusedConfig):
        self.c, self.tile = config, Tile

    @cute.jit
    def look(self, shared):
        """Which thread this is, in what follows."""
        self.number = number_of_warp(shared) - FIRST

    @cute.jit
    def thread(self):
        return cute.arch.thread_idx()[0] - 32 * FIRST & 32 * WARPS - 1

    @cute.jit
    def warp(self):
        return self.number & WARPS - 1

    @cute.jit
    def group(self):
        return self.number >> 3

    @cute.jit
    def meet(self):
        umma.before_others()
        cute.arch.barrier(barrier_id=4 + BARRIERS * self.group(), number_of_threads=32 * WARPS)
        umma.after_others()

    @cute.jit
    def meet_first(self):
        cute.arch.barrier(barrier_id=5 + BARRIERS * self.group(), number_of_threads=128)

    @cute.jit
    def meet_last(self):
        cute.arch.barrier(barrier_id=6 + BARRIERS * self.group(), number_of_threads=128)

    @cute.jit
    def until_free(self, empty, phase, b, step):
        cute.arch.mbarrier_wait(empty, phase)
        if self.warp() == LEAST:
            b[cute.arch.lane_idx()] = step                                     # the chunk before needs b no more

    def in_TB(self, column, row):
        return in_wide_rows(column, row, C)

    @cute.jit
    def from_shared(self, TB, whole, tile, A_inv, rows, stride):
        """It lies in the tile."""

    @cute.jit
    def accumulator(self):
        return cute.make_rmem_tensor(C // 2, Float32)

    @cute.jit
    def products(self, acc, x, y, rows_of_y: cutlass.Constexpr, phase):
        to = self.columns_of_pairs(0)
        self.ask_for_pairs(PAIRS, to, Shared.Y, phase)
        self.fetch_pairs(acc, to)

    @cute.jit
    def of_level(self, acc, x, level: cutlass.Constexpr, phase):
        """Each has its own columns, the first those of WQ: acc begins when rows have gone."""
        self.ask_for_pairs(HALVES, self.columns_of_pairs(level), Shared.X, phase)

    @cute.jit
    def of_levels(self, acc):
        for level in cutlass.range_constexpr(LEVELS):
            found = self.accumulator()
            self.fetch_pairs(found, self.columns_of_pairs(level))
            self.add_level(acc, found, level)
        umma.before_others()

    @cute.jit
    def columns_of_pairs(self, level: cutlass.Constexpr):
        if cutlass.const_expr(level == 0):
            return Columns.pairs + self.group() * C
        return Columns.WQ + (level - 1) * C + self.group() * K

    @cute.jit
    def ask_for_pairs(self, product: cutlass.Constexpr, to, y: cutlass.Constexpr, phase):
        """[k; q] @ k^T under decays, by warps 0 to 3."""
        of_group = self.group() * Shared.group
        if self.warp() == 0:
            with cute.arch.elect_one():
                umma.multiply(product, to, self.begin, of_group + Shared.X, of_group + y, False)
                umma.commit(self.made)
        cute.arch.mbarrier_wait(self.made, phase)
        umma.after_others()

    @cute.jit
    def fetch_pairs(self, acc, to):
        found = umma.load_matrices(to + (self.warp() << 21), C)
        for i in cutlass.range_constexpr(C // 2):
            acc[i] = found[i]

    @cute.jit
    def produce(
        self, q, k, g, beta, A_log, dt_bias, cu_seqlens, shared, full, empty, made, T, H, HV, walks, pieces, scale,
        lower_bound, rank
    ):  # fmt: skip
        """Every fourth chunk of all that the cluster walks over."""
        self.look(shared)
        if self.warp() == LEAST:
            of_group = shared + self.group() * Shared.group
            self.zeros(cute.recast_ptr(of_group + Shared.columns, dtype=Float32),
                       cute.recast_ptr(of_group + Tile.TB, dtype=BFloat16))  # fmt: skip
        before = Int32(0)
        walk, head = first_item(HV)
        while walk < walks:
            self.look(shared)
            begin, tokens = part(self.c, cu_seqlens, walk, T, pieces)[:2]
            self.keep_item(
                shared, walk, head, tokens, scale, lower_bound,
                *self.of_head(q, k, g, beta, A_log, dt_bias, begin, head, H, HV)
            )  # fmt: skip
            chunk = CTAS * self.group() + rank - before & RING - 1
            while chunk < self.chunks_of_item(shared):
                self.produce_one(
                    shared, full, empty, made, chunk, H, HV, before + chunk >> RING.bit_length() - 1 & 1, rank
                )  # fmt: skip
                chunk += RING
            before += self.chunks_of_item(shared)
            walk, head = next_item(*self.place_of_item(shared), HV)

    @cute.jit
    def item(self, shared, at: cutlass.Constexpr, dtype: cutlass.Constexpr):
        """What is known of the sequence and head that a group is at."""
        return cute.recast_ptr(shared + (Shared.items + at) + self.group() * ITEM, dtype=dtype)

    @cute.jit
    def keep_item(self, shared, walk, head, tokens, scale, lower_bound, q, k, g, beta, rate, bias):
        """By all of a group."""
        self.meet()                                                            # all have read what was there
        if self.warp() == 0:
            with cute.arch.elect_one():
                store(self.item(shared, 0, Int64), [q.toint(), k.toint()])
                store(self.item(shared, 16, Int64), [g.toint(), beta.toint()])
                store(self.item(shared, 32, Int64), [bias.toint()])
                store(self.item(shared, 40, Int32), [walk, head])
                store(self.item(shared, 48, Int32), [tokens])
                store(self.item(shared, 52, Float32), [rate])
                store(self.item(shared, 56, Float32), [scale, lower_bound])
        self.meet()

    @cute.jit
    def chunks_of_item(self, shared):
        self.look(shared)
        return chunks_of(load_one(self.item(shared, 48, Int32)))

    @cute.jit
    def place_of_item(self, shared):
        self.look(shared)
        return [load_one(self.item(shared, 40 + 4 * i, Int32)) for i in range(2)]

    @cute.jit
    def chunk_of_item(self, shared, chunk, H, HV):
        """Where its rows of a chunk begin, and its bias."""
        c = self.c
        of_qk, of_rest = load(self.item(shared, 0, Int64), 2), load(self.item(shared, 16, Int64), 2)
        found = []
        for x, kind, elements in (
            (of_qk[0], "bfloat16", H * K), (of_qk[1], "bfloat16", H * K),
            (of_rest[0], c.g_dtype, HV * K), (of_rest[1], c.beta_dtype, HV),
        ):  # fmt: skip
            dtype = TYPES[kind]
            row = fast.row(x, chunk, elements * Int32(C * dtype.width // 8))
            found.append(cute.make_ptr(dtype, row, cute.AddressSpace.gmem))
        bias = cute.make_ptr(Float32, load_one(self.item(shared, 32, Int64)), cute.AddressSpace.gmem)
        return *found, bias

    @cute.jit
    def produce_one(self, shared, full, empty, made, chunk, H, HV, turn, rank):
        self.look(shared)
        q, k, g, beta, bias = self.chunk_of_item(shared, chunk, H, HV)
        tokens, rate, scale, lower_bound = [
            load_one(self.item(shared, 48 + 4 * i, Float32 if i else Int32)) for i in range(4)
        ]
        rows = cutlass.min(tokens - chunk * C, C)
        group = self.group()
        stage = CTAS * group + rank
        tile = shared + group * Shared.group
        rows_of_x, rows_of_y = [cute.recast_ptr(tile + at, dtype=BFloat16) for at in (Shared.X, Shared.Y)]
        sums, A_kk, columns, b = [
            cute.recast_ptr(tile + at, dtype=Float32) for at in (Shared.sums, Shared.A_kk, Shared.columns, Shared.b)
        ]
        A1 = cute.recast_ptr(tile + self.tile.TB, dtype=BFloat16)
        self.made, made = made + group, made + GROUPS + group
        self.begin = cute.recast_ptr(shared + Shared.begin, dtype=Uint32)
        step = Float32(0.0)
        if self.warp() == LEAST:
            step = step_size(beta, self.c.beta, rows, HV, cute.arch.lane_idx())
        own = self.rows(q, k, g, rate, bias, rows, H, HV, scale, lower_bound)
        free = (empty + stage, turn ^ 1, b, step)
        acc = self.accumulator()
        if cutlass.const_expr(self.c.block):
            self.at_once(*own, sums, rows_of_x, rows_of_y, tile, lower_bound, *free)
            if self.warp() < 4:
                self.products(acc, rows_of_x, rows_of_y, C, turn)
        else:
            self.by_halving(*own, sums, rows_of_x, A_kk, tile, acc, turn, *free)
        if self.warp() < 4:
            self.make_A1(acc, A_kk, columns, A1, b, rows)
            if self.warp() == 0:
                self.ask_for_WQ(made)
        else:
            self.fetch_WQ(tile, made, turn)
            if self.warp() == 4:
                self.hand_over(shared, full, rank)

    @cute.jit
    def make_A1(self, acc, A_kk, columns, A1, b, rows):
        """TB and A_qk TB, transposed, next to each other, by warps 0 to 3."""
        if self.warp() < 2:
            self.A_kk_to_shared(acc, A_kk, b)
        self.meet_first()
        if self.warp() == 0:
            self.inverse(A_kk, columns, A1, None, b, None, None, rows, 0)
        self.meet_first()
        if self.warp() >= 2:
            self.A_qk_times_TB(acc, A1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet_first()

    @cute.jit
    def A_qk_times_TB(self, acc, A1):
        """(A_qk TB)^T = TB^T @ A_qk^T: a warp has 16 columns, rows of A_qk as the product left them."""
        lane, at = cute.arch.lane_idx(), places(self.thread())
        pairs = [words_of(self.without_later(acc, at, i))[0] for i in range(0, C // 2, 2)]
        row, piece = lane & 15, lane >> 4
        to = COLUMNS // 2 // 8 + 2 * (self.warp() - 2)                         # piece of the warp's first column
        for m in cutlass.range_constexpr(2):
            found = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
            for step in cutlass.range_constexpr(2):
                a = load_matrices(A1 + in_wide_rows(16 * m + row, (2 * step + piece) * 8, C) // 2)
                for n in cutlass.range_constexpr(2):
                    found[n] = mma_bf16(found[n], a, [pairs[4 * step + n], pairs[4 * step + 2 + n]])
            words = [word for n in range(2) for word in words_of(found[n])]
            store_matrices(A1 + in_wide_rows(16 * m + row, (to + piece) * 8, C) // 2, words)

    @cute.jit
    def ask_for_WQ(self, made):
        """WQ = A1 @ kE + [0; -1] @ qg, by warp 0."""
        to, tile = Columns.WQ + self.group() * K, self.group() * Shared.group
        umma.after_others()
        with cute.arch.elect_one():
            umma.multiply(ON_KE, to, self.begin, tile + Tile.TB, tile, False)
            umma.multiply(ON_KE, to, self.begin, Shared.minus_one, tile + C * umma.ROW, True)
            umma.commit(made)

    @cute.jit
    def fetch_WQ(self, tile, made, phase):
        """WQ, rounded, in place of [kE; qg], by warps 4 to 7: 16 rows each."""
        lane, warp = cute.arch.lane_idx(), self.warp() - 4
        source = Columns.WQ + self.group() * K + (warp << 21)
        row, piece = 16 * warp + (lane & 15), lane >> 4
        cute.arch.mbarrier_wait(made, phase)
        umma.after_others()
        for half in cutlass.range_constexpr(K // HALF):
            words = words_of(umma.load_matrices(source + half * HALF, HALF))
            for pair in cutlass.range_constexpr(HALF // 16):
                at = in_wide_rows(row, half * HALF + (2 * pair + piece) * 8, 2 * C)
                store_matrices(cute.recast_ptr(tile, dtype=BFloat16) + at // 2, words[4 * pair : 4 * pair + 4])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet_last()

    @cute.jit
    def hand_over(self, shared, full, rank):
        """The tile to both CHAINs, by one warp."""
        group = number_of_warp(shared) - FIRST >> 3
        tile, full, neighbour = shared + group * Shared.group, full + (CTAS * group + rank), rank ^ 1
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.tile.end, peer_cta_rank_in_cluster=neighbour)
            bulk_copy_to_neighbour(tile, tile + self.tile.bytes, self.tile.end, full, neighbour)

    @cute.jit
    def clear(self, o, end, T, HV):
        """Zero where tokens are no sequence's, a token a warp."""
        own = cute.arch.block_idx()[0] * (GROUPS * WARPS) + cute.arch.warp_idx() - FIRST
        warps, zero = cute.arch.grid_dim()[0] * (GROUPS * WARPS), [Float32(0.0)] * (V // 32)
        for token in cutlass.range(Int32(end) + own, T, warps, unroll=1):
            row = o + Int64(token) * HV * V + cute.arch.lane_idx() * (V // 32)
            for head in cutlass.range(HV, unroll=1):
                store(row + head * V, zero)


class Consumer:
    """A state's walk over tiles that two CTAs make."""

    def __init__(self, config: FusedConfig):
        self.c = config

    @cute.jit
    def walk(
        self, v, h0, o, response, ht, M, h, cu_seqlens, shared, full, empty, out, added, T, HV, walks, pieces, every,
        rank
    ):  # fmt: skip
        c = self.c
        chunk, states = Int32(0), Int32(0)                                     # of all items; kept before
        walk, head = first_item(HV)
        while walk < walks:
            warp, thread = self.who(shared)
            begin, tokens, n, piece, answers = part(c, cu_seqlens, walk, T, pieces)
            steps = chunks_of(tokens)
            self.enter(h0, Int64(n) * HV + head, rank, thread, piece, answers)
            if every > 0:
                states = self.states_before(cu_seqlens, n, T, every)
            to = response.toint() if answers else o.toint()
            own = (begin * HV + head) * V + rank * COLUMNS
            if warp < 2:
                for i in cutlass.range_constexpr(AHEAD - 1):
                    self.bring(v, shared, thread, own, i, chunk + i, tokens, HV, answers)
                self.brought()
            cute.arch.barrier(barrier_id=1, number_of_threads=128)             # rows of v
            if warp == 0 and steps > 0:
                self.ask_for_A1_v(shared, full, chunk, rank)
            for i in cutlass.range(steps, unroll=1):
                kept = Int32(-1)                                               # the state's number, if it is
                if every > 0 and (i & every - 1) == 0:
                    kept = states + i // every
                self.step(
                    v, h, to, shared, full, empty, out, added, own, i, chunk, steps, tokens, kept, head, HV, rank,
                    answers
                )  # fmt: skip
                chunk += 1
            thread = self.who(shared)[1]
            if cutlass.const_expr(c.cut):
                number = Int64(n * pieces + piece) * HV + head
                if answers:
                    self.keep_state(M, number, rank, thread, True)             # transposed, as compose reads it
                else:
                    self.keep_state(ht, number, rank, thread, False)
            elif cutlass.const_expr(c.ht):
                self.keep_state(ht, Int64(n) * HV + head, rank, thread, c.v_first)
            walk, head = next_item(walk, head, HV)

    @cute.jit
    def step(
        self, v, h, o, shared, full, empty, out, added, own, i, chunk, steps, tokens, kept, head, HV, rank, answers
    ):  # fmt: skip
        """One chunk."""
        warp, thread = self.who(shared)
        lane = thread & 31
        tile, phase = self.stage(chunk, rank), chunk & 1
        begin = cute.recast_ptr(shared + Shared.begin, dtype=Uint32)
        cute.arch.mbarrier_wait(full + (chunk & RING - 1), chunk // RING & 1)
        decay = load_one(cute.recast_ptr(shared + (tile + Tile.DECAY), dtype=Float32) + in_decays(thread))
        for first in cutlass.range_constexpr(0, COLUMNS, COLUMNS // 4):
            S = umma.load_row(self.own_row(thread, first), COLUMNS // 4)
            words = words_of(S)
            self.round_state(words, first, shared, thread)
            if kept >= 0:
                self.write_state(h, Int64(kept) * HV + head, rank, thread, first, self.c.v_first, S)
            umma.store_row(self.own_row(thread, first), [x * decay for x in S])
        umma.until_stored()
        cute.arch.fence_proxy("async.shared", space="cta")
        umma.before_others()
        cute.arch.barrier(barrier_id=1, number_of_threads=128)
        to = Columns.out + phase * COLUMNS
        if warp == 0:
            umma.after_others()
            with cute.arch.elect_one():
                umma.multiply(ON_STATE, to, begin, tile, Shared.S, True)
                umma.commit(out)
        cute.arch.mbarrier_wait(out, phase)
        umma.after_others()
        words = words_of(umma.load_matrices(to + (warp << 21), COLUMNS))
        of_v = Shared.v + chunk % AHEAD * (C * umma.ROW)
        target = cute.recast_ptr(shared + (of_v if warp < 2 else Int32(Shared.o)), dtype=BFloat16)
        row, piece = 16 * (warp & 1) + (lane & 15), lane >> 4
        for pair in cutlass.range_constexpr(COLUMNS // 16):
            at = in_wide_rows(row, (2 * pair + piece) * 8, C)
            store_matrices(target + at // 2, words[4 * pair : 4 * pair + 4])
        if warp < 2:
            self.brought()                                                     # v of the next chunk, too
            umma.before_others()
            cute.arch.barrier(barrier_id=2, number_of_threads=64)
            if warp == 0:
                umma.after_others()
                with cute.arch.elect_one():
                    umma.multiply(ADDED, Columns.S, begin, tile + Tile.KG, of_v, True)
                    umma.commit(added)
                if i + 1 < steps:
                    self.ask_for_A1_v(shared, full, chunk + 1, rank)
            self.bring(v, shared, thread, own, i + AHEAD - 1, chunk + AHEAD - 1, tokens, HV, answers)
        else:
            cute.arch.barrier(barrier_id=3, number_of_threads=64)
            self.write(o, shared, thread - 64, own, i, tokens, HV)
        cute.arch.mbarrier_wait(added, phase)
        umma.after_others()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + (chunk & RING - 1), peer_cta_rank_in_cluster=chunk & 1)

    @cute.jit
    def ask_for_A1_v(self, shared, full, chunk, rank):
        """A1 @ v of a chunk, by warp 0, once its tile is there."""
        cute.arch.mbarrier_wait(full + (chunk & RING - 1), chunk // RING & 1)
        to, A1 = Columns.out + (chunk & 1) * COLUMNS, self.stage(chunk, rank) + Tile.TB
        begin, of_v = cute.recast_ptr(shared + Shared.begin, dtype=Uint32), Shared.v + chunk % AHEAD * (C * umma.ROW)
        umma.after_others()
        with cute.arch.elect_one():
            umma.multiply(ON_V, to, begin, A1, of_v, False)

    @cute.jit
    def stage(self, chunk, rank):
        """Where the tile of a chunk is: with the group that makes it, or that gets it from the neighbour."""
        return (chunk >> 1 & 1) * Shared.group + ((chunk ^ rank) & 1) * Tile.bytes

    @cute.jit
    def who(self, shared):
        """This thread's warp, and it."""
        warp = number_of_warp(shared)
        return warp, 32 * warp + cute.arch.lane_idx()

    @cute.jit
    def own_row(self, thread, first: cutlass.Constexpr):
        """Of S in tensor memory, from a column on."""
        return Columns.S + first + (thread >> 5 << 21)

    @cute.jit
    def round_state(self, words, first: cutlass.Constexpr, shared, thread):
        """Half a row of S to shared memory, as ON_STATE reads it."""
        to = cute.recast_ptr(shared + Shared.S, dtype=Uint32)
        for piece in cutlass.range_constexpr(COLUMNS // 32):
            store(to + in_wide_rows(thread, first + piece * 8, K) // 4, words[4 * piece : 4 * piece + 4])

    @cute.jit
    def bring(self, v, shared, thread, own, i, chunk, tokens, HV, answers):
        """Rows of v of chunk i, if there is one, by 64 threads; zeros where it answers."""
        if i * C < tokens:
            for j in cutlass.range_constexpr(C // 8):
                row, piece = own_piece(thread, j)
                token = cutlass.min(i * C + row, tokens - 1)           # past the end: a row that counts for nothing
                to = shared + Shared.v + chunk % AHEAD * (C * umma.ROW) + in_wide_rows(row, piece * 8, C)
                if answers:
                    store(cute.recast_ptr(to, dtype=Int32), [Int32(0)] * 4)
                else:
                    copy_16_bytes_later(self.row(v.toint(), own + piece * 8, token, HV), to)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def brought(self):
        """This thread's rows of the next chunk, where products see them."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def write(self, o, shared, thread, own, i, tokens, HV):
        """Rows of o out of shared memory, as whole lines, by warps 2 and 3."""
        for j in cutlass.range_constexpr(C // 8):
            row, piece = own_piece(thread, j)
            if i * C + row < tokens:
                to = self.row(o, own + piece * 8, i * C + row, HV)
                source = cute.recast_ptr(shared + Shared.o, dtype=BFloat16) + in_wide_rows(row, piece * 8, C) // 2
                copy_16_bytes(source, cute.make_ptr(BFloat16, to, cute.AddressSpace.gmem))

    @cute.jit
    def row(self, x, own, token, HV):
        """The address in what begins at x, v or o, `token` rows below element `own`."""
        return fast.row(x + own * 2, token, HV * Int32(2 * V))

    @cute.jit
    def states_before(self, cu_seqlens, n, T, every):
        """States that are kept of sequences before n."""
        each = every * C
        if cutlass.const_expr(self.c.offsets):
            lane, found = cute.arch.lane_idx(), Int32(0)
            for m in cutlass.range(lane, n, 32, unroll=1):
                found += Int32((load_one(cu_seqlens + m + 1) - load_one(cu_seqlens + m) + each - 1) // each)
            for far in (16, 8, 4, 2, 1):
                found += cute.arch.shuffle_sync_bfly(found, far)
        else:
            found = n * ((T + each - 1) // each)
        return found

    @cute.jit
    def enter(self, h0, number, rank, thread, piece, answers):
        """S of a walk's first token: its columns of a state that was given, 0, or the identity."""
        for first in cutlass.range_constexpr(0, COLUMNS, COLUMNS // 4):
            values = [Float32(0.0)] * (COLUMNS // 4)
            if cutlass.const_expr(self.c.h0):
                if piece == 0:
                    own, apart = self.place_of_state(h0, number, rank, thread, first, self.c.v_first)
                    values = [load_one(own + e * apart).to(Float32) for e in range(COLUMNS // 4)]
            if cutlass.const_expr(self.c.cut):
                column = thread - rank * COLUMNS - first                       # of the identity
                one = [Float32(1.0) if column == e else Float32(0.0) for e in range(COLUMNS // 4)]
                values = [one[e] if answers else values[e] for e in range(COLUMNS // 4)]
            umma.store_row(self.own_row(thread, first), values)
        umma.until_stored()

    @cute.jit
    def keep_state(self, x, number, rank, thread, v_first: cutlass.Constexpr):
        """S to its columns of one of many states."""
        for first in cutlass.range_constexpr(0, COLUMNS, COLUMNS // 4):
            S = umma.load_row(self.own_row(thread, first), COLUMNS // 4)
            self.write_state(x, number, rank, thread, first, v_first, S)

    @cute.jit
    def write_state(self, x, number, rank, thread, first: cutlass.Constexpr, v_first: cutlass.Constexpr, values):
        own, apart = self.place_of_state(x, number, rank, thread, first, v_first)
        for e in cutlass.range_constexpr(len(values)):
            store(own + e * apart, [values[e]])

    @cute.jit
    def place_of_state(self, x, number, rank, thread, first: cutlass.Constexpr, v_first: cutlass.Constexpr):
        """Where this thread's row is at a column, and how far columns are apart."""
        over_channels, over_columns = (1, K) if cutlass.const_expr(v_first) else (V, 1)
        of_row = thread * over_channels + (rank * COLUMNS + first) * over_columns
        return x + (number * (K * V) + of_row), over_columns


class Fused:
    def __init__(self, config: FusedConfig):
        self.c = config
        self.producer, self.consumer = Producer(config), Consumer(config)

    @cute.jit
    def __call__(
        self, q: cute.Pointer, k: cute.Pointer, v: cute.Pointer, g: cute.Pointer, beta: cute.Pointer,
        A_log: cute.Pointer, dt_bias: cute.Pointer, h0: cute.Pointer, o: cute.Pointer, response: cute.Pointer,
        ht: cute.Pointer, M: cute.Pointer, h: cute.Pointer, cu_seqlens: cute.Pointer, T: Int32, N: Int32, H: Int32,
        HV: Int32, pieces: Int32, every: Int32, scale: Float32, lower_bound: Float32, ctas: Int32, stream,
    ):  # fmt: skip
        self.kernel(
            q, k, v, g, beta, A_log, dt_bias, h0, o, response, ht, M, h, cu_seqlens, T, N, H, HV, pieces, every, scale,
            lower_bound
        ).launch(
            grid=(ctas, 1, 1), cluster=self.c.cluster, block=(self.c.threads, 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self, q: cute.Pointer, k: cute.Pointer, v: cute.Pointer, g: cute.Pointer, beta: cute.Pointer,
        A_log: cute.Pointer, dt_bias: cute.Pointer, h0: cute.Pointer, o: cute.Pointer, response: cute.Pointer,
        ht: cute.Pointer, M: cute.Pointer, h: cute.Pointer, cu_seqlens: cute.Pointer, T: Int32, N: Int32, H: Int32,
        HV: Int32, pieces: Int32, every: Int32, scale: Float32, lower_bound: Float32,
    ):  # fmt: skip
        rank, warp = cute.arch.block_idx()[0] % CTAS, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator().allocate_array(Uint8, Shared.end, byte_alignment=1024)
        full = cute.recast_ptr(shared + Shared.barriers, dtype=Int64)
        empty, out, added, made = full + RING, full + 2 * RING, full + 2 * RING + 1, full + 2 * RING + 2
        if cute.arch.thread_idx()[0] == 0:
            for s in cutlass.range_constexpr(RING):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, 4 * CTAS)
            for s in cutlass.range_constexpr(2 + 2 * GROUPS):
                cute.arch.mbarrier_init(out + s, 1)
            cute.arch.mbarrier_init_fence()
            store(cute.recast_ptr(shared + Shared.begin, dtype=Uint32), [(shared.toint().to(Uint32) & 0x3FFFF) >> 4])
        with cute.arch.elect_one():
            store(cute.recast_ptr(shared + Shared.numbers, dtype=Int32) + warp, [warp])
        if warp == 0:
            umma.allocate(cute.recast_ptr(shared + Shared.tmem, dtype=Uint32), TMEM)
        self.minus_one(cute.recast_ptr(shared + Shared.minus_one, dtype=BFloat16))
        umma.before_others()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        umma.after_others()
        walks = N * (2 * pieces - 1) if cutlass.const_expr(self.c.cut) else N
        if warp < FIRST:
            self.consumer.walk(
                v, h0, o, response, ht, M, h, cu_seqlens, shared, full, empty, out, added, T, HV, walks, pieces,
                every, rank
            )  # fmt: skip
        else:
            self.producer.produce(
                q, k, g, beta, A_log, dt_bias, cu_seqlens, shared, full, empty, made, T, H, HV, walks, pieces, scale,
                lower_bound, rank
            )  # fmt: skip
            if cutlass.const_expr(self.c.offsets):
                begin, tokens = place(self.c.offsets, cu_seqlens, N - 1, T)
                self.producer.clear(o, begin + tokens, T, HV)
        umma.before_others()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            umma.free(TMEM)

    @cute.jit
    def minus_one(self, to):
        """[0; -1] (2 C, C), across: row j of 2 C elements has -1 at C + j."""
        row, piece = cute.arch.thread_idx()[0] >> 3, cute.arch.thread_idx()[0] & 7
        if row < C:
            one = [Float32(-1.0) if piece * 8 + e == C + row else Float32(0.0) for e in range(8)]
            store(to + in_wide_rows(row, piece * 8, C) // 2, one)
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def first_item(HV):
    """Sequence and value head that a cluster begins with."""
    item = cute.arch.block_idx()[0] // CTAS
    return item // HV, item % HV


@cute.jit
def next_item(n, head, HV):
    head += cute.arch.grid_dim()[0] // CTAS
    while head >= HV:
        n, head = n + 1, head - HV
    return n, head


@cute.jit
def number_of_warp(shared):
    """Out of shared memory: what is known to stay the same would be worked out once, addresses first of all, and kept
    from chunk to chunk, where there are no registers for it."""
    numbers = cute.recast_ptr(shared + Shared.numbers, dtype=Int32)
    return cute.arch.make_warp_uniform(load_one(numbers + cute.arch.warp_idx()))


@cute.jit
def part(c: cutlass.Constexpr, cu_seqlens, walk, T, pieces):
    """First token and tokens of a walk; the sequence, its segment, and whether it is the segment's second walk."""
    n, piece, answers = walk, Int32(0), False
    if cutlass.const_expr(c.cut):
        n = walk // (2 * pieces - 1)
        number = walk - n * (2 * pieces - 1)
        piece, answers = number + 1 >> 1, (number & 1) < cutlass.min(number, 1)
    begin, tokens = place(c.offsets, cu_seqlens, n, T)
    if cutlass.const_expr(c.cut):
        begin, tokens = segment(begin, tokens, piece, pieces)
    return begin, tokens, n, piece, answers


@cute.jit
def own_piece(thread, j: cutlass.Constexpr):
    """Row and 16-byte piece of it that one of 64 threads moves, of rows 8 j to 8 j + 7."""
    return 8 * j + (thread >> 3), thread & 7


def build(c: FusedConfig, target: Target) -> cutedsl.Compiled:
    x = pointers(
        f"bfloat16 bfloat16 bfloat16 {c.g_dtype} {c.beta_dtype} float32 float32 {c.h0 or 'float32'} bfloat16 "
        f"bfloat16 float32 float32 bfloat16 {c.offsets or 'int64'}"
    )
    numbers = [Int32(1)] * 6 + [Float32(1)] * 2 + [Int32(1)]
    return cutedsl.compile(Fused(c), *x, *numbers, cutedsl.fake_stream(), target=target)
