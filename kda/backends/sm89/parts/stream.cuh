// Operands that one warp alone reads, on their way from global memory: a ring of stages in shared memory, 1 KiB each.
//
// A stage is a tile (16, 16) of a row-major matrix: lane 4 g + t asks for columns 4 t .. 4 t + 3 of rows g and g + 8
// and reads back what it asked for itself, so there is no barrier.  For mma the four columns are k t and t + 4 of two
// steps.
#pragma once

#include "copies.cuh"
#include "products.cuh"

// A matrix of which a warp has stages in every chunk: PITCH elements a row; WIDE stages a tile of 16 rows, 0 where
// there is but one tile.
template <int PITCH_, int WIDE_ = 0>
struct Part {
  static constexpr int PITCH = PITCH_, WIDE = WIDE_;
  const float* at;  // the lane's own element of the next stage
  i64 by;           // to the next chunk
  int stages;
  // Asks for stage `stage` of this chunk.
  __device__ __forceinline__ void ask(float4* slot, int stage) {
    copy16(slot, at);
    copy16(slot + 32, at + 8 * PITCH);
    at += 16;
    if (WIDE && stage % (WIDE ? WIDE : 1) == WIDE - 1) at += 16 * PITCH - 16 * WIDE;
  }
  __device__ __forceinline__ void next_chunk() {
    at += by - (WIDE ? stages / (WIDE ? WIDE : 1) * (16 * PITCH) : 16 * stages);
  }
};

// The stages of one warp, chunk after chunk: of some matrices, one after the other.
template <int DEPTH, typename First, typename Second, typename Third, typename Fourth>
struct Stream {
  First a;
  Second b;
  Third c;
  Fourth d;
  i64 chunks;  // left
  int stage;
  float4* slot;  // of this lane, in the ring: what is asked for lies where DEPTH stages ago something was
  float4* const ring;

  __device__ __forceinline__ Stream(float4* of_warp, First a, Second b, Third c, Fourth d, i64 chunks, Lane l)
      : a(a), b(b), c(c), d(d), chunks(a.stages + b.stages + c.stages + d.stages ? chunks : 0), stage(0),
        slot(of_warp + l.lane), ring(of_warp + l.lane) {
#pragma unroll 1
    for (int i = 0; i < DEPTH; ++i) ask();
  }
  // Asks for the next stage; a group is made even of nothing.
  __device__ __forceinline__ void ask() {
    const int of_b = a.stages, of_c = of_b + b.stages, of_d = of_c + c.stages;
    if (chunks > 0) {
      if (stage < of_b) a.ask(slot, stage);
      else if (stage < of_c) b.ask(slot, stage - of_b);
      else if (stage < of_d) c.ask(slot, stage - of_c);
      else if (Fourth::PITCH) d.ask(slot, stage - of_d);
      if (++stage == of_d + d.stages) {
        stage = 0, --chunks;
        a.next_chunk(), b.next_chunk(), c.next_chunk(), d.next_chunk();
      }
    }
    commit();
    slot = slot == ring + 64 * (DEPTH - 1) ? ring : slot + 64;
  }
  // The stage asked for DEPTH groups ago; and asks for another.
  __device__ __forceinline__ void take(float4& g, float4& h) {
    wait<DEPTH - 1>();
    g = slot[0], h = slot[32];
    ask();
  }
};

// tiles += a stage @ 16 rows of x from `row`, which is in its parts: TILES times 8 columns.
template <int TILES, int PITCH>
__device__ __forceinline__ void multiply(Tile (&tile)[TILES], const float4& g, const float4& h, const float2* x,
                                         int row, Lane l) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const A a = step ? A(g.z, h.z, g.w, h.w) : A(g.x, h.x, g.y, h.y);
    const float2* at = x + (row + 4 * l.t + 2 * step) * PITCH + l.g;
#pragma unroll
    for (int n = 0; n < TILES; ++n) tile[n].add(a, B(at[8 * n], at[PITCH + 8 * n]));
  }
}
