// cp.async: 16 bytes from global to shared memory, in groups.
#pragma once

#include "numbers.cuh"

// `bytes` of the 16 are read, the others are zero.
__device__ __forceinline__ void copy16(void* to, const void* from, int bytes = 16) {
  const u32 address = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

// WIDE elements of each of ROWS rows, `stride` apart, by the ALL threads of a CTA; zero from row `rows` on.
template <int ROWS, int WIDE, int ALL, int PITCH>
__device__ __forceinline__ void copy_rows(float (*to)[PITCH], const float* from, i64 stride, int rows) {
#pragma unroll
  for (int n = 0; n < ROWS * WIDE / 4 / ALL; ++n) {
    const int index = threadIdx.x + n * ALL, i = index / (WIDE / 4), e = index % (WIDE / 4) * 4;
    const bool has_row = i < rows;
    copy16(&to[i][e], from + (has_row ? i * stride + e : 0), has_row ? 16 : 0);
  }
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All groups but the last `still` are there, for the thread that requested them.
template <int still>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(still) : "memory");
}
