// Products of float32 matrices on tensor cores, 3xTF32: x = hi + lo, hi rounded to tf32, lo cut to it, and
//   x y = hi hi + (hi lo + lo hi)
// in two accumulators, for a tensor core cuts what it adds up: the small one is cut at 2^-11 of the sum, and the large
// one is emptied into an IEEE sum after at most four steps of k.
//
// mma.m16n8k8, lane = 4 g + t:  A (16, 8) rows g and g + 8, k t and t + 4;  B (8, 8) k t and t + 4, column g;
// C (16, 8) rows g and g + 8, columns 2 t and 2 t + 1.  Which k is which does not matter as long as A and B agree.
#pragma once

#include "numbers.cuh"

struct Lane {
  int lane, g, t;
  __device__ Lane() : lane(threadIdx.x % 32), g(lane / 4), t(lane % 4) {}
};

__device__ __forceinline__ void split(float x, u32& hi, u32& lo) {
  hi = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;  // to nearest
  lo = __float_as_uint(x - __uint_as_float(hi));      // a nan stays one here
}

struct A {
  u32 hi[4], lo[4];  // rows g, g + 8 at k t, then the same at k t + 4
  __device__ __forceinline__ A(float g0, float h0, float g4, float h4) {
    split(g0, hi[0], lo[0]);
    split(h0, hi[1], lo[1]);
    split(g4, hi[2], lo[2]);
    split(h4, hi[3], lo[3]);
  }
};

struct B {
  u32 hi[2], lo[2];
  __device__ __forceinline__ B(float x0, float x4) {
    split(x0, hi[0], lo[0]);
    split(x4, hi[1], lo[1]);
  }
  __device__ __forceinline__ B(float4 parts) {
    hi[0] = __float_as_uint(parts.x), hi[1] = __float_as_uint(parts.y);
    lo[0] = __float_as_uint(parts.z), lo[1] = __float_as_uint(parts.w);
  }
};

// hi of both, lo of both.
__device__ __forceinline__ float4 parts_of(float x, float y) {
  const B b(x, y);
  return make_float4(__uint_as_float(b.hi[0]), __uint_as_float(b.hi[1]), __uint_as_float(b.lo[0]),
                     __uint_as_float(b.lo[1]));
}

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A tile (16, 8) of a product.
struct Tile {
  float sum[4], large[4], small[4];
  __device__ __forceinline__ Tile() {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = large[i] = small[i] = 0.0f;
  }
  __device__ __forceinline__ void add(const A& a, const B& b) {
    mma(small, a.lo, b.hi);
    mma(small, a.hi, b.lo);
    mma(large, a.hi, b.hi);
  }
  // At least every four steps.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += large[i], large[i] = 0.0f;
  }
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += large[i] + small[i], large[i] = small[i] = 0.0f;
  }
};
