// bwd/wy of one chunk and one value head, except its products with states.
//
//   P = A_inv^T @ dv_new;  dv = b P;  db_local = sum_V P v
//   dA_qk = scale tril(do @ v_new^T);  dA_kk = -strict_tril(P @ v_new^T)
//
// A CTA has C / 8 warps and walks V in slices of 32 columns.  Of P a warp has a tile of 16 rows and 16 columns of a
// slice; of dA_qk (even warps) or dA_kk (odd ones) some tiles (16, 8) at or below the diagonal, in registers.
// All products are 3xTF32.
//
// do, v_new, dv_new, v, dv and P are rows of tokens (tokens, HV, V), db (tokens, HV); A_inv, dA_qk and dA_kk tiles
// (C, C), of which nothing is written in blocks above the diagonal.  b comes from fwd/prepare.
//
// Barriers: three a slice (the one before was read; do, v_new and dv_new are there; P is there).  The next slice is on
// its way meanwhile.
// Shared memory: A_inv (C, C + 4), P (C, 40), two slices of dv_new (C, 36), do and v_new (C, 40): 87,552 bytes at
// C = 64.  128 registers: two CTAs an SM where there is shared memory for them.
#include "copies.cuh"
#include "pairs.cuh"
#include "places.cuh"

constexpr int V = HEAD_V, C = CHUNK, WARPS = C / 8, THREADS = 32 * WARPS, M = C / 16;
constexpr int MATRIX = M * (M + 1), TILES = MATRIX / (WARPS / 2);  // tiles of dA_qk; of a warp

struct Columns {
  float dv_new[C][SLICE + 4], d_o[C][PITCH], v_new[C][PITCH];
};

struct Shared {
  float A_inv[C][C + 4], P[C][PITCH];
  Columns slice[2];
  float db[2][C];
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    wy_bwd(const float* v, const float* A_inv, const float* of_rows, const float* v_new, const float* dv_new,
           const float* d_o, const Offset* cu_seqlens, const i64* first_chunk, float* P, float* dv, float* dA_qk,
           float* dA_kk, float* db, i64 T, i64 N, i64 chunks, i64 HV, float scale) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *(Shared*)memory;
  const Lane l;
  const int warp = threadIdx.x / 32, row = warp % M * 16, column = warp / M * 16;
  const i64 chunk = blockIdx.x / HV, head = blockIdx.x % HV, tile = blockIdx.x;
  const Place place = chunk_place(chunk, cu_seqlens, first_chunk, T, N, chunks, C);
  if (PACKED && place.rows == 0) {  // dv is zero where no sequence is
    for (int r = warp; r < C && place.begin + r < T; r += WARPS)
      for (int e = l.lane; e < V; e += 32) dv[((place.begin + r) * HV + head) * V + e] = 0.0f;
    return;
  }
  const int rows = place.rows;
  const i64 token = place.begin * HV + head, stride = HV * V;
  const float* from = A_inv + tile * (C * C);
  for (int index = threadIdx.x; index < C * C / 4; index += THREADS)
    copy16(&s.A_inv[index / (C / 4)][index % (C / 4) * 4], from + 4 * index);
  const auto load = [&](int e) {
    Columns& to = s.slice[e / SLICE % 2];
    copy_rows<C, SLICE, THREADS>(to.d_o, d_o + token * V + e, stride, rows);
    copy_rows<C, SLICE, THREADS>(to.v_new, v_new + token * V + e, stride, rows);
    copy_rows<C, SLICE, THREADS>(to.dv_new, dv_new + token * V + e, stride, rows);
    commit();
  };
  load(0);

  float matrix[TILES][4] = {}, of_P[2] = {};
  const float b[2] = {of_rows[tile * (3 * C) + 2 * C + row + l.g], of_rows[tile * (3 * C) + 2 * C + row + l.g + 8]};
#pragma unroll 1
  for (int e0 = 0; e0 < V; e0 += SLICE) {
    __syncthreads();  // the slice before was read
    if (e0 + SLICE < V) load(e0 + SLICE), wait<1>();
    else wait<0>();
    const Columns& x = s.slice[e0 / SLICE % 2];
    __syncthreads();  // do, v_new and dv_new are there

    Tile tiles[2];
#pragma unroll 1
    for (int k = row; k < C; k += 16) {
#pragma unroll
      for (int step = k; step < k + 16; step += 8) {
        const int j = step + 2 * l.t, i = row + l.g;
        const A a(s.A_inv[j][i], s.A_inv[j][i + 8], s.A_inv[j + 1][i], s.A_inv[j + 1][i + 8]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int e = column + 8 * n + l.g;
          tiles[n].add(a, B(x.dv_new[j][e], x.dv_new[j + 1][e]));
        }
      }
      tiles[0].settle(), tiles[1].settle();
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      tiles[n].finish();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = row + l.g + 8 * h, e = column + 8 * n + 2 * l.t;
        const float2 p = make_float2(tiles[n].sum[2 * h], tiles[n].sum[2 * h + 1]);
        *(float2*)&s.P[i][e] = p;
        if (i < rows) {
          const i64 offset = token * V + i * stride + e0 + e;
          const float2 of_v = *(const float2*)&v[offset];
          *(float2*)&P[offset] = p;
          *(float2*)&dv[offset] = make_float2(b[h] * p.x, b[h] * p.y);
          of_P[h] = fmaf(p.x, of_v.x, fmaf(p.y, of_v.y, of_P[h]));
        }
      }
    }
    __syncthreads();  // P is there
    const float (*left)[PITCH] = warp % 2 ? s.P : x.d_o;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int pair = warp / 2 * TILES + n, m = (pair >= 2) + (pair >= 6) + (pair >= 12), j = 8 * (pair - m * (m + 1));
      Tile one;
#pragma unroll 2
      for (int e = 0; e < SLICE; e += 8) {
        const float2 g = *(const float2*)&left[16 * m + l.g][e + 2 * l.t];
        const float2 h = *(const float2*)&left[16 * m + l.g + 8][e + 2 * l.t];
        const float2 of_j = *(const float2*)&x.v_new[j + l.g][e + 2 * l.t];
        one.add(A(g.x, h.x, g.y, h.y), B(of_j.x, of_j.y));
      }
      one.finish();
#pragma unroll
      for (int i = 0; i < 4; ++i) matrix[n][i] += one.sum[i];
    }
  }
  float* to = (warp % 2 ? dA_kk : dA_qk) + tile * (C * C);
  const float sign = warp % 2 ? -1.0f : scale;
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int pair = warp / 2 * TILES + n, m = (pair >= 2) + (pair >= 6) + (pair >= 12), j = 8 * (pair - m * (m + 1));
    float2* out = (float2*)&to[(16 * m + l.g) * C + j + 2 * l.t];
    out[0] = make_float2(sign * matrix[n][0], sign * matrix[n][1]);
    out[4 * C] = make_float2(sign * matrix[n][2], sign * matrix[n][3]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    of_P[h] += __shfl_xor_sync(~0u, of_P[h], 1);
    of_P[h] += __shfl_xor_sync(~0u, of_P[h], 2);
    if (l.t == 0) s.db[warp / M][row + l.g + 8 * h] = of_P[h];
  }
  __syncthreads();  // both halves of the columns are summed
  for (int i = threadIdx.x; i < rows; i += THREADS) db[token + i * HV] = s.db[0][i] + s.db[1][i];
}
