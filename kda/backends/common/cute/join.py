"""o += response @ edge: what a row of o has of the state that enters its segment, of which the forward that cuts
sequences knew nothing.  Of a segment, not the first of its sequence, one value head and at most JOIN_ROWS rows.

  edge      (K, V) float32, rounded into shared memory: panels of 64 columns, rows of 128 bytes, swizzled
  response  (tokens, HV, K), as operands of mma.sync straight from where it is
  warps     16 rows each, and those 128 below

A lane reads and writes 16 bytes at a time: the eight neighbours that it has of 32 channels, or columns, are those that
two steps of mma.sync, or four tiles of eight columns, have in that lane.  So edge lies in shared memory in the order
of those (`place_of_channel`, `place_of_column`).

  barrier  threads  says
  0        256      edge is in shared memory
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, Uint32
from cutlass.memory import SmemAllocator

from .configs import JOIN_ROWS
from .copies import floats_of, load, neighbours, store
from .entry import Entry, wait_for_the_kernel_before
from .fragments import load_matrices, mma_bf16
from .segments import locate_segment, locate_sequence
from .tile import swizzle_128B


class Join(Entry):
    @cute.kernel
    def kernel(self, x):
        block, head, z = cute.arch.block_idx()
        wait_for_the_kernel_before()
        n = z // (x.segments - 1)
        number = z - n * (x.segments - 1) + 1
        begin, tokens = locate_segment(*locate_sequence(self.c.offsets, x, n), number, x.segments, self.c.unit)
        rows = cutlass.min(tokens - block * JOIN_ROWS, JOIN_ROWS)
        if rows > 0:
            K, V, warp = self.c.K, self.c.V, cute.arch.make_warp_uniform(cute.arch.warp_idx())
            B = SmemAllocator().allocate_array(BFloat16, K * V, byte_alignment=1024)
            self.round_edge(x.edge + (Int64(n * x.segments + number) * x.HV + head) * (K * V), B)
            cute.arch.sync_threads()
            first = (begin + block * JOIN_ROWS) * x.HV + head
            for row in cutlass.range(16 * warp, rows, self.c.threads // 32 * 16, unroll=1):
                self.add(x.response + first * K, x.o + first * V, B, row, rows, x.HV)

    def round_edge(self, edge, B):
        """A thread moves eight columns of a row at a time."""
        K, V, threads = self.c.K, self.c.V, self.c.threads
        for i in range(K * V // 8 // threads):
            number = i * threads + cute.arch.thread_idx()[0]
            channel, column = number // (V // 8), number % (V // 8) * 8
            parts = [load(edge + (channel * V + column + offset), 4) for offset in (0, 4)]
            row = place_of_channel(channel)
            for pair in range(4):
                two = [parts[pair // 2][pair % 2 * 2 + e] for e in range(2)]
                store(B + swizzle_128B(row, place_of_column(column + 2 * pair), K) // 2, two)

    @cute.jit
    def add(self, response, o, B, row, rows, HV):
        """16 rows of o: a lane has rows lane / 4 and that + 8, and of 32 channels or columns eight."""
        K, V, lane = self.c.K, self.c.V, cute.arch.lane_idx()
        lane_rows = [row + (lane >> 2) + 8 * r for r in range(2)]
        elements, first = [Int64(x * HV) for x in lane_rows], (lane & 3) * 8
        of_K, of_V = [[x + (row * width + first) for row in elements] for x, width in ((response, K), (o, V))]
        a = [self.block(lane_rows, rows, of_K, block) for block in range(K // 32)]
        old = self.block(lane_rows, rows, of_V, 0)                             # loaded one block ahead
        for block in cutlass.range_constexpr(V // 32):
            entering, acc = old, [[Float32(0.0)] * 4 for _ in range(4)]        # four tiles of eight columns
            if cutlass.const_expr(block + 1 < V // 32):
                old = self.block(lane_rows, rows, of_V, block + 1)
            for step in cutlass.range_constexpr(K // 16):
                of_step, half = a[step // 2], step % 2 * 2
                operand = [of_step[r][half + side] for side in range(2) for r in range(2)]
                for pair in cutlass.range_constexpr(2):
                    channel, column = 16 * step + (lane & 15), 32 * block + 16 * pair + 8 * (lane >> 4)
                    b = load_matrices(B + swizzle_128B(channel, column, K) // 2, transposed=True)
                    for side in cutlass.range_constexpr(2):
                        tile = 2 * pair + side
                        acc[tile] = mma_bf16(acc[tile], operand, b[2 * side : 2 * side + 2])
            for r in cutlass.range_constexpr(2):
                if lane_rows[r] < rows:
                    new = []
                    for tile in cutlass.range_constexpr(4):
                        before = floats_of([entering[r][tile]])
                        new += [before[e] + acc[tile][2 * r + e] for e in range(2)]
                    store(of_V[r] + 32 * block, new)

    def block(self, lane_rows, rows, places, block: int):
        """Return the lane's words of a block of 32 of each of its rows."""
        return [self.words_if(row < rows, place + 32 * block) for row, place in zip(lane_rows, places)]

    @cute.jit
    def words_if(self, exists, pointer):
        """Eight neighbours as four words; zeros where nothing is."""
        found = cute.make_rmem_tensor(4, Uint32)
        found.fill(0)
        if exists:
            cute.autovec_copy(neighbours(cute.recast_ptr(pointer, dtype=Uint32), 4), found)
        return found


def place_of_channel(channel):
    """In the order in which mma.sync counts them: of 32, those that a lane has in two steps are eight neighbours."""
    return (channel & -32) + (channel >> 2 & 1) * 16 + (channel >> 1 & 1) * 8 + (channel >> 3 & 3) * 2 + (channel & 1)


def place_of_column(column):
    """The same of results: of 32, those that a lane has in four tiles of eight columns."""
    return (column & -32) + (column >> 1 & 3) * 8 + (column >> 3 & 3) * 2 + (column & 1)


build = Join.build
