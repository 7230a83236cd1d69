"""Which sequences, heads and segments a cluster walks over, and where they lie.

An item is a walk and a value head; clusters take items in turn.  A walk is a sequence, or, where sequences are cut
(`cut`), one of the 2 segments - 1 walks over a sequence's segments: the first segment is walked over once, each other
segment a second time, from the identity, for the transition M.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common.cute.segments import locate_segment, locate_sequence
from ...common.cute.tile import C
from ..configs import CTAS


@cute.jit
def first_item(HV):
    """Return the walk and the value head that a cluster begins with."""
    item = cute.arch.block_idx()[0] // CTAS
    return item // HV, item % HV


@cute.jit
def next_item(walk, head, HV):
    head += cute.arch.grid_dim()[0] // CTAS
    while head >= HV:
        walk, head = walk + 1, head - HV
    return walk, head


@cute.jit
def locate_walk(c: cutlass.Constexpr, x, walk):
    """Return a walk's first token and tokens, sequence and segment, and whether this is a transition's walk."""
    n, segment, is_transition = walk, Int32(0), False
    if cutlass.const_expr(c.cut):
        n = walk // (2 * x.segments - 1)
        number = walk - n * (2 * x.segments - 1)
        segment, is_transition = number + 1 >> 1, (number & 1) < cutlass.min(number, 1)
    begin, tokens = locate_sequence(c.offsets, x, n)
    if cutlass.const_expr(c.cut):
        begin, tokens = locate_segment(begin, tokens, segment, x.segments, C)
    return begin, tokens, n, segment, is_transition


@cute.jit
def chunks_of(tokens):
    return (tokens + C - 1) >> C.bit_length() - 1
