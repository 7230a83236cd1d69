"""The state on its way from chunk to chunk (parts/state.py), in halves of 64 channels, so that the tensor core hardly
waits for roundings:

  S^T, channels 0 to 63        is rounded while o and the other half are computed
  o^T                          goes to shared memory while the other half is
  S^T, channels 64 to 127      is rounded while [P; O] of the next chunk adds up the first half

Every sum has the order, and so the bits, of parts/state.py.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...common.cute.copies import words_of
from ...common.cute.tile import BF16, HALF, C
from ..configs import COLUMNS, FusedConfig
from .state import State, multiply, register_mma
from .wgmma import accumulator, standing_view, wide_view


class StateInHalves(State):
    def __init__(self, config: FusedConfig):
        super().__init__(config.chain)
        self.halves = self.c.K // HALF
        self.rounded = 1 if config.rounds_late else self.halves                # halves, when a chunk ends

    def operand(self, S):
        """Registers for S^T as [P; O] is multiplied by it, which have what a chunk rounds at its end."""
        mma = register_mma(C, OperandMajorMode.K)
        operand = cute.make_rmem_tensor(mma.partition_shape_A((COLUMNS, self.c.K)), BFloat16)
        for half in range(self.rounded):
            self.round_half(operand, S, half)
        return operand

    def round_half(self, operand, S, half: int):
        """Round with statements that NVVM cannot repeat: it would round again where a product is issued, behind its
        fence."""
        words, x = cute.recast_tensor(cute.coalesce(operand), Uint32), cute.coalesce(S)
        count = cute.size(words) // self.halves
        for i in range(half * count, (half + 1) * count):
            words[i] = rounded_pair(x[2 * i], x[2 * i + 1])

    def issue_PO_and_round(self, operand, S, tile):
        """[P; O] of a chunk, not awaited, and the other half of S^T, rounded."""
        mma, rows = register_mma(self.c.rows, OperandMajorMode.K), (self.c.rows, self.c.K)
        PO = accumulator(mma, (COLUMNS, self.c.rows))
        b = cute.local_tile(wide_view(tile, 2 * C, self.c.K), rows, (0, 0))
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(b))
        for half in range(self.halves):
            if half > 0:
                warpgroup.wait_group(1)                                        # for nothing: else ptxas waits for all
                if half >= self.rounded:
                    self.round_half(operand, S, half)
            warpgroup.fence()
            for step in range(half * HALF // 16, (half + 1) * HALF // 16):
                mma.set(warpgroup.Field.ACCUMULATE, step > 0)
                cute.gemm(mma, PO, operand[None, None, step], b[None, None, step], PO)
            warpgroup.commit_group()
        return PO

    def update_in_halves(self, S, operand, PO, tile, words_of_v, rows_of_v, rows_of_o, beside):
        """From P and O of a chunk to the state after it, whose first half is rounded, and to o and r, in shared memory.
        The tile is read no more.  `beside` does something meanwhile; return what it returns."""
        added = self.new_values(S, PO, tile, words_of_v, rows_of_v)
        self.issue_half_of_S(S, added, tile, 0)
        of_o = self.outputs()
        if self.c.has_o:
            self.issue_o(of_o, added, tile, fenced=True)
        for half in range(1, self.halves):
            self.issue_half_of_S(S, added, tile, half, fenced=True)
        behind = self.c.has_o + self.halves - 1                                # groups behind the first half of S
        warpgroup.wait_group(behind)
        self.round_half(operand, S, 0)
        if self.c.has_o:
            warpgroup.wait_group(behind - 1)
            self.put_sum(rows_of_o, of_o, PO)
        found = beside()
        if self.halves > 1:
            warpgroup.wait_group(0)
        for half in range(1, self.rounded):
            self.round_half(operand, S, half)
        return found

    def issue_half_of_S(self, S, added, tile, half: int, fenced: bool = False):
        """S^T += v_new^T @ kg, of a half, not awaited."""
        mma, first = register_mma(HALF, OperandMajorMode.MN), half * cute.size(S) // self.halves
        shape = cute.make_layout(mma.partition_shape_C((COLUMNS, HALF)))
        of_half = cute.make_tensor(cute.coalesce(S).iterator + first, shape)
        kg = standing_view(tile + (self.tile.KG.offset + half * (C * HALF * BF16)), HALF)
        multiply(mma, of_half, added, kg, True, fenced)
        warpgroup.commit_group()

    def put_sum(self, rows_of_o, of_o, PO):
        """o of a chunk in shared memory; no product's registers change while the next product runs."""
        found, of_state, words = cute.coalesce(of_o), cute.coalesce(PO), []
        for e in range(0, 16, 2):
            words += words_of([found[e + n] + of_state[16 + e + n] for n in range(2)])
        self.put_words(rows_of_o, words)


def rounded_pair(low, high):
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low]
    )
