"""Single instructions; all flush denormals to zero."""

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

LOG2_E = 1.4426950408889634
FLOOR = -127.0                               # 2^FLOOR is nothing, and sums of a chunk stay finite
NORM_EPS = 1e-6


@cute.jit
def exp2(x):
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def log2(x):
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


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
def whole(x):
    """The nearest integer."""
    return cute.arch.inline_ptx("cvt.rni.f32.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def times_pair(x, y):
    """Of words of two bfloat16."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y])


@cute.jit
def sigmoid(x):
    return reciprocal(Float32(1.0) + exp2(Float32(-LOG2_E) * x))


@cute.jit
def finite(x):
    """At most what log2(e) times is finite, too."""
    return cute.arch.inline_ptx(
        "min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, Float32(2.3e38)]
    )


@cute.jit
def bounded(x):
    """A finite number that a gate cannot tell from x; nan stays."""
    return cute.arch.inline_ptx(
        "{.reg .f32 t; min.NaN.f32 t, {$r0}, {$r1}; max.NaN.f32 {$w0}, t, {$r2};}", write_only_types=[Float32],
        read_only_args=[x, Float32(3.0e38), Float32(-3.0e38)],
    )  # fmt: skip


@cute.jit
def distance(x, y):
    """-|x - y|."""
    return cute.arch.inline_ptx(
        "{.reg .f32 t; sub.ftz.f32 t, {$r0}, {$r1}; abs.f32 t, t; neg.f32 {$w0}, t;}", write_only_types=[Float32],
        read_only_args=[x, y],
    )  # fmt: skip


@cute.jit
def softplus(x):
    """max(x, 0) + log(1 + e) of e = exp(-|x|) in [0, 1]: twice atanh(s), s = e / (2 + e) <= 1/3, a series."""
    e = exp2(distance(x, Float32(0.0)) * Float32(LOG2_E))
    s = e * reciprocal(Float32(2.0) + e)
    t = s * s
    p = Float32(1.0 / 13.0)
    for n in (11, 9, 7, 5, 3):
        p = p * t + Float32(1.0 / n)
    return at_least(x, 0.0) + Float32(2.0) * s * (p * t + Float32(1.0))


@cute.jit
def row(address, number, size):
    """The address of row `number`, of `size` bytes each."""
    return cute.arch.inline_ptx(
        "mad.wide.s32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int64], read_only_args=[number, size, address]
    )
