"""What the Triton backend's kernels take of every GPU: shared memory, registers, spills, and seconds to build.

    python -m benchmarks.fits [--arch sm80,sm86,sm90,sm100] [--dim 16,64,128,256] [--dtype bfloat16,float32]
                              [--kernel state,prepare] [--workers 2] [--json FILE]

One line for each kernel, arch, K = V and dtype: the most that any variant of it takes.  No GPU is needed.  Exits with 1
if a kernel takes more shared memory than the GPU has.
"""

import importlib
import itertools
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from kda.backends.triton.plan import recipes
from kda.model.host import host_of
from kda.model.problem import Problem
from ptxkit.compile import triton as door
from ptxkit.compile.triton import Recipe

from . import common

OPTIONS = "packed softplus dt_bias=true l2norm beta=sigmoid state_dtype=float32 final_state=true"
WAYS = ("forward", "backward", "forward disable_recompute=true", "backward disable_recompute=true")
LINE = "{:6} {:9} {:>4}  {:12} {:>7} {:>4} {:>6} {:>7}"


class Taken(NamedTuple):
    shared: int                              # bytes of a block
    registers: int                           # per thread
    spills: int                              # bytes per thread
    seconds: float                           # seconds that one CPU took


def take(text: str) -> Taken:
    """Build the kernel of a recipe, in a process of its own with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        recipe = Recipe.read(text)
        door.load()
        function, before = getattr(importlib.import_module(recipe.module), recipe.name), sum(os.times()[:4])
        options = {"divisible": recipe.divisible, **recipe.options}
        k = door.compile(function, recipe.signature, recipe.constants, target=recipe.target, **options)
        seconds = sum(os.times()[:4]) - before
    return Taken(k.dynamic_shared + k.shared, k.registers, k.spills, round(seconds, 1))


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--arch", type=common.words, default=["sm80", "sm86", "sm90", "sm100"])
    parser.add_argument("--dim", type=common.numbers, default=[16, 64, 128, 256])
    parser.add_argument("--dtype", type=common.words, default=["bfloat16", "float32"])
    parser.add_argument("--kernel", type=common.words, help="by default all")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    lines, futures = [], {}
    print(LINE.format("arch", "dtype", "K=V", "kernel", "shared", "regs", "spills", "seconds"))
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for arch, dtype, dim in itertools.product(args.arch, args.dtype, args.dim):
            by_name = {}
            for way in WAYS:
                for recipe in recipes(Problem.parse(f"K={dim} V={dim} {dtype} {way} {OPTIONS}"), host_of(arch)):
                    if recipe.name in (args.kernel or {recipe.name} - {"tables"}):
                        futures[recipe] = futures.get(recipe) or pool.submit(take, recipe.text)
                        by_name.setdefault(recipe.name, []).append(futures[recipe])
            for name, variants in by_name.items():
                most = Taken(*map(max, zip(*(future.result() for future in variants))))
                lines.append({"arch": arch, "dtype": dtype, "K": dim, "kernel": name, **most._asdict()})
                over = "  does not fit" if most.shared > host_of(arch).smem else ""
                print(LINE.format(arch, dtype, dim, name, *most) + over, flush=True)
    common.write(args.json, lines)
    sys.exit(any(line["shared"] > host_of(line["arch"]).smem for line in lines))


if __name__ == "__main__":
    main()
