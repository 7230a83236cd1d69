// What a chain over chunks keeps: a warp's rows of a state (K, BV), in registers.
#pragma once

#include "stream.cuh"

// A stage of the stream times rows of x.
template <int TILES, int PITCH, typename Stream>
__device__ __forceinline__ void step(Tile (&tile)[TILES], Stream& stream, const float2 (*x)[PITCH], int row, Lane l) {
  float4 g, h;
  stream.take(g, h);
  multiply<TILES, PITCH>(tile, g, h, &x[0][0], row, l);
}

template <int TILES>
__device__ __forceinline__ void settle(Tile (&tile)[TILES]) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) tile[n].settle();
}

template <int TILES>
__device__ __forceinline__ void finish(Tile (&tile)[TILES]) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) tile[n].finish();
}

// A warp's rows of the state.
template <int K, int V, int BV, int OWN, bool V_FIRST>
struct State {
  static constexpr int TILES = BV / 8;
  float of[OWN][TILES][4];
  // Element [n][i] of tile m is row 16 m + g + 8 (i / 2), column 8 n + 2 t + i % 2.  `at` begins at the warp's columns.
  template <typename Each>
  __device__ __forceinline__ void each(int warp, Lane l, Each each) {
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          each(of[m][n][i], 16 * (OWN * warp + m) + l.g + i / 2 * 8, 8 * n + 2 * l.t + i % 2);
  }
  __device__ __forceinline__ void load(const float* from, i64 part, int warp, Lane l) {
    each(warp, l, [&](float& x, int row, int column) { x = from ? from[at(row, column, part)] : 0.0f; });
  }
  __device__ __forceinline__ void store(float* to, i64 part, int warp, Lane l) {
    each(warp, l, [&](float& x, int row, int column) { to[at(row, column, part)] = x; });
  }
  __device__ __forceinline__ void share(float2 (*to)[BV + 1], int warp, Lane l) {
    each(warp, l, [&](float& x, int row, int column) { to[row][column] = parts_of(x); });
  }
  __device__ __forceinline__ static i64 at(int row, int column, i64 part) {
    return V_FIRST ? (part * BV + column) * K + row : row * V + part * BV + column;
  }
};

// Rows of tokens (.., HV, V) at a warp's 16 rows of a chunk: a pair of columns a lane.
template <int V, int BV>
struct TokenRows {
  i64 at, stride;  // of the lane's row g
  bool g, h;       // its rows are there
  __device__ __forceinline__ TokenRows(i64 begin, i64 head, i64 HV, i64 part, int row, i64 rows, Lane l)
      : at(((begin + row + l.g) * HV + head) * V + part * BV + 2 * l.t), stride(HV * V * 8), g(row + l.g < rows),
        h(row + l.g + 8 < rows) {}
  __device__ __forceinline__ void put(float* to, int n, float x0, float x1, float x2, float x3) const {
    if (g) *(float2*)(to + at + 8 * n) = make_float2(x0, x1);
    if (h) *(float2*)(to + at + stride + 8 * n) = make_float2(x2, x3);
  }
};
