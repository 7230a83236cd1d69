// fwd/state and fwd/output: one sequence, one value head and BV columns of its state, chunk after chunk.
//
//   v_new = u - w @ h;  next h = 2^gc_last h + kg^T @ v_new;  o = scale qg @ h + A_qk @ v_new
//
// A CTA has C / 8 warps.  First a warp has 16 rows of [w; qg] @ h: the lower half of the warps v_new, the upper half o.
// Then a warp has 16 or 32 rows of the state, in registers, kg^T @ v_new, and the upper half A_qk @ v_new as well.  All
// products are 3xTF32 into fresh accumulators; the state is kept by IEEE sums.  Left operands (w, qg, kg_t, A_qk) are
// read by one warp each and come through its own ring (stream.cuh); the state and v_new, which all warps read, lie in
// shared memory in their tf32 parts.
//
// h and v_new are kept where asked for; for a backward (without OUTPUT) h is (K, V), and there is no o.
//
// Two barriers a chunk: the state is there (and v_new was read); v_new is there (and the state was read).
// Shared memory: state (K, BV + 1) and v_new (C, BV + 1), 8 bytes an element; rings of DEPTH KiB a warp: 91,648 bytes
// at K = 128, C = 64, BV = 16.
#include "places.cuh"
#include "state.cuh"

constexpr int K = HEAD_K, V = HEAD_V, C = CHUNK, WARPS = C / 8, THREADS = 32 * WARPS, HALF = WARPS / 2;
constexpr int BV = COLUMNS, DEPTH = STAGES, TILES = BV / 8, PITCH = BV + 1;
// Warps that keep the state, and their tiles of 16 rows.
constexpr int OWNERS = K / 16 < WARPS ? K / 16 : WARPS, OWN = K / 16 / OWNERS;

struct Shared {
  float4 ring[WARPS][DEPTH][2][32];
  float2 state[K][PITCH], v_new[C][PITCH];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    chain(const float* w, const float* qg, const float* kg_t, const float* u, const float* A_qk, const float* gc_last,
          const float* h0, const Offset* cu_seqlens, const i64* first_chunk, float* o, float* v_new, float* h,
          float* ht, i64 T, i64 chunks, i64 HV, float scale) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *(Shared*)memory;
  const Lane l;
  const int warp = threadIdx.x / 32;
  const i64 part = blockIdx.x % (V / BV), number = blockIdx.x / (V / BV), head = number % HV;
  const Sequence sequence = sequence_place(number / HV, cu_seqlens, first_chunk, T, chunks);
  const bool keeps = warp < OWNERS, upper = warp >= HALF;
  const i64 count = (sequence.tokens + C - 1) / C;
  i64 tile = sequence.first_chunk * HV + head;

  const int row = warp % HALF * 16;
  const i64 of_rows = tile * (C * K) + (row + l.g) * K + 4 * l.t, by = HV * (C * K);
  using Rows = Part<K>;
  using Channels = Part<C, OWN == 1 ? 0 : C / 16>;
  using Inside = Part<C>;
  Stream<DEPTH, Rows, Channels, Inside, Part<0>> stream(
      &s.ring[warp][0][0][0], {(upper ? qg : w) + of_rows, by, OUTPUT || !upper ? K / 16 : 0},
      {kg_t + tile * (C * K) + (OWN * warp * 16 + l.g) * C + 4 * l.t, by, keeps ? OWN * C / 16 : 0},
      {A_qk + tile * (C * C) + (row + l.g) * C + 4 * l.t, HV * (C * C), OUTPUT && upper ? row / 16 + 1 : 0},
      {nullptr, 0, 0}, count, l);

  State<K, V, BV, OWN, STATES_V_FIRST> S;
  if (keeps) S.load(h0 ? h0 + number * (K * V) : nullptr, part, warp, l);
#pragma unroll 1
  for (i64 done = 0; done < count; ++done, tile += HV) {
    const i64 begin = sequence.begin + done * C, rows = sequence.tokens - done * C;
    if (keeps) {
      S.share(s.state, warp, l);
      if (h) ((State<K, V, BV, OWN, OUTPUT && STATES_V_FIRST>&)S).store(h + tile * (K * V), part, warp, l);
    }
    float2 of_u[TILES][2];
    if (!upper) {
      const float* from = u + tile * (C * V) + (row + l.g) * V + part * BV + 2 * l.t;
#pragma unroll
      for (int n = 0; n < TILES; ++n)
        of_u[n][0] = *(const float2*)(from + 8 * n), of_u[n][1] = *(const float2*)(from + 8 * V + 8 * n);
    }
    float last[OWN][2];
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        last[m][i] = keeps ? gc_last[tile * K + 16 * (OWN * warp + m) + l.g + 8 * i] : 0.0f;
    __syncthreads();  // the state is there, v_new was read
    Tile mine[TILES];
    if (OUTPUT || !upper) {
#pragma unroll 1
      for (int k = 0; k < K; k += 32) {
        step(mine, stream, s.state, k, l);
        step(mine, stream, s.state, k + 16, l);
        settle(mine);
      }
      finish(mine);
    }
    if (!upper) {
      const TokenRows<V, BV> out(begin, head, HV, part, row, rows, l);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const float x[4] = {of_u[n][0].x - mine[n].sum[0], of_u[n][0].y - mine[n].sum[1],
                            of_u[n][1].x - mine[n].sum[2], of_u[n][1].y - mine[n].sum[3]};
#pragma unroll
        for (int i = 0; i < 4; ++i) s.v_new[row + l.g + i / 2 * 8][8 * n + 2 * l.t + i % 2] = parts_of(x[i]);
        if (v_new) out.put(v_new, n, x[0], x[1], x[2], x[3]);
      }
    }
    __syncthreads();  // v_new is there, the state was read
    if (keeps) {
#pragma unroll
      for (int m = 0; m < OWN; ++m) {
        Tile added[TILES];
#pragma unroll 1
        for (int k = 0; k < C; k += 32) {
          step(added, stream, s.v_new, k, l);
          step(added, stream, s.v_new, k + 16, l);
          settle(added);
        }
        finish(added);
        const float decay[2] = {exp2_(last[m][0]), exp2_(last[m][1])};
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) S.of[m][n][i] = fmaf(S.of[m][n][i], decay[i / 2], added[n].sum[i]);
      }
    }
    if (OUTPUT && upper) {
      Tile inside[TILES];
#pragma unroll 1
      for (int k = 0; k <= row; k += 16) {
        step(inside, stream, s.v_new, k, l);
        settle(inside);
      }
      finish(inside);
      const TokenRows<V, BV> out(begin, head, HV, part, row, rows, l);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = fmaf(scale, mine[n].sum[i], inside[n].sum[i]);
        out.put(o, n, x[0], x[1], x[2], x[3]);
      }
    }
  }
  if (ht && keeps) S.store(ht + number * (K * V), part, warp, l);
}
