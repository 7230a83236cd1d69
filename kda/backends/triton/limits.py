"""The limits of every configuration of a kernel in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from ..common.limits import MAX_THREADS, Limited

MAX_WARPS = MAX_THREADS // 32


def is_power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


class TritonConfig(Limited):
    """A frozen dataclass with `num_warps`, and sizes of tiles, whose names are `tiles`."""

    without_limits = "reference"
    num_warps: int
    tiles: ClassVar[tuple[str, ...]] = ()
    smallest_tile: ClassVar[int] = 1

    def broken_limits(self) -> Iterator[str]:
        for name in ("num_warps", *self.tiles):
            value: Any = getattr(self, name)
            if value is not None and not is_power_of_2(value):
                yield f"{name} must be a power of two; found {value}"
        for name in self.tiles:
            value = getattr(self, name)
            if value is not None and value < self.smallest_tile:
                yield f"{name} must be at least {self.smallest_tile}; found {value}"
        if self.num_warps > MAX_WARPS:
            yield f"there are at most {MAX_WARPS} warps of a CTA; found {self.num_warps}"
