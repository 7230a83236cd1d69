"""Single instructions; all flush denormals to zero."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

LOG2_E = 1.4426950408889634
FLOOR = -127.0                               # 2^FLOOR is nothing, and sums of a chunk stay finite
NORM_EPS = 1e-6
LARGEST = 3.0e38                             # stands where a number would be infinite
# log(1 + e) / e for e in [0, 1], from the constant on: within 2e-7 of it.
LOG1P = (0.9999998211860657, -0.4999740421772003, 0.33275479078292847, -0.24495463073253632, 0.17745241522789001,
         -0.10768171399831772, 0.04408963397145271, -0.008539208211004734)


def instruction(text, dtype):
    """Return the function that emits an instruction of its operands, in PTX, and returns what it writes."""
    def emit(*operands):
        return cute.arch.inline_ptx(text, write_only_types=[dtype], read_only_args=list(operands))
    return emit


exp2 = instruction("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32)
log2 = instruction("lg2.approx.ftz.f32 {$w0}, {$r0};", Float32)
reciprocal = instruction("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32)
rsqrt = instruction("rsqrt.approx.ftz.f32 {$w0}, {$r0};", Float32)
whole = instruction("cvt.rni.f32.f32 {$w0}, {$r0};", Float32)                 # the nearest integer
again = instruction("mov.b32 {$w0}, {$r0};", Int32)                            # to NVVM it is another number
high_word = instruction("mul.hi.u32 {$w0}, {$r0}, {$r1};", Int32)               # the upper bits of a product
negative = instruction("{.reg .f32 t; abs.f32 t, {$r0}; neg.f32 {$w0}, t;}", Float32)  # -|x|
times_pair = instruction("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", Uint32)        # words of two bfloat16
larger = instruction("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32)
smaller = instruction("min.NaN.f32 {$w0}, {$r0}, {$r1};", Float32)
smaller_size = instruction("min.NaN.xorsign.abs.f32 {$w0}, {$r0}, {$r1};", Float32)    # x, or y > 0 with its sign
bounded_pair = instruction(                                                    # bounded, of a word of two bfloat16
    "{.reg .b32 most; mov.b32 most, 0x7F7F7F7F; min.NaN.xorsign.abs.bf16x2 {$w0}, {$r0}, most;}", Uint32
)
clamped = instruction(
    "{.reg .f32 t; min.NaN.f32 t, {$r0}, {$r1}; max.NaN.f32 {$w0}, t, {$r2};}", Float32
)
multiply_add = instruction("mad.wide.s32 {$w0}, {$r0}, {$r1}, {$r2};", Int64)


def converted_now(x):
    """x, which NVVM would convert where it was loaded, and wait for it there."""
    bits = Uint16 if x.dtype.width == 16 else Uint32
    return instruction(f"mov.b{x.dtype.width} {{$w0}}, {{$r0}};", bits)(x.bitcast(bits)).bitcast(x.dtype)


def at_least(x, low):
    """max that keeps a nan."""
    return larger(x, Float32(low))


def sigmoid(x):
    return reciprocal(Float32(1.0) + exp2(Float32(-LOG2_E) * x))


def finite(x):
    """At most what log2(e) times is finite, too."""
    return smaller(x, Float32(2.3e38))


def bounded(x):
    """A finite number that a gate cannot tell from x; nan stays."""
    return smaller_size(x, Float32(LARGEST))


def softplus(x):
    """max(x, 0) + log(1 + e) of e = exp(-|x|)."""
    e = exp2(negative(x) * Float32(LOG2_E))
    p = Float32(LOG1P[-1])
    for of_power in LOG1P[-2::-1]:
        p = p * e + Float32(of_power)
    return p * e + at_least(x, 0.0)


def row(address, number, size):
    """The address of row `number`, of `size` bytes each."""
    return multiply_add(number, size, address)
