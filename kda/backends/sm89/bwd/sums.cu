// dA_log and ddt_bias of one value head: sums over all chunks, always in one order.
//
// A CTA of 512 threads: thread K j + d has channel d of every (512 / K)th chunk.
// One barrier: sums of threads are there.  Shared memory: 4 KiB.
#include "places.cuh"

constexpr int K = HEAD_K, THREADS = 512, GROUPS = THREADS / K;

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_chunks(const float* of_A_log, const float* of_dt_bias, const i64* first_chunk, float* dA_log, float* ddt_bias,
               i64 N, i64 chunks, i64 HV) {
  __shared__ float of[2][THREADS];
  const i64 head = blockIdx.x, all = PACKED ? first_chunk[N] : chunks;
  const int d = threadIdx.x % K;
  float A = 0.0f, bias = 0.0f;
#pragma unroll 4
  for (i64 c = threadIdx.x / K; c < all; c += GROUPS) {
    if (RATE) A += of_A_log[(c * HV + head) * K + d];
    if (BIAS) bias += of_dt_bias[(c * HV + head) * K + d];
  }
  of[0][threadIdx.x] = A, of[1][threadIdx.x] = bias;
  __syncthreads();  // sums of all threads are there
  if (BIAS && threadIdx.x < GATES) {  // one gate per head: of all channels
    float sum = 0.0f;
    for (int j = 0; j < THREADS / GATES; ++j) sum += of[1][GATES * j + OF_GATE(d)];
    ddt_bias[head * GATES + OF_GATE(d)] = sum;
  }
  if (RATE && threadIdx.x < 32) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < THREADS; i += 32) sum += of[0][i];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (threadIdx.x == 0) dA_log[head] = sum;
  }
}
