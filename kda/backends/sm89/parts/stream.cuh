// Left operands, each read by one warp alone, on their way from global memory to its registers.
//
// A stage is a tile (16, 16) of a row-major matrix: lane 4 g + t has columns 4 t .. 4 t + 3 of rows g and g + 8, which
// for mma are k t and t + 4 of two steps.  It is asked for DEPTH stages before it is taken, in the chunk before if need
// be.  Numbers of stages are known where loops are unrolled, so what is on its way has registers of its own.
#pragma once

#include "products.cuh"

struct Stage {
  float4 g, h;
};

// A matrix of which a warp has COUNT stages in every chunk: PITCH elements a row, WIDE stages a tile of 16 rows.
template <int PITCH, int WIDE, int COUNT_>
struct Part {
  static constexpr int COUNT = COUNT_;
  const float* at;     // the lane's own element of the first stage of this chunk
  i64 by;              // to the next chunk
  int stages = COUNT;  // that are not zero
  __device__ __forceinline__ void load(Stage& to, int stage, bool of_next) const {
    if (stage < 0 || stage >= COUNT || stage >= stages) return;
    const float* from = at + (of_next ? by : 0) + stage / WIDE * (16 * PITCH) + stage % WIDE * 16;
    to.g = *(const float4*)from, to.h = *(const float4*)(from + 8 * PITCH);
  }
};

// Stages of three matrices, chunk after chunk, taken in the order of their numbers.
template <int DEPTH, typename First, typename Second, typename Third>
struct Stream {
  static constexpr int SECOND = First::COUNT, THIRD = SECOND + Second::COUNT, END = THIRD + Third::COUNT;
  static constexpr int ALL = (END + DEPTH - 1) / DEPTH * DEPTH;
  First first;
  Second second;
  Third third;
  i64 chunks;  // left, with this one
  Stage waiting[DEPTH];

  __device__ __forceinline__ Stream(const First& first, const Second& second, const Third& third, i64 chunks)
      : first(first), second(second), third(third), chunks(chunks) {
#pragma unroll
    for (int n = 0; n < DEPTH; ++n) {
      waiting[n] = {};
      if (chunks > 0) load(n, false);
    }
  }
  __device__ __forceinline__ void load(int n, bool of_next) {
    Stage& to = waiting[n % DEPTH];
    first.load(to, n, of_next), second.load(to, n - SECOND, of_next), third.load(to, n - THIRD, of_next);
  }
  __device__ __forceinline__ Stage take(int n) {
    const Stage now = waiting[n % DEPTH];
    if (n + DEPTH < ALL) load(n + DEPTH, false);
    else if (chunks > 1) load(n + DEPTH - ALL, true);
    return now;
  }
  __device__ __forceinline__ void next_chunk() {
#pragma unroll
    for (int n = END; n < ALL; ++n) take(n);
    --chunks, first.at += first.by, second.at += second.by, third.at += third.by;
  }
};

// tiles += a stage @ 16 rows of x from `row`, which is in its parts: TILES times 8 columns.
template <int TILES, int PITCH>
__device__ __forceinline__ void multiply(Tile (&tile)[TILES], const Stage& of, const float2 (*x)[PITCH], int row,
                                         Lane l) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const A a = step ? A(of.g.z, of.h.z, of.g.w, of.h.w) : A(of.g.x, of.h.x, of.g.y, of.h.y);
    const float2* at = &x[row + 4 * l.t + 2 * step][l.g];
#pragma unroll
    for (int n = 0; n < TILES; ++n) tile[n].add(a, B(at[8 * n], at[PITCH + 8 * n]));
  }
}

// tiles = COUNT stages from number `first` on @ x from `row` on; those past `stages` are zero.
template <int COUNT, int TILES, int PITCH, typename Stream>
__device__ __forceinline__ void product(Tile (&tile)[TILES], Stream& stream, int first, const float2 (*x)[PITCH],
                                        Lane l, int stages = COUNT, int row = 0) {
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    const Stage of = stream.take(first + n);
    if (n < stages) multiply(tile, of, x, row + 16 * n, l);
    if (n % 2)  // two stages do not wait for the two before
#pragma unroll
      for (int i = 0; i < TILES; ++i) tile[i].finish();
  }
}
