"""What a first call of a training step costs, with an empty cache of kernels and with a warm one.

    python -m benchmarks.first_call [--tokens 8192] [--heads 64] [--backend auto] [--dtype bfloat16] [--json FILE]

Two processes, one after the other, with a cache of their own.  Seconds; torch and CUDA are awake before the call, and
torch's first backward, which imports for a second, was one of torch's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from . import common


def one(tokens: int, heads: int, backend: str, dtype: str) -> dict[str, float]:
    import torch

    import kda
    from kda.tools.verify.cases import make_inputs
    from kda.tools.verify.definition import leaves_of

    x = torch.ones(1, device="cuda", requires_grad=True)
    (2 * x).backward(torch.ones_like(x))
    case = make_inputs(T=tokens, H=heads, K=128, V=128, dtype=dtype, initial_state=False, device="cuda")
    recorded = case.keywords | leaves_of(case.keywords)
    forward, (o, _) = seconds(lambda: kda.chunk_kda(**recorded, backend=backend))
    backward, _ = seconds(lambda: o.backward(case.do))
    return {"forward": forward, "backward": backward}


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time of a call until the GPU is done, and what it returned."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return round(time.perf_counter() - start, 3), result


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one:
        print(json.dumps(one(a.tokens, a.heads, a.backend, a.dtype)))
        return
    times = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty cache", "warm cache"):
            again = common.again(__spec__, "--one", "--tokens", a.tokens, "--heads", a.heads, "--backend", a.backend,
                                 "--dtype", a.dtype)
            environment = os.environ | {"KDA_CACHE_DIR": cache}
            run = subprocess.run(again, env=environment, stdout=subprocess.PIPE, check=True, cwd=common.ROOT)
            times[name] = json.loads(run.stdout.splitlines()[-1])
            print(name, *(f"{way} {took:.2f} s" for way, took in times[name].items()), sep=", ", flush=True)
    common.write(a.json, times)


if __name__ == "__main__":
    main()
