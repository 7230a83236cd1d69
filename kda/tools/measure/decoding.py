"""One call of `kda.decode_step`: held against the reference in float64, then timed.  Imports torch.

On a GPU calls are replayed from one CUDA graph over pools of four times the L2 cache, as the layers of a model do; the
time is that of one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kda.tools.verify.steps import UPDATED, budgets, bytes_moved, copied, make_step, run_step

from .clocks import CpuClock, CudaClock, Timings, interleaved

L2_TIMES, FEW = 4, 3                         # sequences that are compared


class DecodeSizes(NamedTuple):
    """A call by its sizes."""

    sequences: int
    heads: int
    value_heads: int
    K: int
    V: int
    dtype: str
    states: str                              # their dtype
    gate: str                                # a word of kda.tools.measure.shapes.GATES


class Decoded(NamedTuple):
    sizes: DecodeSizes
    backend: str
    used: float  # share of the budget in the tensor that uses most; above 1 the result is wrong
    bytes: int                               # bytes that any kernel must move
    timing: Timings | None = None             # None if the result is wrong


def measure(sizes: DecodeSizes, backend: str, clock: CpuClock | CudaClock, repeats: int, seconds: float) -> Decoded:
    device = str(getattr(clock, "device", "cpu"))
    shape = (sizes.heads, sizes.value_heads, sizes.K, sizes.V)
    how: dict[str, Any] = {"dtype": sizes.dtype, "states": sizes.states, "gate": sizes.gate}
    few = make_step(min(sizes.sequences, FEW), 1, *shape, **how)
    moved = {name: t.to(device) if torch.is_tensor(t) else t for name, t in copied(few).items()}
    results = run_step(moved, backend=backend)
    used = max(budget.excess(results[name]) for name, budget in budgets(few).items())
    x = make_step(sizes.sequences, 1, *shape, **how, device=device)
    wrong = Decoded(sizes, backend, used, bytes_moved(x))
    if not used <= 1:
        return wrong
    calls = [functools.partial(run_step, one, backend=backend) for one in pools(x)]

    return wrong._replace(timing=time_of_one(calls, clock, repeats, seconds))


def time_of_one(
    calls: Sequence[Callable[[], Any]], clock: CpuClock | CudaClock, repeats: int, seconds: float
) -> Timings:
    """Time one call among others that are made in turn, on a GPU from one CUDA graph."""
    def all_calls() -> None:
        for call in calls:
            call()

    once = clock.captured(lambda: all_calls) if isinstance(clock, CudaClock) else all_calls
    ((timing, _),) = interleaved([once], clock, repeats, seconds)
    return Timings(tuple(t / len(calls) for t in timing.seconds), timing.host_inside)


def pools(x: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the call on pools that push each other out of L2; on a CPU as it is."""
    states = x["states"]
    if not states.is_cuda:
        return [x]
    L2 = torch.cuda.get_device_properties(states.device).L2_cache_size
    count = max(2, -(-L2_TIMES * L2 // (states.numel() * states.element_size())))
    return [x | {name: x[name].clone() for name in UPDATED if x.get(name) is not None} for _ in range(count)]
