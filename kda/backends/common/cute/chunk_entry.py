"""The kernel of a CTA that has one chunk and value head, in calls with such a kernel."""

import cutlass
import cutlass.cute as cute

from .clear import clear_chunk
from .entry import Entry
from .order import wait_for_the_kernel_before
from .segments import locate_chunk


class ChunkEntry(Entry):
    """A subclass has `make(x, chunk, begin, tokens, number, head)`, of what `locate_chunk` finds, and `warp()`.  A CTA
    without a chunk clears its share of the rows of o outside every sequence."""

    @cute.kernel
    def kernel(self, x):
        head, y, z = cute.arch.block_idx()
        if cutlass.const_expr(self.c.pdl):
            wait_for_the_kernel_before()
        chunk, begin, tokens, number = locate_chunk(self.c.packed, x, y, z)
        if tokens > 0:
            self.make(x, chunk, begin, tokens, number, head)
        elif cutlass.const_expr(self.c.packed):
            clear_chunk(x, self.c.V, begin, -tokens, head, self.warp())
