// bwd/intra of one chunk, one value head and 32 channels of K, with what bwd/wy takes from states and the gate.
//
//   x = scale 2^gc (do @ h^T) + sum_j dA_qk_ij kn_j D_ij          dqn = x
//   plus = -2^gc (P @ h^T) + sum_j dA_kk_ij kn_j D_ij             dkn = b plus + minus;  db = db_local + sum_K kn plus
//   minus = 2^(gc_last - gc) (v_new @ dh^T) + sum_i (dA_qk_ij qn_i + dA_kk_ij b_i kn_i) D_ij
//   dg2[t] = what each decay over t gains: sums over rows i >= t of qn x + b kn plus, over rows i < t of kn minus,
//            block by block (pairs.cuh), and 2^gc_last sum_V h dh.  No term is subtracted that was added before.
//
// A CTA has C / 8 warps.  Products with states: a warp has 16 rows and 16 of the channels, V in slices of 32.  After
// that a warp has 8 rows and a lane a channel: pairs inside 8 rows are IEEE products in registers; those of halves of
// blocks of 16, 32 and 64 rows are 3xTF32 products of decayed rows, whose results come back through shared memory.
//
// dqn, dkn (tokens, HV, K); dg (tokens, HV, K), or with one gate per head (K / 32, tokens, HV), shares of it: sums over
// a CTA's channels; db (1 + K / 32, tokens, HV), shares of it, of which wy_bwd makes the first; of_A_log, of_dt_bias
// (chunks, HV, K), sums over a chunk.
//
// Barriers: two a slice of V; results are there; two a level (decayed rows are there; results are there); totals.
// Shared memory: two slices of do, P, v_new (C, 40), h and dh (32, 40), one on its way, in one place with dA_qk, dA_kk
// (C, C + 4) and six halves of rows (C / 2, 36), or three wholes: 90,240 bytes at C = 64.
#include "copies.cuh"
#include "pairs.cuh"
#include "places.cuh"

constexpr int K = HEAD_K, V = HEAD_V, C = CHUNK, WARPS = C / 8, THREADS = 32 * WARPS, M = C / 16;
constexpr int LEVELS = C == 64 ? 3 : 2, P36 = SLICE + 4, PA = C + 4, SLICES = K / SLICE;

struct Columns {
  float d_o[C][PITCH], P[C][PITCH], v_new[C][PITCH], h[SLICE][PITCH], dh[SLICE][PITCH];
};

struct Shared {
  union {
    Columns slice[2];
    struct {
      float dA_qk[C][PA], dA_kk[C][PA];
      union {
        float whole[3][C][P36];  // x, plus, minus of states
        struct {
          float of_j[C / 2][P36], of_q[C / 2][P36], of_k[C / 2][P36];  // decayed kn; qn, b kn
          float x[C / 2][P36], plus[C / 2][P36], minus[C / 2][P36];    // what comes back
        };
      };
    };
  };
  float total[WARPS][SLICE], terms[LEVELS + 2][WARPS][SLICE], through_last[SLICE], sums[2][WARPS][SLICE];
};

struct Matrices {
  const float *d_o, *P, *v_new, *h, *dh;  // the chunk's first row; the first of the channels
};

// whole = do @ h^T, P @ h^T, v_new @ dh^T;  through_last = sum_V h dh.
__device__ __forceinline__ void of_states(Shared& s, const Matrices& x, i64 stride, int rows, int warp, Lane l) {
  const int row = warp % M * 16, column = warp / M * 16;
  float sum[3][2][4] = {}, last[SLICE / WARPS] = {};
  const auto load = [&](int e) {
    Columns& to = s.slice[e / SLICE % 2];
    copy_rows<C, SLICE, THREADS>(to.d_o, x.d_o + e, stride, rows);
    copy_rows<C, SLICE, THREADS>(to.P, x.P + e, stride, rows);
    copy_rows<C, SLICE, THREADS>(to.v_new, x.v_new + e, stride, rows);
    copy_rows<SLICE, SLICE, THREADS>(to.h, x.h + e, V, SLICE);
    copy_rows<SLICE, SLICE, THREADS>(to.dh, x.dh + e, V, SLICE);
    commit();
  };
  load(0);
#pragma unroll 1
  for (int e0 = 0; e0 < V; e0 += SLICE) {
    if (e0 + SLICE < V) load(e0 + SLICE), wait<1>();
    else wait<0>();
    const Columns& y = s.slice[e0 / SLICE % 2];
    __syncthreads();  // the slice is there
    Tile tiles[3][2];
#pragma unroll
    for (int e = 2 * l.t; e < SLICE; e += 8) {
      B of_h[2] = {B(0.0f, 0.0f), B(0.0f, 0.0f)}, of_dh[2] = {B(0.0f, 0.0f), B(0.0f, 0.0f)};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int d = column + 8 * n + l.g;
        const float2 a = *(const float2*)&y.h[d][e], b = *(const float2*)&y.dh[d][e];
        of_h[n] = B(a.x, a.y), of_dh[n] = B(b.x, b.y);
      }
#pragma unroll
      for (int m = 0; m < 3; ++m) {
        const float (*left)[PITCH] = m == 0 ? y.d_o : m == 1 ? y.P : y.v_new;
        const float2 g = *(const float2*)&left[row + l.g][e], h = *(const float2*)&left[row + l.g + 8][e];
        const A a(g.x, h.x, g.y, h.y);
#pragma unroll
        for (int n = 0; n < 2; ++n) tiles[m][n].add(a, m == 2 ? of_dh[n] : of_h[n]);
      }
    }
#pragma unroll
    for (int m = 0; m < 3; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        tiles[m][n].finish();
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] += tiles[m][n].sum[i];
      }
#pragma unroll
    for (int i = 0; i < SLICE / WARPS; ++i) {
      const int d = warp + WARPS * i;
      last[i] = fmaf(y.h[d][l.lane], y.dh[d][l.lane], last[i]);
    }
    __syncthreads();  // and was read
  }
#pragma unroll
  for (int i = 0; i < SLICE / WARPS; ++i) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) last[i] += __shfl_xor_sync(~0u, last[i], by);
    if (l.lane == 0) s.through_last[warp + WARPS * i] = last[i];
  }
#pragma unroll
  for (int m = 0; m < 3; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int d = column + 8 * n + 2 * l.t;
      *(float2*)&s.whole[m][row + l.g][d] = make_float2(sum[m][n][0], sum[m][n][1]);
      *(float2*)&s.whole[m][row + l.g + 8][d] = make_float2(sum[m][n][2], sum[m][n][3]);
    }
}

// A warp's 8 rows of one channel.
struct Channel {
  float qn[8], kn[8], b[8];
  float x[8], plus[8], minus[8], dg2[8];

  // Adds to dg2 what row i passes to the rows up to it, and returns the sum for the warps before.
  __device__ __forceinline__ float pass_back(const float (&row)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int r = 7; r >= 0; --r) sum += row[r], dg2[r] += sum;
    return sum;
  }
  // The same to the rows after it, for later warps.
  __device__ __forceinline__ float pass_on(const float (&row)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < 8; ++r) dg2[r] += sum, sum += row[r];
    return sum;
  }

  // Pairs inside the 8 rows; dA_qk and dA_kk begin at the first of them, in row and column.
  __device__ __forceinline__ void near(const float (&g2)[8], const float (*dA_qk)[PA], const float (*dA_kk)[PA]) {
    float pairs[8];
    const auto begin = [&](int j) {
      const float on = dA_qk[j][j];
      x[j] = fmaf(on, kn[j], x[j]);
      minus[j] = fmaf(on, qn[j], minus[j]);
      return 1.0f;
    };
    const auto each = [&](int i, int j, float D) {
      const float of_q = dA_qk[i][j], of_k = dA_kk[i][j], kd = kn[j] * D;
      const float y = D * fmaf(of_q, qn[i], of_k * (b[i] * kn[i]));
      x[i] = fmaf(of_q, kd, x[i]);
      plus[i] = fmaf(of_k, kd, plus[i]);
      minus[j] += y;
      pairs[i] = kn[j] * y;
    };
    walk_near(g2, begin, each, [&](int j) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 7; i > j; --i) sum += pairs[i], dg2[i] += sum;
    });
  }
};

// Products of one level: x, plus = [dA_qk; dA_kk] of (second, first half) @ of_j, 8 rows of both in a tile;
// minus = dA_qk^T @ of_q + dA_kk^T @ of_k.
template <int S>
__device__ __forceinline__ void multiply_level(Shared& s, int warp, Lane l) {
  const int half_row = warp % M * 8, block = half_row / S, i0 = block * 2 * S + S + half_row % S, j0 = block * 2 * S;
  const int column = warp / M * 16 + l.g;
  Tile tiles[2];
#pragma unroll
  for (int k = 0; k < S; k += 8) {
    const float2 q = *(const float2*)&s.dA_qk[i0 + l.g][j0 + k + 2 * l.t];
    const float2 kk = *(const float2*)&s.dA_kk[i0 + l.g][j0 + k + 2 * l.t];
    const A a(q.x, kk.x, q.y, kk.y);
    const int from = block * S + k + 2 * l.t;
#pragma unroll
    for (int n = 0; n < 2; ++n)
      tiles[n].add(a, B(s.of_j[from][column + 8 * n], s.of_j[from + 1][column + 8 * n]));
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    tiles[n].finish();
    const int d = warp / M * 16 + 8 * n + 2 * l.t;
    *(float2*)&s.x[half_row + l.g][d] = make_float2(tiles[n].sum[0], tiles[n].sum[1]);
    *(float2*)&s.plus[half_row + l.g][d] = make_float2(tiles[n].sum[2], tiles[n].sum[3]);
  }
  // 16 rows of minus and 8 channels; in blocks of 16 rows there are but 8, and 16 channels.
  constexpr int HIGH = S == 8 ? 1 : 2, WIDE = 3 - HIGH;
  const int group = warp % (M / HIGH) * (8 * HIGH), first = group / S, start = warp / (M / HIGH) * (8 * WIDE);
  const int j = first * 2 * S + group % S + l.g;
  Tile back[WIDE];
#pragma unroll
  for (int k = 0; k < S; k += 8) {
    const int i = first * 2 * S + S + k + 2 * l.t, from = first * S + k + 2 * l.t;
    const bool both = HIGH == 2;
    const A q(s.dA_qk[i][j], both ? s.dA_qk[i][j + 8] : 0.0f, s.dA_qk[i + 1][j], both ? s.dA_qk[i + 1][j + 8] : 0.0f);
    const A kk(s.dA_kk[i][j], both ? s.dA_kk[i][j + 8] : 0.0f, s.dA_kk[i + 1][j], both ? s.dA_kk[i + 1][j + 8] : 0.0f);
#pragma unroll
    for (int n = 0; n < WIDE; ++n) {
      const int d = start + 8 * n + l.g;
      back[n].add(q, B(s.of_q[from][d], s.of_q[from + 1][d]));
      back[n].add(kk, B(s.of_k[from][d], s.of_k[from + 1][d]));
    }
    if (k % 16 == 8) {
#pragma unroll
      for (int n = 0; n < WIDE; ++n) back[n].settle();
    }
  }
#pragma unroll
  for (int n = 0; n < WIDE; ++n) {
    back[n].finish();
    const int d = start + 8 * n + 2 * l.t;
    *(float2*)&s.minus[group + l.g][d] = make_float2(back[n].sum[0], back[n].sum[1]);
    if (HIGH == 2) *(float2*)&s.minus[group + l.g + 8][d] = make_float2(back[n].sum[2], back[n].sum[3]);
  }
}

template <int LEVEL>
__device__ __forceinline__ void far(Shared& s, Channel& c, const Rows& e, int warp, Lane l) {
  constexpr int S = 8 << LEVEL;
  const ToCut cut(s.total, warp, LEVEL, l.lane);
  const int half_row = packed(8 * warp, S);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const float decay = cut.decay(e, r);
    if (cut.second) {
      s.of_q[half_row + r][l.lane] = c.qn[r] * decay;
      s.of_k[half_row + r][l.lane] = c.b[r] * c.kn[r] * decay;
    } else {
      s.of_j[half_row + r][l.lane] = c.kn[r] * decay;
    }
  }
  __syncthreads();  // decayed rows are there
  multiply_level<S>(s, warp, l);
  __syncthreads();  // results are there
  float row[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const float decay = cut.decay(e, r);
    if (cut.second) {
      const float x = s.x[half_row + r][l.lane] * decay, plus = s.plus[half_row + r][l.lane] * decay;
      c.x[r] += x, c.plus[r] += plus;
      row[r] = fmaf(c.qn[r], x, c.b[r] * c.kn[r] * plus);
    } else {
      const float minus = s.minus[half_row + r][l.lane] * decay;
      c.minus[r] += minus;
      row[r] = c.kn[r] * minus;
    }
  }
  s.terms[LEVEL][warp][l.lane] = cut.second ? c.pass_back(row) : c.pass_on(row);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    intra_bwd(const float* q, const float* k, const float* g, const float* A_log, const float* dt_bias,
              const float* of_rows, const float* h, const float* dh, const float* v_new, const float* d_o,
              const float* P, const float* dA_qk, const float* dA_kk, const Offset* cu_seqlens, const i64* first_chunk,
              float* dqn, float* dkn, float* dg, float* db, float* of_A_log, float* of_dt_bias, i64 T, i64 tokens,
              i64 N, i64 chunks, i64 H, i64 HV, float scale, float lower_bound) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *(Shared*)memory;
  const Lane l;
  const int warp = threadIdx.x / 32, slice = blockIdx.x % SLICES, d = slice * SLICE + l.lane;
  const i64 tile = blockIdx.x / SLICES, chunk = tile / HV, head = tile % HV;
  const Place place = chunk_place(chunk, cu_seqlens, first_chunk, T, N, chunks, C);
  if (PACKED && place.rows == 0) {  // dg is zero where no sequence is
    for (int r = warp; !PER_HEAD && r < C && place.begin + r < T; r += WARPS)
      dg[((place.begin + r) * HV + head) * K + d] = 0.0f;
    return;
  }
  const int rows = place.rows;
  const i64 row = place.begin * HV + head, q_row = place.begin * H + head / (HV / H), q_stride = H * K;
  const i64 state = tile * (K * V) + (i64)slice * (SLICE * V);
  const float bias = BIAS ? dt_bias[head * GATES + OF_GATE(d)] : 0.0f, rate = RATE ? finite(exp_(A_log[head])) : 1.0f;
  Channel c;
  float g2[8], logit[8];
  const i64 g_stride = HV * K, of_d = (row + 8 * warp * HV) * K + d;  // the lane's first row in g and its like
  const float *from_q = q + q_row * K + 8 * warp * q_stride + d, *from_k = k + (from_q - q);
  const float* from_g = PER_HEAD ? g + row + 8 * warp * HV : g + of_d;
#pragma unroll
  for (int r = 0; r < 8; ++r, from_q += q_stride, from_k += q_stride, from_g += HV * GATES) {  // on their way meanwhile
    const bool has_row = 8 * warp + r < rows;
    c.qn[r] = has_row ? *from_q : 0.0f;
    c.kn[r] = has_row ? *from_k : 0.0f;
    logit[r] = has_row ? *from_g : 0.0f;
  }
  of_states(s, {d_o + row * V, P + row * V, v_new + row * V, h + state, dh + state}, HV * V, rows, warp, l);

#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const float* from = of_rows + tile * (3 * C) + 8 * warp + r;
    c.qn[r] *= from[0], c.kn[r] *= from[C], c.b[r] = from[2 * C];
    logit[r] += bias;
    g2[r] = 8 * warp + r < rows ? log2_decay<GATE_IS>(logit[r], rate, lower_bound) : 0.0f;
  }
  const Rows e(g2);
  s.total[warp][l.lane] = e.total;
  for (int index = threadIdx.x; index < C * C / 4; index += THREADS) {
    const int i = index / (C / 4), j = index % (C / 4) * 4;
    if (j / 16 > i / 16) continue;  // never written
    copy16(&s.dA_qk[i][j], dA_qk + tile * (C * C) + 4 * index);
    copy16(&s.dA_kk[i][j], dA_kk + tile * (C * C) + 4 * index);
  }
  commit();
  wait<0>();
  __syncthreads();  // results of states, totals and matrices are there

  const Around around(s.total, warp, WARPS, l.lane);
  const float before = exp2_(around.before), after = exp2_(around.after);
  float of_row[8], of_column[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int i = 8 * warp + r;
    const float decay = e.after[r] * before;
    c.x[r] = s.whole[0][i][l.lane] * (scale * decay);
    c.plus[r] = -(s.whole[1][i][l.lane] * decay);
    c.minus[r] = s.whole[2][i][l.lane] * (e.before[r] * after);
    of_row[r] = fmaf(c.qn[r], c.x[r], c.b[r] * c.kn[r] * c.plus[r]);
    of_column[r] = c.kn[r] * c.minus[r];
    c.dg2[r] = 0.0f;
  }
  const float through_last = s.through_last[l.lane] * exp2_(around.before + e.total + around.after);
  s.terms[LEVELS][warp][l.lane] = c.pass_back(of_row);
  s.terms[LEVELS + 1][warp][l.lane] = c.pass_on(of_column);
  c.near(g2, (const float (*)[PA]) & s.dA_qk[8 * warp][8 * warp], (const float (*)[PA]) & s.dA_kk[8 * warp][8 * warp]);
  __syncthreads();  // results of states were read
  far<0>(s, c, e, warp, l);
  far<1>(s, c, e, warp, l);
  if constexpr (LEVELS == 3) far<2>(s, c, e, warp, l);
  __syncthreads();  // terms of all warps are there

  float others = through_last;
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    const int first = warp >> level << level;
#pragma unroll
    for (int i = 0; i < 1 << level; ++i)
      if (warp >> level & 1 ? first + i > warp : first + i < warp) others += s.terms[level][first + i][l.lane];
  }
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    if (i > warp) others += s.terms[LEVELS][i][l.lane];
    if (i < warp) others += s.terms[LEVELS + 1][i][l.lane];
  }
  float of_A = 0.0f, of_bias = 0.0f, of_b[8], of_gate[8] = {};
#pragma unroll
  for (int r = 0; r < 8; ++r) of_b[r] = c.kn[r] * c.plus[r];
  sum_lanes<8>(of_b, l.lane);  // lane 4 r has that of r
  if (const int i = 8 * warp + l.lane / 4; l.lane % 4 == 0 && i < rows)
    db[(slice + 1) * tokens * HV + row + i * HV] = of_b[0];
  i64 to = of_d;
#pragma unroll
  for (int r = 0; r < 8; ++r, to += g_stride) {
    if (8 * warp + r < rows) {
      dqn[to] = c.x[r];
      dkn[to] = fmaf(c.b[r], c.plus[r], c.minus[r]);
      float dx, of_rate;
      log2_decay_bwd<GATE_IS>(c.dg2[r] + others, logit[r], rate, lower_bound, dx, of_rate);
      if (PER_HEAD) of_gate[r] = dx;
      else dg[to] = dx;
      of_A += of_rate, of_bias += dx;
    }
  }
  if (PER_HEAD) {
    sum_lanes<8>(of_gate, l.lane);
    if (const int i = 8 * warp + l.lane / 4; l.lane % 4 == 0 && i < rows)
      dg[slice * tokens * HV + row + i * HV] = of_gate[0];
  }
  if (!RATE && !BIAS) return;
  s.sums[0][warp][l.lane] = of_A, s.sums[1][warp][l.lane] = of_bias;
  __syncthreads();  // sums of warps are there
  if (warp < 2) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += s.sums[warp][i][l.lane];
    if (warp == 0 && RATE) of_A_log[tile * K + d] = sum;
    if (warp == 1 && BIAS) of_dt_bias[tile * K + d] = sum;
  }
}
