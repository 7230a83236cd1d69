"""What a chunk costs in each form of the Hopper forward, by which plan.py decides between them.  No torch, no cutlass.

The unit is what prepare and chain take for a chunk of K = V = 128 with a bounded gate, 24.2 ns on an H200.  Rows of
K = V = 128 were measured there; those of other dims, and of returned states, on an H100, whose memory is slower: what
two kernels take, which memory bounds, was multiplied by 0.7, the ratio of the two for K = V = 128.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Costs:
    pair: float                              # in a cluster of two
    four: float                              # in a cluster of four
    piece: float                             # a walk's own cost beside its chunks, in chunks of a cluster of two
    both: float                              # in prepare and chain
    prepared: float                          # in prepare
    cut: float                               # in segments
    alone: float = math.inf                  # in a CTA alone
    chained: float = 0.42                    # in chain
    carried: float = 0.62                    # in carry, with M
    step: float = 26                         # a chain's step
    making: float = math.inf                 # in a CTA of a stream that makes tiles; alone it takes four fifths
    walked: float = 19.5                     # a stream's walk
    begin: float = 900                       # a stream's own cost beside its chunks
    sharing: float = 1                       # factor of `pair` where clusters share all walks


Table = Mapping[tuple[int, int, bool], Costs]

ONE_PRODUCT = Costs(pair=50, four=32.7, piece=1.75, both=1, prepared=0.6, cut=1.45, making=104)
IN_BLOCKS = Costs(pair=72.8, four=44.5, piece=0.72, both=1.27, prepared=0.96, cut=1.75, making=153, begin=1100)
# By K, V and whether pairs are made in blocks.  K = 64 has no blocks: such a gate runs in two kernels.
FORWARD = {
    (128, 128, False): ONE_PRODUCT,
    (128, 128, True): IN_BLOCKS,
    (128, 64, False): replace(ONE_PRODUCT, alone=87, pair=47.5, four=math.inf, both=0.82, chained=0.22),
    (128, 64, True): replace(IN_BLOCKS, alone=134, pair=74, four=math.inf, both=1.1, chained=0.22),
    (64, 128, False): Costs(pair=39.5, four=24, piece=1.4, both=0.67, prepared=0.4, cut=0.85, chained=0.27, step=16),
    (64, 64, False): Costs(
        alone=68.5, pair=36, four=math.inf, piece=1.4, both=0.55, prepared=0.4, cut=0.8, chained=0.15, step=17
    ),
}
# The same where states that enter chunks are returned, of K = V = 128.
STATES = {
    (128, 128, False): replace(ONE_PRODUCT, pair=68, sharing=1.09, four=52, both=1.2, chained=0.6, step=45),
    (128, 128, True): replace(IN_BLOCKS, pair=88, four=57, both=1.45, chained=0.6, step=45),
}
# The same where what a backward reads is kept, for V = K; sequences are not cut then.  In clusters of two, gates in
# blocks of 8 rows leave no shared memory for it.
KEEPING_128 = Costs(
    pair=72, sharing=1.11, four=43, piece=2.4, both=1.32, prepared=0.556, chained=0.767, step=34, cut=math.inf
)
KEEPING = {
    (128, 128, False): KEEPING_128,
    (128, 128, True): replace(KEEPING_128, pair=math.inf, four=53, both=1.68, prepared=0.914),
    (64, 64, False): replace(
        KEEPING_128, alone=95, pair=48, sharing=1.13, four=math.inf, both=0.7, prepared=0.4, chained=0.3, step=22
    ),
}
