"""fwd/gate to fwd/output in one kernel: a cluster of two CTAs walks the chunks of one sequence and value head, and what
`prepare` would hand to `chain` through memory goes from shared memory to shared memory.

Each CTA has 64 columns of the state and makes every second tile, for both: what a group of eight warps makes is what
prepare's CTA makes, straight into a stage, from where one bulk copy brings it to the same stage of the neighbour.

  warps  registers  role     does
  0-3    192        CHAIN    as in fwd/chain.py, and its rows of v, three chunks ahead
  4-11   72         PREPARE  as in fwd/prepare.py, chunks 4 i + rank, into stage rank
  12-19  72         PREPARE  chunks 4 i + 2 + rank, into stage 2 + rank

A stage has one producer: chunk c lies in stage c mod 4, which group (c >> 1) & 1 of CTA c & 1 makes, and waits for
after its sums.  Of a group, warp 0 goes on to the inverse when the others go on to the rows of their next chunk; they
meet at the sums.  Warp 7 has least to do and asks for warp 0's next rows, into L2: no registers are there to hold them.

  pipeline    arrivals                                              says
  full        1, of PREPARE's warp 0; in the neighbour with the     a tile is there
              bytes of the copy
  empty       8, a lane of each warp of both CHAINs, in the CTA     nobody reads the stage any more, in either CTA, and
              that makes the stage's tiles                          the copy is done
  barrier 1   128                                                   rows of v and o are in shared memory
  barrier 2+  256 and 128, of each group                            prepare's 0 and 1
  cluster     640 x 2                                               first: mbarriers are there; last: nobody looks here

Registers are shared out of what the launch has, 640 x 96: a warp of its own to load would, in the warpgroup that it
needs, leave CHAIN 136.

Tokens of no sequence are cleared by all CTAs' PREPAREs, at the end.

  shared memory of K = 128: stages 4 x 29 KiB, a group's operands, sums and A_kk 36, v 4 x 4.5, o 2 x 4.5
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.memory import SmemAllocator

from kda.compile import cutedsl
from kda.compile.target import Target

from ...common.cute.async_copies import bulk_copy_to_neighbour, copy_16_bytes_later, prefetch
from ...common.cute.chunk import step_size
from ...common.cute.copies import pointers, store
from ...common.cute.order import after_the_kernel_before
from ...common.cute.tile import PAD, PITCH_X, WARPS, C, Tile
from ..configs import COLUMNS, GROUPS, PITCH, RING, FusedConfig, PrepareConfig
from ..parts.product import accumulator
from .chain import Chain, own_piece, product, rounded
from .prepare import Prepare

FIRST = 4                                    # warp of the first group
LEAST = WARPS - 1                            # of a group's warps the one that has least to do


class Producer(Prepare):
    """Eight of the CTA's warps, and a tile in shared memory."""

    @cute.jit
    def thread(self):
        return cute.arch.thread_idx()[0] - 32 * FIRST & 32 * WARPS - 1

    @cute.jit
    def warp(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST & WARPS - 1

    @cute.jit
    def group(self):
        return (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST) >> 3

    @cute.jit
    def meet(self):
        cute.arch.barrier(barrier_id=2 + 2 * self.group(), number_of_threads=32 * WARPS)

    @cute.jit
    def meet_first(self):
        cute.arch.fence_proxy("async.shared", space="cta")                     # A_qk
        cute.arch.barrier(barrier_id=3 + 2 * self.group(), number_of_threads=128)

    @cute.jit
    def until_free(self, empty, phase, b, step):
        cute.arch.mbarrier_wait(empty, phase)
        if self.warp() == LEAST:
            b[cute.arch.lane_idx()] = step                                     # the chunk before needs b no more

    @cute.jit
    def from_shared(self, TB, whole, tile, A_inv, rows, stride):
        """It lies in the tile."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def produce(
        self, q, k, g, beta, A_log, dt_bias, shared, full, empty, begin, tokens, head, H, HV, scale,
        lower_bound, rank
    ):  # fmt: skip
        """Every fourth chunk of the sequence."""
        K, group = self.c.K, self.group()
        stage = 2 * group + rank
        tile = shared + group * of_a_group(self.c)
        rows_of_x = cute.recast_ptr(tile + 2 * self.tile.bytes, dtype=BFloat16)
        rows_of_y = rows_of_x + 2 * C * K
        sums = cute.recast_ptr(tile + (2 * self.tile.bytes + 6 * C * K), dtype=Float32)
        A_kk = sums + (WARPS + 2) * K
        columns = A_kk + C * PAD
        b = columns + C * PITCH_X
        TB = cute.recast_ptr(tile + self.tile.TB, dtype=BFloat16)
        if self.warp() == LEAST:
            self.zeros(columns, TB)
        for chunk in cutlass.range(stage, (tokens + C - 1) // C, RING, unroll=1):
            first, rows = begin + chunk * C, cutlass.min(tokens - chunk * C, C)
            of_q, of_k, of_g, of_beta, rate, bias = self.of_head(
                q, k, g, beta, A_log, dt_bias, first, head, H, HV
            )  # fmt: skip
            step = Float32(0.0)
            if self.warp() == LEAST:
                step = step_size(of_beta, self.c.beta, rows, HV, cute.arch.lane_idx())
            own = self.rows(of_q, of_k, of_g, rate, bias, rows, H, HV, scale, lower_bound)
            phase = chunk >> RING.bit_length() - 1 & 1 ^ 1
            self.at_once(*own, sums, rows_of_x, rows_of_y, tile, lower_bound, empty + stage, phase, b, step)
            if self.warp() == LEAST and (chunk + RING) * C < tokens:
                self.ask_for_rows(q, k, g, first + RING * C, tokens - (chunk + RING) * C, head, H, HV)
            elif self.warp() < 4:
                acc = self.accumulator()
                self.products(acc, rows_of_x, rows_of_y, C)
                self.matrices(acc, A_kk, b, tile, None, rows, 0)
                self.meet_first()
                if self.warp() == 0:
                    self.inverse(A_kk, columns, TB, None, b, tile, None, rows, 0)
                    self.hand_over(tile, full + stage, rank ^ 1)

    @cute.jit
    def ask_for_rows(self, q, k, g, first, rows, head, H, HV):
        """The rows of q, k and g that warp 0 reads of a chunk, into L2: 24 lanes have a line of 128 bytes."""
        lane = cute.arch.lane_idx()
        of_q = head // (HV // H) if cutlass.const_expr(self.c.grouped) else head
        of_g = lane >= 16
        source = k.toint() if lane >= 8 else q.toint()
        source = g.toint() if of_g else source
        heads, head = (HV if of_g else H), (head if of_g else of_q)
        size = Int32(g.dtype.width // 8 if of_g else 2) * self.c.K
        row = cutlass.min(lane >> 1 & 3, rows - 1)
        if lane < 24:
            prefetch(source + ((first + row) * heads + head) * size + (lane & 1) * 128)

    @cute.jit
    def hand_over(self, tile, full, neighbour):
        """The tile to both CHAINs, by one warp."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.tile.end, peer_cta_rank_in_cluster=neighbour)
            bulk_copy_to_neighbour(tile, tile + self.tile.bytes, self.tile.end, full, neighbour)

    @cute.jit
    def clear_from(self, o, end, T, head, HV):
        """Zero where tokens are no sequence's, a row a warp."""
        V, group = self.c.V, self.group()
        part, _, n = cute.arch.block_idx()
        own = ((n * 2 + part) * GROUPS + group) * WARPS + self.warp()
        zero = [Float32(0.0)] * (V // 32)
        for row in cutlass.range(Int32(end) + own, T, cute.arch.grid_dim()[2] * (2 * GROUPS * WARPS), unroll=1):
            store(o + (Int64(row) * HV + head) * V + cute.arch.lane_idx() * (V // 32), zero)


class Consumer(Chain):
    """A state's walk over tiles that two CTAs make."""

    @cute.jit
    def walk(self, S, v, o, shared, of_group: cutlass.Constexpr, sV, sO, full, empty, first_v, rank, tokens, HV):
        operand = rounded(product(C, OperandMajorMode.K), S, self.c.K)
        own, steps = first_v + own_piece(0)[1], (tokens + C - 1) // C
        for i in cutlass.range_constexpr(RING - 1):
            self.bring(v, sV, own, Int32(i), tokens, HV)
        self.brought()
        for i in cutlass.range(steps, unroll=1):
            stage, phase = i & RING - 1, i // RING & 1
            tile = shared + ((stage >> 1) * of_group + ((stage ^ rank) & 1) * self.tile.bytes)
            words = self.own_v(sV + stage * (C * PITCH), of_M=False)
            cute.arch.mbarrier_wait(full + stage, phase)
            PO = self.ask(operand, tile)
            self.bring(v, sV, own, i + RING - 1, tokens, HV)                   # where all have read chunk i - 1
            self.brought()
            if i > 0:
                self.write(o, sO, own, i - 1, Int32(C), HV)
            self.go_on(S, operand, PO, tile, words, sO + (i & 1) * (C * PITCH))
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage, peer_cta_rank_in_cluster=stage & 1)
        if steps > 0:
            self.brought()
            self.write(o, sO, own, steps - 1, tokens - (steps - 1) * C, HV)

    @cute.jit
    def bring(self, v, sV, own, i, tokens, HV):
        """Rows of v of chunk i, if there is one."""
        if i * C < tokens:
            for j in cutlass.range_constexpr(2):
                row, column = own_piece(j)
                token = cutlass.min(i * C + row, tokens - 1)           # past the end: a row that counts for nothing
                to = sV + (((i & RING - 1) * C + row) * PITCH + column)
                copy_16_bytes_later(self.row(v, own, token, HV), to)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def brought(self):
        """All four warps' rows of the next chunk, and of o of the last."""
        cute.arch.cp_async_wait_group(RING - 2)
        cute.arch.barrier(barrier_id=1, number_of_threads=128)


class Fused:
    def __init__(self, config: FusedConfig):
        self.c = config
        self.producer, self.consumer = Producer(config.prepare), Consumer(config.chain)
        self.tile = self.producer.tile

    @cute.jit
    def __call__(
        self, q: cute.Pointer, k: cute.Pointer, v: cute.Pointer, g: cute.Pointer, beta: cute.Pointer,
        A_log: cute.Pointer, dt_bias: cute.Pointer, h0: cute.Pointer, o: cute.Pointer, ht: cute.Pointer,
        table: cute.Pointer, T: Int32, H: Int32, HV: Int32, scale: Float32, lower_bound: Float32, N: Int32, stream,
    ):  # fmt: skip
        self.kernel(q, k, v, g, beta, A_log, dt_bias, h0, o, ht, table, T, H, HV, scale, lower_bound).launch(
            grid=(2, HV, N), cluster=self.c.cluster, block=(self.c.threads, 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self, q: cute.Pointer, k: cute.Pointer, v: cute.Pointer, g: cute.Pointer, beta: cute.Pointer,
        A_log: cute.Pointer, dt_bias: cute.Pointer, h0: cute.Pointer, o: cute.Pointer, ht: cute.Pointer,
        table: cute.Pointer, T: Int32, H: Int32, HV: Int32, scale: Float32, lower_bound: Float32,
    ):  # fmt: skip
        c, K = self.c.chain, self.c.chain.K
        rank, head, n = cute.arch.block_idx()
        after_the_kernel_before()
        _, begin, tokens, _, _ = self.consumer.place(n, table, T, 0, 1, 0)
        smem = SmemAllocator()
        of_group = of_a_group(self.c.prepare)
        shared = smem.allocate_array(cutlass.Uint8, GROUPS * of_group, byte_alignment=1024)
        sV = smem.allocate_array(BFloat16, RING * C * PITCH, byte_alignment=16)
        sO = smem.allocate_array(BFloat16, 2 * C * PITCH, byte_alignment=16)
        full = smem.allocate_array(Int64, RING)
        empty = smem.allocate_array(Int64, RING)
        if cute.arch.thread_idx()[0] == 0:
            for s in cutlass.range_constexpr(RING):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, 8)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < FIRST:
            cute.arch.setmaxregister_increase(192)
            S = accumulator(product(K, OperandMajorMode.MN), (COLUMNS, K))
            S.fill(0.0)
            if cutlass.const_expr(c.h0):
                self.consumer.states(h0, n * HV + head, rank, c.V, c.v_first, S, to_memory=False)
            first_v = (begin * HV + head) * c.V + rank * COLUMNS
            self.consumer.walk(S, v, o, shared, of_group, sV, sO, full, empty, first_v, rank, tokens, HV)
            if cutlass.const_expr(c.ht):
                self.consumer.states(ht, n * HV + head, rank, c.V, c.v_first, S, to_memory=True)
        else:
            cute.arch.setmaxregister_decrease(72)
            self.producer.produce(
                q, k, g, beta, A_log, dt_bias, shared, full, empty, begin, tokens, head, H, HV, scale,
                lower_bound, rank
            )  # fmt: skip
            if cutlass.const_expr(c.packed):
                _, begin, tokens, _, _ = self.consumer.place(cute.arch.grid_dim()[2] - 1, table, T, 0, 1, 0)
                self.producer.clear_from(o, begin + tokens, T, head, HV)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def of_a_group(c: PrepareConfig) -> int:
    """Bytes: the tile that it makes, the neighbour's; operands; sums, A_kk, columns of inverses, b."""
    return 2 * Tile(c.K).bytes + -(-(c.shared - 2 * C * C) // 1024) * 1024


def build(c: FusedConfig, target: Target) -> cutedsl.Compiled:
    of = c.prepare
    x = pointers(
        f"bfloat16 bfloat16 bfloat16 {of.g_dtype} {of.beta_dtype} float32 float32 {c.chain.h0 or 'float32'} bfloat16 "
        "float32 int64"
    )
    numbers = [Int32(1)] * 3 + [Float32(1)] * 2 + [Int32(1)]
    return cutedsl.compile(Fused(c), *x, *numbers, cutedsl.fake_stream(), target=target)
