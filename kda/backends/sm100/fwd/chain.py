"""CHAIN of fwd/fused.py: four warps walk from chunk to chunk with half of the columns of the state, over tiles that the
PREPAREs of both CTAs make.

  [-X; o] = [kE; qg] @ S - [1; 0] @ v
  S = 2^gc_last S + KT^T @ X
  o += A2 @ X

  warps  do
  0-3    S (K, V / 2) in tensor memory: a thread rounds and decays what it has, of 128 rows one, of 64 half of one (a
         product of 64 rows has 16 in the lanes of each warp)
  0      issues products: [-v; 0] of the next chunk before its state is there
  0, 1   -X to shared memory; rows of v, two chunks ahead
  2, 3   o of the chunk before to global memory

Of a call whose gradients are recorded (`keeps`), b is on keys and the tile has -kE (fwd/record.py), so X is not
negated, and r lies where -X lay.  Warps 0, 1 store r; each thread its row of the state that enters every second chunk.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ...common.cute import fast
from ...common.cute.async_copies import copy_16_bytes_later
from ...common.cute.copies import field_at, floats, load, load_one, store
from ...common.cute.fragments import store_matrices
from ...common.cute.packed import both, rounded, times_pairs
from ...common.cute.rings import phase_of, stage_of
from ...common.cute.segments import place_of_checkpoint
from ...common.cute.share import Crossing
from ...common.cute.tile import HALF, C, decay_index, swizzle_64B, swizzle_128B
from ..configs import AHEAD, CTAS, RING, STATE_ROUNDED, X_THERE, FirstRow, FusedConfig, PieceField
from ..parts import umma
from ..parts.state import in_shared
from ..parts.teams import arrive_at, wait
from ..parts.walks import Share, kept_places, locate_walk

FINDER = 3                                   # the warp that finds the next piece
STATE_PIECE = 16                             # columns of a row that a thread has in registers at a time
RESULT_PIECE = 32                            # columns of a row of r or o that two lanes have


class Consumer:
    def __init__(self, config: FusedConfig):
        self.c, self.fields = config, config.memory
        K, N = config.K, config.columns
        A, of_X, steps = umma.across(C), umma.across(C, N), range(C // 16)     # of_X: of v, too
        minus = not config.keeps                                               # -X is in shared memory, kE in the tile
        self.on_v = umma.Product(2 * C, N, A, of_X, steps)                     # [-1; 0] @ v
        self.on_state = umma.Product(2 * C, N, umma.along(2 * C), umma.across(K, N), range(K // 16))    # [kE; qg] @ S
        self.added = umma.Product(K, N, A, of_X, steps, negated=minus)         # -KT^T @ -X
        self.on_X = umma.Product(2 * C, N, A, of_X, steps, negated=minus)      # -[TB; A2] @ -X
        self.halves = K == 64                                                  # a thread has half of a row of S
        self.own_columns = N // 2 if self.halves else N                        # how many of its columns a thread has
        self.bytes_of_v = C * 2 * N                                            # in a chunk
        self.share, self.crossing = Share(config), Crossing(CTAS, K * N)

    @cute.jit
    def walk_share(self, x, shared, barriers, rank):
        """Walk over all pieces that are the cluster's.  While one is walked, the next is known."""
        warp, thread = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.thread_idx()[0]
        chunk, who, more, is_ahead = Int32(0), Int32(0), Boolean(True), Boolean(False)
        slot = Int32(self.fields.cta.v.offset)                                 # where rows of v of the chunk are
        while more:
            STATE_ROUNDED.sync()                                               # all are done with the piece before
            piece = self.share.found(shared, who)
            if warp == FINDER:
                self.find(x, shared, who, chunk + piece.chunks, rank)
            if warp < 2 and not is_ahead:
                self.load_v(x, shared, who, thread, 0, slot)
                self.load_v(x, shared, who, thread, 1, self.next_slot(slot))
            if piece.enters == PieceField.FROM_CLUSTER:
                self.enter_share(x, self.share.cluster(shared) - 1, rank, thread)
            if piece.enters == PieceField.FROM_MEMORY:
                walk = locate_walk(self.c, x, piece.walk)
                self.enter(x.h0, Int64(walk.n) * x.HV + piece.head, rank, thread, walk.segment, walk.is_transition)
            if warp < 2 and not is_ahead:
                self.wait_for_v()
            STATE_ROUNDED.sync()                                               # the next piece, rows of v are there
            if warp == 0 and piece.chunks > 0 and not is_ahead:
                self.issue_v(shared, chunk, slot)
            chunk, slot = self.walk(x, shared, barriers, piece, who, chunk, slot, rank, warp, thread)
            piece = self.share.found(shared, who)                              # again: not kept from chunk to chunk
            if piece.chunks > 0:
                self.store_results(x, shared, who, piece.chunks - 1, chunk - 1, warp, thread)
            if piece.leaves == PieceField.FROM_CLUSTER:
                self.leave_share(x, self.share.cluster(shared), rank, thread)
            if piece.leaves == PieceField.FROM_MEMORY:
                walk = locate_walk(self.c, x, piece.walk)
                self.leave(x, walk.n, walk.segment, walk.is_transition, piece.head, rank, thread)
            who, is_ahead = who ^ 1, piece.chunks > 1
            more = self.share.found(shared, who).enters != PieceField.NOWHERE

    @cute.jit
    def find(self, x, shared, who, walked, rank):
        """One warp finds the piece behind CHAIN's, before which so many chunks are walked, and where its rows of v and
        o begin, of this CTA's columns: no registers keep them from chunk to chunk."""
        c, following = self.c, who ^ 1
        if walked < self.share.chunks(shared):
            self.share.find(x, shared, who, following)
        else:
            self.share.find_without_tokens(x, shared, who, following)
        piece = self.share.found(shared, following)
        walk = locate_walk(c, x, piece.walk)
        begin, tokens = walk.piece(piece)[:2]
        skipped = ((begin * x.HV + piece.head) * c.V + rank * c.columns) * 2
        v, o = x.v.toint() + skipped, x.o.toint() + skipped
        if cutlass.const_expr(c.cut):
            if walk.is_transition:
                v, o = Int64(0), x.response.toint() + skipped
        with cute.arch.elect_one():
            store(self.first_row(shared, following, FirstRow.V), [v, o])
            if cutlass.const_expr(c.keeps):
                kept = self.kept_state(x, Int64(kept_places(c, x, piece)[1]) * x.HV + piece.head, rank)
                store(self.first_row(shared, following, FirstRow.R), [x.r.toint() + skipped, kept])
            store(field_at(shared, self.fields.cta.tokens) + following, [tokens])

    @cute.jit
    def walk(self, x, shared, barriers, piece, who, chunk, slot, rank, warp, thread):
        """Walk over the chunks of a piece, and return how many and which slot follow them."""
        c = self.c
        states, until = Int32(0), Int32(-1)                                    # kept before; chunks to the next one
        if cutlass.const_expr(not c.keeps):
            if x.every > 0:
                skipped = (piece.skipped + x.every - 1) // x.every             # states
                states = self.states_before(x, locate_walk(c, x, piece.walk).n) + skipped
                until = skipped * x.every - piece.skipped
        place = place_of_checkpoint(c, x, states, Int32(0), piece.chunks)
        if piece.chunks > 0:
            wait(barriers.full + stage_of(chunk, RING), phase_of(chunk, RING))
        for i in cutlass.range(piece.chunks, unroll=1):
            if cutlass.const_expr(c.checkpoints is not None):
                if place >= 0:
                    self.store_state(x.pool + place, Int64(self.share.head(shared, who)), rank, thread, c.v_first)
                place = place_of_checkpoint(c, x, states, i + 1, piece.chunks)
            elif cutlass.const_expr(not c.cut and not c.keeps):                # or no state is requested
                if until == 0:
                    number = Int64(states) * x.HV + self.share.head(shared, who)
                    self.store_state(x.h, number, rank, thread, c.v_first)
                    states, until = states + 1, x.every
                until -= 1
            self.step(x, shared, barriers, i, piece.chunks, who, chunk, slot, rank, warp, thread)
            chunk, slot = chunk + 1, self.next_slot(slot)
        if cutlass.const_expr(c.releases_late):
            if piece.chunks > 0:
                self.let_go(shared, barriers, chunk - 1)
        return chunk, slot

    @cute.jit
    def step(self, x, shared, barriers, i, steps, who, chunk, slot, rank, warp, thread):
        """Process chunk i of a piece, `chunk` of all, whose tile is there and whose rows of v are `slot` bytes behind
        `shared`.  Where one product makes pairs, the state is there before o of the chunk before is."""
        tile, parity = self.tile_of(chunk, rank), chunk & 1
        fields, base_desc = self.fields.tile, field_at(shared, self.fields.cta.base_desc)
        requested = self.request_piece(thread, 0, Uint32)
        kept = self.kept_row(x, shared, who, i, thread)
        self.round_and_decay(shared, tile, thread, kept, requested)
        base = load_one(base_desc)
        STATE_ROUNDED.sync()
        if warp == 0:
            with cute.arch.elect_one():
                umma.multiply_from(base, self.on_state, self.out(chunk), tile, self.fields.cta.S.offset, True)
                umma.commit(barriers.out)
        if cutlass.const_expr(self.c.releases_late):
            if i > 0:
                self.let_go(shared, barriers, chunk - 1)
        if warp < 2:
            ends = i + 2 >= steps                                              # then it is a chunk of the next piece
            if steps > 1 or not ends:
                number, of_piece = i + 2 - steps if ends else i + 2, who ^ Int32(ends)
                self.load_v(x, shared, of_piece, thread, number, self.next_slot(self.next_slot(slot)))
            if i > 0 and self.c.keeps:
                self.store_results(x, shared, who, i - 1, chunk - 1, warp, thread)
            base = load_one(base_desc)
            wait(barriers.out, parity)
            umma.fence_after_thread_sync()
            self.round_X(shared, slot, warp, thread, chunk)
            self.wait_for_v()                                                  # rows of the next chunk and -X are there
            umma.fence_before_thread_sync()
            X_THERE.sync()
            if warp == 0:
                umma.fence_after_thread_sync()
                with cute.arch.elect_one():
                    umma.multiply_from(base, self.added, self.c.tmem.S, tile + fields.KG.offset, slot, True)
                    if cutlass.const_expr(self.c.releases_late):
                        umma.commit(barriers.added)
                    umma.multiply_from(base, self.on_X, self.out(chunk), tile + fields.TA.offset, slot, True)
                    umma.commit(barriers.o_done)
                if i + 1 < steps or (steps > 1 and self.tokens(shared, who ^ 1) > 0):
                    self.issue_v(shared, chunk + 1, self.next_slot(slot))
        else:
            if i > 0:
                self.store_results(x, shared, who, i - 1, chunk - 1, warp, thread)
            umma.fence_before_thread_sync()
            X_THERE.arrive()
        if cutlass.const_expr(not self.c.releases_late):
            self.let_go(shared, barriers, chunk)
        if i + 1 < steps:
            wait(barriers.full + stage_of(chunk + 1, RING), phase_of(chunk + 1, RING))
        if cutlass.const_expr(self.c.releases_late):
            wait(barriers.added, parity)
            umma.fence_after_thread_sync()

    @cute.jit
    def let_go(self, shared, barriers, chunk):
        """Wait until o of a chunk is there, and let go of its tile."""
        wait(barriers.o_done, chunk & 1)
        umma.fence_after_thread_sync()
        arrive_at(field_at(shared + self.group_of(chunk), self.fields.group.empty), chunk & 1)

    @cute.jit
    def round_and_decay(self, shared, tile, thread, kept, requested):
        """All four warps store S, rounded, to shared memory, and 2^gc_last S to where S was; and, unless that is 0, to
        where the thread's row is kept.  A piece is requested ahead of the one before it."""
        decay = both(load_one(field_at(shared + tile, self.fields.tile.decay) + decay_index(self.channel(thread))))
        for first in cutlass.range_constexpr(0, self.own_columns, STATE_PIECE):
            # redundant: ptxas would mix the pieces, and run out of registers
            cute.arch.sync_warp()
            words = umma.arrived(requested)
            if cutlass.const_expr(first + STATE_PIECE < self.own_columns):
                requested = self.request_piece(thread, first + STATE_PIECE, Uint32)
            of_S = rounded(words)
            self.round_state(of_S, first, shared, thread)
            if cutlass.const_expr(self.c.keeps):
                if kept != 0:
                    self.keep_piece(of_S, first, kept, thread)
            self.store_piece(thread, first, times_pairs(words, decay))
        cute.arch.fence_proxy("async.shared", space="cta")
        umma.wait_for_stores()

    def kept_state(self, x, number, rank):
        """Return the address of the CTA's columns of one of the states that are kept: a panel of an image."""
        return x.h.toint() + (number * self.c.V + rank * self.c.columns) * (2 * self.c.K)

    def first_row(self, shared, who, field: int):
        """Return where one of a piece's addresses lies (FirstRow)."""
        return field_at(shared, self.fields.cta.first_rows) + (FirstRow.COUNT * who + field)

    @cute.jit
    def kept_row(self, x, shared, who, i, thread):
        """Return the address of the thread's row in the state that enters chunk i of a piece, which lies as in shared
        memory; 0 if it is not kept."""
        row = Int64(0)
        if cutlass.const_expr(self.c.keeps):
            if (self.share.skipped(shared, who) + i) & 1 == 0:
                first = load_one(self.first_row(shared, who, FirstRow.KEPT))
                row = first + Int64(i >> 1) * x.HV * (2 * self.c.K * self.c.V) + self.channel(thread) * (2 * HALF)
        return row

    @cute.jit
    def keep_piece(self, words, first: int, row, thread):
        """Store a piece of a row: two of 16 bytes that the swizzle leaves neighbours."""
        swaps = self.channel(thread) & 1 == 1
        first_half = [words[i + 4] if swaps else words[i] for i in range(4)]
        second_half = [words[i] if swaps else words[i + 4] for i in range(4)]
        store_32_bytes(row + ((first // 8) ^ (self.channel(thread) & 6)) * 16, first_half + second_half)

    @cute.jit
    def store_results(self, x, shared, who, i, chunk, warp, thread):
        """Store chunk i of [r; o] of a piece, rounded, out of tensor memory, 16 rows a warp: a lane has half of a row's
        part."""
        row, half, field = 16 * (warp & 1) + (thread & 15), thread >> 4 & 1, FirstRow.O
        if cutlass.const_expr(self.c.keeps):
            field = Int32(FirstRow.R) if warp < 2 else Int32(FirstRow.O)
        if (warp < 2 and self.c.keeps) or (warp >= 2 and self.c.o):
            tokens, first = self.tokens(shared, who), load_one(self.first_row(shared, who, field))
            for piece in cutlass.range_constexpr(0, self.c.columns, RESULT_PIECE):
                # redundant: ptxas would mix the pieces, and run out of registers
                cute.arch.sync_warp()
                source = self.out(chunk) + piece + warp * umma.WARP_LANES
                words = rounded(umma.load_halves(source, RESULT_PIECE // 2, RESULT_PIECE // 2, Uint32))
                if i * C + row < tokens:
                    element = piece + half * (RESULT_PIECE // 2)
                    store_32_bytes(self.row(first, element, i * C + row, x.HV), words)

    def round_X(self, shared, to, warp, thread, chunk):
        """Warps 0 and 1 store -X, rounded, out of tensor memory to shared memory, 16 rows each."""
        lane = thread & 31
        words = rounded(umma.load_fragments(self.out(chunk) + warp * umma.WARP_LANES, self.c.columns, Uint32))
        row, piece = 16 * warp + (lane & 15), lane >> 4
        place = (shared + to).toint() + self.swizzled(row, piece * 8, C)
        for pair in range(self.c.columns // 16):
            store_matrices(in_shared(place ^ pair * 32), words[4 * pair : 4 * pair + 4])

    def issue_v(self, shared, chunk, slot):
        """Warp 0 issues the product that makes [-v; 0] of a chunk."""
        fields = self.fields.cta
        base_desc = field_at(shared, fields.base_desc)
        with cute.arch.elect_one():
            umma.multiply(self.on_v, self.out(chunk), base_desc, fields.minus_one.offset, slot, False)

    def out(self, chunk):
        return self.c.tmem.out + (chunk & 1) * self.c.columns

    def tile_of(self, chunk, rank):
        """Return bytes to a chunk's tile: with the group that makes it, or that gets it from the neighbour."""
        return self.group_of(chunk) + ((chunk ^ rank) & 1) * self.fields.tile.bytes

    def channel(self, thread):
        """Return the row of S that a thread has."""
        return (thread >> 5) * 16 + (thread & 15) if self.halves else thread

    def column(self, thread):
        """Return the first of the thread's columns there."""
        return (thread >> 4 & 1) * self.own_columns if self.halves else 0

    def load_piece(self, thread, first: int, kind=Float32):
        """STATE_PIECE of a thread's columns of S, from one of them on."""
        if self.halves:
            return umma.load_halves(self.own_row(thread, first), STATE_PIECE, self.own_columns, kind)
        return umma.load_row(self.own_row(thread, first), STATE_PIECE, kind)

    def request_piece(self, thread, first: int, kind=Float32):
        """Request what `load_piece` loads."""
        if self.halves:
            return umma.request_halves(self.own_row(thread, first), STATE_PIECE, self.own_columns, kind)
        return umma.request_row(self.own_row(thread, first), STATE_PIECE, kind)

    def store_piece(self, thread, first: int, values):
        """The reverse of `load_piece`: done after `wait_for_stores`."""
        if self.halves:
            umma.store_halves(self.own_row(thread, first), self.own_columns, values)
        else:
            umma.store_row(self.own_row(thread, first), values)

    def own_row(self, thread, first: int):
        """Return where the thread's row of S begins in tensor memory, from column `first` on."""
        return self.c.tmem.S + first + (thread >> 5) * umma.WARP_LANES

    def swizzled(self, row, column, rows: int):
        """Return the bytes to a column of the CTA's in `rows` rows."""
        return swizzle_128B(row, column, rows) if self.c.columns == HALF else swizzle_64B(row, column)

    def round_state(self, words, first: int, shared, thread):
        """Store a piece of a row of S to shared memory, as the product with it reads it."""
        place = (shared + self.fields.cta.S.offset).toint()
        place += self.swizzled(self.channel(thread), self.column(thread), self.c.K)
        for piece in range(STATE_PIECE // 8):
            to = in_shared(place ^ (first // 8 + piece) * 16)
            store(cute.recast_ptr(to, dtype=Uint32), words[4 * piece : 4 * piece + 4])

    def tokens(self, shared, who):
        """Return the tokens of a piece."""
        return load_one(field_at(shared, self.fields.cta.tokens) + who)

    @cute.jit
    def load_v(self, x, shared, who, thread, i, slot):
        """Request rows of v of chunk i of a piece, if there is one, by 64 threads; zeros in a transition's walk."""
        tokens = self.tokens(shared, who)
        if i * C < tokens:
            first = load_one(self.first_row(shared, who, FirstRow.V))
            for j in cutlass.range_constexpr(self.c.columns // 16):
                row, piece = self.own_piece(thread, j)
                token = cutlass.min(i * C + row, tokens - 1)           # past the end: a row that counts for nothing
                to = shared + slot + self.swizzled(row, piece * 8, C)
                if cutlass.const_expr(not self.c.cut):
                    copy_16_bytes_later(self.row(first, piece * 8, token, x.HV), to)
                elif first == 0:
                    store(cute.recast_ptr(to, dtype=Int32), [Int32(0)] * 4)
                else:
                    copy_16_bytes_later(self.row(first, piece * 8, token, x.HV), to)
        cute.arch.cp_async_commit_group()

    def wait_for_v(self):
        """Wait until this thread's rows of the next chunk are there, for products."""
        cute.arch.cp_async_wait_group(1)                                       # those behind them may come later
        cute.arch.fence_proxy("async.shared", space="cta")

    def row(self, first, element, token, HV):
        """Return the address in what begins at `first`, v or o, `token` rows below `element`."""
        return fast.row(first + element * 2, token, HV * Int32(2 * self.c.V))

    @cute.jit
    def states_before(self, x, n):
        """Return how many states are kept of sequences before n."""
        each = x.every * C
        if cutlass.const_expr(self.c.offsets):
            lane, found = cute.arch.lane_idx(), Int32(0)
            for m in cutlass.range(lane, n, 32, unroll=1):
                found += Int32((load_one(x.cu_seqlens + m + 1) - load_one(x.cu_seqlens + m) + each - 1) // each)
            for far in (16, 8, 4, 2, 1):
                found += cute.arch.shuffle_sync_bfly(found, far)
        else:
            found = n * ((x.T + each - 1) // each)
        return found

    @cute.jit
    def enter(self, h0, number, rank, thread, segment, is_transition):
        """Store S before a walk's first token: the CTA's columns of a given state, 0, or the identity."""
        for first in cutlass.range_constexpr(0, self.own_columns, STATE_PIECE):
            values = [Float32(0.0)] * STATE_PIECE
            if cutlass.const_expr(self.c.h0):
                if segment == 0:
                    place, apart = self.place_of_state(h0, number, rank, thread, first, self.c.v_first)
                    if cutlass.const_expr(self.c.v_first):
                        values = [load_one(place + e * apart).to(Float32) for e in range(STATE_PIECE)]
                    else:
                        values = [x for e in range(0, STATE_PIECE, 4) for x in floats(load(place + e, 4))]
            if cutlass.const_expr(self.c.cut):
                # The identity has a 1 in this element of the values.
                column = self.channel(thread) - rank * self.c.columns - first - self.column(thread)
                one = [Float32(1.0) if column == e else Float32(0.0) for e in range(STATE_PIECE)]
                values = [one[e] if is_transition else values[e] for e in range(STATE_PIECE)]
            self.store_piece(thread, first, values)
        umma.wait_for_stores()

    @cute.jit
    def leave(self, x, n, segment, is_transition, head, rank, thread):
        """Store S behind the last token of a walk."""
        c = self.c
        if cutlass.const_expr(c.cut):
            number = Int64(n * x.segments + segment) * x.HV + head
            if is_transition:
                self.store_state(x.M, number, rank, thread, True)              # transposed, as compose reads it
            else:
                self.store_state(x.ht, number, rank, thread, False)
        elif cutlass.const_expr(c.ht):
            self.store_state(x.ht, Int64(n) * x.HV + head, rank, thread, c.v_first)

    def enter_share(self, x, cluster, rank, thread):
        """Go on with S where the cluster before has left it."""
        self.crossing.wait(x, cluster, rank, STATE_ROUNDED)
        place = self.crossing.place(x, cluster, rank)
        for first in range(0, self.own_columns, STATE_PIECE):
            values = []
            for e in range(first, first + STATE_PIECE, 4):
                values += floats(load(place + 128 * e, 4))
            self.store_piece(thread, first, values)
        umma.wait_for_stores()

    def leave_share(self, x, cluster, rank, thread):
        """Leave S to the cluster behind."""
        place = self.crossing.place(x, cluster, rank)
        for first in range(0, self.own_columns, STATE_PIECE):
            S = self.load_piece(thread, first)
            for e in range(0, STATE_PIECE, 4):
                store(place + 128 * (first + e), S[e : e + 4])
        self.crossing.hand_over(x, cluster, rank, STATE_ROUNDED)

    def store_state(self, to, number, rank, thread, v_first: bool):
        """Store S to the CTA's columns of one of many states."""
        for first in range(0, self.own_columns, STATE_PIECE):
            S = self.load_piece(thread, first)
            place, apart = self.place_of_state(to, number, rank, thread, first, v_first)
            together = 1 if v_first else 4                                     # neighbours
            for e in range(0, STATE_PIECE, together):
                store(place + e * apart, S[e : e + together])

    def place_of_state(self, x, number, rank, thread, first: int, v_first: bool):
        """Return where this thread's row is at column `first`, and how far columns are apart."""
        K, V = self.c.K, self.c.V
        over_channels, over_columns = (1, K) if v_first else (V, 1)
        of_row = self.channel(thread) * over_channels
        of_row += (rank * self.c.columns + first + self.column(thread)) * over_columns
        return x + (number * (K * V) + of_row), over_columns

    def own_piece(self, thread, j: int):
        """Return the row, and the 16-byte piece of it, that one of 64 threads moves in its j-th turn."""
        pieces = self.c.columns // 8
        return 64 // pieces * j + (thread >> pieces.bit_length() - 1), thread & pieces - 1

    def group_of(self, chunk):
        """Return the bytes to the fields of the group that makes a chunk, in its CTA."""
        return (chunk & 2) * (self.fields.group.bytes // 2)

    @cute.jit
    def next_slot(self, slot):
        """Return where rows of v of the next chunk are, in the ring of AHEAD."""
        first, after = self.fields.cta.v.offset, slot + self.bytes_of_v
        return Int32(first) if after == first + AHEAD * self.bytes_of_v else after


def store_32_bytes(address, words):
    """Eight words to global memory, by one instruction, which brings a whole sector."""
    found = ", ".join(f"{{$r{i + 1}}}" for i in range(8))
    cute.arch.inline_ptx(f"st.global.v8.b32 [{{$r0}}], {{{found}}};", read_only_args=[address, *words])
