"""The state of one value head, all of it, on its way from chunk to chunk: what fwd/record.py and bwd/walk.py share.

S (K, V) float32 lies in tensor memory, channels in lanes.  Of the eight warps that have it, warp w has channels
K / 4 (w % 4) .. and columns V / 2 (w / 4) ..: a thread has half a row, or of 64 channels, 16 in the lanes of each warp,
a quarter, whose decay is one number.  Where S is multiplied it lies in shared memory, rounded: an image of V / 64
panels of 64 columns, K rows of 128 bytes each, swizzle_128B.  Images are also what is kept of states and of their
gradients, one bulk copy each.

LOAD, one warp, brings a chunk to a stage: its tile by one bulk copy, rows of v or do in pieces of 16 bytes, swizzled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from ...common.cute import fast
from ...common.cute.async_copies import arrive_when_copied, bulk_copy, bulk_store, copy_16_bytes_later
from ...common.cute.barriers import initialise
from ...common.cute.copies import copy_16_bytes, field_at, fields_at, floats, in_global, load, load_one, store
from ...common.cute.entry import Entry
from ...common.cute.fragments import store_matrices
from ...common.cute.packed import both, rounded, times_pairs
from ...common.cute.rings import advance
from ...common.cute.tile import HALF, C, decay_index, swizzle_128B
from ..configs import STATE_WARPS
from . import umma

PIECE = 32                                   # columns of a row that a thread has in registers at a time, or fewer


class Walker(Entry):
    """A subclass has `walk`; `back`: from the last chunk to the first."""

    back: bool

    def __init__(self, config):
        K, V = config.K, config.V
        self.c, self.tile, self.stage, self.tmem = config, config.tile, config.stage, config.tmem
        self.quarters = K == 64                                                # a thread has a quarter of a row of S
        self.own_columns = K * V // (32 * STATE_WARPS)                         # how many of its columns a thread has
        self.piece = min(PIECE, self.own_columns)
        self.image = 2 * K * V                                                 # bytes
        self.pieces = V // 8                                                   # pieces of a row of v

    @cute.jit
    def set_up(self):
        """Shared memory by names, with its mbarriers; tensor memory."""
        struct = self.c.struct
        base = SmemAllocator().allocate_array(Uint8, struct.end, byte_alignment=1024)
        s = fields_at(base, struct)
        if cute.arch.thread_idx()[0] == 0:
            initialise(s, self.c.state_pipelines)
            store(s.base_desc, [(base.toint().to(Uint32) & 0x3FFFF) >> 4])
        if cute.arch.warp_idx() == 0:
            umma.allocate(s.tmem, self.c.allocated)
        return s

    @cute.jit
    def load(self, x, s, source, begin, tokens, chunk, head, steps, has_rows=True):
        """LOAD copies tiles, and rows of `source` (v or do), into the ring."""
        first = (begin * x.HV + head) * self.c.V
        self.load_on(x, s, source, first, tokens, chunk, head, steps, has_rows, Int32(0), Int32(0))

    @cute.jit
    def load_on(self, x, s, source, element, tokens, chunk, head, steps, has_rows, stage, phase):
        """The same from a stage of the ring on, rows from an element on; returns where the ring is then."""
        lane = cute.arch.lane_idx()
        row, column = self.place_of_piece(lane)
        address = source.toint() + (element + column) * 2
        for j in cutlass.range(steps, unroll=1):
            i = steps - 1 - j if cutlass.const_expr(self.back) else j
            to = s.stages + stage * self.stage.bytes
            cute.arch.mbarrier_wait(s.empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                # redundant: its release, not the arrival; this thread has written nothing
                cute.arch.mbarrier_arrive_and_expect_tx(s.full + stage, self.tile.end)
                place = (Int64(chunk + i) * x.HV + head) * self.tile.bytes
                bulk_copy(to, x.tiles + place, self.tile.end, s.full + stage)
            if has_rows:
                first = to + (self.stage.rows.offset + swizzle_128B(row, column, C))
                for r in cutlass.range_constexpr(0, C, 32 // self.pieces):
                    token = cutlass.min(i * C + row + r, tokens - 1)       # past the end: a row that counts for nothing
                    below = (first.toint() ^ (r & 7) * 16) + r * 128
                    copy_16_bytes_later(fast.row(address, token, x.HV * Int32(2 * self.c.V)), in_shared(below))
            arrive_when_copied(s.full + stage)
            stage, phase = advance(stage, phase, self.c.stages)
        return stage, phase

    def find_tensor_memory(self, s):
        """Load where the CTA's tensor memory begins, once it is allocated."""
        self.begin = umma.first_column(self.c, s)

    def place_of_piece(self, thread):
        """Return the row and the first column of the piece of 16 bytes that one of some threads moves."""
        return thread >> self.pieces.bit_length() - 1, (thread & self.pieces - 1) * 8

    # the eight warps that have the state

    def channel(self):
        thread = cute.arch.thread_idx()[0]
        return (thread >> 5 & 3) * 16 + (thread & 15) if self.quarters else thread & self.c.K - 1

    def column(self):
        """Return the first of the thread's columns."""
        thread = cute.arch.thread_idx()[0]
        of_warp = (thread >> 7) * (self.c.V // 2)
        return of_warp + (thread >> 4 & 1) * self.own_columns if self.quarters else of_warp

    def in_tensor_memory(self, first: int):
        """Return the address of a piece of what the warp has."""
        of_warp = (cute.arch.thread_idx()[0] >> 7) * (self.c.V // 2)
        return self.begin + self.tmem.S + first + of_warp + (cute.arch.warp_idx() & 3) * umma.WARP_LANES

    def load_piece(self, first: int, kind=Float32):
        """Load some of the thread's columns of S, from one of them on."""
        if self.quarters:
            return umma.load_halves(self.in_tensor_memory(first), self.piece, self.own_columns, kind)
        return umma.load_row(self.in_tensor_memory(first), self.piece, kind)

    def store_piece(self, first: int, values):
        """Store what `load_piece` loads; this is done after `wait_for_stores`."""
        if self.quarters:
            umma.store_halves(self.in_tensor_memory(first), self.own_columns, values)
        else:
            umma.store_row(self.in_tensor_memory(first), values)

    def round_and_decay(self, s, image, tile):
        """Store S, rounded, to an image, and 2^gc_last S to where S was: for products, once all have met."""
        decay = load_one(field_at(tile, self.tile.decay) + decay_index(self.channel()))
        factor, place = both(decay), image.toint() + swizzle_128B(self.channel(), self.column(), self.c.K)
        for first in range(0, self.own_columns, self.piece):
            S = self.load_piece(first, Uint32)
            words = rounded(S)
            for piece in range(self.piece // 8):
                to = in_shared(place ^ (first // 8 + piece) * 16)
                store(cute.recast_ptr(to, dtype=Uint32), words[4 * piece : 4 * piece + 4])
            self.store_piece(first, times_pairs(S, factor))
        umma.wait_for_stores()
        cute.arch.fence_proxy("async.shared", space="cta")

    def send_image(self, to, image):
        """One thread sends an image to global memory."""
        bulk_store(to, image, self.image)
        cute.arch.cp_async_bulk_commit_group()

    def wait_for_images(self):
        """Wait, in the warp of the thread that sent them, until images were read."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def wait_for_last_image(self):
        """Wait likewise before shared memory becomes another CTA's."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def put_rows(self, out, to):
        """Copy (V, C) from tensor memory, rounded, as C rows of V columns: 16 a warp, or 16 in half of the rows."""
        warp, rows = cute.arch.warp_idx(), C // 2 if self.quarters else C
        of_half = C // 2 if self.quarters else umma.HALF_LANES
        out = out + (warp & 3) * umma.WARP_LANES + (warp >> 2) * of_half
        words = rounded(umma.load_fragments(out, rows, Uint32))
        if self.quarters:
            store_transposed(to + (warp >> 2) * (rows * HALF), words, (warp & 3) * 16, rows)
        else:
            store_transposed(to, words, (warp & 3) * 32 + (warp >> 2) * 16, rows)
        cute.arch.fence_proxy("async.shared", space="cta")
        umma.fence_before_thread_sync()

    @cute.jit
    def store_rows(self, x, element, rows, first, tokens, HV):
        """256 threads store C rows of V columns from shared memory, as whole lines, from row `first` of memory on."""
        first_row, column = self.place_of_piece(cute.arch.thread_idx()[0])
        for r in cutlass.range_constexpr(0, C, 32 * STATE_WARPS // self.pieces):
            row = r + first_row
            if row < tokens:
                to = fast.row(x.toint() + (element + column) * 2, first + row, HV * Int32(2 * self.c.V))
                copy_16_bytes(rows + swizzle_128B(row, column, C) // 2, in_global(to, rows.dtype))

    def enter(self, x, number, transposed: bool):
        """Load S from one of many states."""
        place, apart = self.place(x, number, transposed)
        for first in range(0, self.own_columns, self.piece):
            values = []
            if transposed:
                values = [load_one(place + (first + e) * apart).to(Float32) for e in range(self.piece)]
            else:
                for e in range(first, first + self.piece, 4):
                    values += floats(load(place + e, 4))
            self.store_piece(first, values)
        umma.wait_for_stores()

    @cute.jit
    def enter_constant(self, identity):
        """Set S to 0, or to the identity."""
        for first in cutlass.range_constexpr(0, self.own_columns, self.piece):
            one = Float32(1.0) if identity else Float32(0.0)
            of_diagonal = self.channel() - self.column() - first
            values = [one if of_diagonal == e else Float32(0.0) for e in range(self.piece)]
            self.store_piece(first, values)
        umma.wait_for_stores()

    def leave(self, x, number, transposed: bool):
        """Store S to one of many states."""
        place, apart = self.place(x, number, transposed)
        for first in range(0, self.own_columns, self.piece):
            S = self.load_piece(first)
            if transposed:
                for e in range(self.piece):
                    store(place + (first + e) * apart, [S[e]])
            else:
                for e in range(0, self.piece, 4):
                    store(place + (first + e), S[e : e + 4])

    def place(self, x, number, transposed: bool):
        """Return where this thread's part of a row begins in one of many states, and how far its columns are apart."""
        K, V = self.c.K, self.c.V
        over_channels, over_columns = (1, K) if transposed else (V, 1)
        element = self.channel() * over_channels + self.column() * over_columns
        return x + (Int64(number) * (K * V) + element), over_columns


def store_transposed(to, words, first, rows: int):
    """Fragments (16, rows) of tensor memory, in words of two, as so many rows of V columns, from a column on."""
    lane = cute.arch.lane_idx()
    row, column = (lane >> 4) * 8 + (lane & 7), first + (lane >> 3 & 1) * 8
    for q in range(rows // 16):
        place = swizzle_128B(16 * q + row, column, rows)
        store_matrices(to + place // 2, words[4 * q : 4 * q + 4], transposed=True)


def in_shared(address):
    return cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=16)
