// Decays between the rows of one chunk, without an exponent above zero and without a difference of sums.
//
//   M[i, j] = sum_K x_i y_j 2^(gc_i - gc_j)        i >= j
//
// A warp has 8 rows and, slice after slice of K, a channel a lane.  Pairs inside its 8 rows are IEEE products in
// registers, each decay a product of single ones.  The others go by halving: in a block of 2 S rows, S = 8, 16, 32, the
// decay from j in the first half to i in the second is that from j to the cut times that from the cut to i, both in
// [0, 1]: one 3xTF32 product of decayed rows.
//
// Prefixes and suffixes of a row are sums of the warp's own 8 rows and of totals of whole warps, terms <= 0 all.
#pragma once

#include "products.cuh"

constexpr int SLICE = 32;          // channels, one a lane
constexpr int PITCH = SLICE + 8;   // from row to row of a slice: pairs of floats of 4 rows lie in different banks

// Sums over the lanes of COUNT values, each in some lanes in the end: of 64, lane L has those of 2 L and 2 L + 1 in
// x[0] and x[1]; of 32 / n, lane L has that of L / n in x[0].
template <int COUNT, int BY = 16, int SIZE>
__device__ __forceinline__ void sum_lanes(float (&x)[SIZE], int lane) {
  if constexpr (COUNT > 1) {
    const bool upper = lane & BY;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      const float mine = upper ? x[i + COUNT / 2] : x[i], other = upper ? x[i] : x[i + COUNT / 2];
      x[i] = mine + __shfl_xor_sync(~0u, other, BY);
    }
  } else {
    x[0] += __shfl_xor_sync(~0u, x[0], BY);
  }
  if constexpr (BY > 1) sum_lanes<(COUNT > 1 ? COUNT / 2 : 1), BY / 2>(x, lane);
}

// Decays of a warp's 8 rows in one channel, in powers of two.
struct Rows {
  float after[8];   // from the first of the 8 rows to row r, with it
  float before[8];  // from row r, without it, to the last
  float total;      // log2 of the decay by all 8
  __device__ __forceinline__ Rows(const float (&g2)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < 8; ++r) sum += g2[r], after[r] = exp2_(sum);
    total = sum;
    sum = 0.0f;
#pragma unroll
    for (int r = 7; r >= 0; --r) before[r] = exp2_(sum), sum += g2[r];
  }
};

// log2 of the decays by the warps before this warp and after it, in its block of `warps`.
struct Around {
  float before, after;
  __device__ __forceinline__ Around(const float (*total)[SLICE], int warp, int warps, int lane) : before(0), after(0) {
    const int first = warp / warps * warps;
#pragma unroll
    for (int i = 0; i < warps; ++i) {
      const float other = total[first + i][lane];
      if (first + i < warp) before += other;
      if (first + i > warp) after += other;
    }
  }
};

// A level cuts blocks of 2 S = 16 << level rows in two: this has the decays between each of a warp's 8 rows and the
// cut, in powers of two.
struct ToCut {
  bool second;  // the rows are behind the cut
  float rest;   // the decay between the 8 rows and the cut
  __device__ __forceinline__ ToCut(const float (*total)[SLICE], int warp, int level, int lane) {
    const Around around(total, warp, 1 << level, lane);
    second = warp >> level & 1;
    rest = exp2_(second ? around.before : around.after);
  }
  __device__ __forceinline__ float decay(const Rows& rows, int r) const {
    return (second ? rows.after[r] : rows.before[r]) * rest;
  }
};

// Returns where a row lies if the halves of all blocks of 2 S rows that it belongs to follow each other.
__device__ __forceinline__ int packed(int row, int S) { return row / (2 * S) * S + row % S; }

// Pairs inside 8 rows: of each column j, `x = begin(j)`, then x times the decay from j to i, `each(i, j, x)`, for the
// rows i below it in turn, then `end(j)`.
template <typename Begin, typename Each, typename End>
__device__ __forceinline__ void walk_near(const float (&g2)[8], Begin begin, Each each, End end) {
  float decay[8];
#pragma unroll
  for (int r = 1; r < 8; ++r) decay[r] = exp2_(g2[r]);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float x = begin(j);
#pragma unroll
    for (int i = j + 1; i < 8; ++i) {
      x *= decay[i];
      each(i, j, x);
    }
    end(j);
  }
}

// Pairs of one slice inside 8 rows: [i][j] with i > j has k_i k_j, with i <= j q_j k_i, under their decay.
__device__ __forceinline__ void near_pairs(float (&pairs)[64], const float (&q)[8], const float (&k)[8],
                                           const float (&g2)[8]) {
  const auto begin = [&](int j) {
    pairs[9 * j] = fmaf(q[j], k[j], pairs[9 * j]);
    return k[j];
  };
  const auto each = [&](int i, int j, float kd) {
    pairs[8 * i + j] = fmaf(k[i], kd, pairs[8 * i + j]);
    pairs[8 * j + i] = fmaf(q[i], kd, pairs[8 * j + i]);
  };
  walk_near(g2, begin, each, [](int) {});
}

// A tile of 8 rows i in a second half and 8 columns j in the first half of the same block of 2 S rows.
template <int S>
struct FarTile {
  int i, j;  // first row and column
  __device__ __forceinline__ FarTile(int number) {
    constexpr int side = S / 8;
    const int block = number / (side * side), index = number % (side * side);
    i = block * 2 * S + S + index / side * 8;
    j = block * 2 * S + index % side * 8;
  }
  // x: decayed rows of k; y: decayed rows of q in second halves, one half after the other.
  __device__ __forceinline__ void add(float (&sum)[4], const float (*x)[PITCH], const float (*y)[PITCH], Lane l) const {
    Tile tile;
#pragma unroll
    for (int d = 0; d < SLICE; d += 8) {
      const float2 of_k = *(const float2*)&x[i + l.g][d + 2 * l.t];
      const float2 of_q = *(const float2*)&y[packed(i, S) + l.g][d + 2 * l.t];
      const float2 of_j = *(const float2*)&x[j + l.g][d + 2 * l.t];
      tile.add(A(of_k.x, of_q.x, of_k.y, of_q.y), B(of_j.x, of_j.y));
    }
    tile.finish();
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[n] += tile.sum[n];
  }
};
