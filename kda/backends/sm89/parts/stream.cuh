// Left operands, each read by one warp alone, on their way from global memory through a ring of the warp's own; right
// ones in shared memory, in their parts: of rows 2 r and 2 r + 1 both hi, then both lo.
//
// A stage is a tile (16, 16) of a row-major matrix, 1 KiB: lane 4 g + t requests columns 4 t .. 4 t + 3 of rows g and
// g + 8 and reads back only its own copies, so there is no barrier; for mma they are k t and t + 4 of two steps.
// Stages come in batches.  When the first of a batch is used, all of it goes to registers and the one after the next
// is requested into its place, so two are in flight, reaching into the next chunk if necessary.
//
// Not in registers alone: a warp counts its loads together, and who waits for one waits for the youngest.
#pragma once

#include "copies.cuh"
#include "products.cuh"

struct Stage {
  float4 g, h;
};

// A matrix of which a warp has COUNT stages in every chunk: PITCH elements a row, WIDE stages a tile of 16 rows.
template <int PITCH, int WIDE, int COUNT_>
struct Part {
  static constexpr int COUNT = COUNT_;
  const float* element;            // the lane's own element of the first stage of this chunk
  i64 by;                          // to the next chunk
  int begin = 0, end = COUNT - 1;  // the first and the last stage that are not zero
  __device__ __forceinline__ void ask(float4* slot, int stage, bool of_next) const {
    if (stage < 0 || stage >= COUNT) return;
    const float* from = element + (of_next ? by : 0) + stage / WIDE * (16 * PITCH) + stage % WIDE * 16;
    const int bytes = begin <= stage && stage <= end ? 16 : 0;
    copy16(slot, from, bytes);
    copy16(slot + 32, from + 8 * PITCH, bytes);
  }
};

// Stages of three matrices, chunk after chunk, used in the order of their numbers; an even number of batches a chunk,
// of MOST stages or fewer.
template <int MOST, typename First, typename Second, typename Third>
struct Stream {
  static constexpr int SECOND = First::COUNT, THIRD = SECOND + Second::COUNT, END = THIRD + Third::COUNT;
  static constexpr int PAIRS = END > 2 * MOST ? (END + 2 * MOST - 1) / (2 * MOST) : 1;
  static constexpr int BATCH = END ? (END + 2 * PAIRS - 1) / (2 * PAIRS) : 1, DEPTH = 2 * BATCH, ALL = DEPTH * PAIRS;
  float4* const ring;  // the lane's own element of the first slot
  First first;
  Second second;
  Third third;
  i64 chunks;  // left, with this one
  Stage batch[BATCH] = {};

  __device__ __forceinline__ Stream(float4* of_warp, const First& first, const Second& second, const Third& third,
                                    i64 chunks)
      : ring(of_warp + threadIdx.x % 32), first(first), second(second), third(third), chunks(chunks) {
    ask(0, chunks > 0);
    ask(BATCH, chunks > 0);
  }
  // For the batch that begins with stage n of this chunk, or with n - ALL of the next.  A group may be of nothing.
  __device__ __forceinline__ void ask(int n, bool exists) {
#pragma unroll
    for (int i = n; i < n + BATCH; ++i) {
      if (!exists) continue;
      float4* slot = ring + i % DEPTH * 64;
      const bool of_next = i >= ALL;
      const int stage = i % ALL;
      first.ask(slot, stage, of_next);
      second.ask(slot, stage - SECOND, of_next);
      third.ask(slot, stage - THIRD, of_next);
    }
    commit();
  }
  __device__ __forceinline__ Stage take(int n) {
    if (n % BATCH == 0) {
      wait<1>();
#pragma unroll
      for (int i = 0; i < BATCH && n + i < END; ++i) {
        const float4* slot = ring + (n + i) % DEPTH * 64;
        batch[i].g = slot[0], batch[i].h = slot[32];
      }
      ask(n + DEPTH, n + DEPTH < ALL || chunks > 1);
    }
    return batch[n % BATCH];
  }
  __device__ __forceinline__ void next_chunk() {
#pragma unroll
    for (int n = END; n < ALL; ++n) take(n);
    --chunks, first.element += first.by, second.element += second.by, third.element += third.by;
  }
};

// 16 rows and 8 columns, as mma leaves them, to a right operand.  Lanes of rows 2 r and 2 r + 1 swap, and each has both
// rows of one column.
template <int PITCH>
__device__ __forceinline__ void shelve(float4 (*to)[PITCH], int row, int column, const float (&x)[4], Lane l) {
  const int odd = l.g % 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float got = __shfl_xor_sync(~0u, odd ? x[2 * h] : x[2 * h + 1], 4);
    to[(row + l.g) / 2 + 4 * h][column + 2 * l.t + odd] =
        odd ? parts_of(got, x[2 * h + 1]) : parts_of(x[2 * h], got);
  }
}

// tiles += a stage @ 16 rows of x from `row`: TILES times 8 columns.
template <int TILES, int PITCH>
__device__ __forceinline__ void multiply(Tile (&tile)[TILES], const Stage& stage, const float4 (*x)[PITCH], int row,
                                         Lane l) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const A a = step ? A(stage.g.z, stage.h.z, stage.g.w, stage.h.w) : A(stage.g.x, stage.h.x, stage.g.y, stage.h.y);
#pragma unroll
    for (int n = 0; n < TILES; ++n) tile[n].add(a, B(x[row / 2 + 2 * l.t + step][8 * n + l.g]));
  }
}

// tiles = COUNT stages from number `first` on @ x.
template <int COUNT, int TILES, int PITCH, typename Stream>
__device__ __forceinline__ void product(Tile (&tile)[TILES], Stream& stream, int first, const float4 (*x)[PITCH],
                                        Lane l) {
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    multiply(tile, stream.take(first + n), x, 16 * n, l);
    if (n % 2)  // two stages do not wait for the two before
#pragma unroll
      for (int i = 0; i < TILES; ++i) tile[i].finish();
  }
}
