"""Group 3: shared memory, by width and by conflicts; that of a neighbour in the cluster; what a proxy fence costs.

A latency is a chase: every word holds its own address, so each load gives the address of the next. A rate has sixteen
warps read or write fixed places, every loaded word going into a sum that is checked.
"""

from __future__ import annotations

from typing import NamedTuple

from . import frame
from .bench import Bench

UNROLLED, TRIPS, WARPS = 64, 32, 16
ROUND = 512 * UNROLLED                       # bytes that a trip goes over: 512 an access
SHARED = ROUND + 32 * 144                    # with the widest stride
SM = "clocks of an SM"
HALVES = 0x10001                             # a word that is the same transposed
ANEW = "at ^= zero;"                         # no access is the same in every trip, for all that a compiler knows


class Access(NamedTuple):
    ptx: str                                 # %0 .. are words, the last is the address
    words: int
    sass: str
    stores: bool = False
    stride: int = 0                          # bytes from lane to lane; 0: as wide as the access
    lanes: str = ""                          # the place of a lane, where it is no multiple of the stride

    @property
    def place(self) -> str:
        return self.lanes or f"LANE * {self.stride or 4 * self.words}"

    def line(self, names: list[str], address: str) -> str:
        ins = frame.registers("r", [*names, address] if self.stores else [address])
        return frame.asm(self.ptx, "" if self.stores else frame.registers("=r", names), ins)


def vector(words: int) -> tuple[str, str]:
    names = ", ".join(f"%{n}" for n in range(words))
    return ("", names) if words == 1 else (f".v{words}", "{" + names + "}")


def load(width: int, stride: int = 0, lanes: str = "", where: str = "shared") -> Access:
    words, opcode = width // 32, "LDS" if where == "shared" else "LD"
    suffix, names = vector(words)
    sass = opcode if width == 32 or opcode == "LD" else f"{opcode}.{width}"
    how = "volatile." if where == "shared" else ""                           # which is .sys for a neighbour's
    return Access(f"ld.{how}{where}{suffix}.b32 {names}, [%{words}];", words, sass, False, stride, lanes)


def store(width: int, stride: int = 0, where: str = "shared") -> Access:
    words, opcode = width // 32, "STS" if where == "shared" else "ST"
    suffix, names = vector(words)
    sass = opcode if width == 32 or opcode == "ST" else f"{opcode}.{width}"
    return Access(f"st.{where}{suffix}.b32 [%{words}], {names};", words, sass, True, stride)


def matrices(count: int, stores: bool = False, trans: str = "") -> Access:
    names, lanes = "{" + ", ".join(f"%{n}" for n in range(count)) + "}", f"(LANE % {8 * count}) * 16"
    shape = f"sync.aligned.m8n8.x{count}{trans}.shared.b16"
    if stores:
        return Access(f"stmatrix.{shape} [%{count}], {names};", count, "STSM", True, 0, lanes)
    return Access(f"ldmatrix.{shape} {names}, [%{count}];", count, "LDSM", False, 0, lanes)


RATES = {f"LDS.{width}": load(width) for width in (32, 64, 128)}
RATES |= {f"LDS.32, {ways} ways": load(32, 4 * ways) for ways in (2, 4, 8, 16, 32)}
RATES |= {"LDS.32, one word for all": load(32, 0, "0u"), "LDS.128, rows of 144 bytes": load(128, 144),
          "LDS.128, rows of 128 bytes": load(128, 128)}
RATES |= {f"STS.{width}": store(width) for width in (32, 64, 128)}
RATES |= {f"STS.32, {ways} ways": store(32, 4 * ways) for ways in (2, 8, 32)}
RATES |= {f"LDSM.x{n}": matrices(n) for n in (1, 2, 4)} | {"LDSM.x4.trans": matrices(4, trans=".trans")}
RATES |= {f"STSM.x{n}": matrices(n, True) for n in (1, 2, 4)} | {"STSM.x4.trans": matrices(4, True, ".trans")}
CHASED = ("LDS.32", "LDS.64", "LDS.128", "LDS.32, 2 ways", "LDS.32, 8 ways", "LDS.32, 32 ways", "LDSM.x1", "LDSM.x2",
          "LDSM.x4")
FENCED = 0, 1, 4, 8                          # STS.128 ahead of a fence
FENCED_WARPS = 1, 4, 8


def accesses(access: Access, count: int, step: int) -> str:
    """`count` of them from `at`, `step` bytes apart; what is loaded goes into `all`, what is stored is `x`."""
    lines = []
    for n in range(count):
        names = ["x"] * access.words if access.stores else [f"y{n}_{w}" for w in range(access.words)]
        if not access.stores:
            lines.append(f"      u32 {', '.join(names)};")
        lines.append(access.line(names, f"at + {step * n}"))
        if not access.stores:
            lines.append(f"      all += {' + '.join(names)};")
    return "\n".join(lines)


def rate_source(access: Access) -> str:
    return frame.loop(
        f"      {ANEW}\n{accesses(access, UNROLLED, 512)}",
        setup=f"""for (u32 i = threadIdx.x; i < {SHARED // 4}; i += blockDim.x) ((u32*)smem)[i] = {HALVES};
  sync_all();
  u32 at = address(smem) + {access.place}, all = 0, x = {3 * HALVES} + zero;""",
        finish="sync_all(); out[threadIdx.x] = all + ((u32*)smem)[threadIdx.x];",
        params="u32 zero",
        threads=32 * WARPS,
    )


def rates(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    for name, access in RATES.items():
        built = bench.build(rate_source(access), {access.sass: UNROLLED})
        clocks = bench.clocks(built, trips, 0, block=32 * WARPS, dynamic_shared=SHARED)
        loads = UNROLLED * access.words * (trips + frame.WARM)
        total, ends = bench.results(1)[0], 3 * HALVES if access.stores else (loads + 1) * HALVES & 0xFFFFFFFF
        fault = bench.wrong(f"the sum is {total}, not {ends}", total == ends)
        bench.each(f"{name}: rate", clocks, trips * UNROLLED * WARPS, built.fault, fault, unit=SM)


def chase_source(access: Access) -> str:
    """The first word of each access is the address of the next."""
    names = ["at", "more1", "more2", "more3"][: access.words]
    use = "".join(f" all ^= {name};" for name in names[1:])
    each_word = f"for (u32 w = 0; w < {access.words}; ++w) ((u32*)smem)[(at - address(smem)) / 4 + w] = at;"
    rows = "for (u32 i = LANE; i < 128; i += 32) ((u32*)smem)[i] = address(smem) + 16 * (i / 4);"
    return frame.loop(
        "\n".join([access.line(names, "at") + use] * UNROLLED),
        setup=f"""u32 at = address(smem) + {access.place}, all = 0, more1 = 0, more2 = 0, more3 = 0;
  for (u32 i = LANE; i < {SHARED // 4}; i += 32) ((u32*)smem)[i] = address(smem) + 4 * i;
  sync_all();
  {rows if access.lanes else each_word}
  sync_all();""",
        finish="out[threadIdx.x] = at; out[32 + threadIdx.x] = all;",
        threads=32,
    )


def latencies(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    for name in CHASED:
        built = bench.build(chase_source(RATES[name]), {RATES[name].sass: UNROLLED})
        clocks = bench.clocks(built, trips, block=32, dynamic_shared=SHARED)
        bench.each(f"{name}: latency", clocks, trips * UNROLLED, built.fault)
    both = frame.asm("st.volatile.shared.b32 [%1], %0; ld.volatile.shared.b32 %0, [%1];", '"+r"(x)', '"r"(at)')
    setup = "u32 at = address(smem) + 4 * LANE, x = LANE;"
    text = frame.loop("\n".join([both] * UNROLLED), setup, "out[threadIdx.x] = x;", threads=32)
    built = bench.build(text, {"STS": UNROLLED, "LDS": UNROLLED})
    clocks = bench.clocks(built, trips, block=32, dynamic_shared=128)
    fault = bench.wrong("the words changed", bench.results(32) == list(range(32)))
    bench.each("STS.32 and LDS.32 of it: latency", clocks, trips * UNROLLED, built.fault, fault)
    add = frame.asm("atom.shared.add.u32 %0, [%1], %2;", '"=r"(x)', '"r"(at), "r"(x & zero)')
    setup = "u32 at = address(smem) + 4 * LANE, x = 0; ((u32*)smem)[LANE] = 0;"
    text = frame.loop("\n".join([add] * UNROLLED), setup, "out[threadIdx.x] = x;", "u32 zero", threads=32)
    built = bench.build(text, {"ATOMS": UNROLLED})
    clocks = bench.clocks(built, trips, 0, block=32, dynamic_shared=128)
    bench.each("atom.shared.add, after LOP3: latency", clocks, trips * UNROLLED, built.fault)


def fences(bench: Bench) -> None:
    """Time `count` STS.128 by every lane, then the fence, then, if the name says so, a barrier of all warps."""
    trips = bench.trips(256)
    for count in FENCED:
        for barrier in (False, True):
            end = "fence_async(); sync_all();" if barrier else "fence_async();"
            body = f"      {ANEW}\n{accesses(store(128), count, 512)}\n      {end}"
            setup = f"""for (u32 i = threadIdx.x; i < 1024; i += blockDim.x) ((u32*)smem)[i] = 0;
  sync_all();
  u32 at = address(smem) + WARP * {512 * max(count, 1)} + 16 * LANE, x = threadIdx.x;"""
            finish = "sync_all(); out[threadIdx.x] = ((u32*)smem)[threadIdx.x];"
            built = bench.build(frame.loop(body, setup, finish, "u32 zero"), {"STS.128": count, "FENCE": 1})
            for warps in FENCED_WARPS:
                clocks = bench.clocks(built, trips, 0, block=32 * warps, dynamic_shared=max(512 * count * warps, 4096))
                name = f"{count} STS.128, proxy fence{', barrier' if barrier else ''}, {warps} warps"
                bench.each(name, clocks, trips, built.fault)


def neighbours(bench: Bench) -> None:
    """Shared memory of the other CTA of a pair, read and written by instructions."""
    trips, several = bench.trips(TRIPS), 16
    setup = """u32 own = address(smem) + 16 * threadIdx.x, there = remote(own, cluster_rank());
  u32 at = remote(own, cluster_rank() ^ 1), all = 0, x = 3;
  for (u32 i = 4 * threadIdx.x; i < shared / 4; i += 4 * blockDim.x)
    for (u32 w = 0; w < 4; ++w) ((u32*)smem)[i + w] = there;
  cluster_sync();"""
    finish = """cluster_sync();
  if (blockIdx.x == 0) { out[threadIdx.x] = all + ((u32*)smem)[4 * threadIdx.x]; out[1024 + threadIdx.x] = at; }"""
    chase = "\n".join([frame.asm("ld.shared::cluster.b32 %0, [%0];", '"+r"(at)')] * UNROLLED)
    built = bench.build(frame.loop(chase, setup, finish, "u32 zero, u32 shared", threads=32), {"LD": UNROLLED})
    clocks = bench.clocks(built, trips, 0, 512, grid=2, cluster=2, block=32, dynamic_shared=512)
    bench.each("neighbour's LDS.32: latency", clocks, trips * UNROLLED, built.fault)
    step = 512 * WARPS
    for kind, operation in (("LDS.128", load), ("STS.128", store)):
        access = operation(128, where="shared::cluster")
        body = f"      {ANEW}\n{accesses(access, several, step)}"
        text = frame.loop(body, setup, finish, "u32 zero, u32 shared", threads=32 * WARPS, drain="cluster_sync();")
        built = bench.build(text, {access.sass: several})
        for where, pairs in (("one pair", 1), ("every pair", bench.sms // 2)):
            shape = dict(grid=2 * pairs, cluster=2, block=32 * WARPS, dynamic_shared=several * step)
            clocks = bench.clocks(built, trips, 0, several * step, **shape)
            stored = not access.stores or set(bench.results(32 * WARPS)) == {3}
            fault = bench.wrong("the neighbour's words did not arrive", stored)
            bench.rate(f"neighbour's {kind}: rate, {where}", step * trips * several, clocks, built.fault, fault)


def measure(bench: Bench) -> None:
    rates(bench)
    latencies(bench)
    fences(bench)
    if bench.target.cc >= (9, 0):
        neighbours(bench)
