"""What bwd/reverse is built for, and its shared memory.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..common.cute.barriers import Meeting, Pipeline, of_a_lane, of_each_warp
from ..common.cute.fields import Struct, array
from ..common.cute.one_grid import OneGridConfig, Queue
from .configs import STATE_WARPS, GradsConfig, WalkConfig


@dataclass(frozen=True)
class ReverseConfig(OneGridConfig):
    walk: WalkConfig
    grads: GradsConfig
    loader, publisher = STATE_WARPS, STATE_WARPS + 1    # warps of a CTA that walks, behind WALK's

    @property
    def walker_pipelines(self) -> tuple[Pipeline, ...]:
        stored = of_each_warp(STATE_WARPS, "WALK")
        return (
            *self.walk.pipelines,
            Pipeline("stored", stored, "PUBLISH", "dv and dh of 64 tokens are in memory", 2),
            Pipeline("published", of_a_lane("PUBLISH"), "WALK", "the queue has the item", 2),
        )

    @cached_property
    def walker(self) -> Struct:              # type: ignore[override]
        return Struct(align=1024, **self.walk.memory.fields, held=array("int32", Queue.HELD))

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        return self.walk.meetings + self.grads.meetings
