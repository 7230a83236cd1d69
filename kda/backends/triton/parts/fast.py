"""Instructions that Triton would wrap in care for denormals, or not pair.  All flush denormals to zero."""

import triton
import triton.language as tl


@triton.jit
def exp2(x):
    """Returns 2^x within two ulps."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rounded_product(x, y):
    """Returns x y, for sums that several threads hold: fused with an addition, it would differ in their last bits."""
    return tl.inline_asm_elementwise("mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True,
                                     pack=1)


@triton.jit
def reciprocal(x):
    """Returns 1 / x within an ulp; 0 for infinity."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def times(x, E):
    """Returns x * E in the dtype of x; a float32 E is rounded to it first."""
    if x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise("{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z;}", "=r,r,r",
                                      [x, E.to(x.dtype)], dtype=x.dtype, is_pure=True, pack=2)
    elif x.dtype == tl.float16:
        y = tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, E.to(x.dtype)], dtype=x.dtype,
                                      is_pure=True, pack=2)
    else:
        y = x * E
    return y


@triton.jit
def times_both(x, norm, E):
    """Returns x * norm * E in the dtype of x, rounded once; E may be near 2^-126 or 2^127, x * norm is at most about
    1."""
    return (x.to(tl.float32) * norm * E).to(x.dtype)


@triton.jit
def in_two(x, DOT: tl.constexpr):
    """Returns x, float32, as a sum of two of dtype DOT."""
    high = x.to(DOT)
    return high, (x - high.to(tl.float32)).to(DOT)


@triton.jit
def settled(x):
    """Returns x, computed at this point: otherwise a sum of products waits for its use, with both factors in
    registers."""
    return tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def load_float(pointers):
    """Loads in any layout: Triton needs seconds to find one for a hundred dependent loads."""
    return tl.inline_asm_elementwise("ld.global.f32 $0, [$1];", "=f,l", [pointers], dtype=tl.float32, is_pure=False,
                                     pack=1)
