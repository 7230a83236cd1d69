"""What bwd/reverse is built for, and its shared memory.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from ..common.arguments import Arguments, KernelConfig
from ..common.cute.barriers import Meeting, Pipeline, mbarriers, of_a_lane, of_each_warp
from ..common.cute.fields import Struct
from ..common.cute.training import Queue, RemadeArguments, ReverseArguments
from .configs import STATE_WARPS, GradsConfig, WalkConfig


@dataclass(frozen=True)
class ReverseConfig(KernelConfig):
    """The options of bwd/walk and of bwd/grads.  With `remade`, this backward made the tiles and does not need them
    after the walk: dh of an item lies over the item's tiles."""

    walk: WalkConfig
    grads: GradsConfig
    remade: bool = False
    queue = Queue.ITEMS                      # elements of the queue beside the items
    launch_options = MappingProxyType({"min_blocks_per_mp": 1})
    loader, publisher = STATE_WARPS, STATE_WARPS + 1    # warps of a CTA that walks, behind WALK's

    @property
    def threads(self) -> int:                # type: ignore[override]
        return self.grads.threads

    @property
    def arguments(self) -> type[Arguments]:  # type: ignore[override]
        return RemadeArguments if self.remade else ReverseArguments

    @property
    def roles(self) -> dict[str, range]:     # type: ignore[override]
        """Those of a CTA that computes gradients."""
        return self.grads.roles

    @property
    def walker_pipelines(self) -> tuple[Pipeline, ...]:
        """Those of a CTA while it walks."""
        stored = of_each_warp(STATE_WARPS, "WALK")
        return (
            *self.walk.pipelines,
            Pipeline("stored", stored, "PUBLISH", "dv and dh of 64 tokens are in memory", 2),
            Pipeline("published", of_a_lane("PUBLISH"), "WALK", "the queue has the item", 2),
        )

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.walker_pipelines + self.grads.pipelines

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        return self.walk.meetings + self.grads.meetings

    @cached_property
    def struct(self) -> Struct:
        """What the CTA has; while it walks, WalkConfig.memory lies below the mbarriers."""
        return Struct(align=1024, **self.grads.struct.fields, **mbarriers(self.walker_pipelines))

    @property
    def shared(self) -> int:
        return self.struct.end

    def broken_limits(self) -> Iterator[str]:
        yield from self.walk.broken_limits()
        yield from self.grads.broken_limits()
        most = self.struct.values_full.offset
        if self.walk.memory.end > most:
            yield f"a CTA that walks has {most:,} bytes below the mbarriers; found {self.walk.memory.end:,}"
        yield from super().broken_limits()
