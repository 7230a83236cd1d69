// fwd/gate, fwd/intra and fwd/wy of one chunk and one value head.
//
//   qn, kn, b, g2      l2norm, beta, gate (numbers.cuh)
//   A_qk, A_kk         IEEE products inside 8 rows, 3xTF32 products by halving beyond (pairs.cuh)
//   A_inv              (I + A_kk)^-1, by substitution (inverse.cuh)
//   w, u               A_inv @ (b kn 2^gc), A_inv @ (b v): 3xTF32
//   qg = qn 2^gc;  kg = kn 2^(gc_last - gc);  gc_last
//
// A CTA has C / 8 warps, a warp 8 rows; lanes go along 32 channels of K, slice after slice.  Tiles are (chunk, head)
// with all of a chunk's rows: w, qg (C, K), kg_t (K, C), u (C, V), A_qk (C, C), gc_last (K); rows past the end are 0.
// KEEP 1: A_qk and A_inv go to rows of tokens (tokens, HV, C) as well.  KEEP 2, for a backward: kg (C, K), w_t (K, C),
// A_inv (C, C) and 1 / |q|, 1 / |k| and b (3, C) too, and transposed qg (K, C) and A_qk (C, C) in place of qg and A_qk.
//
// Barriers: two a slice (totals of warps are there; decayed rows are there), then A, the inverse's, v.
// Shared memory: kE (C, K + 4), and in one place decayed rows of a slice, then X, A_kk, A_qk (C, C + 8), then X and v:
// 90,880 bytes at K = 128, C = 64.
#include "inverse.cuh"
#include "pairs.cuh"
#include "places.cuh"

constexpr int K = HEAD_K, V = HEAD_V, C = CHUNK, WARPS = C / 8, THREADS = 32 * WARPS, LEVELS = C == 64 ? 3 : 2;
constexpr int P = C + 8;

struct Shared {
  float kE[C][K + 4];  // kn 2^gc
  union {
    struct {
      float x[LEVELS][C][PITCH], y[LEVELS][C / 2][PITCH];
    };
    struct {
      float X[C][P];
      union {
        struct {
          float A_kk[C][P], A_qk[C][P];
        };
        float v[C][V + 4];
      };
    };
  };
  float total[WARPS][SLICE], qs[C], ks[C], b[C];
};

struct Inputs {
  const float *q, *k, *v, *g, *beta, *A_log, *dt_bias;  // q .. beta begin at the chunk's first row
};

struct Tiles {
  float *w, *qg, *kg_t, *u, *A_qk, *gc_last, *w_t, *kg, *A_inv, *of_rows;
};

// 8 rows of a channel, in a transposed tile.
__device__ __forceinline__ void put_channel(float* to, const float (&x)[8]) {
  ((float4*)to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  ((float4*)to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// 1 / |q| and 1 / |k| of a warp's rows, and their step sizes.
__device__ __forceinline__ void norms(Shared& s, const Inputs& x, i64 q_stride, i64 HV, int rows, int warp, Lane l) {
  if (NORM) {
    float squares[16] = {};  // q, k
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const i64 at = min(8 * warp + r, rows - 1) * q_stride + l.lane;
#pragma unroll
      for (int d = 0; d < K; d += 32) {
        const float a = x.q[at + d], b = x.k[at + d];
        squares[r] = fmaf(a, a, squares[r]), squares[r + 8] = fmaf(b, b, squares[r + 8]);
      }
    }
    sum_lanes<16>(squares, l.lane);  // lane 2 i has that of i
    if (l.lane % 2 == 0) (l.lane < 16 ? s.qs : s.ks)[8 * warp + l.lane / 2 % 8] = inverse_norm(squares[0]);
  }
  if (l.lane < 8) {
    const int r = 8 * warp + l.lane;
    if (!NORM) s.qs[r] = s.ks[r] = 1.0f;
    s.b[r] = r < rows ? step_size<BETA_IS>(x.beta[r * HV]) : 0.0f;
  }
  __syncwarp();
}

// A warp's rows of one channel, as they come; zero past the end.
struct Slice {
  float q[8], k[8], g[8], bias;
  __device__ __forceinline__ void load(const Inputs& x, i64 head, i64 q_stride, i64 HV, int rows, int d, int warp) {
    bias = BIAS ? x.dt_bias[head * K + d] : 0.0f;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int at = 8 * warp + r;
      const bool here = at < rows;
      q[r] = here ? x.q[at * q_stride + d] : 0.0f;
      k[r] = here ? x.k[at * q_stride + d] : 0.0f;
      g[r] = here ? x.g[at * HV * K + d] : 0.0f;
    }
  }
};

// Decayed rows of one slice: for the products of each level, and what leaves the chunk.
__device__ __forceinline__ void decay_rows(Shared& s, const Tiles& to, const Rows& e, const float (&q)[8],
                                           const float (&k)[8], int d, int warp, Lane l) {
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    const Around around(s.total, warp, 1 << level, l.lane);
    const bool second = warp >> level & 1;
    const float rest = exp2_(second ? around.before : around.after);
    const int half = 8 << level, row = 8 * warp, of_q = row / (2 * half) * half + row % half;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const float decay = (second ? e.after[r] : e.before[r]) * rest;
      s.x[level][row + r][l.lane] = k[r] * decay;
      if (second) s.y[level][of_q + r][l.lane] = q[r] * decay;
    }
  }
  const Around around(s.total, warp, WARPS, l.lane);
  const float before = exp2_(around.before), after = exp2_(around.after);
  float kg[8], qg[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = 8 * warp + r;
    const float kn = k[r] * s.ks[row], decay = e.after[r] * before;
    s.kE[row][d] = kn * decay;
    qg[r] = q[r] * s.qs[row] * decay;
    kg[r] = kn * (e.before[r] * after);
    if (KEEP != 2) to.qg[row * K + d] = qg[r];
    else to.kg[row * K + d] = kg[r];
  }
  put_channel(&to.kg_t[d * C + 8 * warp], kg);
  if (KEEP == 2) put_channel(&to.qg[d * C + 8 * warp], qg);
  if (warp == WARPS - 1) to.gc_last[d] = around.before + e.total;
}

// Tiles of pairs that lie 8 rows apart and more; a warp has some of each level.
struct Far {
  float of8[4] = {}, of16[4] = {}, of32[2][4] = {};
  __device__ __forceinline__ void add(const Shared& s, int warp, Lane l) {
    if (warp < C / 16) FarTile<8>(warp).add(of8, s.x[0], s.y[0], l);
    FarTile<16>(warp).add(of16, s.x[1], s.y[1], l);
    if (C == 64) {
      FarTile<32>(2 * warp).add(of32[0], s.x[LEVELS - 1], s.y[LEVELS - 1], l);
      FarTile<32>(2 * warp + 1).add(of32[1], s.x[LEVELS - 1], s.y[LEVELS - 1], l);
    }
  }
};

template <int S>
__device__ __forceinline__ void put_far(Shared& s, const FarTile<S>& at, const float (&sum)[4], float scale, Lane l) {
  const int i = at.i + l.g, j = at.j + 2 * l.t;
  const float of_k = s.ks[i] * s.b[i], of_q = s.qs[i] * scale, k0 = s.ks[j], k1 = s.ks[j + 1];
  *(float2*)&s.A_kk[i][j] = make_float2(sum[0] * of_k * k0, sum[1] * of_k * k1);
  *(float2*)&s.A_qk[i][j] = make_float2(sum[2] * of_q * k0, sum[3] * of_q * k1);
}

// A_kk below the diagonal and A_qk on it as well; above it, 0 inside 8 rows, which are read together.
__device__ __forceinline__ void put_pairs(Shared& s, float (&near)[64], Far& far, float scale, int warp, Lane l) {
  sum_lanes<64>(near, l.lane);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int a = 8 * warp + l.lane / 4, b = 8 * warp + l.lane % 4 * 2 + n;
    if (a > b) s.A_kk[a][b] = near[n] * s.ks[a] * s.ks[b] * s.b[a], s.A_qk[b][a] = 0.0f;
    else s.A_qk[b][a] = near[n] * s.qs[b] * s.ks[a] * scale, s.A_kk[a][b] = 0.0f;
  }
  if (warp < C / 16) put_far(s, FarTile<8>(warp), far.of8, scale, l);
  put_far(s, FarTile<16>(warp), far.of16, scale, l);
  if (C == 64) {
    put_far(s, FarTile<32>(2 * warp), far.of32[0], scale, l);
    put_far(s, FarTile<32>(2 * warp + 1), far.of32[1], scale, l);
  }
}

// 16 rows and 8 columns of a tile (C, D), and transposed where asked for.
template <int D>
__device__ __forceinline__ void put_tile(Tile& tile, float* to, float* transposed, int row, int column, Lane l) {
  tile.finish();
  float* out = to + (row + l.g) * D + column + 2 * l.t;
  *(float2*)out = make_float2(tile.sum[0], tile.sum[1]);
  *(float2*)(out + 8 * D) = make_float2(tile.sum[2], tile.sum[3]);
  if (transposed) {
    float* at = transposed + (column + 2 * l.t) * C + row + l.g;
    at[0] = tile.sum[0], at[C] = tile.sum[1], at[8] = tile.sum[2], at[C + 8] = tile.sum[3];
  }
}

// w, u = (X b) @ kE, (X b) @ v: a warp has some columns of both.
__device__ __forceinline__ void times_inverse(const Shared& s, const Tiles& to, int warp, Lane l) {
  constexpr int OF_K = K / 8 / WARPS, OF_V = V / 8 / WARPS;
#pragma unroll 1
  for (int row = 0; row < C; row += 16) {
    Tile of_w[OF_K], of_u[OF_V];
#pragma unroll 1
    for (int k = 0; k <= row; k += 16) {
#pragma unroll
      for (int step = k; step < k + 16; step += 8) {
        const int at = step + 2 * l.t;
        const float2 g = *(const float2*)&s.X[row + l.g][at], h = *(const float2*)&s.X[row + l.g + 8][at];
        const float2 b = *(const float2*)&s.b[at];
        const A a(g.x * b.x, h.x * b.x, g.y * b.y, h.y * b.y);
        const float* x = &s.kE[at][8 * OF_K * warp + l.g];
        const float* y = &s.v[at][8 * OF_V * warp + l.g];
#pragma unroll
        for (int n = 0; n < OF_K; ++n) of_w[n].add(a, B(x[8 * n], x[8 * n + K + 4]));
#pragma unroll
        for (int n = 0; n < OF_V; ++n) of_u[n].add(a, B(y[8 * n], y[8 * n + V + 4]));
      }
#pragma unroll
      for (int n = 0; n < OF_K; ++n) of_w[n].settle();
#pragma unroll
      for (int n = 0; n < OF_V; ++n) of_u[n].settle();
    }
#pragma unroll
    for (int n = 0; n < OF_K; ++n)
      put_tile<K>(of_w[n], to.w, KEEP == 2 ? to.w_t : nullptr, row, 8 * (OF_K * warp + n), l);
#pragma unroll
    for (int n = 0; n < OF_V; ++n) put_tile<V>(of_u[n], to.u, nullptr, row, 8 * (OF_V * warp + n), l);
  }
}

// A thread's share of v (C, V): fetched early, shared late.
struct Share {
  static constexpr int EACH = C * V / 4 / THREADS;
  float4 of[EACH];
  __device__ __forceinline__ void fetch(const float* v, i64 stride, int rows) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int at = threadIdx.x + n * THREADS, i = at / (V / 4), e = at % (V / 4) * 4;
      of[n] = i < rows ? *(const float4*)(v + i * stride + e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __device__ __forceinline__ void share(Shared& s) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int at = threadIdx.x + n * THREADS;
      *(float4*)&s.v[at / (V / 4)][at % (V / 4) * 4] = of[n];
    }
  }
};

__device__ __forceinline__ float4 lower(const float (*x)[P], int i, int j) {
  const float4 y = j <= i ? *(const float4*)&x[i][j] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return make_float4(j <= i ? y.x : 0.0f, j + 1 <= i ? y.y : 0.0f, j + 2 <= i ? y.z : 0.0f, j + 3 <= i ? y.w : 0.0f);
}

// A_qk, and where it is kept A_inv, with zeros above the diagonal.
__device__ __forceinline__ void put_matrices(const Shared& s, const Tiles& to, float* kept_A_qk, float* kept_A_inv,
                                             i64 row, i64 HV, int rows) {
#pragma unroll 1
  for (int at = 4 * threadIdx.x; at < C * C; at += 4 * THREADS) {
    const int i = at / C, j = at % C;
    const float4 of = lower(s.A_qk, i, j);
    if (KEEP == 2) {
      *(float4*)&to.A_inv[at] = lower(s.X, i, j);
      *(float4*)&to.A_qk[at] = make_float4(i <= j ? s.A_qk[j][i] : 0.0f, i <= j + 1 ? s.A_qk[j + 1][i] : 0.0f,
                                           i <= j + 2 ? s.A_qk[j + 2][i] : 0.0f, i <= j + 3 ? s.A_qk[j + 3][i] : 0.0f);
    } else {
      *(float4*)&to.A_qk[at] = of;
    }
    if (KEEP == 1 && i < rows) {
      *(float4*)&kept_A_qk[(row + i * HV) * C + j] = of;
      *(float4*)&kept_A_inv[(row + i * HV) * C + j] = lower(s.X, i, j);
    }
  }
  if (KEEP == 2)
    for (int i = threadIdx.x; i < C; i += THREADS)
      to.of_rows[i] = s.qs[i], to.of_rows[C + i] = s.ks[i], to.of_rows[2 * C + i] = s.b[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prepare(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* A_log,
            const float* dt_bias, const Offset* cu_seqlens, const i64* first_chunk, float* w, float* qg, float* kg_t,
            float* u, float* A_qk, float* gc_last, float* kept_A_qk, float* kept_A_inv, float* o,
            float* w_t, float* kg, float* A_inv, float* of_rows, i64 T, i64 N,
            i64 chunks, i64 H, i64 HV, float scale, float lower_bound) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *(Shared*)memory;
  const Lane l;
  const int warp = threadIdx.x / 32;
  const i64 chunk = blockIdx.x / HV, head = blockIdx.x % HV, tile = blockIdx.x;
  const Place place = chunk_place(chunk, cu_seqlens, first_chunk, T, N, chunks, C);
  if (PACKED && place.rows == 0) {  // o is zero where no sequence is
    for (int r = warp; o && r < C && place.begin + r < T; r += WARPS)
      for (int e = l.lane; e < V; e += 32) o[((place.begin + r) * HV + head) * V + e] = 0.0f;
    return;
  }
  const int rows = place.rows;
  const i64 row = place.begin * HV + head, q_row = place.begin * H + head / (HV / H), q_stride = H * K;
  const Inputs x = {q + q_row * K, k + q_row * K, v + row * V, g + row * K, beta + row, A_log, dt_bias};
  const Tiles to = {w + tile * (C * K),    qg + tile * (C * K),   kg_t + tile * (C * K),
                    u + tile * (C * V),    A_qk + tile * (C * C), gc_last + tile * K,
                    w_t + tile * (C * K),  kg + tile * (C * K),   A_inv + tile * (C * C), of_rows + tile * (3 * C)};
  norms(s, x, q_stride, HV, rows, warp, l);

  const float rate = RATE ? finite(exp_(A_log[head])) : 1.0f;
  float near[64] = {};
  Far far;
  Slice next;
  next.load(x, head, q_stride, HV, rows, l.lane, warp);
#pragma unroll 1
  for (int d = l.lane; d < K; d += SLICE) {
    const Slice now = next;
    if (d + SLICE < K) next.load(x, head, q_stride, HV, rows, d + SLICE, warp);
    float g2[8];
#pragma unroll
    for (int r = 0; r < 8; ++r)
      g2[r] = 8 * warp + r < rows ? log2_decay<GATE_IS>(now.g[r] + now.bias, rate, lower_bound) : 0.0f;
    near_pairs(near, now.q, now.k, g2);
    const Rows e(g2);
    s.total[warp][l.lane] = e.total;
    __syncthreads();  // totals are there, and the slice before was multiplied
    decay_rows(s, to, e, now.q, now.k, d, warp, l);
    __syncthreads();  // decayed rows are there
    far.add(s, warp, l);
  }
  __syncthreads();  // the last slice was multiplied: A takes its place
  put_pairs(s, near, far, scale, warp, l);
  __syncthreads();  // A is there
  Share of_v;
  of_v.fetch(x.v, HV * V, rows);
  inverse<C, P>(s.X, s.A_kk, warp, l);
  put_matrices(s, to, kept_A_qk, kept_A_inv, row, HV, rows);
  __syncthreads();  // A was read: v takes its place
  of_v.share(s);
  __syncthreads();  // v is there
  times_inverse(s, to, warp, l);
}
