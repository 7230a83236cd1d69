// What is left of bwd/gate for one token and q/k head: back through the l2norms, and beta.
//
//   dq = (dqn - qn (qn . dqn)) / |q|, dqn a sum over the value heads of the q/k head; dk alike
//   dbeta = db through its sigmoid, db a sum of shares; dg of one gate per head is such a sum
//
// A warp a token and head, lanes along K.  No barrier, no shared memory.  Tokens of no sequence get zeros.
#include "places.cuh"

constexpr int K = HEAD_K, EACH = K / 32, SHARES = 1 + K / 32, WARPS = 8;

__device__ __forceinline__ float sum_of(float x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
}

// Gradient of x (K), whose normalised gradients by `group` value heads are dxn (group, K).
__device__ __forceinline__ void norm_bwd(const float* x, const float* dxn, float* dx, i64 group, bool inside,
                                         int lane) {
  float y[EACH], dy[EACH] = {}, squares = 0.0f, along = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int d = lane + 32 * i;
    if (inside)
      for (i64 j = 0; j < group; ++j) dy[i] += dxn[j * K + d];
    y[i] = inside && NORM ? x[d] : 0.0f;
    squares = fmaf(y[i], y[i], squares);
  }
  if (NORM) {
    const float r = inverse_norm(sum_of(squares));
#pragma unroll
    for (int i = 0; i < EACH; ++i) y[i] *= r, along = fmaf(y[i], dy[i], along);
    along = sum_of(along);
#pragma unroll
    for (int i = 0; i < EACH; ++i) dy[i] = r * fmaf(-y[i], along, dy[i]);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) dx[lane + 32 * i] = dy[i];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    norms_bwd(const float* q, const float* k, const float* beta, const float* dqn, const float* dkn, const float* db,
              const Offset* cu_seqlens, float* dq, float* dk, float* dbeta,
#if PER_HEAD
              const float* dg_shares, float* dg,
#endif
              i64 tokens, i64 N, i64 H, i64 HV) {
  const i64 number = (i64)blockIdx.x * WARPS + threadIdx.x / 32, group = HV / H;
  const int lane = threadIdx.x % 32;
  if (number >= tokens * H) return;
  const i64 token = number / H, first = number * group;  // its value heads, in rows of (tokens, HV)
  const bool inside = !PACKED || token < (i64)cu_seqlens[N];
  norm_bwd(q + number * K, dqn + first * K, dq + number * K, group, inside, lane);
  norm_bwd(k + number * K, dkn + first * K, dk + number * K, group, inside, lane);
  for (i64 j = lane; j < group; j += 32) {
    float sum = 0.0f;
    if (inside) {
#pragma unroll
      for (int share = 0; share < SHARES; ++share) sum += db[share * tokens * HV + first + j];
      if (BETA_IS != AS_IT_IS) sum *= sigmoid_slope(beta[first + j]) * (BETA_IS == TWICE_SIGMOID ? 2.0f : 1.0f);
    }
    dbeta[first + j] = sum;
#if PER_HEAD
    sum = 0.0f;
    for (int share = 0; inside && share < SHARES - 1; ++share) sum += dg_shares[share * tokens * HV + first + j];
    dg[first + j] = sum;
#endif
  }
}
