"""Single instructions; all flush denormals to zero."""

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

LOG2_E = 1.4426950408889634
FLOOR = -127.0                               # 2^FLOOR is nothing, and sums of a chunk stay finite
NORM_EPS = 1e-6
# log(1 + e) / e for e in [0, 1], from the constant on: within 2e-7 of it.
LOG1P = (0.9999998211860657, -0.4999740421772003, 0.33275479078292847, -0.24495463073253632, 0.17745241522789001,
         -0.10768171399831772, 0.04408963397145271, -0.008539208211004734)


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
    """Multiply words of two bfloat16."""
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
    )


@cute.jit
def distance(x, y):
    """-|x - y|."""
    return cute.arch.inline_ptx(
        "{.reg .f32 t; sub.ftz.f32 t, {$r0}, {$r1}; abs.f32 t, t; neg.f32 {$w0}, t;}", write_only_types=[Float32],
        read_only_args=[x, y],
    )


@cute.jit
def softplus(x):
    """max(x, 0) + log(1 + e) of e = exp(-|x|)."""
    e = exp2(distance(x, Float32(0.0)) * Float32(LOG2_E))
    p = Float32(LOG1P[-1])
    for of_power in LOG1P[-2::-1]:
        p = p * e + Float32(of_power)
    return p * e + at_least(x, 0.0)


@cute.jit
def row(address, number, size):
    """The address of row `number`, of `size` bytes each."""
    return cute.arch.inline_ptx(
        "mad.wide.s32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int64], read_only_args=[number, size, address]
    )
