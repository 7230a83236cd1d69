// What both chains over chunks have in common: their sizes, and what a warp keeps of a state (K, BV), in registers.
#pragma once

#include "stream.cuh"

constexpr int K = HEAD_K, V = HEAD_V, C = CHUNK, WARPS = C / 8, THREADS = 32 * WARPS, HALF = WARPS / 2;
constexpr int BV = COLUMNS, TILES = BV / 8, PITCH = BV + 1, SLOTS = RING;
// Warps that keep the state, and their tiles of 16 rows.
constexpr int OWNERS = K / 16 < WARPS ? K / 16 : WARPS, OWN = K / 16 / OWNERS;

// A warp's rows of the state.
template <bool V_FIRST>
struct State {
  float value[OWN][TILES][4];
  // Element [n][i] of tile m is row 16 m + g + 8 (i / 2), column 8 n + 2 t + i % 2 of the CTA's.
  template <typename Each>
  __device__ __forceinline__ void each(int warp, Lane l, Each each) {
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          each(value[m][n][i], 16 * (OWN * warp + m) + l.g + i / 2 * 8, 8 * n + 2 * l.t + i % 2);
  }
  __device__ __forceinline__ void load(const float* from, i64 part, int warp, Lane l) {
    each(warp, l, [&](float& x, int row, int column) { x = from ? from[offset(row, column, part)] : 0.0f; });
  }
  __device__ __forceinline__ void store(float* to, i64 part, int warp, Lane l) {
    each(warp, l, [&](float& x, int row, int column) { to[offset(row, column, part)] = x; });
  }
  __device__ __forceinline__ void share(float4 (*to)[PITCH], int warp, Lane l) {
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n) shelve(to, 16 * (OWN * warp + m), 8 * n, value[m][n], l);
  }
  __device__ __forceinline__ static i64 offset(int row, int column, i64 part) {
    return V_FIRST ? (part * BV + column) * K + row : row * V + part * BV + column;
  }
};

// Rows of tokens (.., HV, V) at a warp's 16 rows of a chunk: a pair of columns a lane.
struct TokenRows {
  i64 offset, stride;  // elements to the lane's row g; elements of 8 rows
  int row;
  __device__ __forceinline__ TokenRows(i64 begin, i64 head, i64 HV, i64 part, int row, Lane l)
      : offset(((begin + row + l.g) * HV + head) * V + part * BV + 2 * l.t), stride(HV * V * 8), row(row + l.g) {}
  // Stores a pair of columns of both rows, if a chunk of `rows` rows has them.
  __device__ __forceinline__ void put(float* to, int n, int rows, const float (&x)[4]) const {
    if (row < rows) *(float2*)(to + offset + 8 * n) = make_float2(x[0], x[1]);
    if (row + 8 < rows) *(float2*)(to + offset + stride + 8 * n) = make_float2(x[2], x[3]);
  }
  __device__ __forceinline__ void move(int chunks) { offset += chunks * (C / 8) * stride; }
};
