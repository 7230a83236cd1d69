"""Matrices for tests: element types as raw bits, and the published model of how tensor cores round a sum."""

import math
from fractions import Fraction

import torch

# type -> (mantissa bits, exponent bits, bias, what the top exponent holds, bits that are dropped)
FORMATS = {
    "f16": (10, 5, 15, "specials", 0),
    "bf16": (7, 8, 127, "specials", 0),
    "tf32": (10, 8, 127, "specials", 13),
    "f32": (23, 8, 127, "specials", 0),
    "e4m3": (3, 4, 7, "one nan", 0),
    "e5m2": (2, 5, 15, "specials", 0),
}
TORCH = {
    **{"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "f32": torch.float32, "f64": torch.float64},
    **{"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8, "s32": torch.int32},
}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}


def size_of(type_):
    return TORCH[type_].itemsize


def bits_of(type_):
    return 8 * size_of(type_)


def encode(values, type_):
    """Return raw bits, as non-negative numbers in an int64 tensor of the same shape."""
    t = torch.as_tensor(values).to(TORCH[type_])
    return t.view(WORDS[t.element_size()]).long() & ((1 << 8 * t.element_size()) - 1 if t.element_size() < 8 else -1)


def decode(bits, type_):
    """Return the values of raw bits, in f64 (or int64 for integers)."""
    n = size_of(type_)
    signed = torch.where(bits >> (8 * n - 1) > 0, bits - (1 << 8 * n), bits) if 1 < n < 8 else bits
    values = signed.to(WORDS[n]).contiguous().view(TORCH[type_])
    return values.long() if type_ in ("s8", "u8", "s32") else values.double()


def number(type_, bits):
    """Return (significand, exponent): 1 <= |significand| < 2, less for a subnormal. A NaN or an infinity is a float."""
    mantissa, exponent, bias, top, dropped = FORMATS[type_]
    bits >>= dropped
    fraction, field = bits & (1 << mantissa) - 1, bits >> mantissa & (1 << exponent) - 1
    sign = -1 if bits >> mantissa + exponent & 1 else 1
    if field == (1 << exponent) - 1 and (top == "specials" or fraction == (1 << mantissa) - 1):
        return math.nan if fraction else sign * math.inf
    return sign * (Fraction(fraction, 1 << mantissa) + bool(field)), max(field, 1) - bias


def _cut(x):
    return int(x)  # towards zero


def _result(total, type_, kept):
    """Return the bits of a fraction: cut to f32 with that many mantissa bits, or the nearest f16."""
    mantissa, _, bias, *_ = FORMATS[type_]
    sign = 1 << (31 if type_ == "f32" else 15) if total < 0 else 0
    if not total:
        return 0
    size = abs(total)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    exponent = max(exponent, 1 - bias)
    if type_ == "f32":
        units = _cut(size / Fraction(2) ** (exponent - kept)) << mantissa - kept
    else:
        units = round(size / Fraction(2) ** (exponent - mantissa))
    field = exponent + bias - 1
    return sign | min((field << mantissa) + units, 2 * bias + 1 << mantissa)


def _step(a, b, c, types, fraction_bits, kept):
    type_a, type_b, type_d = types
    terms, specials = [], []
    for x, y in zip(a, b):
        x, y = number(type_a, x), number(type_b, y)
        if isinstance(x, float) or isinstance(y, float):
            specials.append(math.prod(v if isinstance(v, float) else float(v[0]) for v in (x, y)))
        elif x[0] and y[0]:
            terms.append((x[0] * y[0], x[1] + y[1]))
    start = number(type_d, c)
    if isinstance(start, float):
        specials.append(start)
    else:
        terms.append(start if start[0] else (Fraction(0), -126))
    if specials:
        total = sum(specials)
        return NAN[type_d] if total != total else int(encode([total], type_d))
    largest = max(e for _, e in terms)
    unit = Fraction(2) ** (largest - fraction_bits)
    return _result(sum(_cut(s * Fraction(2) ** (e - largest + fraction_bits)) for s, e in terms) * unit, type_d, kept)


def dot(a, b, c, types, arch, wgmma=False):
    """Return the bits of a . b + c on a tensor core: each step takes 16 (sm_80, sm_89) or 32 bytes of k."""
    size = size_of(types[0])
    if size == 1 and arch >= 90 and not wgmma:
        return _converted_dot(a, b, c, types, arch)
    coarse = size == 1 and (arch == 89 or (arch == 90 and wgmma))
    fraction_bits, kept = (13, 13) if coarse else (25 if arch >= 90 else 24, 23)
    step = (32 if arch >= 90 else 16) // size
    for k in range(0, len(a), step):
        c = _step(a[k : k + step], b[k : k + step], c, types, fraction_bits, kept)
    return c


def _converted_dot(a, b, c, types, arch):
    """Compute fp8 in mma.sync on sm_90 and later like an H200: two sums in f16's way, then c added to nearest."""
    a, b = (encode(decode(torch.as_tensor(x), t), "f16").tolist() for x, t in zip((a, b), types))
    total = 0
    for part in ((0, 1), (2, 3)):
        indices = [k for k in range(len(a)) if k % 4 in part]
        total = dot([a[k] for k in indices], [b[k] for k in indices], total, ("f16", "f16", types[2]), arch)
    values = decode(torch.tensor([total, c]), types[2])
    wide = values.sum() if types[2] == "f16" else (values[0].float() + values[1].float())
    return NAN[types[2]] if wide.isnan() else int(encode(wide[None], types[2]))


def random_bits(shape, type_, generator, spread=4.0):
    """Return the bits of normal numbers of mixed sizes, some of them zero, or of any integers."""
    if type_ in ("s8", "u8"):
        return torch.randint(0, 256, shape, generator=generator)
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * spread)
    values = torch.where(torch.rand(shape, generator=generator) < 0.05, torch.zeros(()), values)
    return encode(values.clamp(-400, 400), type_)


def small_integers(shape, type_, generator, most=4):
    """Return the bits of whole numbers so small that every sum of products is exact."""
    low = 0 if type_ == "u8" else -most
    return encode(torch.randint(low, most + 1, shape, generator=generator).double(), type_)
