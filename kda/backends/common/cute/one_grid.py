"""Walk and grads in one grid: the queue between them, the arguments, and what both archs' configurations share.  No
cutlass: a kept kernel needs none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..arguments import Arguments, KernelConfig, number, tensor
from .barriers import Pipeline, mbarriers
from .fields import Struct
from .training import GradsArguments, WalkArguments


class Queue:
    """Elements of the queue of items: how many were added, how many were removed, and from ITEMS on 1 + each item.

    L2 still has dv, dh and do of an item that is removed soon.  So while AHEAD items wait, a walk holds its items back,
    as many as HELD, and adds them, the last one first, when few wait or when it has ended.
    """

    ADDED, REMOVED, ITEMS = 0, 32, 64        # in lines of their own
    AHEAD, HELD = 16, 512


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
class OneGridConfig(KernelConfig):
    """The options of bwd/walk and of bwd/grads.  With `remade`, this backward made the tiles and does not need them
    after the walk: dh of an item lies over the item's tiles.  An arch adds its walker."""

    walk: Any                                # an arch narrows both
    grads: Any
    remade: bool = False
    queue = Queue.ITEMS                      # elements of the queue beside the items

    @property
    def arguments(self) -> type[Arguments]:  # type: ignore[override]
        return RemadeArguments if self.remade else ReverseArguments

    @property
    def threads(self) -> int:                # type: ignore[override]
        return self.grads.threads

    @property
    def launch_options(self) -> dict[str, int]:  # type: ignore[override]
        return self.grads.launch_options

    @property
    def roles(self) -> dict[str, range]:     # type: ignore[override]
        """Those of a CTA that computes gradients."""
        return self.grads.roles

    @property
    def walker_pipelines(self) -> tuple[Pipeline, ...]:
        """Those of a CTA while it walks."""
        raise NotImplementedError

    @property
    def walker(self) -> Struct:
        """What a CTA has, while it walks, where it has values and rows later: below the mbarriers."""
        raise NotImplementedError

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return self.walker_pipelines + self.grads.pipelines

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
