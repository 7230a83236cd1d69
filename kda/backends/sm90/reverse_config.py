"""What bwd/reverse is built for, its arguments, and its shared memory.  No cutlass: a kept kernel needs none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..common.arguments import Arguments, KernelConfig, number, tensor
from ..common.cute.barriers import (
    LANES_OF_A_WARP,
    Arrivals,
    Meeting,
    NamedBarrier,
    Pipeline,
    mbarriers,
    of_a_lane,
    of_each_warp,
)
from ..common.cute.fields import Struct, array, several
from ..common.cute.tile import C
from ..common.cute.training import GradsArguments, WalkArguments
from .configs import CHAIN_WARPS, COLUMNS, PITCH_V, GradsConfig, WalkConfig, tile

STRIP = NamedBarrier("STRIP", 3, 32 * CHAIN_WARPS, ids_per_group=1)


class Queue:
    """Elements of the queue of items: how many were added, how many were removed, and from ITEMS on 1 + each item."""

    ADDED, REMOVED, ITEMS = 0, 32, 64        # in lines of their own


ReverseArguments = GradsArguments.and_more(
    "ReverseArguments",
    g=tensor(dtype_from="grads.g_dtype"),
    beta=tensor(dtype_from="grads.beta_dtype"),
    dg=tensor(dtype_from="grads.g_dtype"),
    dbeta=tensor(dtype_from="grads.beta_dtype"),
    tiles=WalkArguments.declared["tiles"],
    dht=WalkArguments.declared["dht"],
    dh0=tensor(dtype_from="walk.dh0"),
    segment_table=WalkArguments.declared["segment_table"],
    first_segment=tensor("int32"),           # (N + 1), of packed sequences
    queue=tensor("int32"),                   # Queue, at first 0
    segments=number("int32"),                # segments of a row
    segment=number("int32"),                 # chunks of a segment
    N=number("int32"),
    walks=number("int32"),                   # segments, at least one of a sequence, and value heads
    walkers=number("int32"),                 # CTAs that walk, before they compute gradients
)
RemadeArguments = ReverseArguments.and_more(
    "RemadeArguments",
    places_of_dh=tensor("int32"),            # (items, K / 64): KiB from the tiles to each 64 channels of an item's dh
    spare=number("int32"),                   # KiB from the tiles to memory behind them for 64 channels of each walk
)


@dataclass(frozen=True)
class ReverseConfig(KernelConfig):
    """The options of bwd/walk and of bwd/grads.  With `remade`, this backward made the tiles and does not need them
    after the walk: dh of an item lies over the item's tiles."""

    walk: WalkConfig
    grads: GradsConfig
    remade: bool = False
    queue = Queue.ITEMS                      # elements of the queue beside the items

    @property
    def arguments(self) -> type[Arguments]:  # type: ignore[override]
        return RemadeArguments if self.remade else ReverseArguments

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
    def threads(self) -> int:
        return self.grads.threads

    @property
    def roles(self) -> dict[str, range]:
        """Those of a CTA that computes gradients."""
        return self.grads.roles

    @property
    def launch_options(self) -> dict[str, int]:  # type: ignore[override]
        return self.grads.launch_options

    @property
    def walker_pipelines(self) -> tuple[Pipeline, ...]:
        """Those of a CTA while it walks."""
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
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.walker_pipelines + self.grads.pipelines

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        return Meeting(STRIP, "WALK", self.walk.meetings[0].says), *self.grads.meetings

    @cached_property
    def walker(self) -> Struct:
        """What a CTA has, while it walks, where it has values and rows later."""
        stages, strips = self.walk.stages, self.strips
        return Struct(
            align=1024,
            tiles=several(tile(self.walk.K), stages),
            do=array("bfloat16", strips, stages, C, PITCH_V),
            dv=array("bfloat16", strips, 2, C, PITCH_V),
            state=array("bfloat16", strips, self.walk.K * COLUMNS, align=1024),
        )

    @cached_property
    def struct(self) -> Struct:
        return Struct(align=1024, **self.grads.struct.fields, **mbarriers(self.walker_pipelines))

    @property
    def shared(self) -> int:
        return self.struct.end

    def broken_limits(self) -> Iterator[str]:
        yield from self.walk.broken_limits()
        yield from self.grads.broken_limits()
        most = self.struct.values_full.offset
        if self.walker.end > most:
            yield f"a CTA that walks has {most:,} bytes below the mbarriers; found {self.walker.end:,}"
        yield from super().broken_limits()
