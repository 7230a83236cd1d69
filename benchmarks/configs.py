"""Which configuration of a Triton kernel is fastest on this GPU: where rows of backends/triton/configs.py come from.

    python -m benchmarks.configs --kernel intra --warps 4,8 --BK 32,64 --BV 64 --stages 1 --maxnreg 0,168
                                 [--tokens 8192] [--heads 64] [--dim 128] [--dtype bfloat16] [--regime slow]
                                 [--as sm80]

Every configuration runs one forward and one backward with the kernel in it.  Results are compared with those of the
committed table first; then each launch is timed on its own, after the kernels that come before it in a call.  Medians.

--as sm80: kernels are built for an A100, and the driver makes code for this GPU out of their PTX.  So they multiply by
mma.sync, in the tiles and registers that they have there, on the SMs and memory of this GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

import kda
from kda.backends.triton import call, plan
from kda.backends.triton.configs import TileConfig
from kda.model import host
from kda.model.force import Force, forcing
from kda.model.host import host_of
from kda.tools.verify.cases import make_inputs
from ptxkit.compile.errors import BuildError
from ptxkit.compile.fetching import attempt_all
from ptxkit.temporary import replaced

from . import common
from .launches import each_timed, median

CALLS = 11
CLOSE = 2e-2                                 # two right results differ by roundings of bfloat16 in another order


class Calls:
    """A forward and a backward, and what `kda.backends.triton.call` does for them."""

    def __init__(self, case):
        self.case = case
        self.plans = set()                   # the arguments of plan.plan

    def first(self) -> tuple:
        """Run them and remember what they plan."""
        prepared = call.prepared

        def seen(*arguments):
            self.plans.add(arguments)
            return prepared(*arguments)

        with replaced(call, prepared=seen):
            return self.run()

    def build(self, kernel: str, choices: list[TileConfig]) -> None:
        """Build all kernels side by side."""
        forces = [Force(configs=((kernel, config),)) for config in choices]
        attempt_all([
            recipe for force, (p, *others) in itertools.product(forces, self.plans)
            for recipe in plan.plan(dataclasses.replace(p, force=force), *others).kernels.values()
        ])

    def run(self) -> tuple:
        out = kda.chunk_kda_fwd(**self.case.keywords, backend="triton")
        return out.o, *kda.chunk_kda_bwd(do=self.case.do, **self.case.keywords, backend="triton")

    def times(self) -> dict[str, float]:
        """Milliseconds of each kernel, medians."""
        with each_timed(lambda bound: bound.kernel.name) as pairs:
            for _ in range(CALLS):
                self.run()
        return {name: median(times) for name, times in pairs.items()}


def pretend(arch: str) -> None:
    """Let this GPU count as one of another arch from here on, with the shared memory of that."""
    present, other = host.detect("cuda:0"), host_of(arch)
    pretended = dataclasses.replace(present, cc=other.cc, smem=min(present.smem, other.smem))
    host._examined = lambda device: pretended


def off(results: tuple, expected: tuple) -> float:
    """The largest relative error of a tensor."""
    return max(common.off(x, y) for x, y in zip(results, expected) if x is not None)


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--kernel", default="intra", help="a name in configs.TABLE")
    for name, default in (("warps", "4,8"), ("stages", "1"), ("BK", "64"), ("BV", "64"), ("maxnreg", "0")):
        parser.add_argument("--" + name, default=default, type=common.numbers)
    for name, default in (("tokens", 8192), ("heads", 64), ("dim", 128)):
        parser.add_argument("--" + name, default=default, type=int)
    for name, default in (("dtype", "bfloat16"), ("gate", "bounded"), ("regime", "slow")):
        parser.add_argument("--" + name, default=default)
    parser.add_argument("--as", dest="arch", help="build for this arch: sm80, sm86, ...")
    a = parser.parse_args()
    if a.arch:
        pretend(a.arch)
    calls = Calls(make_inputs(T=a.tokens, H=a.heads, K=a.dim, V=a.dim, dtype=a.dtype, gate=a.gate, regime=a.regime,
                              initial_state=False, device="cuda"))
    expected = calls.first()
    choices = [TileConfig(*x[:4], x[4] or None) for x in itertools.product(a.warps, a.stages, a.BK, a.BV, a.maxnreg)]
    calls.build(a.kernel, choices)
    lines = []
    for config in [None, *choices]:
        try:
            with forcing(configs=((a.kernel, config),) if config else ()):
                error = off(calls.run(), expected)
                times = calls.times() if error < CLOSE else "wrong"
        except (BuildError, RuntimeError) as failure:
            error, times = None, str(failure).splitlines()[0]
        lines.append({"config": str(config or "the table's"), "off": error, "ms": times})
        print(json.dumps(lines[-1]), flush=True)
    common.write(a.json, lines)


if __name__ == "__main__":
    main()
