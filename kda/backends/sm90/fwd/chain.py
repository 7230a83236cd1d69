"""fwd/state and fwd/output: the chunks of one segment of a sequence in turn, one value head, 64 columns of the state.

  [P; O] = S^T @ [kn 2^gc; scale qn 2^gc]^T          S^T (64, K) float32 in registers, bfloat16 where it is multiplied
  v_new^T = (v^T - P) @ TB^T
  o^T = O + v_new^T @ A_qk^T
  S^T = S^T 2^gc_last + v_new^T @ kg

A segment is the whole of a sequence, or, where few heads would leave the chip idle, a run of chunks.  Then `carry`
walks first: from zero to what a segment adds to a state, and, with v = 0, from the columns of 1 to those of M (K, K),
the matrix that it multiplies a state by, kept transposed.  It has no outputs; common/cute/compose.py makes the states
between segments of both.

  warps  role   does
  0-3    CHAIN  all products, from registers and shared memory; o to global memory
  4      LOAD   a tile (common/cute/tile.py) by one bulk copy, rows of v in pieces of 16 bytes: bulk copies of rows
                would be issued by one lane after the other, 50 clocks each

  pipeline  arrivals                                              says
  full      1 and the bytes of the tile; 32, a lane's pieces of v a chunk is there
  empty     4, a lane of each warp of CHAIN                       nobody reads the stage any more
  barrier 1 128                                                   o is in shared memory, the o before last was read

The state's way from chunk to chunk is what binds: S rounded, P, v - P rounded, v_new, S.  While P and O are made, o of
the chunk before is written; o's other product stands in the queue behind S.

  shared memory of K = 128, a stage: the tile's 29 KiB, v 4.5;  o twice 4.5 KiB
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator

from kda.compile import cutedsl
from kda.compile.target import Target

from ...common.cute import fast
from ...common.cute.async_copies import arrive_when_copied, bulk_copy, copy_16_bytes_later
from ...common.cute.copies import (
    copy_16_bytes,
    floats,
    load,
    load_one,
    load_transposed,
    pointers,
    store,
    store_transposed,
)
from ...common.cute.order import after_the_kernel_before
from ...common.cute.tile import C, Tile
from ..configs import COLUMNS, PITCH, ChainConfig
from ..parts.product import accumulator, queue
from ..parts.views import narrow_standing_view, narrow_view, standing_view, wide_view


class Chain:
    def __init__(self, config: ChainConfig):
        self.c = config
        self.tile = Tile(config.K)

    @cute.jit
    def __call__(
        self, tiles: cute.Pointer, v: cute.Pointer, h0: cute.Pointer, o: cute.Pointer, ht: cute.Pointer,
        M: cute.Pointer, h: cute.Pointer, table: cute.Pointer, T: Int32, chunks: Int32, pieces: Int32, segment: Int32,
        HV: Int32, parts: Int32, segments: Int32, stream,
    ):  # fmt: skip
        self.kernel(tiles, v, h0, o, ht, M, h, table, T, chunks, pieces, segment, HV).launch(
            grid=(parts, HV, segments), block=(self.c.threads, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, tiles: cute.Pointer, v: cute.Pointer, h0: cute.Pointer, o: cute.Pointer, ht: cute.Pointer,
        M: cute.Pointer, h: cute.Pointer, table: cute.Pointer, T: Int32, chunks: Int32, pieces: Int32, segment: Int32,
        HV: Int32,
    ):  # fmt: skip
        c = self.c
        part, head, p = cute.arch.block_idx()
        after_the_kernel_before()
        n, begin, left, chunk, state = self.place(p, table, T, chunks, pieces, segment)
        tokens = cutlass.min(left, segment * C)
        last = tokens == left                                                  # of its sequence
        if n >= 0 and not (cutlass.const_expr(c.carry) and last):
            smem = SmemAllocator()
            stages = smem.allocate_array(cutlass.Uint8, c.stages * self.tile.bytes, byte_alignment=1024)
            sV = smem.allocate_array(BFloat16, c.stages * C * PITCH, byte_alignment=16)
            sO = sV if cutlass.const_expr(c.carry) else smem.allocate_array(BFloat16, 2 * C * PITCH, byte_alignment=16)
            full = smem.allocate_array(Int64, c.stages)
            empty = smem.allocate_array(Int64, c.stages)
            if cute.arch.thread_idx()[0] == 0:
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(full + s, 33)
                    cute.arch.mbarrier_init(empty + s, 4)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            first_v = (begin * HV + head) * c.V + part * COLUMNS
            steps = (tokens + C - 1) // C
            of_M = c.carry and part >= c.V // COLUMNS
            if cute.arch.warp_idx() == 4:
                self.load(tiles, v, stages, sV, full, empty, first_v, tokens, chunk, head, steps, HV, of_M)
            else:
                S = accumulator(product(c.K, OperandMajorMode.MN), (COLUMNS, c.K))
                S.fill(0.0)
                if cutlass.const_expr(c.walk == "segments"):
                    self.states(h0, p * HV + head, part, c.V, False, S, to_memory=False)
                elif cutlass.const_expr(c.h0):
                    self.states(h0, n * HV + head, part, c.V, c.v_first, S, to_memory=False)
                if of_M:
                    self.columns_of_one(S, part - c.V // COLUMNS)
                first_h = (Int64(state) * HV + head) * (c.K * c.V)
                self.chain(S, o, h, stages, sV, sO, full, empty, first_v, first_h, part, tokens, steps, HV, of_M)
                if cutlass.const_expr(c.carry):
                    if of_M:
                        self.states(M, p * HV + head, part - c.V // COLUMNS, c.K, True, S, to_memory=True)
                    else:
                        self.states(ht, p * HV + head, part, c.V, False, S, to_memory=True)
                elif cutlass.const_expr(c.ht) and last:
                    self.states(ht, n * HV + head, part, c.V, c.v_first, S, to_memory=True)

    @cute.jit
    def place(self, p, table, T, chunks, pieces, segment):
        """Sequence, first token, tokens from there to the sequence's end, first chunk and first kept state of segment
        p; a row of T tokens has `pieces` of them and `chunks` chunks."""
        every = self.c.every
        if cutlass.const_expr(self.c.packed):
            at = table + 6 * p
            n, begin, left, chunk, state = [load_one(at + i) for i in (0, 2, 3, 4, 5)]
            n, left, chunk, state = Int32(n), Int32(left), Int32(chunk), Int32(state)
        else:
            n = p // pieces
            skipped = (p - n * pieces) * segment
            begin, left, chunk = Int64(n) * T + skipped * C, T - skipped * C, n * chunks + skipped
            state = n * ((chunks + every - 1) // every) + skipped // every
        return n, begin, left, chunk, state

    @cute.jit
    def load(self, tiles, v, stages, sV, full, empty, first_v, tokens, chunk, head, steps, HV, of_M):
        lane = cute.arch.lane_idx()
        stage, phase = Int32(0), Int32(0)
        for i in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile.bytes)
                place = (Int64(chunk + i) * HV + head) * self.tile.bytes
                bulk_copy(stages + stage * self.tile.bytes, tiles + place, self.tile.bytes, full + stage)
            cute.arch.sync_warp()
            if not of_M:
                for j in cutlass.range_constexpr(C // 4):
                    row, column = 4 * j + lane // 8, lane % 8 * 8
                    token = cutlass.min(i * C + row, tokens - 1)       # past the end: a row that counts for nothing
                    to = sV + ((stage * C + row) * PITCH + column)
                    copy_16_bytes_later(self.row(v, first_v + column, token, HV), to)
            arrive_when_copied(full + stage)
            stage, phase = advance(stage, phase, self.c.stages)

    @cute.jit
    def chain(self, S, o, h, stages, sV, sO, full, empty, first_v, first_h, part, tokens, steps, HV, of_M):
        c = self.c
        operand, own = rounded(product(C, OperandMajorMode.K), S, c.K), first_v + own_piece(0)[1]
        stage, phase = Int32(0), Int32(0)
        for i in cutlass.range(steps, unroll=1):
            tile = stages + stage * self.tile.bytes
            if cutlass.const_expr(c.h) and i % c.every == 0:
                at = h + (first_h + Int64(i // c.every) * HV * (c.K * c.V))
                self.states(at, 0, part, c.V, c.v_first, S, to_memory=True)
            cute.arch.mbarrier_wait(full + stage, phase)
            words = self.own_v(sV + stage * (C * PITCH), of_M)                 # before o: it is waited for first
            PO = self.ask(operand, tile)
            if cutlass.const_expr(not c.carry) and i > 0:
                cute.arch.barrier(barrier_id=1, number_of_threads=128)
                self.write(o, sO, own, i - 1, Int32(C), HV)
            self.go_on(S, operand, PO, tile, words, sO + (i & 1) * (C * PITCH))
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage)
            stage, phase = advance(stage, phase, c.stages)
        if cutlass.const_expr(not c.carry) and steps > 0:
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            self.write(o, sO, own, steps - 1, tokens - (steps - 1) * C, HV)

    @cute.jit
    def columns_of_one(self, S, part):
        """Columns of the matrix (K, K) that changes nothing."""
        flat = cute.coalesce(S)
        for i in range(cute.size(flat)):
            d, e = self.place_in_state(i, part)
            flat[i] = Float32(1.0) if d == e else Float32(0.0)

    @cute.jit
    def ask(self, operand, tile):
        """Queues [P; O] = S^T @ [kE; qg]^T: a product with 32 columns would take as long as one with 64."""
        mma, rows = product(self.c.rows, OperandMajorMode.K), (self.c.rows, self.c.K)
        PO = accumulator(mma, (COLUMNS, self.c.rows))
        of_k_and_q = cute.local_tile(wide_view(tile, 2 * C, self.c.K), rows, (0, 0))
        multiply(mma, PO, operand, of_k_and_q, accumulate=False)
        return PO

    @cute.jit
    def own_v(self, sV, of_M):
        """v^T of the warp's columns as it lies in an operand, in words of two."""
        at, words = sV + own_matrices(), [Uint32(0)] * 8
        if not of_M:
            words = [*load_transposed(at), *load_transposed(at + 16 * PITCH)]
        return words

    @cute.jit
    def go_on(self, S, operand, PO, tile, words, sO):
        """From P and O of a chunk to the state after it, rounded, too, and to o in shared memory."""
        c, lane = self.c, cute.arch.lane_idx()
        standing = OperandMajorMode.MN
        mma, mma_V, mma_S = product(C, OperandMajorMode.K), product(C, standing), product(c.K, standing)
        warpgroup.wait_group(0)
        # v_new^T = (v^T - P) @ TB^T
        left = cute.make_rmem_tensor(mma.make_fragment_A(mma.partition_shape_A((COLUMNS, C))).shape, BFloat16)
        own, PO_flat, left_flat = cute.make_rmem_tensor(8, Uint32), cute.coalesce(PO), cute.coalesce(left)
        for w in cutlass.range_constexpr(8):
            own[w] = words[w]
        own = floats(cute.recast_tensor(own, BFloat16))
        for e in cutlass.range_constexpr(16):
            left_flat[e] = (own[e] - PO_flat[e]).to(BFloat16)
        v_new = accumulator(mma, (COLUMNS, C))
        multiply(mma_V, v_new, left, narrow_standing_view(tile + self.tile.TB), accumulate=False)
        decay = cute.recast_ptr(tile + self.tile.DECAY, dtype=Float32)
        S_flat = cute.coalesce(S)
        for block in cutlass.range_constexpr(c.K // 16):
            d = load(decay + block * 16 + lane % 4 * 4, 4)
            for e in cutlass.range_constexpr(8):
                S_flat[block * 8 + e] = S_flat[block * 8 + e] * d[e // 4 * 2 + e % 2]
        warpgroup.wait_group(0)
        # S^T += v_new^T @ kg;  o^T = O + v_new^T @ A_qk^T
        added = rounded(mma, v_new, C)
        multiply(mma_S, S, added, standing_view(tile + self.tile.KG, c.K), accumulate=True)
        within = accumulator(mma, (COLUMNS, C))                                # half of PO would be no accumulator to
        if cutlass.const_expr(not c.carry):                                    # ptxas, and each product would wait
            multiply(mma, within, added, narrow_view(tile + self.tile.A_qk), accumulate=False)
        warpgroup.wait_group(0 if cutlass.const_expr(c.carry) else 1)
        round_to(operand, S)
        if cutlass.const_expr(not c.carry):
            warpgroup.wait_group(0)
            of_o = cute.coalesce(within)
            for e in cutlass.range_constexpr(16):
                of_o[e] = of_o[e] + PO_flat[16 + e]
            words, at = cute.recast_tensor(rounded(mma, within, C), Uint32), sO + own_matrices()
            store_transposed(at, [words[w] for w in range(4)])
            store_transposed(at + 16 * PITCH, [words[w] for w in range(4, 8)])

    @cute.jit
    def write(self, o, sO, own, i, rows, HV):
        """Rows of o of chunk i out of shared memory, as whole lines."""
        for j in cutlass.range_constexpr(2):
            row, column = own_piece(j)
            if row < rows:
                to = self.row(o, own, i * C + row, HV)
                source = sO + ((i & 1) * (C * PITCH) + row * PITCH + column)
                copy_16_bytes(source, cute.make_ptr(BFloat16, to, cute.AddressSpace.gmem))

    @cute.jit
    def row(self, x, own, token, HV):
        """The address in v or o, `token` rows below element `own`."""
        return fast.row(x.toint() + own * 2, token, HV * Int32(2 * self.c.V))

    @cute.jit
    def place_in_state(self, i: cutlass.Constexpr, part):
        """(channel, column) of a thread's element i of S^T."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        return i // 4 * 8 + lane % 4 * 2 + i % 2, part * COLUMNS + warp * 16 + lane // 4 + i % 4 // 2 * 8

    @cute.jit
    def states(
        self, x, number, part, columns: cutlass.Constexpr, transposed: cutlass.Constexpr, S,
        to_memory: cutlass.Constexpr,
    ):  # fmt: skip
        """S from or to its columns of one of many matrices (K, columns) in memory."""
        c, flat = self.c, cute.coalesce(S)
        over_channels, over_columns = (1, c.K) if cutlass.const_expr(transposed) else (columns, 1)
        first_d, first_e = self.place_in_state(0, part)                        # all others at constants from there
        x = x + (Int64(number) * (c.K * columns) + first_d * over_channels + first_e * over_columns)
        for i in range(cute.size(flat)):
            at = (i // 4 * 8 + i % 2) * over_channels + i % 4 // 2 * 8 * over_columns
            if cutlass.const_expr(to_memory):
                store(x + at, [flat[i]])
            else:
                flat[i] = load_one(x + at).to(Float32)


@cute.jit
def product(n: cutlass.Constexpr, major: cutlass.Constexpr):
    """(64, n) out of registers and shared memory."""
    source = warpgroup.OperandSource.RMEM
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (COLUMNS, n, 16), source, OperandMajorMode.K, major)
    return cute.make_tiled_mma(op)


@cute.jit
def own_matrices():
    """Where in 16 rows of v or o this lane's row begins, of the four 8 x 8 matrices that are its warp's 16 columns."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    return (lane % 8 + lane // 16 * 8) * PITCH + warp * 16 + lane // 8 % 2 * 8


@cute.jit
def own_piece(j: cutlass.Constexpr):
    """Row and first column of the eight that a thread moves of half j of 32 rows of v or o."""
    thread = cute.arch.thread_idx()[0]
    return 16 * j + thread // 8, thread % 8 * 8


@cute.jit
def rounded(mma, acc, k: cutlass.Constexpr):
    """An accumulator (64, k) as the operand from registers of the next product: the order of elements is the same."""
    operand = cute.make_rmem_tensor(mma.partition_shape_A((COLUMNS, k)), BFloat16)
    round_to(operand, acc)
    return operand


@cute.jit
def round_to(operand, acc):
    to, x = cute.coalesce(operand), cute.coalesce(acc)
    for i in cutlass.range_constexpr(cute.size(x)):
        to[i] = x[i].to(BFloat16)


@cute.jit
def multiply(mma, acc, operand, b, accumulate: cutlass.Constexpr):
    """Queues acc (+)= operand @ b^T."""
    queue(mma, acc, operand, mma.make_fragment_B(mma.get_slice(0).partition_B(b)), accumulate)


@cute.jit
def advance(stage, phase, stages: cutlass.Constexpr):
    stage += 1
    wraps = stage == stages
    return (Int32(0) if wraps else stage), (phase ^ 1 if wraps else phase)


def build(c: ChainConfig, target: Target) -> cutedsl.Compiled:
    x = pointers(f"uint8 bfloat16 {c.h0 or 'float32'} bfloat16 float32 float32 bfloat16 int64")
    return cutedsl.compile(Chain(c), *x, *[Int32(1)] * 7, cutedsl.fake_stream(), target=target)
