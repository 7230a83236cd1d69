// X = (I + A)^-1 of a strictly lower triangular A (C, C), both in shared memory, by substitution.
//
// A thread owns a column of a diagonal block of 16 rows, in IEEE float32; then blocks are joined by 3xTF32 products:
// X10 = -X11 (A10 X00), a warp for each 8 columns.  A10 X00 waits above the diagonal of X, where nothing else is; only
// the diagonal blocks of 16 rows hold zeros there.
#pragma once

#include "products.cuh"

template <int C, int P>
__device__ __forceinline__ void solve_diagonal(float (*X)[P], const float (*A_kk)[P]) {
  if (threadIdx.x >= C) return;
  const int first = threadIdx.x / 16 * 16, column = threadIdx.x % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] = fmaf(-A_kk[first + i][first + j], x[j], x[i]);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) X[first + i][first + column] = x[i];
}

// 16 rows from `row` of x, k from `from` to `to`, times 8 columns from `column` of y, whose row `first` meets k = `from`.
template <int P, int Q>
__device__ __forceinline__ Tile product(const float (*x)[P], int row, int from, int to, const float (*y)[Q], int first,
                                        int column, Lane l) {
  Tile tile;
  for (int k = from; k < to; k += 16) {
#pragma unroll
    for (int step = 0; step < 16; step += 8) {
      const float2 g = *(const float2*)&x[row + l.g][k + step + 2 * l.t];
      const float2 h = *(const float2*)&x[row + l.g + 8][k + step + 2 * l.t];
      const int y_row = first + k - from + step + 2 * l.t;
      tile.add(A(g.x, h.x, g.y, h.y), B(y[y_row][column + l.g], y[y_row + 1][column + l.g]));
    }
    tile.settle();
  }
  tile.finish();
  return tile;
}

template <int P>
__device__ __forceinline__ void put(float (*x)[P], int row, int column, const Tile& tile, float sign, Lane l) {
  *(float2*)&x[row + l.g][column + 2 * l.t] = make_float2(sign * tile.sum[0], sign * tile.sum[1]);
  *(float2*)&x[row + l.g + 8][column + 2 * l.t] = make_float2(sign * tile.sum[2], sign * tile.sum[3]);
}

template <int S, int C, int P>
__device__ __forceinline__ void join(float (*X)[P], const float (*A_kk)[P], int warp, Lane l) {
  const int block = warp / (S / 8), tile = warp % (S / 8);
  if (block >= C / (2 * S)) return;
  const int r0 = block * 2 * S, r1 = r0 + S, column = 8 * tile, diagonal = tile / 2 * 16;
#pragma unroll 1
  for (int row = 0; row < S; row += 16)
    put(X, r0 + row, r1 + column,
        product(A_kk, r1 + row, r0 + diagonal, r1, X, r0 + diagonal, r0 + column, l), 1.0f, l);
  __syncwarp();
#pragma unroll 1
  for (int row = 0; row < S; row += 16)
    put(X, r1 + row, r0 + column, product(X, r1 + row, r1, r1 + row + 16, X, r0, r1 + column, l), -1.0f, l);
}

// All threads; a barrier before it, and one at its end.
template <int C, int P>
__device__ __forceinline__ void inverse(float (*X)[P], const float (*A_kk)[P], int warp, Lane l) {
  solve_diagonal<C, P>(X, A_kk);
  __syncthreads();  // the diagonal blocks are there
  join<16, C, P>(X, A_kk, warp, l);
  __syncthreads();
  if (C == 64) {
    join<C / 2, C, P>(X, A_kk, warp, l);
    // redundant: in a forward that saves nothing, which reads X after the next barrier
    __syncthreads();
  }
}
