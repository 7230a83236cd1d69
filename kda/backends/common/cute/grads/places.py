"""What a lane of MATH of bwd/grads has: of 64 channels and 64 tokens, two of 16 channels and four of 16 tokens."""

import cutlass
import cutlass.cute as cute

from ..copies import floats_of
from ..fragments import load_matrices
from ..training import STEP, TOKEN_FACTORS, TOKENS

STEPS = TOKENS // STEP
EACH = 4                                     # tokens of a step that a lane has: 4 a .. 4 a + 3
Q, K_, B = range(TOKEN_FACTORS)              # the factors of a token: 1 / |q|, 1 / |k|, b
SMALLEST_B = 2.0**-40                        # instead of smaller given b: b db is divided by b, which may be 0
HALVES = 2                                   # rows (channels) of an accumulator that a lane has: lane / 4, and 8 below


def at_element(s: int, r: int, t: int) -> int:
    """The element of an accumulator (64 channels, 64 tokens), and of an operand like it: step, half, token of four."""
    return s * 8 + t // 2 * 4 + r * 2 + t % 2


def position(token):
    """Return the position of a token in shared memory."""
    return token & -16 | (token & 2) << 2 | (token & 12) >> 1 | token & 1


def last_token(row, tokens):
    """The row, or the last one that there is."""
    return cutlass.min(row, tokens - 1)


def neighbour(x, far: int):
    return cute.arch.shuffle_sync_bfly(x, far)


def raw(rows, b: int):
    """Both halves' channels of four tokens of step b, as `at_element` counts."""
    return floats_of(raw_words(rows, b))


def raw_words(rows, b: int):
    """Return them as words of two bfloat16."""
    return load_matrices(rows + b * (STEP * 64), transposed=True)
