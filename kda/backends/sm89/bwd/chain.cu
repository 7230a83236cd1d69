// bwd/output and bwd/state: one sequence, one value head and BV columns of the state's gradient, from the last chunk.
//
//   dv_new = A_qk^T @ do + kg @ dh;  next dh = 2^gc_last dh + scale qg^T @ do - w^T @ dv_new
//
// A CTA has C / 8 warps.  First the lower half of the warps has 16 rows each of kg @ dh, the upper half of A_qk^T @ do,
// which is handed over in shared memory; and the warps that keep 16 or 32 rows of dh have qg^T @ do for these.  Then
// these have w^T @ dv_new.  As in fwd/chain.cu, products are 3xTF32 into fresh accumulators, dh is kept by IEEE sums,
// left operands come through a ring for each warp, and dh, do and dv_new lie in shared memory in their tf32 parts.
//
// Three barriers a chunk: dh and do are there (dv_new was read); A_qk^T @ do is there (dh and do were read); dv_new is
// there (A_qk^T @ do was read).
// Shared memory: dh (K, BV + 1), do and dv_new (C, BV + 1), 8 bytes an element; A_qk^T @ do (C, BV + 1), 4 bytes; rings
// of DEPTH KiB a warp: 88,320 bytes at K = 128, C = 64, BV = 16.
#include "places.cuh"
#include "state.cuh"

constexpr int K = HEAD_K, V = HEAD_V, C = CHUNK, WARPS = C / 8, THREADS = 32 * WARPS, HALF = WARPS / 2;
constexpr int BV = COLUMNS, DEPTH = STAGES, TILES = BV / 8, PITCH = BV + 1;
constexpr int OWNERS = K / 16 < WARPS ? K / 16 : WARPS, OWN = K / 16 / OWNERS;  // warps that keep dh; their tiles
constexpr int EACH = C * BV / THREADS;  // elements of do of a thread

struct Shared {
  float4 ring[WARPS][DEPTH][2][32];
  float2 dh[K][PITCH], d_o[C][PITCH], dv_new[C][PITCH];
  float local[C][PITCH];
};

// A thread's share of do (C, BV) of a chunk: fetched early, shared late.
struct Share {
  float of[EACH];
  __device__ __forceinline__ void fetch(const float* d_o, i64 begin, i64 rows, i64 head, i64 HV, i64 part) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = threadIdx.x + i * THREADS, row = at / BV;
      of[i] = row < rows ? d_o[((begin + row) * HV + head) * V + part * BV + at % BV] : 0.0f;
    }
  }
  __device__ __forceinline__ void share(Shared& s) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = threadIdx.x + i * THREADS;
      s.d_o[at / BV][at % BV] = parts_of(of[i]);
    }
  }
};

template <int stages, typename Stream>
__device__ __forceinline__ void product(Tile (&tile)[TILES], Stream& stream, const float2 (*x)[PITCH], Lane l) {
#pragma unroll 1
  for (int k = 0; k < 16 * stages; k += 32) {
    step(tile, stream, x, k, l);
    step(tile, stream, x, k + 16, l);
    settle(tile);
  }
  finish(tile);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    chain_bwd(const float* A_qk_t, const float* qg_t, const float* kg, const float* w_t, const float* gc_last,
              const float* d_o, const float* dht, const Offset* cu_seqlens, const i64* first_chunk, float* dv_new,
              float* dh, float* dh0, i64 T, i64 chunks, i64 HV, float scale) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *(Shared*)memory;
  const Lane l;
  const int warp = threadIdx.x / 32;
  const i64 part = blockIdx.x % (V / BV), number = blockIdx.x / (V / BV), head = number % HV;
  const Sequence sequence = sequence_place(number / HV, cu_seqlens, first_chunk, T, chunks);
  const bool keeps = warp < OWNERS, upper = warp >= HALF;
  const i64 count = (sequence.tokens + C - 1) / C;
  i64 tile = (sequence.first_chunk + count - 1) * HV + head;

  const int row = warp % HALF * 16;
  const i64 of_rows = tile * (C * K) + (row + l.g) * K + 4 * l.t, by = -HV * (C * K);
  const i64 of_channels = tile * (C * K) + (OWN * warp * 16 + l.g) * C + 4 * l.t;
  using Rows = Part<K>;
  using Inside = Part<C>;
  using Channels = Part<C, OWN == 1 ? 0 : C / 16>;
  const int of_own = keeps ? OWN * C / 16 : 0;
  Stream<DEPTH, Rows, Inside, Channels, Channels> stream(
      &s.ring[warp][0][0][0], {kg + of_rows, by, upper ? 0 : K / 16},
      {A_qk_t + tile * (C * C) + (row + l.g) * C + row + 4 * l.t, -HV * (C * C), upper ? (C - row) / 16 : 0},
      {qg_t + of_channels, by, of_own}, {w_t + of_channels, by, of_own}, count, l);

  State<K, V, BV, OWN, STATES_V_FIRST> S;
  if (keeps) S.load(dht ? dht + number * (K * V) : nullptr, part, warp, l);
  Share of_do;
  if (count > 0) {
    of_do.fetch(d_o, sequence.begin + (count - 1) * C, sequence.tokens - (count - 1) * C, head, HV, part);
    of_do.share(s);
  }
#pragma unroll 1
  for (i64 left = count - 1; left >= 0; --left, tile -= HV) {
    const i64 begin = sequence.begin + left * C, rows = sequence.tokens - left * C;
    if (keeps) {
      S.share(s.dh, warp, l);
      ((State<K, V, BV, OWN, false>&)S).store(dh + tile * (K * V), part, warp, l);
    }
    if (left > 0) of_do.fetch(d_o, begin - C, C, head, HV, part);
    float decay[OWN][2];
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        decay[m][i] = keeps ? exp2_(gc_last[tile * K + 16 * (OWN * warp + m) + l.g + 8 * i]) : 0.0f;
    __syncthreads();  // dh and do are there, dv_new was read
    Tile mine[TILES];
    if (!upper) {
      product<K / 16>(mine, stream, s.dh, l);
    } else {
#pragma unroll 1
      for (int k = row; k < C; k += 16) {
        step(mine, stream, s.d_o, k, l);
        settle(mine);
      }
      finish(mine);
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s.local[row + l.g + i / 2 * 8][8 * n + 2 * l.t + i % 2] = mine[n].sum[i];
    }
    if (keeps) {
#pragma unroll
      for (int m = 0; m < OWN; ++m) {
        Tile added[TILES];
        product<C / 16>(added, stream, s.d_o, l);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            S.of[m][n][i] = fmaf(S.of[m][n][i], decay[m][i / 2], scale * added[n].sum[i]);
      }
    }
    __syncthreads();  // A_qk^T @ do is there, dh and do were read
    if (!upper) {
      const TokenRows<V, BV> out(begin, head, HV, part, row, rows, l);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = row + l.g + i / 2 * 8, e = 8 * n + 2 * l.t + i % 2;
          x[i] = s.local[at][e] + mine[n].sum[i];
          s.dv_new[at][e] = parts_of(x[i]);
        }
        out.put(dv_new, n, x[0], x[1], x[2], x[3]);
      }
    }
    if (left > 0) of_do.share(s);
    __syncthreads();  // dv_new is there, A_qk^T @ do was read
    if (keeps) {
#pragma unroll
      for (int m = 0; m < OWN; ++m) {
        Tile taken[TILES];
        product<C / 16>(taken, stream, s.dv_new, l);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) S.of[m][n][i] -= taken[n].sum[i];
      }
    }
  }
  if (dh0 && keeps) S.store(dh0 + number * (K * V), part, warp, l);
}
