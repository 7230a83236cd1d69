"""Error budgets: twice the error of an independent rounding of the same maths, measured in float64.

There are two measures, because a small error everywhere and a large one in a single place are different faults:

  norm   ||x - exact|| / ||exact||
  peak   max |x - exact| / rms(exact)

A single rounding can be lucky, above all in small tensors.  So there are several.  Most have inputs that are shaken in
their last bit, which also shows how far the maths amplifies an error; where a stage stores less than `compute`, each of
them draws that rounding error independently.  A budget is never below what is known beforehand: half an ulp for each of
the sqrt(n) steps that a sum of n terms drifts, and half an ulp of the stored dtype.
The roundings run on a CPU, whose exp2 is accurate to an ulp; two ulps are added, which is what CUDA promises.
If float64 itself is tested, the exact result is a rounding too, with its own budget.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

Tensor = torch.Tensor

FACTOR = 2.0
EXP2_ULPS = 2
EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF << 52)}    # its bits
NOT_FINITE = {"nan": torch.isnan, "inf": torch.isposinf, "-inf": torch.isneginf}
BLOCK = 1 << 17                              # elements that are measured at a time; on a GPU:
GPU_BLOCK = 1 << 24
KEPT = 1 << 22                               # elements of the largest noise that is kept


class Measure(NamedTuple):
    """One result against its budget."""

    error: float                             # norm or peak, whichever uses more of its budget
    budget: float
    used: float                              # > 1: over budget
    kind: str                                # "norm", "peak", or "nan", "inf", "-inf", "shape", where the two differ
    index: tuple[int, ...] | None            # type: ignore[assignment]  # the worst place
    got: float = math.nan
    want: float = math.nan


def shakes(elements: int, coarse: bool = False) -> range:
    """Return how often to shake: few elements may all be lucky, many are not, except for the few sums over all of them,
    if roundings are `coarse`."""
    return range(8 if coarse or elements < 16384 else 1)


def shaken(x: Tensor, shake: int = 0) -> Tensor:
    """Return an eighth of the elements one ulp larger and an eighth one smaller, always the same for one `shake`."""
    which = torch.randint(8, x.shape, generator=torch.Generator().manual_seed(_seed(x.numel(), shake)))
    eps = torch.finfo(x.dtype).eps
    return torch.where(which == 0, x * (1 + eps), torch.where(which == 1, x * (1 - eps), x))


def dithered(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Return x with an error as large as its rounding error in `dtype`, drawn by `seed`; none where x needs no
    rounding."""
    info, (integers, exponent) = torch.finfo(dtype), EXPONENT[x.dtype]
    least = max(info.tiny, torch.finfo(x.dtype).tiny / info.eps**3)            # subnormal errors take 30 times as long
    ulps = (x.contiguous().view(integers) & exponent).view(x.dtype).clamp_(least, info.max).mul_(info.eps)
    drawn = noise if x.numel() <= KEPT else noise.__wrapped__
    inexact = torch.ne(x.to(dtype).to(x.dtype), x, out=torch.empty_like(x))    # 0 or 1; torch.where is much slower
    return ulps.mul_(drawn(x.shape, x.dtype, seed)).mul_(inexact).add_(x)


@functools.lru_cache(maxsize=8)
def noise(shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
    """Return numbers uniform from -1/2 to 1/2.  They are kept, since every chunk of a walk asks for the same."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).sub_(0.5)


class Budget(NamedTuple):
    exact: Tensor                            # float64
    norm: float
    peak: float

    @classmethod
    def of(cls, exact: Tensor, *rounded: Tensor, compute: torch.dtype, stored: torch.dtype, summed: int) -> Budget:
        """`rounded` are independent roundings of `exact`; `summed` terms are in the longest sum behind one element."""
        scale = Scale.of(exact)
        eps = torch.finfo(compute).eps
        floor = eps / 2 * math.sqrt(max(summed, 1)) + torch.finfo(stored).eps / 2
        exp2 = EXP2_ULPS * eps
        # A rounding that overflows gives no budget for others.
        errors = [distance(x.double(), exact).nan_to_num(posinf=0.0) for x in rounded]
        norm = max((float(e.norm()) for e in errors), default=0.0) / scale.norm
        peak = max((float(e.max()) for e in errors if e.numel()), default=0.0) / scale.rms
        both = 2 if compute == torch.float64 else 1
        norm, peak = max(FACTOR * norm, floor) + exp2, max(FACTOR * peak, floor * scale.loudest) + exp2 * scale.loudest
        return cls(exact, both * norm, both * peak)

    def __add__(self, other: Budget) -> Budget:  # type: ignore[override]
        """Return the budget between two results that are each within their own budget."""
        return Budget(self.exact, self.norm + other.norm, self.peak + other.peak)

    def around(self, centre: Tensor) -> Budget:
        """Return the same budget around another result."""
        return self._replace(exact=centre.double())

    def measure(self, x: Tensor) -> Measure:
        if x.shape != self.exact.shape:
            return Measure(math.inf, 0.0, math.inf, "shape", None)
        if not x.numel():
            return Measure(0.0, self.norm, 0.0, "norm", None)
        x, norms, largest, worst = x.detach().to(self.exact.device), [], -1.0, 0
        for start, of_x, of_exact in _blocks(x, self.exact):
            error = (of_x.double() - of_exact).abs_()
            if not math.isfinite(error.max()):                # a nan or an infinity of one of them
                for kind, is_of_kind in NOT_FINITE.items():
                    differs = is_of_kind(of_x) != is_of_kind(of_exact)
                    if differs.any():
                        index = _index(start + int(differs.int().argmax()), x.shape)
                        return Measure(math.inf, 0.0, math.inf, kind, index, float(x[index]), float(self.exact[index]))
                error = distance(of_x.double(), of_exact)
            norms.append(float(error.norm()))
            if (block_largest := float(error.max())) > largest:
                largest, worst = block_largest, start + int(error.argmax())
        scale, index = Scale.of(self.exact), _index(worst, x.shape)
        norm = Measure(math.hypot(*norms) / scale.norm, self.norm, 0.0, "norm", None)
        peak = Measure(largest / scale.rms, self.peak, 0.0, "peak", None)
        worse = max((m._replace(used=_ratio(m.error, m.budget)) for m in (norm, peak)), key=lambda m: m.used)
        return worse._replace(index=index, got=float(x[index]), want=float(self.exact[index]))

    def excess(self, x: Tensor) -> float:
        """Return the used share of the budget; inf for another shape, or nan and inf in other places than exact's."""
        return self.measure(x).used

    def wrong(self, x: Tensor) -> Tensor:
        """Return the elements that each exceed the peak budget."""
        off = distance(x.detach().to(self.exact.device).double(), self.exact)
        return (off > self.peak * Scale.of(self.exact).rms).cpu()


class Scale(NamedTuple):
    """The size of a tensor, without its nan and inf; a tensor of zeros counts as one of ones."""

    norm: float
    rms: float
    loudest: float                           # its largest element over rms

    @classmethod
    def of(cls, exact: Tensor) -> Scale:
        norms, largest = [], 0.0
        for _, block in _blocks(exact):
            if not math.isfinite(norm := float(block.norm())):
                block = block.nan_to_num(0.0, 0.0, 0.0)
                norm = float(block.norm())
            norms.append(norm)
            largest = max(largest, float(block.abs().max()))
        if not (norm := math.hypot(*norms)):
            return cls(1.0, 1.0, 0.0)
        rms = norm / math.sqrt(exact.numel())
        return cls(norm, rms, largest / rms)


def _blocks(*tensors: Tensor) -> Iterator[tuple]:
    """Yield the start of each block of elements, and that block of each tensor, flat: what is made of it stays in a
    core's cache, and no temporary is as large as the tensors."""
    size = BLOCK if tensors[0].device.type == "cpu" else GPU_BLOCK
    parts = (x.reshape(-1).split(size) for x in tensors)
    return ((n * size, *blocks) for n, blocks in enumerate(zip(*parts)) if blocks[0].numel())


def distance(x: Tensor, exact: Tensor) -> Tensor:
    """Return |x - exact|: zero where both are nan or the same infinity, inf where only one is finite."""
    error = (x - exact).abs().nan_to_num(torch.inf, torch.inf)
    return error.masked_fill((x == exact) | (x.isnan() & exact.isnan()), 0.0)


def _seed(*words: str | int) -> int:
    """Return a seed of 32 bits: torch uses only the last 32 of a longer one."""
    return zlib.crc32(" ".join(map(str, words)).encode())


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


def _ratio(error: float, budget: float) -> float:
    return error / budget if budget else (0.0 if error == 0 else math.inf)


class Rounding(NamedTuple):
    """The dtypes of a backend: all sums in `compute`, tensors that a stage writes as in `stored`, by the names of
    `kda.model.stages`: {"w": "bfloat16", ...}.  A backend's launch module declares them: `rounded_to(problem)`.
    """

    compute: torch.dtype
    stored: Mapping[str, str] = {}
    shake: int | None = None                 # which of the `shakes` draws its errors
    gradients: Mapping[str, str] | None = None    # `stored` of the backend that computes them, if it is another

    def dtype_of(self, name: str) -> torch.dtype:
        return getattr(torch, self.stored[name]) if name in self.stored else self.compute

    @property
    def of_gradients(self) -> Rounding:
        """Return the rounding of a backward: it recomputes what it does not get, and that has q's dtype in any case."""
        return self if self.gradients is None else self._replace(stored=self.gradients, gradients=None)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name not in self.stored:
            return x
        if self.shake is None:
            return x.to(self.dtype_of(name)).to(self.compute)
        return dithered(x, self.dtype_of(name), _seed(name, self.shake))
