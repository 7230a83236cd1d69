"""What a launch costs the host: `python -m benchmarks.launch`, on a GPU.

One kernel that does next to nothing is launched by kda, by Triton itself and, for the floor, by a bare call of the
driver with everything ready; an operator of torch stands beside them. Results are checked first. Batches are short, so
that the queue never fills.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ptxkit.commands.layout import table
from ptxkit.compile import driver
from ptxkit.compile import triton as door

from . import common

BATCHES, LAUNCHES, SIZE = 50, 100, 128


@triton.jit
def few(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1.0, mask=i < n)


@triton.jit
def many(a, b, c, d, e, f, g, h, y, n, m, s, t, u, v, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.load(a + i) + tl.load(b + i) + tl.load(c + i) + tl.load(d + i)
    total += tl.load(e + i) + tl.load(f + i) + tl.load(g + i) + tl.load(h + i) + (n + m + s + t + u + v)
    tl.store(y + i, total * scale)


def build(function: Any, tensors: int, integers: int, floats: int) -> Any:
    kinds = ["*fp32"] * tensors + ["i32"] * integers + ["fp32"] * floats
    names = function.arg_names[: len(kinds)]
    major, minor = torch.cuda.get_device_capability()
    target = f"sm{major}{minor}"
    return door.compile(
        function, dict(zip(names, kinds)), {"BLOCK": SIZE}, target=target, divisible=names[:tensors], num_warps=1
    )


def bare(kernel: Any) -> Callable[[], Any]:
    """The driver's call alone, for what was launched last."""
    ready = next(r for r in driver._READY.values() if r.kernel is kernel)
    (config, params), handle, call = ready.idle[-1].pointers, ready.handle, ready.call
    return lambda: call(config, handle, params, None)


def calls() -> dict[str, Callable[[], Any]]:
    x = torch.arange(SIZE, dtype=torch.float32, device="cuda")
    outs = [torch.zeros_like(x) for _ in range(4)]
    numbers = (16, 32, 48, 64, 80, 96, 0.5)
    small, large = build(few, 2, 1, 0), build(many, 9, 6, 1)
    small.launch(1, x, outs[0], SIZE)
    few[(1,)](x, outs[1], SIZE, BLOCK=SIZE, num_warps=1)
    large.launch(1, *[x] * 8, outs[2], *numbers)
    many[(1,)](*[x] * 8, outs[3], *numbers, BLOCK=SIZE, num_warps=1)
    torch.cuda.synchronize()
    for out, wanted in zip(outs, (x + 1, x + 1, (8 * x + 336) / 2, (8 * x + 336) / 2)):
        assert torch.equal(out, wanted), f"a launch gives {out}, not {wanted}"
    return {
        "kernel.launch, 3 arguments": lambda: small.launch(1, x, outs[0], SIZE),
        "kernel.launch, 16 arguments": lambda: large.launch(1, *[x] * 8, outs[2], *numbers),
        "Triton's few[grid](...), 3 arguments": lambda: few[(1,)](x, outs[1], SIZE, BLOCK=SIZE, num_warps=1),
        "Triton's many[grid](...), 16 arguments": lambda: many[(1,)](
            *[x] * 8, outs[3], *numbers, BLOCK=SIZE, num_warps=1
        ),
        "the driver's call alone, 3 arguments": bare(small),
        "the driver's call alone, 16 arguments": bare(large),
        "torch's x.add_(1)": lambda: outs[0].add_(1),
    }


def batches(call: Callable[[], Any]) -> list[float]:
    """Microseconds a call, in batches."""
    times = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        times.append(1e6 * (time.perf_counter() - began) / LAUNCHES)
    return times


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.launch: launches are timed on a GPU; torch finds none here")
    batches_of = {name: batches(call) for name, call in calls().items()}
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    times = {name: {"min": min(each), "median": statistics.median(each)} for name, each in batches_of.items()}
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    rows = [(name, f"{t['min']:.1f}", f"{t['median']:.1f}") for name, t in times.items()]
    print("\n".join(table(rows, header=("microseconds of the host", "min", "median"), align="lrr")))
    common.write(args.json, head | {"microseconds": times})


if __name__ == "__main__":
    main()
