"""Single instructions; all flush denormals to zero."""

import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634
FLOOR = -127.0                               # 2^FLOOR is nothing, and sums of a chunk stay finite
NORM_EPS = 1e-6


@cute.jit
def exp2(x):
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def reciprocal(x):
    return cute.arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def rsqrt(x):
    return cute.arch.inline_ptx("rsqrt.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def at_least(x, low):
    """max that keeps a nan."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, Float32(low)]
    )


@cute.jit
def sigmoid(x):
    return reciprocal(Float32(1.0) + exp2(Float32(-LOG2_E) * x))


@cute.jit
def finite(x):
    return cute.arch.inline_ptx(
        "min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, Float32(3.4028235e38)]
    )
