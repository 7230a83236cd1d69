"""A step of the state over two chunks at once (fwd/stream.py): what a group of PREPARE makes of their tiles, and what
CHAIN does with them.

A chunk's tile (configs.tile) has kE = kn 2^gc, qg = scale qn 2^gc, kg, TB, A_qk and lam = 2^gc_last.  With

  KT = TB^T @ kg,  A2 = A_qk @ TB:      X = v - kE @ S      o = qg @ S + A2 @ X      S' = lam S + KT^T @ X

two products stand between a state and the next one.  Of chunks a and b,

  G = kE_b @ KT_a^T                     by which X_b = v_b - (kE_b lam_a) @ S - G @ X_a
  KT_a' = KT_a lam_b - G^T @ KT_b
  A2_ba = qg_b @ KT_a^T - A2_b @ G

so the step needs X_b without that last term: all of it is in KT_a' and A2_ba.

  [X_a; X_b] = [v_a; v_b] - [kE_a; kE_b lam_a] @ S
  o_a = qg_a @ S + A2_a @ X_a           o_b = (qg_b lam_a) @ S + A2_ba @ X_a + A2_b @ X_b
  S' = lam_a lam_b S + KT_a'^T @ X_a + KT_b^T @ X_b

A step's two tiles lie one after the other.  The four products of rows of one array are one:

  field  of chunk a             of chunk b
  KQ     kE_a; kE_b lam_a       qg_a; qg_b lam_a
  KG     KT_a'                  KT_b
  decay  lam_a lam_b            lam_b
  TB     A2_a                   0
  A_qk   A2_ba                  A2_b
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...common.cute import fast
from ...common.cute.copies import field_at, floats_of, load, store, words_of
from ...common.cute.fragments import load_matrices, mma_bf16, store_matrices
from ...common.cute.tile import WARPS, C, swizzle_64B, swizzle_128B
from ..configs import COLUMNS, PITCH_V, tile
from .state import CHANNELS, State, multiply, own_decays, own_matrices, register_mma
from .wgmma import accumulator, narrow_view, standing_view, wide_view

ROWS = 16                                    # rows of a matrix of mma.sync
PARTS = 2 * C // ROWS                        # parts of a step, of so many tokens


class StepJoiner:
    """Joins two chunks to a step, with the eight warps of a group: `begin` when both have operands and the first one
    has TB, `finish` when the second one has it, and `complete`, by one warp, when all have done that.

    [G; qg_b @ KT_a^T] is one product of the tensor core, by warps 0 to 3: warps 0 and 1 store G, and warps 2 and 3 keep
    the other rows for A2_ba."""

    def __init__(self, K: int, team, tensor_core):
        self.K, self.team, self.tensor_core, self.tile = K, team, tensor_core, tile(K)
        self.channels = K // WARPS           # channels of KT that a warp has

    @cute.jit
    def clear(self, tile):
        """Make the tile of a chunk of no tokens."""
        end, zero = self.tile.end // 16, [Uint32(0)] * 4
        words = cute.recast_ptr(tile, dtype=Uint32)
        for i in cutlass.range(self.team.thread(), end, 32 * WARPS, unroll=1):
            store(words + 4 * i, zero)
        self.team.meet()                                                       # decays may be written over
        if self.team.thread() < self.K:
            store(field_at(tile, self.tile.decay) + self.team.thread(), [Float32(1.0)])

    @cute.jit
    def begin(self, a, b, G):
        """Join what does not need the second chunk's TB, while INVERSE computes that; G is (C, C).  Return KT_a,
        unrounded, and qg_b @ KT_a^T, of which warps 2 and 3 have 16 rows each."""
        self.lane = fast.again(cute.arch.lane_idx())
        warp = self.team.warp()
        rows, half = warp & 3, warp >> 2
        KT, products, A2 = self.make_KT(a), self.tensor_core.accumulator(), [Uint32(0)] * 8
        cute.arch.fence_proxy("async.shared", space="cta")
        self.team.meet()                                                       # KT_a is there; all have read TB_a
        if half == 0:
            self.tensor_core.multiply(products, field_at(b, self.tile.KQ), field_at(a, self.tile.KG), C)
            if rows < 2:
                self.put_rows(G, rows, words_of_two(blocks_of(products)))
        if half == 1 and rows < 2:
            A2 = self.make_A2(a, rows)
        self.team.meet()                                                       # G is there; kE_b, qg_b, TB_a were read
        self.scale(a, b, rows, half)
        if half == 1 and rows < 2:
            self.put_rows(field_at(a, self.tile.TB), rows, A2)
        return KT, products

    @cute.jit
    def finish(self, a, b, G, KT, products):
        """Join what needs the second chunk's TB.  `complete` writes zeros over TB_b when all warps have read it."""
        self.lane = fast.again(cute.arch.lane_idx())
        warp = self.team.warp()
        self.make_KT(b)
        # redundant: in the simulator, to which a warp's lanes are one; here one reads what others have stored of KT_b
        cute.arch.sync_warp()
        self.finish_KT(a, b, G, KT)
        if warp == 2 or warp == 3:
            self.finish_A2(a, b, G, blocks_of(products), warp - 2)

    def put_rows(self, to, m, words):
        """16 rows of (C, C)."""
        for half in range(2):
            store_matrices(to + self.narrow_place(ROWS * m, ROWS * half), words[4 * half : 4 * half + 4])

    def narrow_place(self, row, column):
        """Elements to a lane's row of four matrices 8 x 8 of (C, C), from this row and column on."""
        lane = self.lane
        return swizzle_64B(row + (lane & 15), column + (lane >> 4) * 8) // 2

    def wide_place(self, row, channel, rows: int):
        """The same of (rows, K)."""
        lane = self.lane
        return swizzle_128B(row + (lane & 15), channel + (lane >> 4) * 8, rows) // 2

    def make_KT(self, tile):
        """KT over kg, the warp's channels; returns them unrounded."""
        KG, TB = field_at(tile, self.tile.KG), field_at(tile, self.tile.TB)
        first, KT = self.channels * self.team.warp(), []
        T = {(m, step): load_matrices(TB + self.narrow_place(ROWS * m, ROWS * step))
             for m, step in ((0, 0), (0, 1), (1, 1))}
        kg = [load_matrices(KG + self.wide_place(ROWS * step, first, C), transposed=True) for step in range(2)]
        for m in range(2):
            found = []
            for n in range(2):
                acc = [Float32(0.0)] * 4
                for step in range(m, 2):                                       # TB^T has zeros below its diagonal
                    acc = mma_bf16(acc, T[m, step], kg[step][2 * n : 2 * n + 2])
                found.append(acc)
            KT.append(found)
        for m in range(2):
            store_matrices(KG + self.wide_place(ROWS * m, first, C), words_of_two(KT[m]))
        return KT

    def make_A2(self, tile, m):
        """16 rows of A2, as words."""
        A_qk, TB = field_at(tile, self.tile.A_qk), field_at(tile, self.tile.TB)
        rows_of_A = [load_matrices(A_qk + self.narrow_place(ROWS * m, ROWS * step)) for step in range(2)]
        words = []
        for half in range(2):
            found = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
            for step in range(half, 2):                                        # TB has zeros above its diagonal
                of_TB = load_matrices(TB + self.place_of_columns(ROWS * half, ROWS * step))
                for n in range(2):
                    found[n] = mma_bf16(found[n], rows_of_A[step], of_TB[2 * n : 2 * n + 2])
            words += words_of_two(found)
        return words

    def place_of_columns(self, row, column):
        """Return what `narrow_place` does, for the operand whose columns are rows in memory."""
        lane = self.lane
        return swizzle_64B(row + (lane >> 4) * 8 + (lane & 7), column + (lane >> 3 & 1) * 8) // 2

    def decays(self, tile, block):
        """Return the decays of those of 16 channels that a lane has."""
        return own_decays(field_at(tile, self.tile.decay), block, self.lane)

    def finish_KT(self, a, b, G, of_a):
        """KT_a' over KT_a, the warp's channels."""
        KG, lane, warp = self.tile.KG, self.lane, self.team.warp()
        first = self.channels * warp
        lam_b = self.decays(b, warp)
        KT_b = [load_matrices(field_at(b, KG) + self.wide_place(ROWS * step, first, C), transposed=True)
               for step in range(2)]
        for m in range(2):
            found = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
            for step in range(2):
                row, column = ROWS * step + (lane >> 4) * 8 + (lane & 7), ROWS * m + (lane >> 3 & 1) * 8
                of_G = load_matrices(G + swizzle_64B(row, column) // 2, transposed=True)
                for n in range(2):
                    found[n] = mma_bf16(found[n], of_G, KT_b[step][2 * n : 2 * n + 2])
            left = [[of_a[m][n][e] * lam_b[2 * n + e % 2] - found[n][e] for e in range(4)] for n in range(2)]
            store_matrices(field_at(a, KG) + self.wide_place(ROWS * m, first, C), words_of_two(left))

    @cute.jit
    def scale(self, a, b, rows, half):
        """16 rows of [kE_b; qg_b] times lam_a, half of their channels; kE_b to where qg_a was, and that to where kE_b
        was."""
        KQ_a, KQ_b, blocks = field_at(a, self.tile.KQ), field_at(b, self.tile.KQ), self.K // ROWS
        for side in cutlass.range_constexpr(2):
            if half == side:
                for block in cutlass.range_constexpr(side * blocks // 2, (side + 1) * blocks // 2):
                    lam, scaled, place_b = self.decays(a, block), [], self.wide_place(ROWS * rows, ROWS * block, 2 * C)
                    words = load_matrices(KQ_b + place_b)
                    for w in cutlass.range_constexpr(4):
                        pair = floats_of([words[w]])
                        scaled += words_of([pair[e] * lam[w // 2 * 2 + e] for e in range(2)])
                    if rows < 2:
                        place = self.wide_place(C + ROWS * rows, ROWS * block, 2 * C)
                        of_q = load_matrices(KQ_a + place)
                        store_matrices(KQ_b + place_b, of_q)
                        store_matrices(KQ_a + place, scaled)
                    else:
                        store_matrices(KQ_b + place_b, scaled)

    def finish_A2(self, a, b, G, found, m):
        """16 rows of A2_b, and of A2_ba to where A_qk of chunk a was."""
        lane, words, left = self.lane, self.make_A2(b, m), []
        self.put_rows(field_at(b, self.tile.A_qk), m, words)
        for half in range(2):
            of_half = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
            for step in range(2):
                row, column = ROWS * step + (lane & 15), ROWS * half + (lane >> 4) * 8
                of_G = load_matrices(G + swizzle_64B(row, column) // 2, transposed=True)
                for n in range(2):
                    of_half[n] = mma_bf16(of_half[n], words[4 * step : 4 * step + 4], of_G[2 * n : 2 * n + 2])
            left += of_half
        left = [[found[n][e] - left[n][e] for e in range(4)] for n in range(4)]
        self.put_rows(field_at(a, self.tile.A_qk), m, words_of_two(left))

    @cute.jit
    def complete(self, a, b):
        """Write lam_a lam_b over lam_a, and zeros over TB_b.  One warp does it when all warps have read both."""
        to, of_b = field_at(a, self.tile.decay), field_at(b, self.tile.decay)
        channel = 4 * cute.arch.lane_idx()
        if channel < self.K:
            first, second = load(to + channel, 4), load(of_b + channel, 4)
            store(to + channel, [first[e] * second[e] for e in range(4)])
        words = cute.recast_ptr(field_at(b, self.tile.TB), dtype=Uint32) + channel
        for i in range(C * C // 2 // 128):
            store(words + 128 * i, [Uint32(0)] * 4)


def words_of_two(found):
    """Return rounded accumulators of 16 rows and two times eight columns, in the order of `store_matrices`."""
    return [word for acc in found for word in words_of(acc)]


def blocks_of(products):
    """Return a warp's 16 rows of a product by the tensor core as those of mma.sync, eight columns each."""
    return [[products[4 * n + e] for e in range(4)] for n in range(C // 8)]


class StepState(State):
    """CHAIN's state, over steps of two tiles.

    Issuing a product with A in registers waits until the tensor core has begun it, so P and O are issued in blocks of
    16 channels, and what is to be done meanwhile is spread over the blocks (`beside`)."""

    @property
    def blocks(self):
        return self.c.K // CHANNELS

    def accumulators(self):
        """P, O (then o) and X of a step, transposed, in registers."""
        mma = register_mma(2 * C, OperandMajorMode.K)
        P, O = [accumulator(mma, (COLUMNS, 2 * C)) for _ in range(2)]
        of_chunk = register_mma(C, OperandMajorMode.K).partition_shape_A((COLUMNS, C))
        return P, O, [cute.make_rmem_tensor(of_chunk, BFloat16) for _ in range(2)]

    def issue_P(self, P, operand, S, step, beside):
        """P of a step, and before each block of S is multiplied it is rounded to the operand."""
        for block in range(self.blocks):
            self.round(operand, S, block)
            self.issue_block(P, operand, step, block, fenced=False)
            beside(block)

    def issue_O(self, O, operand, step, beside):
        for block in range(self.blocks):
            self.issue_block(O, operand, step + self.tile.bytes, block, fenced=block > 0)
            beside(block)

    def issue_block(self, acc, operand, rows, block: int, fenced: bool):
        mma, b = register_mma(2 * C, OperandMajorMode.K), wide_view(rows, 2 * C, self.c.K)
        multiply(mma, acc, operand, b, block > 0, fenced, (block,))
        # redundant: behind blocks that nothing waits for before the next one; ptxas has each as a group in any case
        warpgroup.commit_group()

    def issue_S(self, S, X, step, chunk: int):
        """One of the two chunks' parts of it, in no group yet."""
        mma = register_mma(self.c.K, OperandMajorMode.MN)
        KT = standing_view(step + chunk * self.tile.bytes + self.tile.KG.offset, self.c.K)
        multiply(mma, S, X[chunk], KT, True, fenced=chunk > 0)

    def issue_o(self, O, X, step):
        """Right behind S: since its fence, nothing has touched O and X."""
        mma = register_mma(2 * C, OperandMajorMode.K)
        for i in range(2):
            A2 = narrow_view(step + i * self.tile.bytes + self.tile.TB.offset, 2 * C)
            multiply(mma, O, X[i], A2, True, fenced=True)
        warpgroup.commit_group()

    def load_values(self, rows_of_v, part: int):
        """v^T of 16 tokens of a step, in words of two."""
        return load_matrices(rows_of_v + (own_matrices(self.warp()) + part * (ROWS * PITCH_V)), transposed=True)

    def subtract(self, X, P, v, part: int):
        """X = v^T - P, rounded, of 16 tokens of the step."""
        P, v, flat = cute.coalesce(P), floats_of(v), cute.coalesce(X[part // 2])
        for e in range(8):
            flat[part % 2 * 8 + e] = (v[e] - P[8 * part + e]).to(BFloat16)

    def round(self, operand, S, block: int):
        """Round a block with statements that NVVM cannot repeat: it would round again where O is issued, behind the
        fence."""
        words, flat = cute.recast_tensor(cute.coalesce(operand), Uint32), cute.coalesce(S)
        for i in range(4 * block, 4 * block + 4):
            words[i] = cute.arch.inline_ptx(
                "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32],
                read_only_args=[flat[2 * i + 1], flat[2 * i]],
            )

    def put_outputs(self, rows_of_o, O, part: int):
        """o of 16 tokens of the step in shared memory."""
        flat, place = cute.coalesce(O), rows_of_o + (own_matrices(self.warp()) + part * (ROWS * PITCH_V))
        store_matrices(place, words_of([flat[8 * part + e] for e in range(8)]), transposed=True)
