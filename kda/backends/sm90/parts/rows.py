"""A chunk's rows of q, k and g on their way through shared memory: a warp requests its own ones as soon as the products
of the chunk before have read X and Y, where they lie until the operands of their chunk take that place."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ...common.cute.async_copies import copy_16_bytes_later
from ...common.cute.copies import load
from ...common.cute.gate import Gate
from ...common.cute.rows import Rows
from ...common.cute.tile import WARP_ROWS, C

PIECE = 8                                    # elements of 16 bytes


class Requested:
    """Rows that each warp finds where it had them copied to."""

    def row_within(self, row, tokens):
        return row

    @cute.jit
    def request(self, head_rows, tokens, H, HV, X, Y):
        """Past the end of a chunk of so many tokens: its last row."""
        K, lane, first = self.c.K, cute.arch.lane_idx(), WARP_ROWS * self.team.warp()
        for source, heads, to in ((head_rows.q, H, X), (head_rows.k, H, X + C * K), (head_rows.g, HV, Y)):
            for j in cutlass.range_constexpr(WARP_ROWS * K // (32 * PIECE)):
                row, column = first + (lane + 32 * j) // (K // PIECE), lane % (K // PIECE) * PIECE
                address = source + (cutlass.min(row, tokens - 1) * (heads * K) + column)
                copy_16_bytes_later(address.toint(), to + (row * K + column))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def found(self, head_rows, X, Y):
        """Where rows are that were requested, when they are there."""
        cute.arch.cp_async_wait_group(0)
        # redundant: in the simulator, where a warp waits as a whole; the manual lets each lane wait for its own copies
        cute.arch.sync_warp()
        return head_rows._replace(q=X, k=X + C * self.c.K, g=Y)


class RequestedByChannel(Requested, Gate):
    """Requested rows in the layout of Gate."""


class RequestedByRow(Requested, Rows):
    """Requested rows in the layout of Rows."""

    @cute.jit
    def load_row(self, pointer, row, heads):
        source = cute.recast_ptr(pointer, dtype=Uint32) + (row * (self.c.K // 2) + self.first_channel() // 2)
        words = load(source, self.pairs)
        return [words[i] for i in range(self.pairs)]
