"""One chunk of C = 32 rows and one value head, into one tile (configs.record_tile), for a step that records gradients:
formulas are those of common/cute/gate.py, pairs.py and inverse.py, with b on the side of keys.

  kE = kn 2^gc            qg = scale qn 2^gc            KG = b kn 2^(gc_last - gc)
  T' = (I + A_kk diag(b))^-1                            AQ = A_qk diag(b)
  KT = T'^T @ KG          A2 = AQ @ T'

The tile has -kE, as products need it, and T' - I, so that the operand of T' is added exactly.  If one product makes the
pairs, common/cute/rows.py makes all of them.

  warps  do
  0-7    rows, sums, operands
  0      issues the product of pairs; the inverse
  0-3    pairs: warps 0, 1 hold A_kk, warps 2, 3 A_qk and then A2
  4-7    KT, a quarter of the channels each, over KG

A program without a chunk clears its share of the rows of o outside every sequence.

  pipeline, barrier  arrivals                 waits         says
  done               1 of OPERANDS, a commit  OPERANDS      the product of pairs is there (by halving: of each level)
  sync_threads       256                      OPERANDS      the sums of each warp's rows are there, and what is set up
                                                            once; those before each warp; operands (by halving: of each
                                                            level, and the one before was read); T'; all of the tile
  FIRST_FOUR         128                      warps 0 to 3  A_kk is there

The tile is made in shared memory; two bulk copies send it: KQ while T' is computed, then the rest.

  shared memory: configs.OperandsConfig.struct; the tile 29 KiB, operands of the product 16 + 8 KiB (by halving 16),
  sums 5, A_kk 4.5, columns 2.5;  tensor memory: 32 columns (by halving 256), wherever they begin
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from ...common.cute.async_copies import bulk_store
from ...common.cute.barriers import initialise
from ...common.cute.copies import field_at, fields_at, load, load_one, store, words_of
from ...common.cute.entry import ChunkEntry
from ...common.cute.fragments import accumulator_places, load_matrices, mma_bf16, store_matrices
from ...common.cute.gate import Gate, beta_of_row
from ...common.cute.inverse import Inverse
from ...common.cute.pairs import causal_pair, store_A_kk
from ...common.cute.rows import Rows
from ...common.cute.tile import GROUP_ROWS, LEAST_BUSY, C, swizzle_128B
from ..configs import OperandsConfig
from ..parts import umma
from ..parts.pairs import TensorCoreOfCta
from ..parts.teams import WholeCta


class Operands(ChunkEntry):
    def __init__(self, config: OperandsConfig):
        self.c, self.team = config, WholeCta()
        self.tensor_core = TensorCoreOfCta(config, self.team)
        self.gate = Gate(config, self.team)
        self.tile = config.tile
        known = SimpleNamespace(KG=self.tile.KT, decay=self.tile.decay)
        self.rows = Rows(config, self.team, self.tensor_core, known, negated_kE=True)
        self.inverse = Inverse(False, lambda column, row: swizzle_128B(column, row, C), strict=True)
        self.multiplied = Multiplied(self.team, config.K)

    def warp(self):
        return self.team.warp()

    @cute.jit
    def make(self, x, chunk, begin, tokens, number, head):
        shared = SmemAllocator().allocate_array(Uint8, self.c.shared, byte_alignment=1024)
        to = x.tiles + (Int64(chunk) * x.HV + head) * self.tile.bytes
        c, struct, warp = self.c, self.c.struct, self.team.warp()
        tile, s = shared + struct.tile.offset, fields_at(shared, struct)
        X, Y, sums, columns, b = s.X, s.Y, s.sums, s.columns, s.b
        A_kk = cute.recast_ptr(X, dtype=Float32)
        TA = field_at(tile, self.tile.TA)
        if self.team.thread() == 0:
            initialise(s, c.pipelines)
            store(s.base_desc, [(shared.toint().to(Uint32) & 0x3FFFF) >> 4])
        if warp == 1:
            umma.allocate(s.tmem, c.columns)
        head_rows = self.gate.rows_of_head(x, begin, head)
        if warp == 0:
            b[cute.arch.lane_idx()] = beta_of_row(head_rows.beta, c.beta, tokens, x.HV, cute.arch.lane_idx())
        acc = self.tensor_core.accumulator()
        self.tensor_core.done, self.tensor_core.base_desc, self.tensor_core.tmem = s.done, s.base_desc, s.tmem
        raw = self.rows.fetch(head_rows, tokens, x.H, x.HV)
        if cutlass.const_expr(c.bias):
            self.rows.store_bias(head_rows, sums)
            self.team.meet()                                                   # dt_bias is there
        qn, kn, decays = self.rows.prepare(*raw, tokens, head_rows, sums)
        if warp == LEAST_BUSY:
            self.inverse.zeros(columns, TA)
        if cutlass.const_expr(not c.one_product):
            self.rows.blocks(qn, kn, decays, sums, X, Y)
        gc = self.rows.make_sums(decays, sums, Y, x.lower_bound)
        of_k = load(b + self.rows.first_row(), GROUP_ROWS)
        self.rows.operands(qn, kn, gc, sums, X, Y, tile, x.lower_bound, of_k)
        if cutlass.const_expr(not c.one_product):
            self.team.meet()                                                   # kE and qg are there, to be sent
        if warp < 4:
            if cutlass.const_expr(c.one_product):
                self.tensor_core.one_product(acc, 0)
            else:
                self.tensor_core.gather(acc)
            umma.fence_before_thread_sync()                                    # before umma.free, by warp 1
        if warp < 4:
            if warp < 2:
                store_A_kk(acc, A_kk, b, self.team.thread(), on_keys=True)
            self.team.meet_first_four()                                        # A_kk is there
            if warp == 0:
                self.inverse.solve(A_kk, columns, TA, None, None)
        elif warp == LEAST_BUSY:
            self.send(to, tile, 0, self.tile.KT.offset)
        self.team.meet()                                                       # T' is there
        if warp >= 4:
            self.multiplied.make_KT(field_at(tile, self.tile.KT), TA, warp - 4)
        elif warp >= 2:
            self.multiplied.make_A2(acc, TA, b, warp - 2)
        elif warp == 1:
            umma.free(c.columns, load_one(s.tmem))
        cute.arch.fence_proxy("async.shared", space="cta")
        self.team.meet()                                                       # the tile is there
        if warp == LEAST_BUSY:
            self.send(to, tile, self.tile.KT.offset, self.tile.end)
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def send(self, to, tile, begin: int, end: int):
        """One warp sends some bytes of the tile to memory."""
        with cute.arch.elect_one():
            bulk_store(to + begin, tile + begin, end - begin)
            # redundant: the first one; otherwise those bytes belong to the second group, which is waited for as well
            cute.arch.cp_async_bulk_commit_group()


class Multiplied:
    """KT and A2, multiplied by T' ahead of time."""

    def __init__(self, team, K: int):
        self.team, self.channels = team, K // 4                                # channels of KT that a warp has

    def make_KT(self, KG, TA, warp):
        """Store T'^T @ KG over KG, `channels` each warp."""
        row, piece, first = cute.arch.lane_idx() & 15, cute.arch.lane_idx() >> 4, warp * self.channels
        kg, T = [], self.blocks_of_T(TA)
        for step in range(2):
            words = []
            for pair in range(self.channels // 16):
                place = swizzle_128B(16 * step + row, first + (2 * pair + piece) * 8, C)
                words += load_matrices(KG + place // 2, transposed=True)
            kg.append(words)
        for m in range(2):
            for pair in range(self.channels // 16):
                of_pair = [words[4 * pair : 4 * pair + 4] for words in kg]
                found = self.times_T(T, m, [[b[:2] for b in of_pair], [b[2:] for b in of_pair]])
                place = swizzle_128B(16 * m + row, first + (2 * pair + piece) * 8, C)
                store_matrices(KG + place // 2, found)

    def make_A2(self, acc, TA, b, warp):
        """A2^T = T'^T @ AQ^T, next to T' - I: a warp has 16 columns, rows of A_qk as the product left them."""
        lane, places = cute.arch.lane_idx(), accumulator_places(self.team.thread())
        pairs, T = [], self.blocks_of_T(TA)
        for i in range(0, C // 2, 2):
            of_keys = load(b + places[i][1], 2)
            pairs.append(words_of([x * of_keys[e] for e, x in enumerate(causal_pair(acc, places, i))])[0])
        for m in range(2):
            found = self.times_T(T, m, [[[pairs[4 * step + n], pairs[4 * step + 2 + n]] for step in range(2)]
                                        for n in range(2)])
            column = C + (2 * warp + (lane >> 4)) * 8
            store_matrices(TA + swizzle_128B(16 * m + (lane & 15), column, C) // 2, found)

    @cute.jit
    def blocks_of_T(self, TA):
        """T'^T as operands of 16 x 16: those of columns 0 to 15 of T', and of its lower right block; the last is 0."""
        lane = cute.arch.lane_idx()
        row, piece, beyond = lane & 15, lane >> 4, (lane >> 2) - 2 * (lane & 3)
        one = Uint32(0x3F80) if beyond == 0 else (Uint32(0x3F800000) if beyond == 1 else Uint32(0))
        blocks = {}
        for m, step in ((0, 0), (0, 1), (1, 1)):
            words = load_matrices(TA + swizzle_128B(16 * m + row, (2 * step + piece) * 8, C) // 2)
            if cutlass.const_expr(m == step):
                words = [words[0] | one, words[1], words[2], words[3] | one]
            blocks[m, step] = words
        return blocks

    def times_T(self, T, m: int, operands):
        """16 rows of T'^T @ (C, 16), rounded, as four matrices; of two times eight columns, operands by steps."""
        words = []
        for of_columns in operands:
            found = [Float32(0.0)] * 4
            for step in range(m, 2):
                found = mma_bf16(found, T[m, step], of_columns[step])
            words += words_of(found)
        return words


build = Operands.build
