// bwd/output and bwd/state: one sequence, one value head and BV columns of the state's gradient, from the last chunk.
//
//   dv_new = A_qk^T @ do + kg @ dh;  next dh = 2^gc_last dh + scale qg^T @ do - w^T @ dv_new
//
// A CTA has C / 8 warps, of which some keep 16 or 32 rows of dh each.  What waits for dh is kg @ dh and then
// w^T @ dv_new.  The lower half of the warps makes kg @ dh, 16 rows each; the upper half qg^T @ do meanwhile, for its
// own rows or, where it keeps none, for those of the lower half.  Then who keeps rows makes w^T @ dv_new, and qg^T @ do
// where it is not done, and the upper half A_qk^T @ do of the chunk that comes next.  As in fwd/chain.cu, products are
// 3xTF32 into fresh accumulators, dh is kept by IEEE sums, left operands come through rings, and dh, do and dv_new lie
// in shared memory; do twice, for this chunk and the next.
//
// Two barriers a chunk: dh and A_qk^T @ do are there (dv_new was read); dv_new, the next do and qg^T @ do are there (dh
// and A_qk^T @ do were read).
// Shared memory: rings of SLOTS KiB a warp; dh (K, BV + 1), dv_new and two do (C, BV + 1), 8 bytes an element;
// A_qk^T @ do (C, BV + 1) and qg^T @ do (K, BV + 1), 4 bytes: 97,092 bytes at K = 128, C = 64, BV = 16.
#include "places.cuh"
#include "state.cuh"

constexpr bool HANDS = OWNERS <= HALF;          // the upper half keeps no rows
constexpr int EACH = C / 2 * BV / THREADS;      // pairs of rows of do of a thread

struct Shared {
  float4 ring[WARPS][SLOTS][2][32];
  float4 dh[K / 2][PITCH], d_o[2][C / 2][PITCH], dv_new[C / 2][PITCH];
  float inside[C][PITCH], handed[HANDS ? K : 1][PITCH];
};

// A thread's share of do (C, BV) of a chunk: fetched early, shared late.
struct Share {
  float value[EACH][2];
  __device__ __forceinline__ void fetch(const float* d_o, i64 begin, i64 rows, i64 head, i64 HV, i64 part) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int index = threadIdx.x + i * THREADS, row = index / BV * 2;
      const float* from = d_o + ((begin + row) * HV + head) * V + part * BV + index % BV;
      value[i][0] = row < rows ? *from : 0.0f;
      value[i][1] = row + 1 < rows ? from[HV * V] : 0.0f;
    }
  }
  __device__ __forceinline__ void share(float4 (*to)[PITCH]) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int index = threadIdx.x + i * THREADS;
      to[index / BV][index % BV] = parts_of(value[i][0], value[i][1]);
    }
  }
};

// 16 rows of sums, to be handed over and back.
__device__ __forceinline__ void put(float (*to)[PITCH], int row, const Tile (&tiles)[TILES], Lane l) {
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[row + l.g + i / 2 * 8][8 * n + 2 * l.t + i % 2] = tiles[n].sum[i];
}

__device__ __forceinline__ void get(Tile (&tiles)[TILES], const float (*from)[PITCH], int row, Lane l) {
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) tiles[n].sum[i] = from[row + l.g + i / 2 * 8][8 * n + 2 * l.t + i % 2];
}

struct Arguments {
  const float *A_qk_t, *qg_t, *kg, *w_t, *gc_last, *d_o, *dht;
  float *dv_new, *dh, *dh0;
  i64 HV;
  float scale;
};

// A half of the warps.  The upper half's first matrix is zero before its diagonal.
template <bool UPPER>
__device__ __forceinline__ void walk(Shared& s, const Arguments& x, const Sequence& sequence, i64 number, i64 part) {
  constexpr bool KEEPS = !UPPER || !HANDS;
  constexpr int FIRST = UPPER ? C / 16 : K / 16, OF_OWN = OWN * C / 16;
  const Lane l;
  const int warp = threadIdx.x / 32, row = warp % HALF * 16, owned = OWN * 16 * (HANDS ? warp % HALF : warp);
  const i64 head = number % x.HV, count = (sequence.tokens + C - 1) / C;
  i64 tile = (sequence.first_chunk + count - 1) * x.HV + head;

  const i64 of_channels = tile * (C * K) + (owned + l.g) * C + 4 * l.t, by = -x.HV * (C * K);
  const float* of_rows = UPPER ? x.A_qk_t + tile * (C * C) + (row + l.g) * C + 4 * l.t
                               : x.kg + tile * (C * K) + (row + l.g) * K + 4 * l.t;
  Stream<SLOTS / 2, Part<UPPER ? C : K, FIRST, FIRST>, Part<C, C / 16, UPPER || !HANDS ? OF_OWN : 0>,
         Part<C, C / 16, KEEPS ? OF_OWN : 0>>
      stream(&s.ring[warp][0][0][0], {of_rows, UPPER ? -x.HV * (C * C) : by, UPPER ? row / 16 : 0},
             {x.qg_t + of_channels, by}, {x.w_t + of_channels, by}, count);
  State<STATES_V_FIRST> S;
  if (KEEPS) S.load(x.dht ? x.dht + number * (K * V) : nullptr, part, warp, l);
  Share of_do;         // the chunk before this one
  float last[OWN][2];  // both a chunk ahead
  const auto fetch = [&](i64 chunk) {
    of_do.fetch(x.d_o, sequence.begin + chunk * C, sequence.tokens - chunk * C, head, x.HV, part);
  };
  const auto look_ahead = [&](i64 chunk) {
    if (chunk > 0) fetch(chunk - 1);
    const float* from = x.gc_last + ((sequence.first_chunk + chunk) * x.HV + head) * K + owned + l.g;
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) last[m][i] = KEEPS ? from[16 * m + 8 * i] : 0.0f;
  };
  float decay[OWN][2];
  const auto decay_and_add = [&](int m, const Tile (&added)[TILES]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) S.value[m][n][i] = fmaf(S.value[m][n][i], decay[m][i / 2], x.scale * added[n].sum[i]);
  };
  TokenRows out(sequence.begin + (count - 1) * C, head, x.HV, part, row, l);
  int rows = sequence.tokens - (count - 1) * C;
  if (count > 0) {
    fetch(count - 1);
    of_do.share(s.d_o[(count - 1) % 2]);
    look_ahead(count - 1);
  }
  __syncthreads();  // the first do is there
#pragma unroll 1
  for (; stream.chunks > 0; stream.next_chunk(), tile -= x.HV, out.move(-1), rows = C) {
    const i64 left = stream.chunks - 1;
    const int now = left % 2;
    if (KEEPS) {
      S.share(s.dh, warp, l);
      ((State<false>&)S).store(x.dh + tile * (K * V), part, warp, l);
    }
    Tile mine[TILES];
    if (UPPER) {
      product<C / 16>(mine, stream, 0, s.d_o[now], l);
      put(s.inside, row, mine, l);
    }
    __syncthreads();  // dh and A_qk^T @ do are there, dv_new was read
    if (left > 0) of_do.share(s.d_o[1 - now]);
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) decay[m][i] = exp2_(last[m][i]);
    if (left > 0) look_ahead(left - 1);
    if (UPPER) {
#pragma unroll
      for (int m = 0; m < OWN; ++m) {
        Tile added[TILES];
        product<C / 16>(added, stream, stream.SECOND + m * (C / 16), s.d_o[now], l);
        if (KEEPS) decay_and_add(m, added);
        else put(s.handed, owned + 16 * m, added, l);
      }
    } else {
      Tile inside[TILES];
      get(inside, s.inside, row, l);
      product<K / 16>(mine, stream, 0, s.dh, l);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = inside[n].sum[i] + mine[n].sum[i];
        shelve(s.dv_new, row, 8 * n, y, l);
        out.put(x.dv_new, n, rows, y);
      }
    }
    __syncthreads();  // dv_new, the next do and qg^T @ do are there; dh and A_qk^T @ do were read
    if (KEEPS) {
#pragma unroll
      for (int m = 0; m < OWN; ++m) {
        if (UPPER) continue;
        Tile added[TILES];
        if (!HANDS) product<C / 16>(added, stream, stream.SECOND + m * (C / 16), s.d_o[now], l);
        else get(added, s.handed, owned + 16 * m, l);
        decay_and_add(m, added);
      }
#pragma unroll
      for (int m = 0; m < OWN; ++m) {
        Tile taken[TILES];
        product<C / 16>(taken, stream, stream.THIRD + m * (C / 16), s.dv_new, l);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) S.value[m][n][i] -= taken[n].sum[i];
      }
    }
  }
  if (x.dh0 && KEEPS) S.store(x.dh0 + number * (K * V), part, warp, l);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    chain_bwd(const float* A_qk_t, const float* qg_t, const float* kg, const float* w_t, const float* gc_last,
              const float* d_o, const float* dht, const Offset* cu_seqlens, const i64* first_chunk, float* dv_new,
              float* dh, float* dh0, i64 T, i64 chunks, i64 HV, float scale) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *(Shared*)memory;
  const i64 part = blockIdx.x % (V / BV), number = blockIdx.x / (V / BV);
  const Sequence sequence = sequence_place(number / HV, cu_seqlens, first_chunk, T, chunks);
  const Arguments x = {A_qk_t, qg_t, kg, w_t, gc_last, d_o, dht, dv_new, dh, dh0, HV, scale};
  if (threadIdx.x / 32 < HALF) walk<false>(s, x, sequence, number, part);
  else walk<true>(s, x, sequence, number, part);
}
