"""How fast the simulator is, on one core of this machine.

    python -m ptxkit.benchmarks.simulator

Prints: warp-instructions a second in a loop of scalar arithmetic and in one of loads and stores, with and without the
history that finds races; the time of a 128x128x64 tile on sm_100a (TMA in, tcgen05.mma, tensor memory, back to global
memory), whose result is checked; a launch of a million warps; and what it costs to build the engine. Times are of user
and system CPU, the best of a few; of building, of the clock on the wall. `parts` has the parts of any call.
"""

import collections
import os
import pathlib
import tempfile
import time
from unittest import mock

import torch

from ptxkit import TensorMap, application, launch, launches
from ptxkit.engine import binding, build

HERE = pathlib.Path(__file__).parent
TILE = HERE / "kernels" / "tile_sm100.ptx"
FRAME = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry loop(.param .u64 out, .param .u32 turns)
{{
    .reg .pred %p<2>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %rd<4>;
    .shared .align 16 .b8 smem[4096];
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [turns];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd1, %rd1, %rd2;
    shl.b32 %r8, %r2, 2;
    mov.u32 %r9, smem;
    add.u32 %r8, %r8, %r9;
    cvt.rn.f32.u32 %f1, %r2;
    mov.u32 %r3, 0;
TOP:
    {body}
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, %r1;
    @%p1 bra TOP;
    st.global.u32 [%rd1], %r2;
    ret;
}}
"""
SCALAR = """
    fma.rn.f32 %f1, %f1, %f1, %f1;
    mul.lo.u32 %r4, %r2, 7;
    xor.b32 %r2, %r4, %r3;
    shl.b32 %r5, %r2, 3;
    add.f32 %f2, %f1, %f1;
    add.u32 %r2, %r2, %r5;
    lop3.b32 %r6, %r2, %r4, %r5, 0x96;
"""
MEMORY = """
    st.shared.u32 [%r8], %r2;
    ld.shared.u32 %r2, [%r8];
    ld.global.u32 %r4, [%rd1];
"""


PASSED_ON = """
    shl.b32 %r4, %r2, 2;
    mov.u32 %r9, smem;
    add.u32 %r8, %r9, %r4;
    st.shared.u32 [%r8], %r2;
    bar.sync 0;
    xor.b32 %r5, %r8, 128;
    ld.shared.u32 %r6, [%r5];
    bar.sync 0;
"""
PARTS = {"parse": (launches, "parse"), "lower": (launches, "Program"), "engine": (binding, "simulate"),
         "report": (launches, "Run")}


def seconds(call, repeats=5):
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def _wall(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def loop(body, checks, turns):
    out = torch.zeros(128, dtype=torch.int32)
    return launch(FRAME.format(body=body), grid=1, block=128, args=[out, turns], checks=checks)


def tile(check=False):
    a, b = torch.randn(2, 128, 64).bfloat16().unbind()
    d = torch.full((128, 128), float("nan"))
    maps = [TensorMap(x, box=(64, 128), swizzle=128) for x in (a, b)]
    run = launch(TILE.read_text(), grid=1, block=128, dynamic_shared=33024, args=[*maps, d])
    if check:
        error = (d.double() - a.double() @ b.double().T).abs().max().item()
        assert not run.findings and error < 1e-4, (run.findings, error)
    return run


def million_warps():
    """Run 31,250 CTAs of 32 warps that pass words on through shared memory."""
    ptx = FRAME.format(body=PASSED_ON).replace("st.global.u32 [%rd1], %r2;", "")
    assert not launch(ptx, grid=31_250, block=1024, args=[torch.zeros(1), 1]).findings


def parts(call, repeats=3):
    """Return the seconds of each of PARTS in a call that is captured: those of a program come once, of a run each time.

    Nothing of an earlier call is remembered, but for what the call keeps itself.
    """
    spent, best = collections.Counter(), {}

    def timed(part, function):
        def measured(*args, **how):
            began = time.process_time()
            try:
                return function(*args, **how)
            finally:
                spent[part] += time.process_time() - began

        return measured

    call()
    originals = {part: getattr(*place) for part, place in PARTS.items()}
    for part, (owner, name) in PARTS.items():
        setattr(owner, name, timed(part, originals[part]))
    try:
        for _ in range(repeats):
            spent.clear()
            launches.program.cache_clear()
            launches._module.cache_clear()
            call()
            best = {part: min(best.get(part, n), n) for part, n in spent.items()}
    finally:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, originals[part])
    return best


def main():
    torch.set_num_threads(1)
    print(f"{'':44}{'with history':>14}{'without':>14}")
    for name, body, turns in (("scalar arithmetic", SCALAR, 20_000), ("shared and global memory", MEMORY, 2_000)):
        rates = []
        for checks in (True, False):
            n = loop(body, checks, turns).counters["warp_instructions"]
            rates.append(n / seconds(lambda: loop(body, checks, turns)))  # noqa: B023
        print(f"{name + ', warp-instructions a second':44}" + "".join(f"{rate:>14,.0f}" for rate in rates))
    tile(check=True)
    print(f"{'128x128x64 tile through TMA and tcgen05':44}{1e3 * seconds(tile):>11.1f} ms")
    print(f"{'a million warps that use shared memory':44}{seconds(million_warps, 2):>12.1f} s")
    cache = application.current().variable("CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {cache: folder}):
        print(f"{'building the engine, once':44}{_wall(build.library):>12.1f} s")


if __name__ == "__main__":
    main()
