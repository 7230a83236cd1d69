// first_chunk[n] = sum over m < n of ceil((cu_seqlens[m + 1] - cu_seqlens[m]) / C), for n = 0 .. N.
//
// One CTA of 256 threads; a thread has one sequence of each 256 in turn.  Two barriers a turn: sums of warps are there;
// all of them were read.  Shared memory: 32 bytes.
#include "places.cuh"

constexpr int C = CHUNK, THREADS = 256, WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS) tables(const Offset* cu_seqlens, i64* first_chunk, i64 N) {
  __shared__ i64 of_warp[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 before = 0;
  for (i64 n0 = 0; n0 < N; n0 += THREADS) {
    const i64 n = n0 + threadIdx.x;
    const i64 count = n < N ? ((i64)cu_seqlens[n + 1] - (i64)cu_seqlens[n] + C - 1) / C : 0;
    i64 sum = count;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const i64 other = __shfl_up_sync(~0u, sum, by);
      if (lane >= by) sum += other;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();  // sums of all warps are there
    i64 first = before + sum - count;
    for (int w = 0; w < WARPS; ++w) {
      if (w < warp) first += of_warp[w];
      before += of_warp[w];
    }
    if (n < N) first_chunk[n] = first;
    __syncthreads();  // and were read
  }
  if (threadIdx.x == 0) first_chunk[N] = before;
}
