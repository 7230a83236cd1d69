"""A pool of states on the GPU: slots to the states that sequences start from, final states to slots, and where a kernel
that walks over chunks leaves the states of checkpoints.

States lie in a pool `stride` elements apart, each (HV, SIZE) without gaps, in either layout.  Offsets and slots are
numbers on the GPU that were not checked: a slot out of range is none, an offset that no chunk begins at is none.
"""

import triton
import triton.language as tl


@triton.jit
def slot_at(slots, i, count):
    """Returns a slot of the pool; -1: none."""
    slot = tl.load(slots + i).to(tl.int64)
    return tl.where((slot >= 0) & (slot < count), slot, -1)


@triton.jit
def sequence_at(cu_seqlens, n, T):
    """Returns the first token and the number of tokens of sequence n, of rows of T tokens without offsets."""
    if cu_seqlens is None:
        begin, tokens = n.to(tl.int64) * T, tl.zeros((), tl.int64) + T
    else:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        tokens = tl.load(cu_seqlens + n + 1).to(tl.int64) - begin
    return begin, tokens


@triton.jit
def gather(pool, starts, h0, stride, count, HV, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Stores h0[n] = pool[starts[n]], or zero; a program has BLOCK elements of a head."""
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % HV, tl.program_id(0) // blocks // HV
    i = block * BLOCK + tl.arange(0, BLOCK)
    slot = slot_at(starts, n, count)
    x = tl.load(pool + slot * stride + head.to(tl.int64) * SIZE + i, mask=(i < SIZE) & (slot >= 0), other=0.0)
    tl.store(h0 + (n.to(tl.int64) * HV + head) * SIZE + i, x.to(tl.float32), mask=i < SIZE)


@triton.jit
def scatter(
    ht, pool, slots, starts, cu_seqlens, offsets, checkpoints, stride, count, T, HV, E,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Stores pool[slots[n]] = ht[n], and the checkpoints that are final states.  A sequence of no tokens that starts
    where it ends writes nothing: in a captured call such sequences may name any slot."""
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % HV, tl.program_id(0) // blocks // HV
    i = block * BLOCK + tl.arange(0, BLOCK)
    tokens = sequence_at(cu_seqlens, n, T)[1]
    slot, offset = slot_at(slots, n, count), head.to(tl.int64) * SIZE + i
    x = tl.load(ht + n.to(tl.int64) * HV * SIZE + offset, mask=i < SIZE, other=0.0).to(pool.dtype.element_ty)
    moved = (tokens > 0) | (slot != slot_at(starts, n, count))
    tl.store(pool + slot * stride + offset, x, mask=(i < SIZE) & (slot >= 0) & moved)
    if checkpoints is not None:
        for e in range(E):
            to = slot_at(checkpoints, n * E + e, count)
            is_final = (to >= 0) & (tl.load(offsets + n * E + e).to(tl.int64) == tokens)
            tl.store(pool + to * stride + offset, x, mask=(i < SIZE) & is_final)


@triton.jit
def places(
    offsets, checkpoints, cu_seqlens, place, stride, count, T, E, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Stores place[chunk]: the element of the pool where the state that enters a chunk of ROWS rows goes; -1: nowhere.
    Program n writes the chunks of sequence n."""
    n = tl.program_id(0)
    first = tl.zeros((), tl.int64)
    if cu_seqlens is None:
        first += n.to(tl.int64) * tl.cdiv(T, ROWS)
    else:
        for m0 in range(0, n, BLOCK):
            m = m0 + tl.arange(0, BLOCK)
            start = tl.load(cu_seqlens + m, mask=m < n, other=0).to(tl.int64)
            tokens = tl.load(cu_seqlens + m + 1, mask=m < n, other=0).to(tl.int64) - start
            first += tl.sum(tl.cdiv(tokens, ROWS), 0)
    tokens = sequence_at(cu_seqlens, n, T)[1]
    for c0 in range(0, tl.cdiv(tokens, ROWS).to(tl.int32), BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        address = tl.full((BLOCK,), -1, tl.int64)
        for e in range(E):
            to = slot_at(checkpoints, n * E + e, count)
            begins = (to >= 0) & (tl.load(offsets + n * E + e).to(tl.int64) == c.to(tl.int64) * ROWS)
            address = tl.where(begins, to * stride, address)
        tl.store(place + first + c, address, mask=c * ROWS < tokens)
