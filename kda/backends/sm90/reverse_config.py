"""What bwd/reverse is built for, and its shared memory.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..common.cute.barriers import (
    LANES_OF_A_WARP,
    Arrivals,
    Meeting,
    NamedBarrier,
    Pipeline,
    of_a_lane,
    of_each_warp,
)
from ..common.cute.fields import Struct, array, several
from ..common.cute.one_grid import OneGridConfig, Queue
from ..common.cute.tile import C
from .configs import CHAIN_WARPS, COLUMNS, PITCH_V, GradsConfig, WalkConfig, tile

STRIP = NamedBarrier("STRIP", 3, 32 * CHAIN_WARPS, ids_per_group=1)


@dataclass(frozen=True)
class ReverseConfig(OneGridConfig):
    walk: WalkConfig
    grads: GradsConfig

    @property
    def strips(self) -> int:
        return self.walk.strips

    @property
    def publisher(self) -> int:
        """The warp behind those that bring do of each strip."""
        return self.grads.math_warps + self.strips

    @property
    def registers(self) -> tuple[int, int]:
        """MATH's and LOAD's: to find dh over tiles takes some of LOAD's."""
        return (232, 40) if self.remade and self.grads.panels > 1 else self.grads.registers

    @property
    def walker_pipelines(self) -> tuple[Pipeline, ...]:
        warps, stages = CHAIN_WARPS * self.strips, self.walk.stages
        copies = (
            Arrivals(1, "LOAD", bytes="the tile"),
            Arrivals(LANES_OF_A_WARP * self.strips, "LOAD", "each lane with its pieces of do"),
        )
        read = of_each_warp(warps, "WALK")
        return (
            Pipeline("full", copies, "WALK", "a chunk is there", stages),
            Pipeline("empty", read, "LOAD", "no warp reads the stage any more", stages),
            Pipeline("stored", read, "PUBLISH", "dv and dh of 64 tokens are in memory", 2),
            Pipeline("published", of_a_lane("PUBLISH"), "WALK", "the queue has the item", 2),
        )

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        return Meeting(STRIP, "WALK", self.walk.meetings[0].says), *self.grads.meetings

    @cached_property
    def walker(self) -> Struct:              # type: ignore[override]
        stages, strips = self.walk.stages, self.strips
        return Struct(
            align=1024,
            tiles=several(tile(self.walk.K), stages),
            do=array("bfloat16", strips, stages, C, PITCH_V),
            dv=array("bfloat16", strips, 2, C, PITCH_V),
            state=array("bfloat16", strips, self.walk.K * COLUMNS, align=1024),
            held=array("int32", Queue.HELD),
        )
