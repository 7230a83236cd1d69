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
// A forward that saves PRODUCTS also writes A_qk and A_inv to rows of tokens (tokens, HV, C).  FOR_BACKWARD: kg (C, K),
// w_t (K, C), A_inv (C, C) and 1 / |q|, 1 / |k| and b (3, C) too, and transposed qg (K, C) and A_qk (C, C) instead of
// qg and A_qk; with PRODUCTS, A_qk and A_inv are not made but read where the forward left them.
//
// Barriers: two a slice (totals of warps are there; decayed rows are there), then A, the inverse's, A was read, v.
// Shared memory: kE (C, K + 4), and in one place decayed rows of a slice with sums of pairs, then X, A_kk, A_qk
// (C, C + 8), then X and v: 98,048 bytes at K = 128, C = 64.  128 registers at C = 64: two CTAs an SM where there is
// shared memory for them.
#include "copies.cuh"
#include "inverse.cuh"
#include "pairs.cuh"
#include "places.cuh"

constexpr bool MADE = !(FOR_BACKWARD && PRODUCTS), SAVES = PRODUCTS && !FOR_BACKWARD;
constexpr int K = HEAD_K, V = HEAD_V, C = CHUNK, WARPS = C / 8, THREADS = 32 * WARPS, LEVELS = C == 64 ? 3 : 2;
constexpr int TOP = C / 32, FAR = LEVELS - 1 + TOP;  // tiles of the last level in a warp, and of all
constexpr int P = C + 8;

struct Shared {
  float kE[C][K + 4];  // kn 2^gc
  union {
    struct {
      float x[LEVELS][C][PITCH], y[LEVELS][C / 2][PITCH];
      float4 far[FAR][THREADS];  // sums of a warp's tiles of pairs, which would not fit in registers
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
  const float *q, *k, *g, *beta, *A_log, *dt_bias;  // q .. beta begin at the chunk's first row
};

// x, opaque to the compiler: its uses are computed there and not held in registers until then.
__device__ __forceinline__ i64 hidden(i64 x) {
  asm volatile("" : "+l"(x));
  return x;
}

struct Tiles {
  float *w, *qg, *kg_t, *u, *A_qk, *gc_last, *w_t, *kg, *A_inv, *of_rows;
};

// 1 / |q| and 1 / |k| of a warp's rows, and their step sizes: read after the first slice's barriers.
__device__ __forceinline__ void norms(Shared& s, const Inputs& x, i64 q_stride, i64 HV, int rows, int warp, Lane l) {
  if (NORM) {
    float squares[16] = {};  // q, k
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const i64 offset = min(8 * warp + r, rows - 1) * q_stride + l.lane;
#pragma unroll
      for (int d = 0; d < K; d += 32) {
        const float a = x.q[offset + d], b = x.k[offset + d];
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
}

// A warp's rows of one channel, as they come; zero past the end.
struct Slice {
  float q[8], k[8], g[8], bias;
  __device__ __forceinline__ void load(const Inputs& x, i64 head, i64 q_stride, i64 HV, int rows, int d, int warp) {
    bias = BIAS ? x.dt_bias[head * GATES + OF_GATE(d)] : 0.0f;
    const i64 of_q = hidden(q_stride), of_g = hidden(HV * GATES);
    const float *from_q = x.q + 8 * warp * of_q + d, *from_k = x.k + 8 * warp * of_q + d;
    const float* from_g = x.g + 8 * warp * of_g + OF_GATE(d);
#pragma unroll
    for (int r = 0; r < 8; ++r, from_q += of_q, from_k += of_q, from_g += of_g) {
      const bool has_row = 8 * warp + r < rows;
      q[r] = has_row ? *from_q : 0.0f;
      k[r] = has_row ? *from_k : 0.0f;
      g[r] = has_row ? *from_g : 0.0f;
    }
  }
};

// Decayed rows of one slice: for the products of each level, and what leaves the chunk.
__device__ __forceinline__ void decay_rows(Shared& s, const Tiles& to, const Rows& e, const float (&q)[8],
                                           const float (&k)[8], int d, int warp, Lane l) {
#pragma unroll
  for (int level = 0; MADE && level < LEVELS; ++level) {
    const ToCut cut(s.total, warp, level, l.lane);
    const int row = 8 * warp, of_q = packed(row, 8 << level);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const float decay = cut.decay(e, r);
      s.x[level][row + r][l.lane] = k[r] * decay;
      if (cut.second) s.y[level][of_q + r][l.lane] = q[r] * decay;
    }
  }
  const Around around(s.total, warp, WARPS, l.lane);
  const float before = exp2_(around.before), after = exp2_(around.after);
#pragma unroll
  for (int r0 = 0; r0 < 8; r0 += 4) {
    float kg[4], qg[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = r0 + i, row = 8 * warp + r;
      const float kn = k[r] * s.ks[row], decay = e.after[r] * before;
      s.kE[row][d] = kn * decay;
      qg[i] = q[r] * s.qs[row] * decay;
      kg[i] = kn * (e.before[r] * after);
      if (!FOR_BACKWARD) to.qg[row * K + d] = qg[i];
      else to.kg[row * K + d] = kg[i];
    }
    const int offset = d * C + 8 * warp + r0;
    *(float4*)&to.kg_t[offset] = make_float4(kg[0], kg[1], kg[2], kg[3]);
    if (FOR_BACKWARD) *(float4*)&to.qg[offset] = make_float4(qg[0], qg[1], qg[2], qg[3]);
  }
  if (warp == WARPS - 1) to.gc_last[d] = around.before + e.total;
}

struct Sum {
  float value[4];
};

__device__ __forceinline__ Sum far_sum(const Shared& s, int n) {
  const float4 x = s.far[n][threadIdx.x];
  return {x.x, x.y, x.z, x.w};
}

// A slice of one tile of pairs.
template <int S>
__device__ __forceinline__ void add_far(Shared& s, int n, int level, FarTile<S> tile, bool first, Lane l) {
  Sum sum = first ? Sum{} : far_sum(s, n);
  tile.add(sum.value, s.x[level], s.y[level], l);
  s.far[n][threadIdx.x] = make_float4(sum.value[0], sum.value[1], sum.value[2], sum.value[3]);
}

// Pairs that lie 8 rows apart and more; a warp has some tiles of each level.
__device__ __forceinline__ void far_pairs(Shared& s, bool first, int warp, Lane l) {
  if (warp < C / 16) add_far(s, 0, 0, FarTile<8>(warp), first, l);
  if (C == 64) add_far(s, 1, 1, FarTile<16>(warp), first, l);
#pragma unroll 1
  for (int n = 0; n < TOP; ++n) add_far(s, LEVELS - 1 + n, LEVELS - 1, FarTile<C / 2>(TOP * warp + n), first, l);
}

template <int S>
__device__ __forceinline__ void put_far(Shared& s, const FarTile<S>& tile, const float (&sum)[4], float scale, Lane l) {
  const int i = tile.i + l.g, j = tile.j + 2 * l.t;
  const float of_k = s.ks[i] * s.b[i], of_q = s.qs[i] * scale, k0 = s.ks[j], k1 = s.ks[j + 1];
  *(float2*)&s.A_kk[i][j] = make_float2(sum[0] * of_k * k0, sum[1] * of_k * k1);
  *(float2*)&s.A_qk[i][j] = make_float2(sum[2] * of_q * k0, sum[3] * of_q * k1);
}

// A_kk below the diagonal and A_qk on it as well; above it, 0 inside 8 rows, which are read together.
__device__ __forceinline__ void put_pairs(Shared& s, float (&near)[64], float scale, int warp, Lane l) {
  Sum far[FAR];
#pragma unroll
  for (int n = 0; n < FAR; ++n)
    if (n > 0 || warp < C / 16) far[n] = far_sum(s, n);
  __syncthreads();  // the last slice was multiplied, and its sums are in registers: A takes its place
  sum_lanes<64>(near, l.lane);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int a = 8 * warp + l.lane / 4, b = 8 * warp + l.lane % 4 * 2 + n;
    if (a > b) s.A_kk[a][b] = near[n] * s.ks[a] * s.ks[b] * s.b[a], s.A_qk[b][a] = 0.0f;
    else s.A_qk[b][a] = near[n] * s.qs[b] * s.ks[a] * scale, s.A_kk[a][b] = 0.0f;
  }
  if (warp < C / 16) put_far(s, FarTile<8>(warp), far[0].value, scale, l);
  if (C == 64) put_far(s, FarTile<16>(warp), far[1].value, scale, l);
#pragma unroll
  for (int n = 0; n < TOP; ++n) put_far(s, FarTile<C / 2>(TOP * warp + n), far[LEVELS - 1 + n].value, scale, l);
}

// 16 rows and 8 columns of a tile (C, D), and transposed on request.
template <int D>
__device__ __forceinline__ void put_tile(Tile& tile, float* to, float* transposed, int row, int column, Lane l) {
  tile.finish();
  float* out = to + (row + l.g) * D + column + 2 * l.t;
  *(float2*)out = make_float2(tile.sum[0], tile.sum[1]);
  *(float2*)(out + 8 * D) = make_float2(tile.sum[2], tile.sum[3]);
  if (transposed) {
    float* out_t = transposed + (column + 2 * l.t) * C + row + l.g;
    out_t[0] = tile.sum[0], out_t[C] = tile.sum[1], out_t[8] = tile.sum[2], out_t[C + 8] = tile.sum[3];
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
        const int j = step + 2 * l.t;
        const float2 g = *(const float2*)&s.X[row + l.g][j], h = *(const float2*)&s.X[row + l.g + 8][j];
        const float2 b = *(const float2*)&s.b[j];
        const A a(g.x * b.x, h.x * b.x, g.y * b.y, h.y * b.y);
        const float* x = &s.kE[j][8 * OF_K * warp + l.g];
        const float* y = &s.v[j][8 * OF_V * warp + l.g];
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
      put_tile<K>(of_w[n], to.w, FOR_BACKWARD ? to.w_t : nullptr, row, 8 * (OF_K * warp + n), l);
#pragma unroll
    for (int n = 0; n < OF_V; ++n) put_tile<V>(of_u[n], to.u, nullptr, row, 8 * (OF_V * warp + n), l);
  }
}

// A thread's share of v (C, V): fetched early, shared late.
struct Share {
  static constexpr int EACH = C * V / 4 / THREADS;
  float4 value[EACH];
  __device__ __forceinline__ void fetch(const float* v, i64 stride, int rows) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int index = threadIdx.x + n * THREADS, i = index / (V / 4), e = index % (V / 4) * 4;
      value[n] = i < rows ? *(const float4*)(v + i * stride + e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __device__ __forceinline__ void share(Shared& s) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int index = threadIdx.x + n * THREADS;
      *(float4*)&s.v[index / (V / 4)][index % (V / 4) * 4] = value[n];
    }
  }
};

__device__ __forceinline__ float4 lower(const float (*x)[P], int i, int j) {
  const float4 y = j <= i ? *(const float4*)&x[i][j] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return make_float4(j <= i ? y.x : 0.0f, j + 1 <= i ? y.y : 0.0f, j + 2 <= i ? y.z : 0.0f, j + 3 <= i ? y.w : 0.0f);
}

// A_qk and A_inv as a forward kept them; zero past the end.
__device__ __forceinline__ void get_matrices(Shared& s, const float* saved_A_qk, const float* saved_A_inv, i64 row,
                                             i64 HV, int rows) {
#pragma unroll 1
  for (int index = 4 * threadIdx.x; index < C * C; index += 4 * THREADS) {
    const int i = index / C, j = index % C, bytes = i < rows ? 16 : 0;
    const i64 from = (row + (i < rows ? i * HV : 0)) * C + j;
    copy16(&s.A_qk[i][j], saved_A_qk + from, bytes);
    copy16(&s.X[i][j], saved_A_inv + from, bytes);
  }
  commit();
}

// A_qk, and where it is kept A_inv, with zeros above the diagonal.
__device__ __forceinline__ void put_matrices(const Shared& s, const Tiles& to, float* saved_A_qk, float* saved_A_inv,
                                             i64 row, i64 HV, int rows) {
#pragma unroll 1
  for (int index = 4 * threadIdx.x; index < C * C; index += 4 * THREADS) {
    const int i = index / C, j = index % C;
    const float4 of_A_qk = lower(s.A_qk, i, j);
    if (FOR_BACKWARD) {
      *(float4*)&to.A_inv[index] = lower(s.X, i, j);
      *(float4*)&to.A_qk[index] = make_float4(i <= j ? s.A_qk[j][i] : 0.0f, i <= j + 1 ? s.A_qk[j + 1][i] : 0.0f,
                                           i <= j + 2 ? s.A_qk[j + 2][i] : 0.0f, i <= j + 3 ? s.A_qk[j + 3][i] : 0.0f);
    } else {
      *(float4*)&to.A_qk[index] = of_A_qk;
    }
    if (SAVES && i < rows) {
      *(float4*)&saved_A_qk[(row + i * HV) * C + j] = of_A_qk;
      *(float4*)&saved_A_inv[(row + i * HV) * C + j] = lower(s.X, i, j);
    }
  }
  if (FOR_BACKWARD)
    for (int i = threadIdx.x; i < C; i += THREADS)
      to.of_rows[i] = s.qs[i], to.of_rows[C + i] = s.ks[i], to.of_rows[2 * C + i] = s.b[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, C == 64 ? 2 : 3)
    prepare(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* A_log,
            const float* dt_bias, const Offset* cu_seqlens, const i64* first_chunk, float* w, float* qg, float* kg_t,
            float* u, float* A_qk, float* gc_last, float* saved_A_qk, float* saved_A_inv, float* o,
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
  const Inputs x = {q + q_row * K, k + q_row * K, g + row * GATES, beta + row, A_log, dt_bias};
  const auto tiles = [&](i64 tile) {
    return Tiles{w + tile * (C * K),    qg + tile * (C * K),   kg_t + tile * (C * K),
                 u + tile * (C * V),    A_qk + tile * (C * C), gc_last + tile * K,
                 w_t + tile * (C * K),  kg + tile * (C * K),   A_inv + tile * (C * C), of_rows + tile * (3 * C)};
  };
  if (!MADE) get_matrices(s, saved_A_qk, saved_A_inv, row, HV, rows);
  norms(s, x, q_stride, HV, rows, warp, l);

  const float rate = RATE ? finite(exp_(A_log[head])) : 1.0f;
  float near[64] = {};
#pragma unroll 1
  for (int d = l.lane; d < K; d += SLICE) {
    Slice now;
    now.load(x, head, q_stride, HV, rows, d, warp);
    float g2[8];
#pragma unroll
    for (int r = 0; r < 8; ++r)
      g2[r] = GATE_IS == GIVEN || 8 * warp + r < rows  // a decay of 0 was loaded
                  ? log2_decay<GATE_IS>(now.g[r] + now.bias, rate, lower_bound)
                  : 0.0f;
    if (MADE) near_pairs(near, now.q, now.k, g2);
    const Rows e(g2);
    s.total[warp][l.lane] = e.total;
    __syncthreads();  // totals are there, and the slice before was multiplied
    decay_rows(s, tiles(hidden(tile)), e, now.q, now.k, d, warp, l);
    __syncthreads();  // decayed rows are there
    if (MADE) far_pairs(s, d < SLICE, warp, l);
  }
  if (MADE) put_pairs(s, near, scale, warp, l);
  else wait<0>();
  __syncthreads();  // A is there
  Share of_v;
  of_v.fetch(v + hidden(row) * V, HV * V, rows);
  if (MADE) inverse<C, P>(s.X, s.A_kk, warp, l);
  const Tiles to = tiles(hidden(tile));
  put_matrices(s, to, saved_A_qk, saved_A_inv, row, HV, rows);
  // redundant: at V = 64, where v overlaps only A_kk
  __syncthreads();  // A was read: v takes its place
  of_v.share(s);
  __syncthreads();  // v is there
  times_inverse(s, to, warp, l);
}
