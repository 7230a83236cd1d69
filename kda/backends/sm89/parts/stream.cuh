// Operands that one warp alone reads, on their way from global memory: a ring of stages in shared memory, 1 KiB each.
//
// A stage is a tile (16, 16) of a row-major matrix: lane 4 g + t asks for columns 4 t .. 4 t + 3 of rows g and g + 8 and
// reads back what it asked for itself, so there is no barrier.  For mma the four columns are k t and t + 4 of two steps.
#pragma once

#include "copies.cuh"
#include "products.cuh"

template <int DEPTH>
struct Ring {
  float4* mine;  // of this lane: [DEPTH][2][32]
  int in, out;
  __device__ __forceinline__ Ring(float4* of_warp, Lane l) : mine(of_warp + l.lane), in(0), out(0) {}
  // `from` is the lane's own element of row g.
  __device__ __forceinline__ void ask(const float* from, int pitch) {
    copy16(mine + 64 * in, from);
    copy16(mine + 64 * in + 32, from + 8 * pitch);
    in = in + 1 == DEPTH ? 0 : in + 1;
  }
  // The stage asked for DEPTH groups ago.
  __device__ __forceinline__ void take(float4& g, float4& h) {
    wait<DEPTH - 1>();
    g = mine[64 * out], h = mine[64 * out + 32];
    out = out + 1 == DEPTH ? 0 : out + 1;
  }
};

// Stages of one matrix in every chunk: its rows from `at`, the lane's own element, in tiles of 16 rows, `wide` stages each.
struct Part {
  const float* at;
  i64 by;  // to the next chunk
  int pitch, wide, stages;
};

// The stages of one warp, chunk after chunk: of up to three matrices, one after the other.
struct Stream {
  Part part[3];
  i64 left;  // chunks
  int stage, ends[3];
  __device__ __forceinline__ Stream(const Part& a, const Part& b, const Part& c, i64 chunks)
      : part{a, b, c}, left(chunks), stage(0),
        ends{a.stages, a.stages + b.stages, a.stages + b.stages + c.stages} {
    if (ends[2] == 0) left = 0;
  }
  template <int DEPTH>
  __device__ __forceinline__ static void ask_of(Ring<DEPTH>& ring, const Part& of, int stage) {
    ring.ask(of.at + stage / of.wide * (16 * of.pitch) + stage % of.wide * 16, of.pitch);
  }
  // Asks for the next stage; a group is made even of nothing.
  template <int DEPTH>
  __device__ __forceinline__ void ask(Ring<DEPTH>& ring) {
    if (left > 0) {
      if (stage < ends[0]) ask_of(ring, part[0], stage);
      else if (stage < ends[1]) ask_of(ring, part[1], stage - ends[0]);
      else ask_of(ring, part[2], stage - ends[1]);
      if (++stage == ends[2]) {
        stage = 0, --left;
#pragma unroll
        for (int i = 0; i < 3; ++i) part[i].at += part[i].by;
      }
    }
    commit();
  }
};

// tiles += a stage @ 16 rows of x from `row`, which is in its parts: TILES times 8 columns.
template <int TILES, int PITCH>
__device__ __forceinline__ void multiply(Tile (&tile)[TILES], const float4& g, const float4& h, const float2* x, int row,
                                         Lane l) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const A a = step ? A(g.z, h.z, g.w, h.w) : A(g.x, h.x, g.y, h.y);
    const float2* at = x + (row + 4 * l.t + 2 * step) * PITCH + l.g;
#pragma unroll
    for (int n = 0; n < TILES; ++n) tile[n].add(a, B(at[8 * n], at[PITCH + 8 * n]));
  }
}
