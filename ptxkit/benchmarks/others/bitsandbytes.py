"""bitsandbytes: the host functions of its Triton backend. The package's own __init__ loads its library in C++."""

from __future__ import annotations

import torch

from .cases import agree, host_functions

bitsandbytes = host_functions(
    "bitsandbytes", package="bitsandbytes.backends.triton", bare=["bitsandbytes", "bitsandbytes.backends"]
)
NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
)
CODE = torch.cat([-torch.linspace(0, 1, 128).flip(0), torch.linspace(0, 1, 129)[1:]])


def _nearest(x, table, blocksize):
    """Return (index of the nearest value of a table, the blocks' largest magnitudes)."""
    rows = x.view(-1, blocksize)
    largest = rows.abs().amax(1)
    return (rows / largest[:, None])[..., None].sub(table).abs().argmin(-1).flatten(), largest


@bitsandbytes("quantize_blockwise, dequantize_blockwise")
def _(ops):
    x = torch.randn(1024)
    index, largest = _nearest(x, CODE, 256)
    got, scale = ops("ops").quantize_blockwise(x, CODE, 256)
    back = ops("ops").dequantize_blockwise(got, scale, CODE, 256, torch.float32)
    same = agree((CODE[got.long()], CODE[index]), tolerance=1e-6)
    return same and agree((scale, largest), (back, CODE[got.long()] * largest.repeat_interleave(256)))


@bitsandbytes("quantize_4bit, dequantize_4bit, nf4")
def _(ops):
    x = torch.randn(1024)
    index, largest = _nearest(x, NF4, 64)
    packed, scale = ops("ops").quantize_4bit(x, 64, "nf4", torch.uint8)
    back = ops("ops").dequantize_4bit(packed, scale, 64, "nf4", (1024,), torch.float32)
    wanted = NF4[index] * largest.repeat_interleave(64)
    return torch.equal(packed.flatten(), (index[::2] * 16 + index[1::2]).byte()) and agree((back, wanted))


@bitsandbytes("optimizer_update_32bit, adam")
def _(ops):
    g, p, m, v = torch.randn(1000), torch.randn(1000), torch.randn(1000) / 10, torch.rand(1000)
    b1, b2, eps, step, lr = 0.9, 0.95, 1e-8, 3, 1e-2
    wanted_m, wanted_v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    wanted = p - lr * wanted_m / (1 - b1**step) / ((wanted_v / (1 - b2**step)).sqrt() + eps)
    ops("ops").optimizer_update_32bit("adam", g, p, m, v, None, 0.0, 0.0, b1, b2, 0.0, 0.0, eps, 0.0, step, lr, 1.0)
    return agree((m, wanted_m), (v, wanted_v), (p, wanted), tolerance=1e-4)
