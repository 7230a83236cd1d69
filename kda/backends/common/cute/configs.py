"""What kernels that both archs launch are built for.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kda.compile.kernel import Bound, Kernel

STRIP = 8                                    # columns of the states


class Launched:
    """What every kernel's launch has, and most alike."""

    cluster: tuple[int, int, int] | int = 1
    early: bool = False                      # comes onto the SM before the kernel ahead of it in its call is done

    def bound(self, kernel: Kernel, grid: tuple[int, int, int], *numbers: float) -> Bound:
        """The launch of a kernel that was built for this, of all but its tensors."""
        return kernel.bound(
            grid, *numbers, block=self.threads, cluster=self.cluster, dynamic_shared=self.shared, pdl=self.early
        )


@dataclass(frozen=True)
class ComposeConfig(Launched):
    K: int
    V: int
    packed: bool
    h0: str | None
    v_first: bool
    begun: bool = False                      # first segments began with the states that enter sequences: no M of theirs
    ht: bool = False                         # the state that leaves the last segment, too

    @property
    def parts(self) -> int:
        return self.V // STRIP

    @property
    def threads(self) -> int:
        return 2 * self.K

    @property
    def early(self) -> bool:
        return self.begun

    @property
    def shared(self) -> int:
        return 2 * 4 * self.K * STRIP
