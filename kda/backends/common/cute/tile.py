"""The shape of a chunk as kernels make it, and where its elements lie in shared memory.  No cutlass.

A chunk has C = 32 rows; eight warps make its operands, each WARP_ROWS rows of them.  (A call's `chunk_size` p.C is 32
or 64: a chunk of 64 is two of these.)
"""

C = 32                                       # rows of a chunk
WARPS = 8                                    # warps that make a chunk
WARP_ROWS = C // WARPS                       # rows of a warp
LEAST_BUSY = WARPS - 1                       # the warp that has the least to do
LEVELS = C.bit_length() - 1                  # levels of halving
# rows.py
GROUP_ROWS = 2                               # rows that a lane has
ROW_GROUPS = C // GROUP_ROWS                 # groups of rows in a chunk
DECAY, BIAS, TO_LAST, FROM_ZERO = range(ROW_GROUPS, ROW_GROUPS + 4)    # rows of `sums`
SUMS, SUMS_OF_BLOCKS = FROM_ZERO + 1, BIAS + 1   # rows that there are; in blocks of 8 rows
BLOCKS = C // 8                              # blocks of 8 rows in a chunk
SUM_CHANNELS = 64                            # channels of each warp that sums over all rows: two for each thread
OF_BLOCKS = 6 * BLOCKS                       # rows of bfloat16 of what blocks have
MIN_GATE_ONE_PRODUCT = -5.02                 # the lowest bound for which one product is enough: 31 rows are 2^-224
PITCH_A = C + 4                              # floats of a row of A_kk
PITCH_INVERSE = 16 + 4                       # floats of a column of an inverse of 16 rows
HEAD_SIZES = (64, 128)                       # K and V that the layouts of kernels hold
HALF = 64                                    # channels in a row of 128 bytes
BF16 = 2                                     # bytes


# Shifts and masks: a compiler does not know that numbers of threads are not negative.
def swizzle_128B(row, channel, rows: int):
    """Bytes to a channel of a tile with `rows` rows of 128 bytes: 16-byte pieces change places within eight rows.
    Halves of K lie one after the other."""
    piece = (channel & HALF - 1) >> 3 ^ row & 7
    return (channel >> 6) * (rows * 128) + row * 128 + piece * 16 + (channel & 7) * BF16


def row_below(offset, r: int):
    """From an offset by `swizzle_128B` in the first of four rows to the row r below."""
    return (offset ^ r * 16) + r * 128


def swizzle_64B(row, column):
    """Bytes to a column of a tile with rows of 64 bytes."""
    piece = column >> 3 ^ row >> 1 & 3
    return row * 64 + piece * 16 + (column & 7) * BF16


def decay_index(channel):
    """Floats to a channel's decay: of 16 channels, the four of one lane's accumulator columns lie together."""
    return (channel & -16) + (channel >> 1 & 3) * 4 + (channel >> 3 & 1) * 2 + (channel & 1)
