"""Triton kernels of our own, to be run from the PTX that Triton makes of them."""

import triton
import triton.language as tl


@triton.jit
def scale(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, 2.0 * tl.load(x + i))


@triton.jit
def total(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y, tl.sum(tl.load(x + i), axis=0))


@triton.jit
def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, A_T: tl.constexpr,
        B_T: tl.constexpr, TF32: tl.constexpr):
    """Compute c = a @ b in one program, K in steps of BK; A_T, B_T: the operand lies transposed in memory."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((M, N), dtype=tl.float32)
    for k0 in range(0, K, BK):
        kk = k0 + k
        if A_T:
            x = tl.trans(tl.load(a + kk[:, None] * M + m[None, :]))
        else:
            x = tl.load(a + m[:, None] * K + kk[None, :])
        if B_T:
            y = tl.trans(tl.load(b + n[:, None] * K + kk[None, :]))
        else:
            y = tl.load(b + kk[:, None] * N + n[None, :])
        acc = tl.dot(x, y, acc, input_precision="tf32" if TF32 else "ieee")
    tl.store(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def chained_dots(a, b, c, out, N: tl.constexpr):
    """Compute out = (a @ b).to(bf16) @ c: the first result is an operand of the second."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j))
    y = tl.dot(x.to(tl.bfloat16), tl.load(c + i * N + j))
    tl.store(out + i * N + j, y)


@triton.jit
def reductions(x, sums, maxima, indices, rows, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = r < rows
    v = tl.load(x + r[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], mask=mask[:, None], other=0.0)
    tl.store(sums + r, tl.sum(v, axis=1), mask=mask)
    tl.store(maxima + r, tl.max(v, axis=1), mask=mask)
    tl.store(indices + r, tl.argmax(v, axis=1), mask=mask)


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + c, mask=c < columns, other=float("-inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(y + row * columns + c, e / tl.sum(e, axis=0), mask=c < columns)


@triton.jit
def scans(x, sums, products, T: tl.constexpr, K: tl.constexpr):
    offsets = tl.arange(0, T)[:, None] * K + tl.arange(0, K)[None, :]
    v = tl.load(x + offsets)
    tl.store(sums + offsets, tl.cumsum(v, axis=0))
    tl.store(products + offsets, tl.cumprod(v, axis=1))


@triton.jit
def histogram(x, counts, total, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offsets, mask=offsets < n, other=0)
    tl.atomic_add(counts + v, 1, mask=offsets < n)
    tl.atomic_add(total, tl.sum(v.to(tl.float32), axis=0))


@triton.jit
def descriptor_copy(x, y, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """Copy through tensor descriptors made on the device: TMA where the arch has it."""
    source = tl.make_tensor_descriptor(x, shape=[rows, columns], strides=[columns, 1], block_shape=[R, C])
    target = tl.make_tensor_descriptor(y, shape=[rows, columns], strides=[columns, 1], block_shape=[R, C])
    r, c = tl.program_id(0) * R, tl.program_id(1) * C
    target.store([r, c], source.load([r, c]) * 2)


@triton.jit
def sort_rows(x, y, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + offsets, tl.sort(tl.load(x + offsets)))
