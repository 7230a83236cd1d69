"""Temporary: until common/cute has these."""

from __future__ import annotations

from ..common.arguments import Arguments, number, tensor


class ChunkTable:
    """Columns of the table of chunks (fwd/tables.py)."""

    TOKEN, TOKENS, NUMBER = range(3)
    WIDTH = 3


class SegmentTable:
    """Columns of the table of segments (fwd/tables.py)."""

    SEQUENCE, NUMBER, TOKEN, TOKENS_LEFT, CHUNK, STATE = range(6)
    WIDTH = 6


class ChainArguments(Arguments):
    tiles = tensor("uint8")                  # (chunks, HV) tiles
    v = tensor("bfloat16")                   # (B, T, HV, V)
    h0 = tensor(of="h0")                     # (N, HV, K, V) in the caller's layout; (segments, HV, K, V) of segments
    o = tensor("bfloat16")                   # (B, T, HV, V)
    r = tensor("bfloat16")                   # as o
    ht = tensor("float32")                   # as h0; of `carry` what a segment adds, (segments, HV, K, V)
    M = tensor("float32")                    # (segments, HV, K, K), transposed
    h = tensor("bfloat16")                   # (states, HV, K, V): those that enter every so many chunks
    segment_table = tensor("int64")          # (segments, 6), of packed sequences
    T = number("int32")
    chunks = number("int32")                 # of a row of T tokens
    segments = number("int32")               # of a row
    segment = number("int32")                # chunks of a segment
    HV = number("int32")


class WalkArguments(Arguments):
    tiles = tensor("uint8")                  # (chunks, HV) tiles, with b on keys
    do = tensor("bfloat16")                  # (B, T, HV, V)
    dht = tensor("float32")                  # (N, HV, K, V) in the caller's layout; (segments, HV, K, V) of segments
    dv = tensor("bfloat16")                  # (B, T, HV, V)
    dh = tensor("bfloat16")                  # (states, HV, V, K): leaving every two chunks
    dh0 = tensor(of="dh0")                   # (N, ..) as dht; of `carry` what a segment adds, (segments, HV, K, V)
    segment_table = tensor("int64")          # (segments, 6), of packed sequences
    T = number("int32")
    chunks = number("int32")                 # of a row of T tokens
    segments = number("int32")               # of a row
    segment = number("int32")                # chunks of a segment
    HV = number("int32")
