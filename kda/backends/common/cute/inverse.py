"""TB = (I + A_kk)^-1 b (or without b), transposed, by one warp or two: blocks of 8 rows by substitution, a column per
lane; then pairs of blocks as [X 0; -Y A X, Y], and the two blocks of 16 rows the same way.

  A_kk      (C, PITCH_A) float32, below its diagonal
  columns   (C, PITCH_INVERSE) float32: columns of the inverses of blocks of 16 rows
  TB        (C, C) bfloat16: a row is a column of the inverse times its b; rows and bytes as `TB_at` says
  whole     (C, C) bfloat16, swizzled: the inverse itself, where it is kept for a backward

Both merges make Y A first: its rows come out as columns of the other operand of X^T (Y A)^T, where columns of Y A, that
is rows of X, are counted in pairs.

Two warps (`half`) have 16 rows each, and read no A_kk but their own: the second one merges (`join`).  Bits are those of
one warp, which does everything (`solve`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from .copies import load, load_one, store
from .fragments import mma_tf32, tf32s
from .tile import PITCH_A, PITCH_INVERSE, swizzle_64B


class Inverse:
    def __init__(self, kept: bool, TB_at, strict: bool = False):
        self.kept = kept                     # `whole` is wanted
        self.strict = strict                 # TB is wanted without the ones of its diagonal; no b then
        self.TB_at = TB_at                   # (column of the inverse, row) -> bytes

    @cute.jit
    def solve(self, A_kk, columns, TB, whole, b):
        lane = cute.arch.lane_idx()
        block, x = lane >> 3, self.substitute(A_kk, lane)
        self.store_column(columns, lane, x)
        of_TB = x
        if cutlass.const_expr(self.strict):
            of_TB = [Float32(0.0) if lane & 7 == i else x[i] for i in range(8)]
        self.put(TB, whole, b, lane, block * 8, of_TB)
        if cutlass.const_expr(self.kept):
            for above in cutlass.range_constexpr(3):
                if above < block:
                    self.put_whole(whole, lane, above * 8, [Float32(0.0)] * 8)
        cute.arch.sync_warp()                                                  # columns of 8 rows are there
        self.merge_blocks_of_8(A_kk, columns, TB, whole, b)
        cute.arch.sync_warp()                                                  # columns of 16 rows are there
        self.merge_blocks_of_16(A_kk, columns, TB, whole, b)

    def half(self, A_kk, columns, TB, b, first):
        """The block of 16 rows from `first` on, by the warp that has stored these rows of A_kk.  Half of its lanes do
        what the others do."""
        lane = cute.arch.lane_idx()
        row, k, column = first + lane // 4, lane % 4, first + (lane & 15)
        b_of_column, b_of_row = self.b_of(b, column), self.b_of(b, row)
        # redundant: in blocks of 8 rows, where all warps meet after they have stored A_kk
        cute.arch.sync_warp()                                                  # rows of A_kk are there
        x = self.substitute(A_kk, column)
        self.store_column(columns, column, x)
        cute.arch.sync_warp()                                                  # columns of its blocks are there
        of_Y, of_A = columns + ((8 + k) * PITCH_INVERSE + 8 + row), A_kk + ((first + 8 + k) * PITCH_A + row)
        of_Y += first * (PITCH_INVERSE - 1)
        y = tf32s(load_one(of_Y), load_one(of_Y + 4 * PITCH_INVERSE))
        of_X = load(columns + (row * PITCH_INVERSE + 2 * k), 2)
        a = tf32s(load_one(of_A), load_one(of_A + 4 * PITCH_A))
        self.put_TB(TB, b_of_column, column, column & -8, x)
        YA = mma_tf32([Float32(0.0)] * 4, [y[0], y[0], y[1], y[1]], a)
        x = tf32s(of_X[0], of_X[1])
        found = mma_tf32([Float32(0.0)] * 4, [x[0], x[0], x[1], x[1]], tf32s(-YA[0], -YA[1]))[:2]
        store(columns + (row * PITCH_INVERSE + 8 + 2 * k), found)
        self.put_TB(TB, b_of_row, row, first + 8 + 2 * k, found)

    def join(self, A_kk, columns, TB, b, meet):
        """What both halves lack, by the warp of the second one, which waits for the first (`meet`)."""
        row, k = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        of_columns = [self.b_of(b, row + 8 * r) for r in range(2)]
        cute.arch.sync_warp()                                                  # columns of Y are there
        YA = self.product_of_16(A_kk, columns)
        meet()                                                                 # columns of X are there
        found = self.times_X(YA, columns)
        for n in range(2):
            for r in range(2):
                self.put_TB(TB, of_columns[r], row + 8 * r, 16 + 8 * n + 2 * k, found[n][2 * r : 2 * r + 2])

    @cute.jit
    def substitute(self, A_kk, column):
        """A column of the inverse of its block of 8 rows."""
        block, column = column >> 3, column & 7
        x = []
        for i in cutlass.range_constexpr(8):
            parts = [Float32(1.0) if column == i else Float32(0.0), Float32(0.0)]
            for j in cutlass.range_constexpr(0, i, 4):
                a = load(A_kk + (block * (8 * PITCH_A + 8) + (i * PITCH_A + j)), 4)
                for s in cutlass.range_constexpr(min(4, i - j)):
                    parts[s % 2] = parts[s % 2] - a[s] * x[j + s]
            x.append(parts[0] + parts[1])
        return x

    def store_column(self, columns, column, x):
        for i in range(0, 8, 4):
            store(columns + (column * PITCH_INVERSE + (column & 8) + i), x[i : i + 4])

    def merge_blocks_of_8(self, A_kk, columns, TB, whole, b):
        """-Y A X of 8 rows each: the upper 8 rows of products are of the first pair, the lower 8 of the second."""
        row, k = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        of_Y = columns + ((8 + k) * PITCH_INVERSE + 8 + row)
        y = tf32s(*[load_one(of_Y + place * PITCH_INVERSE) for place in (0, 16, 4, 20)])
        of_X = [load(columns + ((row + 16 * p) * PITCH_INVERSE + 2 * k), 2) for p in range(2)]
        x = tf32s(of_X[0][0], of_X[1][0], of_X[0][1], of_X[1][1])
        for p in range(2):
            of_A = A_kk + ((16 * p + 8 + k) * PITCH_A + 16 * p + row)
            YA = mma_tf32([Float32(0.0)] * 4, y, tf32s(load_one(of_A), load_one(of_A + 4 * PITCH_A)))
            found = mma_tf32([Float32(0.0)] * 4, x, tf32s(-YA[2 * p], -YA[2 * p + 1]))[2 * p : 2 * p + 2]
            store(columns + ((16 * p + row) * PITCH_INVERSE + 8 + 2 * k), found)
            self.put(TB, whole, b, 16 * p + row, 16 * p + 8 + 2 * k, found)

    def merge_blocks_of_16(self, A_kk, columns, TB, whole, b):
        row, k = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        found = self.times_X(self.product_of_16(A_kk, columns), columns)
        for n in range(2):
            for r in range(2):
                self.put(TB, whole, b, row + 8 * r, 16 + 8 * n + 2 * k, found[n][2 * r : 2 * r + 2])

    def product_of_16(self, A_kk, columns):
        """Y A, 8 of its columns each."""
        row, k = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        YA = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for step in range(0, 16, 8):
            of_Y = columns + ((16 + step + k) * PITCH_INVERSE + row)
            y = tf32s(*[load_one(of_Y + offset) for offset in (0, 8, 4 * PITCH_INVERSE, 4 * PITCH_INVERSE + 8)])
            for n in range(2):
                of_A = A_kk + ((16 + step + k) * PITCH_A + 8 * n + row)
                YA[n] = mma_tf32(YA[n], y, tf32s(load_one(of_A), load_one(of_A + 4 * PITCH_A)))
        return YA

    def times_X(self, YA, columns):
        """-Y A X, 8 of its rows each."""
        row, k = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        found = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for step in range(2):
            upper, lower = [load(columns + ((row + r) * PITCH_INVERSE + 8 * step + 2 * k), 2) for r in (0, 8)]
            x = tf32s(upper[0], lower[0], upper[1], lower[1])
            for n in range(2):
                found[n] = mma_tf32(found[n], x, tf32s(-YA[step][2 * n], -YA[step][2 * n + 1]))
        return found

    def put(self, TB, whole, b, column, row, values):
        """Some rows of a column of the inverse."""
        self.put_TB(TB, self.b_of(b, column), column, row, values)
        if self.kept:
            self.put_whole(whole, column, row, values)

    def b_of(self, b, column):
        return Float32(1.0) if b is None else b[column]

    def put_TB(self, TB, of_column, column, row, values):
        store(TB + self.TB_at(column, row) // 2, [x * of_column for x in values])

    def put_whole(self, whole, column, row, values):
        for i in range(len(values)):
            whole[swizzle_64B(row + i, column) // 2] = values[i].to(BFloat16)

    @cute.jit
    def zeros(self, columns, TB):
        """What is zero in every inverse, by one warp: above the blocks of 8 rows."""
        lane, zero = cute.arch.lane_idx(), [Float32(0.0)] * 8
        for above in cutlass.range_constexpr(3):
            if above < lane >> 3:
                store(TB + self.TB_at(lane, above * 8) // 2, zero)
        if lane & 8 != 0:
            for i in cutlass.range_constexpr(0, 8, 4):
                store(columns + (lane * PITCH_INVERSE + i), zero[:4])
