// fwd/state and fwd/output: one sequence, one value head and BV columns of its state, chunk after chunk.
//
//   v_new = u - w @ h;  next h = 2^gc_last h + kg^T @ v_new;  o = scale qg @ h + A_qk @ v_new
//
// A CTA has C / 8 warps.  First a warp has 16 rows of [w; qg] @ h: the lower half of the warps v_new, the upper half o.
// Then a warp that keeps rows of the state has 16 or 32 of kg^T @ v_new, and the upper half A_qk @ v_new.  All products
// are 3xTF32 into fresh accumulators; the state is kept by IEEE sums.  Left operands (w, qg, kg_t, A_qk) are read by
// one warp each, through its own ring (stream.cuh); the state and v_new, which all warps read, lie in shared memory.
//
// h and v_new are kept on request; for a backward (without OUTPUT) h is (K, V), and there is no o.
//
// Two barriers a chunk: the state is there (and v_new was read); v_new is there (and the state was read).
// Shared memory: rings of SLOTS KiB a warp; state (K, BV + 1) and v_new (C, BV + 1), 8 bytes an element; qg @ h
// (C, BV), 4 bytes: 95,744 bytes at K = 128, C = 64, BV = 16.
#include "places.cuh"
#include "state.cuh"

struct Shared {
  float4 ring[WARPS][SLOTS][2][32];
  float4 state[K / 2][PITCH], v_new[C / 2][PITCH];
  float4 of_o[OUTPUT ? TILES : 1][HALF * 32];  // qg @ h, of a lane of the upper half
};

struct Arguments {
  const float *w, *qg, *kg_t, *u, *A_qk, *gc_last, *h0;
  float *o, *v_new, *h, *ht;
  i64 HV;
  float scale;
};

// A half of the warps: the upper makes o, and keeps rows of the state where there are enough.
template <bool UPPER>
__device__ __forceinline__ void walk(Shared& s, const Arguments& x, const Sequence& sequence, i64 number, i64 part) {
  constexpr bool KEEPS = !UPPER || OWNERS > HALF, READS = OUTPUT || !UPPER;
  const Lane l;
  const int warp = threadIdx.x / 32, row = warp % HALF * 16;
  const i64 head = number % x.HV, count = (sequence.tokens + C - 1) / C;
  i64 tile = sequence.first_chunk * x.HV + head;

  using Rows = Part<K, K / 16, READS ? K / 16 : 0>;
  using Channels = Part<C, C / 16, KEEPS ? OWN * C / 16 : 0>;
  using Inside = Part<C, C / 16, OUTPUT && UPPER ? C / 16 : 0>;
  Stream<SLOTS / 2, Rows, Inside, Channels> stream(
      &s.ring[warp][0][0][0], {(UPPER ? x.qg : x.w) + tile * (C * K) + (row + l.g) * K + 4 * l.t, x.HV * (C * K)},
      {x.A_qk + tile * (C * C) + (row + l.g) * C + 4 * l.t, x.HV * (C * C), 0, row / 16},
      {x.kg_t + tile * (C * K) + (OWN * warp * 16 + l.g) * C + 4 * l.t, x.HV * (C * K)}, count);
  float2 of_u[TILES][2];  // both a chunk ahead
  float last[OWN][2];
  const auto look_ahead = [&](i64 tile) {
    const float* from = x.u + tile * (C * V) + (row + l.g) * V + part * BV + 2 * l.t;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
      if (!UPPER) of_u[n][0] = *(const float2*)(from + 8 * n), of_u[n][1] = *(const float2*)(from + 8 * V + 8 * n);
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (KEEPS) last[m][i] = x.gc_last[tile * K + 16 * (OWN * warp + m) + l.g + 8 * i];
  };
  TokenRows out(sequence.begin, head, x.HV, part, row, l);
  const int rows_of_last = sequence.tokens - (count - 1) * C;
  if (count > 0) look_ahead(tile);

  State<STATES_V_FIRST> S;
  if (KEEPS) S.load(x.h0 ? x.h0 + number * (K * V) : nullptr, part, warp, l);
#pragma unroll 1
  for (; stream.chunks > 0; stream.next_chunk(), tile += x.HV, out.move(1)) {
    const bool more = stream.chunks > 1;
    const int rows = more ? C : rows_of_last;
    if (KEEPS) {
      S.share(s.state, warp, l);
      if (x.h) ((State<OUTPUT && STATES_V_FIRST>&)S).store(x.h + tile * (K * V), part, warp, l);
    }
    __syncthreads();  // the state is there, v_new was read
    Tile mine[TILES];
    product<Rows::COUNT>(mine, stream, 0, s.state, l);
    if (!UPPER) {
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const float v[4] = {of_u[n][0].x - mine[n].sum[0], of_u[n][0].y - mine[n].sum[1],
                            of_u[n][1].x - mine[n].sum[2], of_u[n][1].y - mine[n].sum[3]};
        shelve(s.v_new, row, 8 * n, v, l);
        if (x.v_new) out.put(x.v_new, n, rows, v);
      }
    } else if (OUTPUT) {  // put aside; otherwise a compiler would move it after the barrier, where v_new is awaited
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const float* y = mine[n].sum;
        s.of_o[n][threadIdx.x - HALF * 32] = make_float4(y[0], y[1], y[2], y[3]);
      }
    }
    float decay[OWN][2];
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) decay[m][i] = KEEPS ? exp2_(last[m][i]) : 0.0f;
    if (more) look_ahead(tile + x.HV);
    __syncthreads();  // v_new is there, the state was read
    if (OUTPUT && UPPER) {
      Tile within[TILES];
      product<C / 16>(within, stream, stream.SECOND, s.v_new, l);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const float4 qg_h = s.of_o[n][threadIdx.x - HALF * 32];
        const float* y = within[n].sum;
        out.put(x.o, n, rows, {fmaf(x.scale, qg_h.x, y[0]), fmaf(x.scale, qg_h.y, y[1]), fmaf(x.scale, qg_h.z, y[2]),
                               fmaf(x.scale, qg_h.w, y[3])});
      }
    }
    if (KEEPS) {
#pragma unroll
      for (int m = 0; m < OWN; ++m) {
        Tile added[TILES];
        product<C / 16>(added, stream, stream.THIRD + m * (C / 16), s.v_new, l);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) S.value[m][n][i] = fmaf(S.value[m][n][i], decay[m][i / 2], added[n].sum[i]);
      }
    }
  }
  if (x.ht && KEEPS) S.store(x.ht + number * (K * V), part, warp, l);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    chain(const float* w, const float* qg, const float* kg_t, const float* u, const float* A_qk, const float* gc_last,
          const float* h0, const Offset* cu_seqlens, const i64* first_chunk, float* o, float* v_new, float* h,
          float* ht, i64 T, i64 chunks, i64 HV, float scale) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *(Shared*)memory;
  const i64 part = blockIdx.x % (V / BV), number = blockIdx.x / (V / BV);
  const Sequence sequence = sequence_place(number / HV, cu_seqlens, first_chunk, T, chunks);
  const Arguments x = {w, qg, kg_t, u, A_qk, gc_last, h0, o, v_new, h, ht, HV, scale};
  if (threadIdx.x / 32 < HALF) walk<false>(s, x, sequence, number, part);
  else walk<true>(s, x, sequence, number, part);
}
