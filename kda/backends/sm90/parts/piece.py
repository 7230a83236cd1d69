"""A chunk's rows in registers, as fwd/fused.py has them where one product makes all pairs of a chunk.

Bits are those of common/cute/gate.py, in fewer instructions: what the scale and rows of no token change of 1 / |q| and
1 / |k| is changed once, in the lanes that have a row's sum, before all lanes receive it.
"""

import cutlass.cute as cute
from cutlass import Float32

from ...common.cute import fast
from ...common.cute.copies import floats_of
from ...common.cute.fragments import sum_over_lanes
from ...common.cute.gate import Gate
from ...common.cute.tile import WARP_ROWS

LANES_OF_A_SUM = 32 // (2 * WARP_ROWS)       # a warp has the rows of q and k


class ScaledGate(Gate):
    @cute.jit
    def prepare(self, raw_q, raw_k, raw_g, head_rows, tokens):
        """What Gate.prepare returns, of rows with norms under a bounded gate."""
        tokens, d = tokens - WARP_ROWS * self.team.warp(), self.c.K // 32 * cute.arch.lane_idx()
        unit = Float32(fast.LOG2_E) * head_rows.lower_bound
        units = [unit if r < tokens else Float32(0.0) for r in range(WARP_ROWS)]
        raw_q, raw_k = [floats_of(words) for words in raw_q], [floats_of(words) for words in raw_k]
        gc = self.sum_of_decays([self.floats_of_gate(words) for words in raw_g], units, head_rows, d)
        each = self.factors(raw_q + raw_k, head_rows.scale, tokens)
        rows = [self.times(row, factor) for row, factor in zip(raw_q + raw_k, each)]
        return rows[:WARP_ROWS], rows[WARP_ROWS:], gc

    @cute.jit
    def factors(self, rows, scale, tokens):
        """scale / |q| and 1 / |k| of rows, the first so many of which are tokens; 0 of others."""
        total, number = sum_over_lanes([self.square(row) for row in rows]), cute.arch.lane_idx() // LANES_OF_A_SUM
        found = fast.rsqrt(total + Float32(fast.NORM_EPS))
        if number < WARP_ROWS:
            found = found * scale
        found = found if (number & WARP_ROWS - 1) < tokens else Float32(0.0)
        return [cute.arch.shuffle_sync(found, LANES_OF_A_SUM * i) for i in range(2 * WARP_ROWS)]
