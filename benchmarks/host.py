"""What a call costs the host: `python -m benchmarks.host`.  Tensors are as small as can be, on the CPU.

`import kda` is timed in fresh interpreters, after `import torch`; everything else in this one, in batches.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import kda
from kda.calls import autograd
from kda.checks.calls import Call, problem_of
from kda.model.problem import Inputs, Options
from kda.routing.dispatch import backend_asked, choose, launcher
from ptxkit.commands.layout import table

from . import common

INTERPRETERS, BATCHES, BATCH_SECONDS = 5, 9, 0.05
IMPORT = "import time, torch; t = time.perf_counter(); import kda; print(time.perf_counter() - t)"


def imports() -> list[float]:
    """Seconds of `import kda` once torch is there, in fresh interpreters."""
    argv = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(common.ROOT)!r}); {IMPORT}"]
    return [float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout) for _ in range(INTERPRETERS)]


def repeated(call: Callable[[], Any]) -> list[float]:
    """Seconds a call, in batches."""
    call()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < BATCH_SECONDS:
        call()
        calls += 1
    batches = []
    for _ in range(BATCHES):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        batches.append((time.perf_counter() - began) / calls)
    return batches


def calls() -> dict[str, Callable[[], Any]]:
    q, k, v = (torch.randn(1, 1, 1, 16) for _ in range(3))
    inputs = Inputs(q, k, v, torch.zeros(1, 1, 1, 16), torch.ones(1, 1, 1))
    rows, options = inputs[:5], Options(scale=0.25)
    call = Call("chunk_kda", inputs, options)
    problem = problem_of(call)
    tensors, settings = inputs[: len(autograd.INPUTS)], [getattr(options, name) for name in autograd.OPTIONS]
    return {
        "a decision made before: choose(problem, backend_asked())": lambda: choose(problem, backend_asked()),
        "problem_of a kind of call seen before": lambda: problem_of(call),
        "launch.forward of the reference, T=1": lambda: launcher("reference").forward(problem, inputs),
        "torch.ops.kda.chunk_forward, T=1": lambda: torch.ops.kda.chunk_forward(*tensors, *settings, "nothing"),
        "kda.chunk_kda, T=1": lambda: kda.chunk_kda(*rows),
        "kda.fused_recurrent_kda, T=1": lambda: kda.fused_recurrent_kda(*rows),
    }


def measure() -> dict[str, Any]:
    taken = {"import kda, after import torch": imports()} | {name: repeated(call) for name, call in calls().items()}
    microseconds = {name: {"min": 1e6 * min(s), "median": 1e6 * statistics.median(s)} for name, s in taken.items()}
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "microseconds": microseconds}


def report(measured: dict[str, Any]) -> list[str]:
    rows = [(name, f"{m['min']:.1f}", f"{m['median']:.1f}") for name, m in measured["microseconds"].items()]
    head = f"torch {measured['torch']}, {measured['threads']} threads"
    return [head, *table(rows, header=("microseconds", "min", "median"), align="lrr")]


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--threads", type=int, default=1, help="of torch  [default: 1, for calls as small as these]")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    measured = measure()
    print("\n".join(report(measured)))
    common.write(args.json, measured)


if __name__ == "__main__":
    main()
