"""LOAD of grads (common/cute/grads/load.py), for which mma.sync sums squares."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...common.cute import fast
from ...common.cute.fragments import load_matrices, mma_bf16
from ...common.cute.grads.load import Loader
from ...common.cute.training import LOAD_WARPS, STEP, TOKENS


class PanelLoader(Loader):
    def make_norms(self, s, i, of_tokens, tokens):
        if self.c.norm:
            self.sum_squares(s, i, of_tokens, tokens)
        else:                                # not in a function of the DSL: there super() is that of the object's class
            super().make_norms(s, i, of_tokens, tokens)

    @cute.jit
    def sum_squares(self, s, i, of_tokens, tokens):
        """A warp has half of the tokens of q or k: 16 of them times each other, of which it keeps the diagonal."""
        lane, warp, blocks = self.thread() & 31, self.thread() >> 5, TOKENS // STEP // (LOAD_WARPS // 2)
        of_k, first = warp >> 1, (warp & 1) * blocks
        rows = self.field(self.rows_at(s, i), "q") + of_k * (TOKENS * self.c.K) + first * (STEP * 64)
        piece = (lane & 15) * 64 + (lane >> 4 ^ lane & 7) * 8
        for block in cutlass.range_constexpr(blocks):
            lower, upper = [Float32(0.0)] * 4, [Float32(0.0)] * 4          # positions 0 to 7, 8 to 15
            for step in cutlass.range_constexpr(self.c.K // STEP):
                panel = step // 4 * (TOKENS * 64)
                a = load_matrices(rows + ((piece ^ step % 4 * STEP) + (panel + block * (STEP * 64))))
                lower = mma_bf16(lower, a, [a[0], a[2]])
                upper = mma_bf16(upper, a, [a[1], a[3]])
            odd = lane >> 2 & 1
            totals = lower[1] if odd == 1 else lower[0], upper[3] if odd == 1 else upper[2]
            for place, total in ((0, totals[0]), (2, totals[1])):          # places.position, the other way
                token = (first + block) * STEP + 4 * (lane >> 3) + odd + place
                factor = fast.rsqrt(total + Float32(fast.NORM_EPS))
                if (lane & 3) == lane >> 3:                                # the lane has an element of the diagonal
                    of_tokens[of_k * TOKENS + token] = factor if token < tokens else Float32(0.0)
