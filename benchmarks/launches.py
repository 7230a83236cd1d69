"""Events around each launch of a call."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from ptxkit.compile.kernel import Bound
from ptxkit.compile.launch_list import LaunchList, part_of
from ptxkit.temporary import replaced

Pair = tuple[torch.cuda.Event, torch.cuda.Event]


def events() -> Pair:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def median(pairs: list[Pair]) -> float:
    """Return the median of times in milliseconds, once the GPU has done all of its work."""
    torch.cuda.synchronize()
    return round(statistics.median(a.elapsed_time(b) for a, b in pairs), 4)


@contextlib.contextmanager
def each_timed(name_of: Callable[[Bound], str]) -> Iterator[dict[str, list[Pair]]]:
    """Launch the kernels of calls inside the block one by one, and yield events before and after each, by name."""
    pairs: dict[str, list[Pair]] = defaultdict(list)

    def run(launches: LaunchList, tensors: list) -> None:
        for bound, locations in launches.launches:
            pairs[name_of(bound)].append(events())
            before, after = pairs[name_of(bound)][-1]
            before.record()
            bound(*[part_of(tensors, location) for location in locations])
            after.record()

    with replaced(LaunchList, __call__=run):
        yield pairs
