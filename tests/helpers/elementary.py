"""Functions of one number, as kernels compute them: what they are in float64, and how wrong an answer may be.

A budget is the sum of the roundings on the way, each as large as it can be: EPS for a float32 operation, what `Chip`
says for an instruction that approximates, and what an error of an exponent becomes.  Results below TINY are flushed
to zero, which costs as much again as they are multiplied by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Tensor = torch.Tensor

EPS = 2.0**-24                               # error of a rounding to float32
TINY = 2.0**-126                             # the smallest normal float32
LARGEST = torch.finfo(torch.float32).max
LOG2_E = 1.4426950408889634
LOG2_E_ERROR = 1.335e-8                      # what float32 leaves out of it, relative
LOG1P = (1.0, 0.5, 0.333, 0.245, 0.178, 0.108, 0.0441, 0.0086)   # sizes of the coefficients of a fit to log(1 + e) / e
LOG1P_ERROR = 2e-7                           # error of that fit, relative
FLOOR = -127.0                               # the least log2 decay of backends that have one
LOWER_BOUND = -5.0
MORE = 1 + 1e-5                              # products of errors


class Chip(NamedTuple):
    """The relative errors of the instructions that approximate."""

    ex2: float
    rcp: float
    rsqrt: float


SIMULATED = Chip(EPS, EPS, EPS)              # rounded correctly
DOCUMENTED = Chip(2.0**-22, 2.0**-23, 2.0**-22.9)


class Backend(NamedTuple):
    """The errors of a backend's functions."""

    chip: Chip
    exponent: float = EPS + LOG2_E_ERROR     # relative error of x log2(e)
    after: float = 0.0                       # relative error that the operations after ex2 add to its result
    rate: float = 0.0                        # relative error of a rate, before it meets the logit
    fitted: bool = False                     # log(1 + e) by a polynomial in e, or by the series of atanh
    floor: float = FLOOR                     # the least log2 decay
    largest_rate: float = LARGEST

    def exp(self, x: Tensor) -> Tensor:
        """Return the relative error of e^x."""
        return self.chip.ex2 + self.after + self.exponent * x.abs().clamp(max=1e4)


class Function(NamedTuple):
    exact: Callable[[Tensor, Tensor], Tensor]                # a function of x and the rate, in float64
    error: Callable[[Tensor, Tensor, Backend], Tensor | float]   # relative
    domain: tuple[float, float] = (-torch.inf, torch.inf)
    flushed: float = 1.0                     # what is lost where something is flushed, over TINY
    rated: bool = False                      # the rate counts


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def of_sigmoid(x: Tensor, b: Backend) -> Tensor:
    """Bound the error of 1 / (1 + e^-x): the share of e^-x in the sum brings its error along."""
    return torch.sigmoid(-x) * b.exp(x) + EPS + b.chip.rcp


def of_slope(x: Tensor, b: Backend) -> Tensor:
    """Bound the error of e s s with e = e^-|x| and s = 1 / (1 + e)."""
    return b.exp(x) + 2 * (torch.sigmoid(-x.abs()) * b.exp(x) + EPS + b.chip.rcp) + 2 * EPS


def of_log1p(e: Tensor, b: Backend) -> Tensor:
    """Bound the error of log(1 + e).

    The series computes s = e / (2 + e), then 2 s (1 + s^2 p): it leaves out 2 s^15 / 15, and s^2 p rounds twice.  The
    fit e p(e) has its own error, and two roundings of each sum, none of which is larger than its coefficient of LOG1P.
    """
    if b.fitted:
        sums = sum(c * e**n for n, c in enumerate(LOG1P))
        return LOG1P_ERROR + 2 * EPS * sums * e / torch.log1p(e).clamp(min=1e-300) + EPS
    s = e / (2 + e)
    of_s = b.chip.rcp + 2 * EPS
    return of_s + 2 * EPS + s**14 / 15 + (s**2 / 3) * (4 * EPS + 2 * of_s)


def of_softplus(x: Tensor, b: Backend) -> Tensor:
    """Bound the error of max(x, 0) + log(1 + e^-|x|): an error of e counts e / (1 + e) times."""
    e = torch.exp(-x.abs())
    log = torch.log1p(e) * of_log1p(e, b) + e / (1 + e) * b.exp(x)
    return log / softplus(x).clamp(min=1e-300) + EPS


def finite(x: Tensor, rate: Tensor) -> Tensor:
    """Return rate x, no further from 0 than where sigmoids are 0 or 1."""
    return (rate * x).clamp(-1e4, 1e4)


def of_finite(x: Tensor, rate: Tensor, b: Backend) -> Tensor:
    """Bound the error of e^(rate x) by the rounding of rate x."""
    return finite(x, rate).abs() * (EPS + b.rate)


FUNCTIONS = {
    "exp2": Function(lambda x, r: torch.exp2(x), lambda x, r, b: b.chip.ex2),
    "exp": Function(lambda x, r: torch.exp(x), lambda x, r, b: b.exp(x)),
    "reciprocal": Function(lambda x, r: 1 / x, lambda x, r, b: b.chip.rcp, (1.0, torch.inf)),
    "inverse_norm": Function(
        lambda x, r: (x + 1e-6).rsqrt(), lambda x, r, b: b.chip.rsqrt + EPS, (0.0, torch.inf)
    ),
    "finite": Function(lambda x, r: x.clamp(-LARGEST, LARGEST), lambda x, r, b: 0.0),
    "whole": Function(lambda x, r: x.round(), lambda x, r, b: 0.0),
    "recurrent decay": Function(lambda x, r: torch.exp2(x), lambda x, r, b: 2 * EPS, (FLOOR, 127.499)),
    "sigmoid": Function(lambda x, r: sigmoid(x), lambda x, r, b: of_sigmoid(x, b)),
    "sigmoid_slope": Function(lambda x, r: slope(x), lambda x, r, b: of_slope(x, b)),
    "log1p": Function(lambda x, r: torch.log1p(x), lambda x, r, b: of_log1p(x, b), (0.0, 1.0)),
    "softplus": Function(lambda x, r: softplus(x), lambda x, r, b: of_softplus(x, b)),
    "rate": Function(lambda x, r: torch.exp(x), lambda x, r, b: b.exp(x)),
    "given decay": Function(lambda x, r: LOG2_E * x, lambda x, r, b: EPS + LOG2_E_ERROR),
    "softplus decay": Function(
        lambda x, r: -LOG2_E * (r * softplus(x)),
        lambda x, r, b: of_softplus(x, b) + b.rate + 2 * EPS + LOG2_E_ERROR, flushed=2.0, rated=True,
    ),
    "bounded decay": Function(
        lambda x, r: LOG2_E * LOWER_BOUND * sigmoid(finite(x, r)),
        lambda x, r, b: sigmoid(-finite(x, r)) * of_finite(x, r, b) + of_sigmoid(finite(x, r), b) + 3 * EPS
        + LOG2_E_ERROR, flushed=8.0, rated=True,
    ),
    "softplus decay, back": Function(
        lambda x, r: -r * sigmoid(x), lambda x, r, b: of_sigmoid(x, b) + b.rate + 2 * EPS, rated=True
    ),
    "softplus decay, back to the rate": Function(
        lambda x, r: -(r * softplus(x)), lambda x, r, b: of_softplus(x, b) + b.rate + EPS, flushed=2.0, rated=True
    ),
    "bounded decay, back": Function(
        lambda x, r: LOWER_BOUND * slope(finite(x, r)) * r,
        lambda x, r, b: of_finite(x, r, b) + of_slope(finite(x, r), b) + b.rate + 3 * EPS, flushed=6.0, rated=True,
    ),
    "bounded decay, back to the rate": Function(
        lambda x, r: LOWER_BOUND * slope(finite(x, r)) * finite(x, r),
        lambda x, r, b: of_finite(x, r, b) + of_slope(finite(x, r), b) + 4 * EPS, flushed=600.0, rated=True,
    ),
}
CLAMPED = ("given decay", "softplus decay", "bounded decay")

# Where a function, or what it is made of, takes another branch, overflows, vanishes or saturates.
EDGES = (
    0.0, TINY, 2.0**-149, 1e-6, 2.0**-24, 2.0**-12, 0.5, 1.0, 2.0, 16.6, 17.4, 40.0, 83.2, 86.6, 87.336, 87.337, 88.0,
    88.0297, 88.7228, 88.723, 89.0, 103.2, 103.98, 110.0, 125.5, 126.0, 126.5, 127.0, 127.5, 128.0, 138.6, 149.0, 150.0,
    200.0, 2.0**23, 2.0**24, 2.3e38, LARGEST / LOG2_E, LARGEST, torch.inf,
)


def floats(bits: Tensor) -> Tensor:
    """Return float32 numbers from their 32 bits, which are given in int64."""
    return (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)


def near_edges() -> Tensor:
    """Return both signs of all EDGES and their 16 neighbours on either side, nan, and whole numbers and halves."""
    bits = torch.tensor(EDGES, dtype=torch.float32).view(torch.int32).long()
    bits = (bits[:, None] + torch.arange(-16, 17)).flatten().clamp(0, 0x7F800000)
    steps = torch.arange(0, 160, 0.5).view(torch.int32).long()
    bits = torch.cat([bits, steps, torch.tensor([0x7FC00000, 0x7F800001])])
    return floats(torch.cat([bits, bits + (1 << 31)]))


def numbers(seed: int, count: int) -> Tensor:
    """Return `count` float32: all bfloat16, what is near EDGES, and the rest drawn by `seed`.

    An eighth of the rest is drawn evenly from -150 to 150, the others from all exponents and signs alike.
    """
    random = torch.Generator().manual_seed(seed)
    known = torch.cat([floats(torch.arange(1 << 16) << 16), near_edges()])
    rest = count - len(known)
    even = 300 * torch.rand(rest // 8, generator=random) - 150
    bits = torch.randint(1 << 32, (rest - len(even),), generator=random)
    return torch.cat([known, even, floats(bits)])


class Found(NamedTuple):
    """The worst answer, with its error over its budget and its place; and the largest error in ulps of results that are
    not flushed, for |x| up to `NEAR` and for all."""

    used: float
    x: float
    got: float
    want: float
    near: float
    far: float


NEAR = 16.0


def judge(name: str, found: Tensor, x: Tensor, rate: float, b: Backend) -> Found:
    f, wide = FUNCTIONS[name], x.double()
    r = torch.tensor(rate, dtype=torch.float64)
    exact = f.exact(wide, r)
    flushed = f.flushed * TINY * (max(1.0, rate) if f.rated else 1.0)
    error = f.error(wide, r, b) * MORE * exact.abs()
    if name in CLAMPED:
        exact = exact.clamp(min=b.floor)
    largest = b.largest_rate if name == "rate" else LARGEST
    exact = exact.clamp(-largest, largest)                                     # infinity counts as LARGEST
    got = found.double().clamp(-LARGEST, LARGEST)
    in_domain = (wide >= f.domain[0]) & (wide <= f.domain[1]) | wide.isnan()
    wrong = (got - exact).abs()
    used = wrong / (error.nan_to_num(0.0, LARGEST) + flushed)
    used = torch.where(wide.isnan() == found.isnan(), used.nan_to_num(0.0), torch.inf).where(in_domain, -1.0)
    ulps = wrong / torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 24)
    ulps = ulps.where(in_domain & (exact.abs() > 4 * flushed) & (exact.abs() < LARGEST / 4), 0.0).nan_to_num(0.0)
    worst = int(used.argmax())
    near = float(ulps.where(wide.abs() <= NEAR, 0.0).max())
    return Found(float(used[worst]), float(x[worst]), float(found[worst]), float(exact[worst]), near, float(ulps.max()))
