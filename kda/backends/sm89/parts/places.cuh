// Where chunks lie.  B rows of T tokens have `chunks` chunks each; packed sequences [cu_seqlens[n], cu_seqlens[n + 1])
// have first_chunk[n + 1] - first_chunk[n], which fwd/tables.cu counts.  All offsets are 64-bit.
#pragma once

#include "numbers.cuh"

#if PACKED == 32
typedef int Offset;
#else
typedef i64 Offset;
#endif

struct Place {
  i64 begin;  // its first token
  int rows;   // its tokens; none: it is no chunk, and `begin` is a token of no sequence
};

// Chunk c of all.  Past the last there are places for the tokens of no sequence.
__device__ __forceinline__ Place chunk_place(i64 c, const Offset* cu_seqlens, const i64* first_chunk, i64 T, i64 N,
                                             i64 chunks, int C) {
#if PACKED
  const i64 all = first_chunk[N];
  if (c >= all) return {(i64)cu_seqlens[N] + (c - all) * C, 0};
  i64 low = 0, high = N;  // first_chunk[low] <= c < first_chunk[high]
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    if (first_chunk[middle] <= c) low = middle;
    else high = middle;
  }
  const i64 begin = (i64)cu_seqlens[low] + (c - first_chunk[low]) * C, left = (i64)cu_seqlens[low + 1] - begin;
  return {begin, (int)(left < C ? left : C)};
#else
  const i64 skipped = c % chunks * C, left = T - skipped;
  return {c / chunks * T + skipped, (int)(left < C ? left : C)};
#endif
}

struct Sequence {
  i64 begin, tokens, first_chunk;
};

__device__ __forceinline__ Sequence sequence_place(i64 n, const Offset* cu_seqlens, const i64* first_chunk, i64 T,
                                                   i64 chunks) {
#if PACKED
  const i64 begin = cu_seqlens[n];
  return {begin, (i64)cu_seqlens[n + 1] - begin, first_chunk[n]};
#else
  return {n * T, T, n * chunks};
#endif
}
