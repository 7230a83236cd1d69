"""What those who make a chunk's operands hand to those who walk over chunks, for one chunk and one value head: operands
as they lie in shared memory.

  KQ      [kn 2^gc; scale qn 2^gc]   (2 C, K)    halves of K one after the other, 128-byte rows, swizzled
  KG      kn 2^(gc_last - gc)        (C, K)      the same
  DECAY   2^gc_last                  (K) float32, in the order of `in_decays`
  TB      (A_inv b)^T                (C, C)      64-byte rows, swizzled
  A_qk    with scale                 (C, C)      the same

A tile is contiguous and a multiple of 1 KiB, so that one bulk copy brings it where swizzles, which look at addresses,
find it as it was made.  Rows of no token are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

C = 32                                       # rows of a chunk
WARPS = 8                                    # that make one
ROWS = C // WARPS                            # of a warp
LEVELS = C.bit_length() - 1                  # of halving
BOUND = -5.02                                # gates that need one product: 31 rows of it are 2^-224
PAD = C + 4                                  # floats of a row of A_kk
PITCH_X = 16 + 4                             # floats of a column of an inverse of 16 rows
HALF = 64                                    # channels in a row of 128 bytes
BF16 = 2


@dataclass(frozen=True)
class Tile:
    """Byte offsets of the parts."""

    K: int

    @property
    def KG(self) -> int:
        return 2 * C * self.K * BF16

    @property
    def DECAY(self) -> int:
        return self.KG + C * self.K * BF16

    @property
    def TB(self) -> int:
        return self.DECAY + max(4 * self.K, 512)                               # eight rows of 64 bytes

    @property
    def A_qk(self) -> int:
        return self.TB + C * C * BF16

    @property
    def end(self) -> int:
        return self.A_qk + C * C * BF16

    @property
    def bytes(self) -> int:
        return -(-self.end // 1024) * 1024


# Shifts and masks: a compiler does not know that numbers of threads are not negative.
def in_wide_rows(row, channel, rows: int):
    """Bytes to a channel of a tile with `rows` rows of 128 bytes: 16-byte pieces change places within eight rows."""
    piece = (channel & HALF - 1) >> 3 ^ row & 7
    return (channel >> 6) * (rows * 128) + row * 128 + piece * 16 + (channel & 7) * BF16


def row_below(offset, r: int):
    """From there, in the first of four rows, to the row r below."""
    return (offset ^ r * 16) + r * 128


def in_decays(channel):
    """Floats to a channel: of 16 channels, the four that a lane of an accumulator's columns has lie together."""
    return (channel & -16) + (channel >> 1 & 3) * 4 + (channel >> 3 & 1) * 2 + (channel & 1)


def in_narrow_rows(row, column):
    """The same for rows of 64 bytes."""
    piece = column >> 3 ^ row >> 1 & 3
    return row * 64 + piece * 16 + (column & 7) * BF16
