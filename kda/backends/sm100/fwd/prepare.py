"""PREPARE of fwd/fused.py: a group of eight warps makes every fourth chunk's tile, for the CHAINs of both CTAs.

  kE = kn 2^gc, qg = scale qn 2^gc       common/cute/rows.py
  TB = A_inv b                           common/cute/inverse.py
  KT = TB^T @ kg                         transposed in tensor memory, then rounded to where kg was
  A2 = A_qk @ TB

  warps  do
  0-7    rows, sums, operands
  0-3    the product of pairs (warp 0 the inverse, warps 2, 3 A2)
  0      issues products
  4-7    KT, a quarter of the channels each
  4      hands the tile to both CHAINs

Of a call whose gradients are recorded (`keeps`), the tile is that of fwd/operands.py, bit by bit: b on keys, -kE,
T' - I in the place of TB, and a KT that warps 4 to 7 compute.  Warp 4 also sends it to memory.
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ...common.cute.async_copies import bulk_copy_to_neighbour, bulk_store
from ...common.cute.copies import TYPES, field_at, load, store, words_of
from ...common.cute.fragments import accumulator_places, load_matrices, store_matrices, two_mma_bf16
from ...common.cute.gate import Gate, beta_from, load_beta
from ...common.cute.inverse import Inverse
from ...common.cute.packed import rounded
from ...common.cute.pairs import causal_pair, store_A_kk
from ...common.cute.rings import phase_of
from ...common.cute.rows import Rows
from ...common.cute.tile import GROUP_ROWS, LEAST_BUSY, WARPS, C, swizzle_128B
from ..configs import CTAS, FIRST_PRODUCER, GROUPS, OF_CHAIN, RING, FusedConfig, record_tile
from ..parts import umma
from ..parts.pairs import TensorCoreOfGroup
from ..parts.state import store_transposed
from ..parts.teams import MakerGroup, place_again, wait
from ..parts.walks import Share, WorkItem, kept_places, locate_walk, number_of_cta
from .operands import Multiplied

SENDER = 4                                   # warp that hands the tile over


class Producer:
    def __init__(self, config: FusedConfig):
        self.c, self.team, self.fields = config, MakerGroup(config), config.memory
        self.item, self.share = WorkItem(config, self.team), Share(config)
        self.tensor_core = TensorCoreOfGroup(config, self.team)
        self.gate = Gate(config, self.team)
        self.rows = Rows(config, self.team, self.tensor_core, self.fields.tile, negated_kE=config.keeps)
        self.inverse = Inverse(False, lambda column, row: swizzle_128B(column, row, C), strict=config.keeps)
        self.multiplied = Multiplied(self.team, config.K)
        self.early = self.fields.tile.KG.offset if config.one_product else 0   # bytes that leave first: kE and qg
        # KT, transposed: kg^T @ TB
        self.to_KT = umma.Product(config.K, C, umma.across(C), umma.along(C), range(C // 16))

    @cute.jit
    def produce(self, x, shared, barriers, rank):
        """Make every fourth chunk of all that the cluster walks over."""
        self.team.refresh_place(shared)
        if self.team.warp() == LEAST_BUSY:
            of_group = shared + self.team.number() * self.fields.group.bytes
            self.inverse.zeros(field_at(of_group, self.fields.group.columns), field_at(of_group, self.fields.tile.TA))
        before = Int32(0)
        while before < self.share.chunks(shared):
            self.team.refresh_place(shared)
            self.publish(x, shared)
            chunk = CTAS * self.team.number() + rank - before & RING - 1
            if chunk < self.item.chunks(shared):
                requested = self.request(x, shared, chunk)
                while chunk < self.item.chunks(shared):
                    filled = before + chunk >= RING                            # the group has made a tile before
                    phase = phase_of(before + chunk, RING)
                    requested = self.produce_one(x, shared, barriers, chunk, phase, rank, filled, requested)
                    chunk += RING
            before += self.item.chunks(shared)
        if cutlass.const_expr(self.c.keeps):
            self.team.refresh_place(shared)
            if self.team.warp() == SENDER:
                cute.arch.cp_async_bulk_wait_group(0, read=True)               # the copy has read the last tile

    @cute.jit
    def publish(self, x, shared):
        """Store what all chunks of the next piece need to shared memory."""
        self.team.meet()                                                       # all have read the item before
        if self.team.warp() == 0:
            self.share.find(x, shared, OF_CHAIN + self.team.number(), OF_CHAIN + self.team.number())
            piece = self.share.found(shared, OF_CHAIN + self.team.number())
            found = locate_walk(self.c, x, piece.walk).piece(piece)
            tiles = None
            if cutlass.const_expr(self.c.keeps):
                tile = Int64(kept_places(self.c, x, piece)[0]) * x.HV + piece.head
                tiles = x.tiles + tile * record_tile(self.c.K).bytes
            self.item.publish(shared, found.tokens, self.gate.rows_of_head(x, found.begin, piece.head), tiles)
        self.team.meet()                                                       # the item is there
        if cutlass.const_expr(self.c.bias):
            of_group = shared + self.team.number() * self.fields.group.bytes
            head_rows, _ = self.item.chunk(shared, Int32(0), x.H, x.HV)
            self.rows.store_bias(head_rows, field_at(of_group, self.fields.group.sums))
            self.team.meet()                                                   # all of the bias is there

    @cute.jit
    def request(self, x, shared, chunk):
        """Request the lane's rows of a chunk, and one warp beta; past the end of the walk those of its last token."""
        self.team.refresh_place(shared)
        head_rows, tokens = self.item.chunk(shared, chunk, x.H, x.HV)
        rows = cutlass.min(tokens - chunk * C, C)
        beta = TYPES[self.c.beta_dtype](0)
        if self.team.warp() == LEAST_BUSY:
            beta = load_beta(self.item.beta(shared, chunk, x.HV), rows, x.HV, cute.arch.lane_idx())
        return *self.rows.fetch(head_rows, rows, x.H, x.HV), beta

    @cute.jit
    def produce_one(self, x, shared, barriers, chunk, phase, rank, filled, requested):
        self.team.refresh_place(shared)
        head_rows, tokens = self.item.chunk(shared, chunk, x.H, x.HV)
        rows = cutlass.min(tokens - chunk * C, C)
        group = self.fields.group
        tile = shared + self.team.number() * group.bytes
        X, Y = [field_at(tile, field) for field in (group.X, group.Y)]
        sums, A_kk, columns, b = [
            field_at(tile, field) for field in (group.sums, self.fields.A_kk, group.columns, group.b)
        ]
        KT_done, empty = field_at(tile, group.KT_done), field_at(tile, group.empty)
        self.tensor_core.done = field_at(tile, group.pairs_done)
        self.tensor_core.base_desc = field_at(shared, self.fields.cta.base_desc)
        acc = self.tensor_core.accumulator()
        *raw, beta = requested
        if self.team.warp() == LEAST_BUSY:
            of_rows = beta_from(beta, self.c.beta, rows, cute.arch.lane_idx())
            store(b + (phase * C + cute.arch.lane_idx()), [of_rows])
        qn, kn, s = self.rows.prepare(*raw, rows, head_rows, sums)
        if cutlass.const_expr(not self.c.one_product):
            self.rows.blocks(qn, kn, s, sums, X, Y)
        gc = self.rows.make_sums(s, sums, Y, head_rows.lower_bound)
        of_k = None
        if cutlass.const_expr(self.c.keeps):
            of_k = load(b + (phase * C + self.rows.first_row()), GROUP_ROWS)
        acquire = functools.partial(self.acquire, empty, phase, filled)
        self.rows.operands(qn, kn, gc, sums, X, Y, tile, head_rows.lower_bound, of_k, acquire)
        if cutlass.const_expr(self.early > 0):
            needs_kg = self.team.warp() == 0 and not self.c.keeps              # for the product that makes KT
            self.team.meet_for_tile(self.team.warp() == SENDER or needs_kg)    # kE, qg and kg are there
            if self.team.warp() == SENDER:
                self.hand_over(x, shared, barriers.full, rank, chunk, 0, self.early)
        TA = field_at(tile, self.fields.tile.TA)
        if self.team.warp() < 4:
            if cutlass.const_expr(self.c.one_product):
                self.tensor_core.take_one_product(acc, phase)
            else:
                self.tensor_core.gather(acc)
            if cutlass.const_expr(self.c.keeps):
                self.make_T_and_A2(acc, A_kk, columns, TA, b + phase * C)
            else:
                self.make_TB_and_A2(acc, A_kk, columns, TA, b + phase * C, KT_done)
            requested = self.request(x, shared, chunk + RING)
        else:                                                                  # a tile on its way would hold them up
            requested = self.request(x, shared, chunk + RING)
            if cutlass.const_expr(self.c.keeps):
                self.team.meet()                                               # T' is there
                self.multiplied.make_KT(field_at(tile, self.fields.tile.KG), TA, self.team.warp() - 4)
                cute.arch.fence_proxy("async.shared", space="cta")
            else:
                self.store_KT(tile, KT_done, phase)
            self.team.meet_last_six()                                          # KT and A2 are in the tile
            if self.team.warp() == SENDER:
                self.hand_over(x, shared, barriers.full, rank, chunk, self.early, self.fields.tile.end)
        return requested

    @cute.jit
    def acquire(self, empty, phase, filled):
        """The group may overwrite its tile: the warp that sent it says when the copy to memory has read it."""
        if cutlass.const_expr(self.c.keeps):
            if self.team.warp() == SENDER and filled:
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.mbarrier_arrive(empty)
        wait(empty, phase ^ 1)

    @cute.jit
    def make_TB_and_A2(self, acc, A_kk, columns, TA, b, KT_done):
        """Warps 0 to 3 make TB and A2, transposed, next to each other."""
        if self.team.warp() < 2:
            store_A_kk(acc, A_kk, b, self.team.thread())
        self.team.meet_first_four()                                            # A_kk is there
        if self.team.warp() == 0:
            self.inverse.solve(A_kk, columns, TA, None, b)                     # in the tile, where it stays
            cute.arch.fence_proxy("async.shared", space="cta")
        self.team.meet_first_four()                                            # TB is there
        if self.team.warp() == 0:
            self.issue_KT(KT_done)
        elif self.team.warp() >= 2:
            self.A_qk_times_TB(acc, TA)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.team.arrive_for_last_six()

    @cute.jit
    def make_T_and_A2(self, acc, A_kk, columns, TA, b):
        """The same with b on keys: T' - I and A2.  Behind T', all warps that make A2 and KT fence."""
        if self.team.warp() < 2:
            store_A_kk(acc, A_kk, b, self.team.thread(), on_keys=True)
        self.team.meet_first_four()                                            # A_kk is there
        if self.team.warp() == 0:
            self.inverse.solve(A_kk, columns, TA, None, None)
        self.team.meet()                                                       # T' is there, for warps 4 to 7 too
        if self.team.warp() >= 2:
            self.multiplied.make_A2(acc, TA, b, self.team.warp() - 2)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.team.arrive_for_last_six()

    def A_qk_times_TB(self, acc, TA):
        """(A_qk TB)^T = TB^T @ A_qk^T: a warp has 16 columns, rows of A_qk as the product left them."""
        lane, places = cute.arch.lane_idx(), accumulator_places(self.team.thread())
        pairs = [words_of(causal_pair(acc, places, i))[0] for i in range(0, C // 2, 2)]
        row, piece = lane & 15, lane >> 4
        to = C // 8 + 2 * (self.team.warp() - 2)                               # piece of the warp's first column
        for m in range(2):
            a = []
            for step in range(2):
                a.append(load_matrices(TA + swizzle_128B(16 * m + row, (2 * step + piece) * 8, C) // 2))
            found = []
            for n in range(2):
                found.append(two_mma_bf16(a, [[pairs[4 * step + n], pairs[4 * step + 2 + n]] for step in range(2)]))
            words = [word for n in range(2) for word in words_of(found[n])]
            store_matrices(TA + swizzle_128B(16 * m + row, (to + piece) * 8, C) // 2, words)

    def issue_KT(self, done):
        """Warp 0 issues the product that makes KT."""
        tile, fields = self.team.number() * self.fields.group.bytes, self.fields.tile
        with cute.arch.elect_one():
            to, TA = self.columns_of_KT(), tile + fields.TA.offset
            umma.multiply(self.to_KT, to, self.tensor_core.base_desc, tile + fields.KG.offset, TA, False)
            umma.commit(done)

    def columns_of_KT(self):
        """Return the columns of tensor memory where the group's KT lies."""
        return self.c.tmem.KT + self.team.number() * self.c.tmem.OF_KT

    def store_KT(self, tile, done, phase):
        """Warps 4 to 7 store KT, rounded, in the place of kg."""
        warp, channels, KG = self.team.warp() - 4, self.c.K // 4, field_at(tile, self.fields.tile.KG)
        source = self.columns_of_KT() + warp * umma.WARP_LANES
        wait(done, phase)
        umma.fence_after_thread_sync()
        for half in range(channels // 16):
            words = rounded(umma.load_fragments(source + half * umma.HALF_LANES, C, Uint32))
            store_transposed(KG, words, channels * warp + 16 * half, C)
        cute.arch.fence_proxy("async.shared", space="cta")

    def hand_over(self, x, shared, full, rank, chunk, begin: int, end: int):
        """One warp sends some bytes of the tile to the neighbour's CHAIN, of all that this will wait for, and to where
        they are kept; with the last ones the CHAIN of its own CTA has the tile."""
        fields, group = self.fields.tile, place_again(self.c, shared) >> 3
        tile, full, neighbour = shared + group * self.fields.group.bytes, full + (CTAS * group + rank), rank ^ 1
        source = tile + begin
        with cute.arch.elect_one():
            if end == fields.end:
                cute.arch.mbarrier_arrive(full)
            if begin == 0:
                # redundant: its release, not the arrival; the copies bring everything the neighbour reads
                cute.arch.mbarrier_arrive_and_expect_tx(full, fields.end, peer_cta_rank_in_cluster=neighbour)
            bulk_copy_to_neighbour(source, source + fields.bytes, end - begin, full, neighbour)
            if self.c.keeps and end == fields.end:
                bulk_store(self.item.tile(shared, chunk, x.HV), tile, end)
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def clear(self, x, end):
        """Clear o of tokens outside every sequence, a token per warp, whose row is addressed once for all heads."""
        (cta, ctas), V, zero = number_of_cta(), self.c.V, [Float32(0.0)] * (self.c.V // 32)
        warp, warps = cta * (GROUPS * WARPS) + cute.arch.warp_idx() - FIRST_PRODUCER, ctas * (GROUPS * WARPS)
        for token in cutlass.range(Int32(end) + warp, x.T, warps, unroll=1):
            row = x.o + Int64(token) * x.HV * V + cute.arch.lane_idx() * (V // 32)
            for head in cutlass.range(x.HV, unroll=1):
                store(row + head * V, zero)
