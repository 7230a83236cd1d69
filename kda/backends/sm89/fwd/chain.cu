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
// Two barriers a chunk: the state is there (and v_new was read); v_new is there (and the state was read).
// Shared memory: state (K, BV + 1) and v_new (C, BV + 1), 8 bytes an element; rings of DEPTH KiB a warp: 91,648 bytes
// at K = 128, C = 64, BV = 16.
#include "places.cuh"
#include "stream.cuh"

constexpr int K = HEAD_K, V = HEAD_V, C = CHUNK, WARPS = C / 8, THREADS = 32 * WARPS, HALF = WARPS / 2;
constexpr int BV = COLUMNS, DEPTH = STAGES, TILES = BV / 8, PITCH = BV + 1;
constexpr int OWNERS = K / 16 < WARPS ? K / 16 : WARPS, OWN = K / 16 / OWNERS;  // warps that keep the state; their tiles
constexpr int FIRST = K / 16, SECOND = OWN * C / 16;  // stages of the first product, and of kg^T @ v_new

struct Shared {
  float4 ring[WARPS][DEPTH][2][32];
  float2 state[K][PITCH], v_new[C][PITCH];
};

// The stages of one warp, chunk after chunk: its rows of w or qg, of kg_t, of A_qk up to the diagonal.
struct Stream {
  const float *first, *second, *third;  // of this chunk, at the lane's own element
  i64 HV, left;                         // chunks
  int stage, before, both, stages;      // the next; how many of the first product, of the first two, of all
  __device__ Stream(const float* w, const float* qg, const float* kg_t, const float* A_qk, i64 tile, i64 HV, i64 chunks,
                    int warp, Lane l)
      : HV(HV), left(chunks), stage(0) {
    const int row = warp % HALF * 16 + l.g, column = 4 * l.t;
    first = (warp < HALF ? w : qg) + tile * (C * K) + row * K + column;
    second = kg_t + tile * (C * K) + (OWN * warp * 16 + l.g) * C + column;
    third = A_qk + tile * (C * C) + row * C + column;
    before = OUTPUT || warp < HALF ? FIRST : 0;
    both = before + (warp < OWNERS ? SECOND : 0);
    stages = both + (OUTPUT && warp >= HALF ? warp % HALF + 1 : 0);
    if (stages == 0) left = 0;
  }
  // Asks for the next stage; a group is made even of nothing.
  __device__ __forceinline__ void ask(Ring<DEPTH>& ring) {
    if (left > 0) {
      if (stage < before) {
        ring.ask(first + 16 * stage, K);
      } else if (stage < both) {
        const int at = stage - before;
        ring.ask(second + at / (C / 16) * (16 * C) + at % (C / 16) * 16, C);
      } else {
        ring.ask(third + (stage - both) * 16, C);
      }
      if (++stage == stages) {
        stage = 0, --left;
        first += HV * (C * K), second += HV * (C * K), third += HV * (C * C);
      }
    }
    commit();
  }
};

// A stage of the stream times rows of x.
__device__ __forceinline__ void step(Tile (&tile)[TILES], Ring<DEPTH>& ring, Stream& stream, const float2 (*x)[PITCH],
                                     int row, Lane l) {
  float4 g, h;
  ring.take(g, h);
  stream.ask(ring);
  multiply<TILES, PITCH>(tile, g, h, &x[0][0], row, l);
}

__device__ __forceinline__ void settle(Tile (&tile)[TILES]) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) tile[n].settle();
}

__device__ __forceinline__ void finish(Tile (&tile)[TILES]) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) tile[n].finish();
}

// A warp's rows of the state.
struct State {
  float of[OWN][TILES][4];
  // Element [n][i] of tile m is row 16 m + g + 8 (i / 2), column 8 n + 2 t + i % 2.  `at` begins at the warp's columns.
  template <typename Each>
  __device__ __forceinline__ void each(int warp, Lane l, Each each) {
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          each(of[m][n][i], 16 * (OWN * warp + m) + l.g + i / 2 * 8, 8 * n + 2 * l.t + i % 2);
  }
  __device__ __forceinline__ void load(const float* from, i64 part, int warp, Lane l) {
    each(warp, l, [&](float& x, int row, int column) { x = from ? from[at(row, column, part)] : 0.0f; });
  }
  __device__ __forceinline__ void store(float* to, i64 part, int warp, Lane l) {
    each(warp, l, [&](float& x, int row, int column) { to[at(row, column, part)] = x; });
  }
  __device__ __forceinline__ void share(Shared& s, int warp, Lane l) {
    each(warp, l, [&](float& x, int row, int column) { s.state[row][column] = parts_of(x); });
  }
  __device__ __forceinline__ static i64 at(int row, int column, i64 part) {
    return V_FIRST ? (part * BV + column) * K + row : row * V + part * BV + column;
  }
};

// Rows of tokens (.., HV, V) at a warp's 16 rows of a chunk: a pair of columns a lane.
struct TokenRows {
  i64 at, stride;  // of the lane's row g
  bool g, h;       // its rows are there
  __device__ __forceinline__ TokenRows(i64 begin, i64 head, i64 HV, i64 part, int row, i64 rows, Lane l)
      : at(((begin + row + l.g) * HV + head) * V + part * BV + 2 * l.t), stride(HV * V * 8), g(row + l.g < rows),
        h(row + l.g + 8 < rows) {}
  __device__ __forceinline__ void put(float* to, int n, float x0, float x1, float x2, float x3) const {
    if (g) *(float2*)(to + at + 8 * n) = make_float2(x0, x1);
    if (h) *(float2*)(to + at + stride + 8 * n) = make_float2(x2, x3);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    chain(const float* w, const float* qg, const float* kg_t, const float* u, const float* A_qk, const float* gc_last,
          const float* h0, const Offset* cu_seqlens, const i64* first_chunk, float* o, float* v_new, float* h, float* ht,
          i64 T, i64 chunks, i64 HV, float scale) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *(Shared*)memory;
  const Lane l;
  const int warp = threadIdx.x / 32;
  const i64 part = blockIdx.x % (V / BV), number = blockIdx.x / (V / BV), head = number % HV;
  const Sequence sequence = sequence_place(number / HV, cu_seqlens, first_chunk, T, chunks);
  const bool keeps = warp < OWNERS, upper = warp >= HALF;
  const i64 count = (sequence.tokens + C - 1) / C;
  i64 tile = sequence.first_chunk * HV + head;

  Ring<DEPTH> ring(&s.ring[warp][0][0][0], l);
  Stream stream(w, qg, kg_t, A_qk, tile, HV, count, warp, l);
#pragma unroll 1
  for (int i = 0; i < DEPTH; ++i) stream.ask(ring);

  State S;
  if (keeps) S.load(h0 ? h0 + number * (K * V) : nullptr, part, warp, l);
#pragma unroll 1
  for (i64 done = 0; done < count; ++done, tile += HV) {
    const i64 begin = sequence.begin + done * C, rows = sequence.tokens - done * C;
    const int row = warp % HALF * 16;
    if (keeps) {
      S.share(s, warp, l);
      if (h) S.store(h + tile * (K * V), part, warp, l);
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
        step(mine, ring, stream, s.state, k, l);
        step(mine, ring, stream, s.state, k + 16, l);
        settle(mine);
      }
      finish(mine);
    }
    if (!upper) {
      const TokenRows out(begin, head, HV, part, row, rows, l);
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
          step(added, ring, stream, s.v_new, k, l);
          step(added, ring, stream, s.v_new, k + 16, l);
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
        step(inside, ring, stream, s.v_new, k, l);
        settle(inside);
      }
      finish(inside);
      const TokenRows out(begin, head, HV, part, row, rows, l);
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
