"""Floating-point arithmetic on bits, from whole numbers alone: what the simulator is compared with.

A finite value is n * 2**e with whole n; sums and products of them are exact, quotients and roots carry a last bit that
says whether anything is missing. `Format.encode` rounds such a value once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Number(NamedTuple):
    """A number n * 2**e, an infinity (n is its sign) or not a number; `negative` tells -0 from +0."""

    n: int
    e: int
    negative: bool
    kind: str = "finite"  # inf, nan


NAN = Number(0, 0, False, "nan")


def infinity(negative):
    return Number(-1 if negative else 1, 0, negative, "inf")


@dataclass(frozen=True)
class Format:
    exponent: int
    mantissa: int
    nan: int
    finite: int = 0  # the largest finite magnitude's code, where it is not just below infinity's
    infinite: bool = True

    @property
    def bits(self):
        return 1 + self.exponent + self.mantissa

    @property
    def least(self):
        """Return the exponent of the smallest normal number."""
        return 2 - (1 << self.exponent - 1)

    @property
    def most(self):
        return self.finite or (((1 << self.exponent) - 1) << self.mantissa) - 1

    def decode(self, bits, ftz=False):
        negative, magnitude = bool(bits >> self.bits - 1 & 1), bits & (1 << self.bits - 1) - 1
        field, fraction = magnitude >> self.mantissa, magnitude & (1 << self.mantissa) - 1
        if magnitude > self.most:
            return infinity(negative) if self.infinite and not fraction else NAN
        if not field and ftz:
            return Number(0, 0, negative)
        n, e = (fraction | 1 << self.mantissa, field - 1) if field else (fraction, 0)
        return Number(-n if negative else n, e + self.least - self.mantissa, negative)

    def encode(self, x, mode="rn", ftz=False, sat=False, relu=False, satfinite=False):
        """Return the bits of a number after one rounding, then what the modifiers ask for."""
        top = 1 << self.bits - 1
        if x.kind == "nan":
            return 0 if sat else self.nan
        if sat:
            x = _clamped(x)
        if relu and x.negative:
            x = Number(0, 0, False)
        sign = top if x.negative else 0
        if x.kind == "inf":
            return sign | (self.most if satfinite or not self.infinite else self.most + 1)
        if not x.n:
            return sign
        n, top = abs(x.n), abs(x.n).bit_length() + x.e - 1
        unlimited = top - self.mantissa  # what the last bit is worth where exponents have no lower limit
        if ftz and _multiple(n, x.e, unlimited, x.negative, mode).bit_length() + unlimited - 1 < self.least:
            return sign
        quantum = max(top, self.least) - self.mantissa
        code = _multiple(n, x.e, quantum, x.negative, mode) + (quantum + self.mantissa - self.least << self.mantissa)
        if code > self.most:
            inwards = mode == "rz" or (mode == "rm" and not x.negative) or (mode == "rp" and x.negative)
            code = self.most if satfinite or inwards or not self.infinite else self.most + 1
        return sign | code


def _multiple(n, e, quantum, negative, mode):
    """Return how many 2**quantum a magnitude n * 2**e rounds to."""
    shift = quantum - e
    if shift <= 0:
        return n << -shift
    kept, rest, half = n >> shift, n & (1 << shift) - 1, 1 << shift - 1
    up = {
        "rn": rest > half or (rest == half and kept & 1),
        "rna": rest >= half,
        "rz": False,
        "rm": rest and negative,
        "rp": rest and not negative,
    }
    return kept + bool(up[mode])


def _clamped(x):
    one = Number(1, 0, False)
    if x.negative or (x.kind == "finite" and not x.n):
        return Number(0, 0, False)
    return one if x.kind == "inf" or less(one, x) else x


F16 = Format(5, 10, 0x7FFF)
BF16 = Format(8, 7, 0x7FFF)
TF32 = Format(8, 10, 0x3FFFF)
F32 = Format(8, 23, 0x7FFFFFFF)
F64 = Format(11, 52, 0x7FF8000000000000)
E4M3 = Format(4, 3, 0x7F, finite=0x7E, infinite=False)
E5M2 = Format(5, 2, 0x7F)
E2M1 = Format(2, 1, 7, finite=7, infinite=False)
E2M3 = Format(2, 3, 0x1F, finite=0x1F, infinite=False)
E3M2 = Format(3, 2, 0x1F, finite=0x1F, infinite=False)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


def whole(n):
    """Return a number that is an integer."""
    return Number(n, 0, n < 0)


def _sum(n, e, negative_zero):
    return Number(n, e, n < 0 if n else negative_zero)


def add(x, y, mode="rn"):
    if "nan" in (x.kind, y.kind) or (x.kind == y.kind == "inf" and x.n != y.n):
        return NAN
    if "inf" in (x.kind, y.kind):
        return x if x.kind == "inf" else y
    e = min(x.e, y.e)
    zero = (x.negative and y.negative) or ((x.negative or y.negative or bool(x.n)) and mode == "rm")
    return _sum((x.n << x.e - e) + (y.n << y.e - e), e, zero)


def negated(x):
    return Number(-x.n, x.e, not x.negative, x.kind)


def absolute(x):
    return negated(x) if x.negative else x


def multiply(x, y):
    if "nan" in (x.kind, y.kind) or ("inf" in (x.kind, y.kind) and (not x.n or not y.n)):
        return NAN
    if "inf" in (x.kind, y.kind):
        return infinity(x.negative != y.negative)
    return Number(x.n * y.n, x.e + y.e, x.negative != y.negative)


def fma(x, y, z, mode="rn"):
    return add(multiply(x, y), z, mode)


def divide(x, y):
    negative = x.negative != y.negative
    if "nan" in (x.kind, y.kind) or x.kind == y.kind == "inf" or (x.kind == y.kind and not x.n and not y.n):
        return NAN
    if x.kind == "inf" or not y.n:
        return infinity(negative)
    if y.kind == "inf" or not x.n:
        return Number(0, 0, negative)
    shift = 130 + max(0, abs(y.n).bit_length() - abs(x.n).bit_length())
    q, rest = divmod(abs(x.n) << shift, abs(y.n))
    n = 2 * q + bool(rest)
    return Number(-n if negative else n, x.e - y.e - shift - 1, negative)


def square_root(x):
    if x.kind == "nan" or (x.negative and x.n):
        return NAN
    if x.kind == "inf" or not x.n:
        return x
    shift = 260 + (x.e & 1)
    root = math.isqrt(x.n << shift)
    n = 2 * root + (root * root != x.n << shift)
    return Number(n, (x.e - shift) // 2 - 1, False)


def less(x, y):
    """Return x < y for numbers; infinities count, -0 equals +0."""
    if "inf" in (x.kind, y.kind):
        return (x.n if x.kind == "inf" else 0) < (y.n if y.kind == "inf" else 0)
    e = min(x.e, y.e)
    return x.n << x.e - e < y.n << y.e - e


def to_whole(x, mode):
    """Return the integer that x rounds to."""
    if x.e >= 0:
        return x.n << x.e
    low, rest = x.n >> -x.e, x.n & (1 << -x.e) - 1
    half = 1 << -x.e - 1
    up = {"rni": rest > half or (rest == half and low & 1), "rzi": rest and x.n < 0, "rmi": False, "rpi": rest}[mode]
    return low + bool(up)
