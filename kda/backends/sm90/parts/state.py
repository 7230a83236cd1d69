"""The state of one value head, 64 columns of it, on its way from chunk to chunk, by the four warps of CHAIN.

  [P; O] = S^T @ [kn 2^gc; scale qn 2^gc]^T          S^T (64, K) float32 in registers, bfloat16 where it is multiplied
  v_new^T = (v^T - P) @ TB^T
  o^T = O + v_new^T @ A_qk^T
  S^T = S^T 2^gc_last + v_new^T @ kg

fwd/chain.py walks over tiles in memory, fwd/fused.py over those that the cluster makes.  Rows of v and o lie in shared
memory PITCH_V elements apart.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...common.cute import fast
from ...common.cute.async_copies import arrive_when_copied, bulk_copy, bulk_store, copy_16_bytes_later
from ...common.cute.copies import (
    compute_words_now,
    copy_16_bytes,
    field_at,
    floats,
    in_global,
    load,
    load_one,
    neighbours,
    store,
)
from ...common.cute.entry import Entry
from ...common.cute.fragments import load_matrices, store_matrices
from ...common.cute.rings import advance
from ...common.cute.tile import C
from ..configs import CHAIN, COLUMNS, KEPT_COLUMNS, PITCH_V, ChainConfig, tile
from .wgmma import accumulator, issue, narrow_standing_view, narrow_view, standing_view, wide_view


class ThreadPlace(NamedTuple):
    """The eight columns of two rows of v or o that a thread moves; the second row lies 16 below."""

    row: Any
    element: Any                             # in memory, of row 0
    within: Any                              # in shared memory, of a chunk's first element


class Walker(Entry):
    """A kernel that walks with a state; `back`: from the last chunk to the first."""

    back: bool

    def __init__(self, config):
        super().__init__(config)
        self.state = State(config)
        self.tile = self.state.tile

    @cute.jit
    def load(self, x, s, source, rows, first_v, tokens, chunk, head, steps, of_M):
        """LOAD: tiles, and rows of `source` (v or do), into the ring; M's walk has no rows."""
        self.load_on(x, s, source, rows, first_v, tokens, chunk, head, steps, of_M, True, Int32(0), Int32(0))

    @cute.jit
    def load_on(self, x, s, source, rows, first_v, tokens, chunk, head, steps, of_M, of_tiles, stage, phase):
        """The same from a stage of the ring on, and the tiles if this warp brings them; returns where the ring is."""
        for j in cutlass.range(steps, unroll=1):
            i = steps - 1 - j if cutlass.const_expr(self.back) else j
            cute.arch.mbarrier_wait(s.empty + stage, phase ^ 1)
            if of_tiles:
                self.request_tile(x, s, stage, chunk + i, head)
            if not of_M:
                self.state.request_rows(source, rows + stage * (C * PITCH_V), first_v, i * C, tokens, x.HV)
            arrive_when_copied(s.full + stage)
            stage, phase = advance(stage, phase, self.c.stages)
        return stage, phase

    def request_tile(self, x, s, stage, chunk, head):
        with cute.arch.elect_one():
            # redundant: its release, not the arrival; this thread has written nothing
            cute.arch.mbarrier_arrive_and_expect_tx(s.full + stage, self.tile.bytes)
            place = (Int64(chunk) * x.HV + head) * self.tile.bytes
            to = s.tiles + stage * self.tile.bytes
            bulk_copy(to, x.tiles + place, self.tile.bytes, s.full + stage, last=self.back)


class State:
    """What the four warps of CHAIN do."""

    def __init__(self, config: ChainConfig):
        self.c, self.tile = config, tile(config.K)

    def thread(self):
        """Return the thread among those of CHAIN."""
        return cute.arch.thread_idx()[0]

    def warp(self):
        return cute.arch.warp_idx()

    def meet(self):
        CHAIN.sync()

    def was_sent(self):
        """The copies of the state that this thread began have read it in shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def zero(self):
        """S^T of nothing."""
        S = accumulator(register_mma(self.c.K, OperandMajorMode.MN), (COLUMNS, self.c.K))
        S.fill(0.0)
        return S

    def operand(self, S):
        """S^T as [P; O] is multiplied by it."""
        return rounded(register_mma(C, OperandMajorMode.K), S, self.c.K)

    def issue_PO(self, operand, tile):
        """[P; O] of a chunk, not awaited: a product with 32 columns would take as long as one with 64."""
        mma, rows = register_mma(self.c.rows, OperandMajorMode.K), (self.c.rows, self.c.K)
        PO = accumulator(mma, (COLUMNS, self.c.rows))
        of_k_and_q = cute.local_tile(wide_view(tile, 2 * C, self.c.K), rows, (0, 0))
        multiply(mma, PO, operand, of_k_and_q, accumulate=False)
        warpgroup.commit_group()
        return PO

    @cute.jit
    def load_v(self, rows_of_v, zero=False):
        """v^T of the warp's columns as it lies in an operand, in words of two."""
        source, words = rows_of_v + own_matrices(self.warp()), [Uint32(0)] * 8
        if not zero:
            words = [*load_matrices(source, transposed=True), *load_matrices(source + 16 * PITCH_V, transposed=True)]
        return words

    def update(self, S, operand, PO, tile, words_of_v, rows_of_r=None):
        """From P and O of a chunk to the state after it, also rounded, and to o, in registers, and r, in shared memory.
        The tile is read no more."""
        c, standing = self.c, OperandMajorMode.MN
        mma, mma_V = register_mma(C, OperandMajorMode.K), register_mma(C, standing)
        mma_S = register_mma(c.K, standing)
        warpgroup.wait_group(0)
        # v_new^T = (v^T - P) @ TB^T
        left = cute.make_rmem_tensor(mma.make_fragment_A(mma.partition_shape_A((COLUMNS, C))).shape, BFloat16)
        v, PO_flat, left_flat = cute.make_rmem_tensor(8, Uint32), cute.coalesce(PO), cute.coalesce(left)
        for w in range(8):
            v[w] = words_of_v[w]
        v = floats(cute.recast_tensor(v, BFloat16))
        for e in range(16):
            left_flat[e] = (v[e] - PO_flat[e]).to(BFloat16)
        v_new = accumulator(mma, (COLUMNS, C))
        multiply(mma_V, v_new, left, narrow_standing_view(tile + self.tile.TB.offset), accumulate=False)
        warpgroup.commit_group()
        self.decay(S, tile)
        warpgroup.wait_group(0)
        # S^T += v_new^T @ kg;  o^T = O + v_new^T @ A_qk^T
        added = rounded(mma, v_new, C)
        if c.has_r:
            self.put_rows(rows_of_r, added)
        multiply(mma_S, S, added, standing_view(tile + self.tile.KG.offset, c.K), accumulate=True)
        warpgroup.commit_group()
        of_o = accumulator(mma, (COLUMNS, C))                                  # half of PO would be no accumulator to
        if c.has_o:                                                            # ptxas, and each product would wait
            multiply(mma, of_o, added, narrow_view(tile + self.tile.A_qk.offset), accumulate=False, fenced=True)
            warpgroup.commit_group()
        warpgroup.wait_group(1 if c.has_o else 0)
        round_to(operand, S)
        if c.has_o:
            compute_now(operand)
            warpgroup.wait_group(0)
        return of_o

    def decay(self, S, tile):
        """S^T = S^T 2^gc_last, over the chunk, or the step, whose tile this is."""
        decay, flat, lane = field_at(tile, self.tile.decay), cute.coalesce(S), cute.arch.lane_idx()
        for block in range(self.c.K // 16):
            d = load(decay + block * 16 + lane % 4 * 4, 4)
            for e in range(8):
                flat[block * 8 + e] = flat[block * 8 + e] * d[e // 4 * 2 + e % 2]

    def put_o(self, rows_of_o, of_o, PO):
        """o of a chunk in shared memory."""
        if self.c.has_o:
            flat, of_state = cute.coalesce(of_o), cute.coalesce(PO)
            for e in range(16):
                flat[e] = flat[e] + of_state[16 + e]
            self.put_rows(rows_of_o, rounded(register_mma(C, OperandMajorMode.K), of_o, C))

    def put_rows(self, rows, operand):
        """32 rows of 64 columns, out of an operand that has them transposed."""
        words, place = cute.recast_tensor(operand, Uint32), rows + own_matrices(self.warp())
        store_matrices(place, [words[w] for w in range(4)], transposed=True)
        store_matrices(place + 16 * PITCH_V, [words[w] for w in range(4, 8)], transposed=True)

    @cute.jit
    def put_state(self, image, operand):
        """The strip of the state, as it is multiplied, into shared memory (configs.state_image), when all have come
        here and what it held before has gone."""
        if self.thread() == 0:
            self.was_sent()
        self.meet()
        lane_column = own_column(KEPT_COLUMNS * self.warp())
        for half in cutlass.range_constexpr(self.c.K // 64):
            self.put_columns(image + half * (COLUMNS * 64), lane_column, operand, half)
        cute.arch.fence_proxy("async.shared", space="cta")

    def put_columns(self, rows, lane_column, operand, half: int):
        """A warp's columns of the state, 64 channels of each, to where a column has a row of 128 bytes."""
        words, (row, piece) = cute.recast_tensor(cute.coalesce(operand), Uint32), lane_column
        for block in range(0, 8, 2):
            to = rows + (row * 64 + ((block | piece) ^ row & 7) * 8)
            store_matrices(to, [words[2 * (8 * half + block) + w] for w in range(4)])

    @cute.jit
    def send_state(self, x, strip, image):
        """From there to its place among V columns in memory, by one thread, when all have put theirs."""
        half = COLUMNS * 64
        if self.thread() == 0:
            for n in cutlass.range_constexpr(self.c.K // 64):
                bulk_store(x + (n * self.c.V * 64 + strip * half), image + n * half, 2 * half)
            cute.arch.cp_async_bulk_commit_group()

    def keep(self, x, operand, strip, own_rows):
        """The strip of the state, as it is multiplied, to its place among V columns in memory, by each warp alone: a
        column has 128 bytes for every 64 channels, swizzled as bwd/grads reads them (configs.state_image)."""
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane_column = own_column(0)
        rows = own_rows + warp * (KEPT_COLUMNS * 64)
        to = x + ((strip * COLUMNS + warp * KEPT_COLUMNS) * 64 + lane * 8)
        for half in range(self.c.K // 64):
            if half > 0:
                cute.arch.sync_warp()                                          # those before were read
            self.put_columns(rows, lane_column, operand, half)
            cute.arch.sync_warp()                                              # 16 columns are there
            for i in range(KEPT_COLUMNS * 64 // (32 * 8)):
                copy_16_bytes(rows + (lane * 8 + i * 256), to + (half * self.c.V * 64 + i * 256))

    def thread_place(self, first_v):
        """Return the place of a thread of CHAIN in rows of v or o, from a walk's first element on.  ptxas keeps the
        result of a shuffle in registers; else it would compute the place for each chunk again, in 250 clocks."""
        thread = cute.arch.shuffle_sync(self.thread(), cute.arch.lane_idx())
        row, column = thread // 8, thread % 8 * 8
        return ThreadPlace(row, first_v + column, row * PITCH_V + column)

    def store_o(self, o, rows_of_o, thread_place, i, HV, tokens=None):
        """Rows of o of chunk i out of one of two places in shared memory."""
        self.store_own(o, rows_of_o + (i & 1) * (C * PITCH_V), thread_place, i, HV, tokens)

    @cute.jit
    def store_own(self, o, rows, thread_place, i, HV, tokens=None):
        """Rows of o or r of chunk i out of shared memory, as whole lines; all of them, or so many."""
        source = rows + thread_place.within
        if cutlass.const_expr(tokens is None):
            found = [load(source + 16 * j * PITCH_V, 8) for j in range(2)]     # both, before one is stored
            for j in cutlass.range_constexpr(2):
                to = in_global(self.row(o, thread_place.element, i * C + 16 * j + thread_place.row, HV), BFloat16)
                cute.autovec_copy(found[j], neighbours(to, 8))
        else:
            for j in cutlass.range_constexpr(2):
                if 16 * j + thread_place.row < tokens:
                    to = self.row(o, thread_place.element, i * C + 16 * j + thread_place.row, HV)
                    copy_16_bytes(source + 16 * j * PITCH_V, in_global(to, BFloat16))

    def request_rows(self, v, rows, first_v, begin, tokens, HV):
        """Rows of v from token `begin` on, to shared memory, by one warp, which awaits them otherwise."""
        for j in range(C // 4):
            row, column = row_and_column(j)
            token = cutlass.min(begin + row, tokens - 1)               # past the end: a row that counts for nothing
            copy_16_bytes_later(self.row(v, first_v + column, token, HV), rows + (row * PITCH_V + column))

    @cute.jit
    def store_rows(self, o, rows, first_v, begin, tokens, HV, columns: cutlass.Constexpr = None):
        """Rows of o from token `begin` on, out of shared memory, by one warp."""
        for j in cutlass.range_constexpr(C // 4):
            row, column = row_and_column(j)
            if begin + row < tokens:
                to = self.row(o, first_v + column, begin + row, HV, columns)
                copy_16_bytes(rows + (row * PITCH_V + column), in_global(to, BFloat16))

    def row(self, x, element, token, HV, columns: int | None = None):
        """The address in v or o, or in rows of other columns, `token` rows below `element`."""
        columns = self.c.V if columns is None else columns
        return fast.row(x.toint() + element * 2, token, HV * Int32(2 * columns))

    def place_in_state(self, i: int, strip):
        """(channel, column) of a thread's element i of S^T."""
        lane, warp = cute.arch.lane_idx(), self.warp()
        return i // 4 * 8 + lane % 4 * 2 + i % 2, strip * COLUMNS + warp * 16 + lane // 4 + i % 4 // 2 * 8

    @cute.jit
    def load(self, x, number, strip, columns: cutlass.Constexpr, transposed: cutlass.Constexpr, S):
        """S from a strip of one of many matrices (K, columns) in memory."""
        flat = cute.coalesce(S)
        base = self.own_elements(x, number, strip, columns, transposed)
        for i in range(cute.size(flat)):
            flat[i] = load_one(base + self.to_element(i, columns, transposed)).to(Float32)

    @cute.jit
    def store(self, x, number, strip, columns: cutlass.Constexpr, transposed: cutlass.Constexpr, S):
        """The reverse of `load`."""
        flat = cute.coalesce(S)
        base = self.own_elements(x, number, strip, columns, transposed)
        for i in range(cute.size(flat)):
            store(base + self.to_element(i, columns, transposed), [flat[i]])

    def strides(self, columns: int, transposed: bool):
        """Elements from channel to channel, and from column to column."""
        return (1, self.c.K) if transposed else (columns, 1)

    def own_elements(self, x, number, strip, columns: int, transposed: bool):
        """Where this thread's first element is: the others are at constants from there (`to_element`)."""
        over_channels, over_columns = self.strides(columns, transposed)
        channel, column = self.place_in_state(0, strip)
        return x + (Int64(number) * (self.c.K * columns) + channel * over_channels + column * over_columns)

    def to_element(self, i, columns: int, transposed: bool):
        over_channels, over_columns = self.strides(columns, transposed)
        return (i // 4 * 8 + i % 2) * over_channels + i % 4 // 2 * 8 * over_columns

    @cute.jit
    def identity(self, S, strip):
        """S = columns of the matrix (K, K) that changes nothing."""
        flat = cute.coalesce(S)
        for i in range(cute.size(flat)):
            d, e = self.place_in_state(i, strip)
            flat[i] = Float32(1.0) if d == e else Float32(0.0)


def register_mma(n: int, major):
    """(64, n) out of registers and shared memory."""
    source = warpgroup.OperandSource.RMEM
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (COLUMNS, n, 16), source, OperandMajorMode.K, major)
    return cute.make_tiled_mma(op)


def own_column(first):
    """The column of the state that a lane has a row for, of the warp's 16 from `first` on, and which of two pieces of 8
    channels."""
    lane = cute.arch.lane_idx()
    return first + (lane >> 3 & 1) * 8 + (lane & 7), lane >> 4


def own_matrices(warp):
    """Where in 16 rows of v or o this lane's row begins, of the four 8 x 8 matrices that are its warp's 16 columns."""
    lane = cute.arch.lane_idx()
    return (lane % 8 + lane // 16 * 8) * PITCH_V + warp * 16 + lane // 8 % 2 * 8


def row_and_column(j: int):
    """Row and first column of the eight that a lane moves of four rows of v or o."""
    lane = cute.arch.lane_idx()
    return 4 * j + lane // 8, lane % 8 * 8


def rounded(mma, acc, k: int):
    """An accumulator (64, k) as the operand from registers of the next product: the order of elements is the same."""
    operand = cute.make_rmem_tensor(mma.partition_shape_A((COLUMNS, k)), BFloat16)
    round_to(operand, acc)
    return operand


def round_to(operand, acc):
    to, x = cute.coalesce(operand), cute.coalesce(acc)
    for i in range(cute.size(x)):
        to[i] = x[i].to(BFloat16)


def compute_now(operand):
    """An empty statement that reads the operand: NVVM would round it after the next wait."""
    words = cute.recast_tensor(cute.coalesce(operand), Uint32)
    compute_words_now([words[w] for w in range(cute.size(words))])


def multiply(mma, acc, operand, b, accumulate: bool, fenced: bool = False):
    """Issues acc (+)= operand @ b^T, in no group yet."""
    issue(mma, acc, operand, mma.make_fragment_B(mma.get_slice(0).partition_B(b)), accumulate, fenced)
