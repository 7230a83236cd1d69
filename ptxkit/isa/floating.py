"""Floating-point arithmetic.

A mul or add without `.rn` is rounded by itself: an assembler may fuse the two, this machine does not. Subnormals are
kept unless `.ftz` says otherwise. A NaN comes out as the canonical one, 0x7fffffff or 0x7fff; that of a double keeps
its payload, in the order of operands that an H200 has. What PTX only approximates is computed in double and rounded
to nearest: within the documented error, though not always the hardware's bits.
"""

from ptxkit.isa.rows import rows

HALVES = "f16 f16x2"
BRAINS = "bf16 bf16x2"
MIXED = "f32.f16 f32.bf16"

TABLE = rows(
    ("add{.rnd}{.ftz}{.sat}", "f32", "a + b"),
    ("sub{.rnd}{.ftz}{.sat}", "f32", "a - b"),
    ("mul{.rnd}{.ftz}{.sat}", "f32", "product(a, b, flags)"),
    ("fma.rnd{.ftz}{.sat}", "f32", "fused(a, b, c, flags)"),
    ("mad.rnd{.ftz}{.sat}", "f32", "fused(a, b, c, flags)"),
    ("add{.rnd}{.ftz}", "f32x2", "a + b"),
    ("sub{.rnd}{.ftz}", "f32x2", "a - b"),
    ("mul{.rnd}{.ftz}", "f32x2", "product(a, b, flags)"),
    ("fma.rnd{.ftz}", "f32x2", "fused(a, b, c, flags)"),
    ("add{.rnd}", "f64", "payload(a + b, b, a, a)"),
    ("sub{.rnd}", "f64", "payload(a - b, b, a, a)"),
    ("mul{.rnd}", "f64", "payload(a * b, b, a, a)"),
    ("fma.rnd", "f64", "payload(fma(a, b, c), b, c, a)"),
    ("mad.rnd", "f64", "payload(fma(a, b, c), b, c, a)"),
    # a float holds the sum of two 16-bit floats well enough to round it again; products and fma need the odd bit
    ("add{.rn}{.ftz}{.sat}", HALVES, "a + b"),
    ("sub{.rn}{.ftz}{.sat}", HALVES, "a - b"),
    ("mul{.rn}{.ftz}{.sat}", HALVES, "a * b"),
    ("fma.rn{.ftz}{.sat}", HALVES, "odd_fma(a, b, c)"),
    ("fma.rn{.ftz}.relu", HALVES, "odd_fma(a, b, c)"),
    ("fma.rn.oob{.sat}", HALVES, "out_of_bounds(a, b, 0x7ffee000) ? 0 : odd_fma(a, b, c)"),
    ("fma.rn.oob.relu", HALVES, "out_of_bounds(a, b, 0x7ffee000) ? 0 : odd_fma(a, b, c)"),
    ("fma.rn.oob{.relu}", BRAINS, "out_of_bounds(a, b, 0x7ff70000) ? 0 : odd_fma(a, b, c)"),
    ("add{.rn}", BRAINS, "a + b"),
    ("sub{.rn}", BRAINS, "a - b"),
    ("mul{.rn}", BRAINS, "odd_float((double)a * b)"),
    ("fma.rn{.relu}", BRAINS, "odd_fma(a, b, c)"),
    ("add{.rnd}{.sat}", MIXED, "a + b", "f32 = S, f32"),
    ("sub{.rnd}{.sat}", MIXED, "a - b", "f32 = S, f32"),
    ("fma.rnd{.sat}", MIXED, "fmaf(a, b, c)", "f32 = S, S, f32"),
    ("abs{.ftz}", f"f32 {HALVES}", "absolute(a)"),
    ("neg{.ftz}", f"f32 {HALVES}", "-a"),
    ("abs", BRAINS, "absolute(a)"),
    ("neg", BRAINS, "-a"),
    ("abs", "f64", "a != a ? quiet(a) : fabs(a)"),  # not even a NaN's sign changes
    ("neg", "f64", "a != a ? quiet(a) : -a"),
    ("copysign", "f32", "(a & 0x80000000) | (b & 0x7fffffff)", "b32 = b32, b32"),
    ("copysign", "f64", "(a & 1ull << 63) | (b & ~(1ull << 63))", "b64 = b64, b64"),
    ("min{.ftz}{.NaN}{.xorsign.abs}", f"f32 {HALVES}", "minimum(a, b, flags)"),
    ("max{.ftz}{.NaN}{.xorsign.abs}", f"f32 {HALVES}", "maximum(a, b, flags)"),
    ("min{.NaN}{.xorsign.abs}", BRAINS, "minimum(a, b, flags)"),
    ("max{.NaN}{.xorsign.abs}", BRAINS, "maximum(a, b, flags)"),
    ("min{.ftz}{.NaN}{.abs}", "f32", "minimum(minimum(a, b, flags), c, flags)"),
    ("max{.ftz}{.NaN}{.abs}", "f32", "maximum(maximum(a, b, flags), c, flags)"),
    ("min", "f64", "extreme_double(a, b, false)"),
    ("max", "f64", "extreme_double(a, b, true)"),
    ("div.rnd{.ftz}", "f32", "quotient(a, b, flags)"),
    ("div.rnd", "f64", "payload(a / b, a, b, b)"),
    ("rcp.rnd{.ftz}", "f32", "quotient(1, a, flags)"),
    ("rcp.rnd", "f64", "payload(1 / a, a, a, a)"),
    ("sqrt.rnd{.ftz}", "f32", "sqrtf(a)"),
    ("sqrt.rnd", "f64", "payload(sqrt(a), a, a, a)"),
    ("div.approx{.ftz}", "f32", "divide_approximately(a, b)"),
    ("div.full{.ftz}", "f32", "a / b"),
    ("rcp.approx{.ftz}", "f32", "1 / a"),
    ("sqrt.approx{.ftz}", "f32", "sqrtf(a)"),
    ("rsqrt.approx{.ftz}", "f32", "(float)(1 / sqrt((double)a))"),
    ("sin.approx{.ftz}", "f32", "(float)sin((double)a)"),
    ("cos.approx{.ftz}", "f32", "(float)cos((double)a)"),
    ("lg2.approx{.ftz}", "f32", "(float)log2((double)a)"),
    ("ex2.approx{.ftz}", "f32", "(float)power_of_two((double)a)"),
    ("ex2.approx", HALVES, "odd_float(power_of_two((double)a))"),
    ("ex2.approx.ftz", BRAINS, "flush(odd_float(power_of_two((double)flush(a))))"),
    ("tanh.approx", f"f32 {HALVES} {BRAINS}", "(float)tanh((double)a)"),
    ("rsqrt.approx", "f64", "payload((double)(1 / sqrtl((long double)a)), a, a, a)"),
    ("rsqrt.approx.ftz", "f64", "root_upper(a)", "b64 = b64"),
    ("rcp.approx.ftz", "f64", "reciprocal_upper(a)", "b64 = b64"),
    ("testp.finite", "f32 f64", "a - a == 0", "pred = T"),
    ("testp.infinite", "f32 f64", "a == a && a - a != 0", "pred = T"),
    ("testp.number", "f32 f64", "a == a", "pred = T"),
    ("testp.notanumber", "f32 f64", "a != a", "pred = T"),
    ("testp.normal", "f32", "a == 0 || (a - a == 0 && absolute(a) >= 0x1p-126f)", "pred = T"),
    ("testp.normal", "f64", "a == 0 || (a - a == 0 && fabs(a) >= 0x1p-1022)", "pred = T"),
    ("testp.subnormal", "f32", "a != 0 && absolute(a) < 0x1p-126f", "pred = T"),
    ("testp.subnormal", "f64", "a != 0 && fabs(a) < 0x1p-1022", "pred = T"),
)
