"""Group 3: shared memory, by width and by conflicts; that of a neighbour in the cluster; what a proxy fence costs.

A latency is a chase: every word holds its own address, so each load gives the address of the next. A rate has sixteen
warps read or write fixed places, every loaded word going into a sum that is checked.
"""

from __future__ import annotations

from typing import NamedTuple

from . import frame
from .bench import Bench

UNROLLED, TRIPS, WARPS, STEPS = 64, 32, 16, 512
ROUND = 512 * UNROLLED                       # bytes that a trip goes over: 512 an access
SHARED = ROUND + 32 * 144                  # with the widest stride
SM = "clocks of an SM"
HALVES = 0x10001                             # a word that is the same transposed
ANEW = "at ^= zero;"                         # so that no load is the same in every trip


class Access(NamedTuple):
    ptx: str                                 # %0 .. are words, the last is the address
    words: int
    sass: str
    stores: bool = False
    stride: int = 0                          # bytes from lane to lane; 0: as wide as the access
    lanes: str = ""                          # the place of a lane, where it is no multiple of the stride


def load(width: int, stride: int = 0, lanes: str = "", where: str = "shared") -> Access:
    words = width // 32
    vector = "" if words == 1 else f".v{words}"
    names = ", ".join(f"%{n}" for n in range(words))
    names = names if words == 1 else "{" + names + "}"
    spelled = {32: "", 64: ".64", 128: ".128"}[width]
    return Access(f"ld.volatile.{where}{vector}.b32 {names}, [%{words}];", words, f"LDS{spelled}", False, stride, lanes)


def store(width: int, stride: int = 0, where: str = "shared") -> Access:
    words = width // 32
    vector, names = ("", "%0") if words == 1 else (f".v{words}", "{" + ", ".join(f"%{n}" for n in range(words)) + "}")
    spelled = {32: "", 64: ".64", 128: ".128"}[width]
    return Access(f"st.{where}{vector}.b32 [%{words}], {names};", words, f"STS{spelled}", True, stride)


def matrices(count: int, stores: bool = False, trans: str = "") -> Access:
    names = "{" + ", ".join(f"%{n}" for n in range(count)) + "}"
    lanes = f"(LANE % {8 * count}) * 16"
    if stores:
        return Access(f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%{count}], {names};", count, "STSM", True, 0, lanes)
    return Access(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {names}, [%{count}];", count, "LDSM", False, 0, lanes)


RATES = {f"LDS.{width}": load(width) for width in (32, 64, 128)}
RATES |= {f"LDS.32, {ways} ways": load(32, 4 * ways) for ways in (2, 4, 8, 16, 32)}
RATES |= {"LDS.32, one word for all": load(32, 0, "0u"), "LDS.128, rows of 144 bytes": load(128, 144),
          "LDS.128, rows of 128 bytes": load(128, 128)}  # fmt: skip
RATES |= {f"STS.{width}": store(width) for width in (32, 64, 128)}
RATES |= {f"STS.32, {ways} ways": store(32, 4 * ways) for ways in (2, 8, 32)}
RATES |= {f"LDSM.x{n}": matrices(n) for n in (1, 2, 4)} | {"LDSM.x4.trans": matrices(4, trans=".trans")}
RATES |= {f"STSM.x{n}": matrices(n, True) for n in (1, 2, 4)} | {"STSM.x4.trans": matrices(4, True, ".trans")}
CHASED = {name: RATES[name] for name in ("LDS.32", "LDS.64", "LDS.128", "LDS.32, 2 ways", "LDS.32, 8 ways", "LDS.32, 32 ways",
                                         "LDSM.x1", "LDSM.x2", "LDSM.x4")}  # fmt: skip
FENCED = 0, 1, 4, 8                          # STS.128 ahead of a fence
FENCED_WARPS = 1, 4, 8


def place(access: Access) -> str:
    return access.lanes or f"LANE * {access.stride or 4 * access.words}"


def rate_source(access: Access) -> str:
    lines = []
    for n in range(UNROLLED):
        if access.stores:
            given = ", ".join(f'"r"(x{w})' for w in range(access.words))
            lines.append(f'      asm volatile("{access.ptx}" :: {given}, "r"(at + {512 * n}) : "memory");')
        else:
            given = ", ".join(f'"=r"(y{n}_{w})' for w in range(access.words))
            lines.append(f'      u32 {", ".join(f"y{n}_{w}" for w in range(access.words))};')
            lines.append(f'      asm volatile("{access.ptx}" : {given} : "r"(at + {512 * n}));')
            lines += [f"      all += y{n}_{w};" for w in range(access.words)]
    return frame.loop(
        "\n".join([ANEW, *lines]),
        setup=f"""for (u32 i = threadIdx.x; i < {SHARED // 4}; i += blockDim.x) ((u32*)smem)[i] = {HALVES};
  sync_all();
  u32 at = address(smem) + {place(access)}, all = 0{"".join(f", x{w} = {3 * HALVES} + zero" for w in range(4))};""",
        finish="sync_all(); u32 sum = ((u32*)smem)[threadIdx.x]; out[threadIdx.x] = all + sum;",
        params="u32 zero",
        threads=32 * WARPS,
    )


def chase_source(access: Access) -> str:
    """The first word of each access is the address of the next."""
    words = ", ".join(f'"=r"({"at" if w == 0 else f"more{w}"})' for w in range(access.words))
    lines = [f'      asm volatile("{access.ptx}" : {words} : "r"(at));' + "".join(f" all ^= more{w};" for w in range(1, access.words))
             for _ in range(UNROLLED)]  # fmt: skip
    return frame.loop(
        "\n".join(lines),
        setup=f"""u32 at = address(smem) + {place(access)}, all = 0, more1 = 0, more2 = 0, more3 = 0;
  for (u32 i = LANE; i < {SHARED // 4}; i += 32) ((u32*)smem)[i] = address(smem) + 4 * i;
  sync_all();
  {f"for (u32 w = 0; w < {access.words}; ++w) ((u32*)smem)[(at - address(smem)) / 4 + w] = at;" if not access.lanes else ""}
  {"for (u32 i = LANE; i < 128; i += 32) ((u32*)smem)[i] = address(smem) + 16 * (i / 4);" if access.lanes else ""}
  sync_all();""",
        finish="out[threadIdx.x] = at; out[32 + threadIdx.x] = all;",
        threads=32,
    )


def rates(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    for name, access in RATES.items():
        built = bench.build(rate_source(access), {access.sass: UNROLLED})
        clocks = bench.clocks(built, trips, 0, block=32 * WARPS, dynamic_shared=SHARED)
        found = bench.results(32)[0]
        loads = UNROLLED * access.words * (trips + frame.WARM)
        ends = 3 * HALVES if access.stores else (loads + 1) * HALVES & 0xFFFFFFFF
        fault = bench.wrong(f"the sum is {found}, not {ends}", found == ends)
        bench.figure(f"{name}: rate", [c / (trips * UNROLLED * WARPS) for c in clocks], SM, built.fault, fault)


def latencies(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    for name, access in CHASED.items():
        built = bench.build(chase_source(access), {access.sass: UNROLLED})
        clocks = bench.clocks(built, trips, block=32, dynamic_shared=SHARED)
        bench.figure(f"{name}: latency", [c / (trips * UNROLLED) for c in clocks], "clocks", built.fault)
    lines = '      asm volatile("st.volatile.shared.b32 [%1], %0; ld.volatile.shared.b32 %0, [%1];" : "+r"(x) : "r"(at));\n'
    both = frame.loop(lines * UNROLLED, "u32 at = address(smem) + 4 * LANE, x = LANE;", "out[threadIdx.x] = x;", threads=32)
    built = bench.build(both, {"STS": UNROLLED, "LDS": UNROLLED})
    clocks = bench.clocks(built, trips, block=32, dynamic_shared=128)
    fault = bench.wrong("the words changed", bench.results(32) == list(range(32)))
    bench.figure("STS.32 and LDS.32 of it: latency", [c / (trips * UNROLLED) for c in clocks], "clocks", built.fault, fault)
    lines = '      asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(x) : "r"(at), "r"(x & zero));\n'
    text = frame.loop(lines * UNROLLED, "u32 at = address(smem) + 4 * LANE, x = 0; ((u32*)smem)[LANE] = 0;",
                      "out[threadIdx.x] = x;", "u32 zero", threads=32)  # fmt: skip
    built = bench.build(text, {"ATOMS": UNROLLED})
    clocks = bench.clocks(built, trips, 0, block=32, dynamic_shared=128)
    bench.figure("atom.shared.add, after LOP3: latency", [c / (trips * UNROLLED) for c in clocks], "clocks", built.fault)


def fences(bench: Bench) -> None:
    """So many STS.128 of every lane, the fence, and where it says so a barrier of all warps."""
    trips = bench.trips(256)
    for count in FENCED:
        for barrier in (False, True):
            stores = "\n".join(
                f'      asm volatile("st.shared.v4.b32 [%0], {{%1, %1, %1, %1}};" :: "r"(at + {512 * n}), "r"(x) : "memory");'
                for n in range(count)
            )
            body = f"{ANEW}\n{stores}\n      fence_async();\n      {'sync_all();' if barrier else ''}"
            setup = "for (u32 i = threadIdx.x; i < 1024; i += blockDim.x) ((u32*)smem)[i] = 0; sync_all();\n  "
            setup += f"u32 at = address(smem) + WARP * {512 * max(count, 1)} + 16 * LANE, x = threadIdx.x;"
            text = frame.loop(body, setup, "sync_all(); out[threadIdx.x] = ((u32*)smem)[threadIdx.x];", "u32 zero")
            built = bench.build(text, {"STS.128": count, "FENCE": 1})
            for warps in FENCED_WARPS:
                shared = max(512 * count * warps, 4096)
                clocks = bench.clocks(built, trips, 0, block=32 * warps, dynamic_shared=shared)
                name = f"{count} STS.128, proxy fence{', barrier' if barrier else ''}, {warps} warps"
                bench.figure(name, [c / trips for c in clocks], "clocks", built.fault)


def neighbours(bench: Bench) -> None:
    """Shared memory of the other CTA of a pair, read and written by instructions."""
    trips = bench.trips(TRIPS)
    setup = """u32 own = address(smem) + 16 * threadIdx.x, at = remote(own, cluster_rank() ^ 1), there = remote(own, cluster_rank());
  for (u32 w = 0; w < 4; ++w) ((u32*)smem)[4 * threadIdx.x + w] = there;
  u32 all = 0; cluster_sync();"""
    finish = "cluster_sync(); out[threadIdx.x] = at; out[1024 + threadIdx.x] = all;"
    chase = '      asm volatile("ld.shared::cluster.b32 %0, [%0];" : "+r"(at));\n' * UNROLLED
    built = bench.build(frame.loop(chase, setup, finish, threads=32))
    clocks = bench.clocks(built, trips, grid=2, cluster=2, block=32, dynamic_shared=512)
    bench.figure("neighbour's LDS.32: latency", [c / (trips * UNROLLED) for c in clocks], "clocks", built.fault)
    names = ", ".join(f"y{w}" for w in range(4))
    for name, access in (("LDS.128", load(128, where="shared::cluster")), ("STS.128", store(128, where="shared::cluster"))):
        if access.stores:
            line = f'      asm volatile("{access.ptx}" :: {", ".join(4 * [chr(34) + "r" + chr(34) + "(x)"])}, "r"(at) : "memory");\n'
        else:
            line = f'      {{ u32 {names}; asm volatile("{access.ptx}" : {", ".join(f"{chr(34)}=r{chr(34)}(y{w})" for w in range(4))} : "r"(at)); all += y0 + y1 + y2 + y3; }}\n'
        text = frame.loop(ANEW + "\n" + line * UNROLLED, setup + " u32 x = zero;", finish, "u32 zero", threads=32 * WARPS)
        built = bench.build(text)
        for ctas in (2, 2 * (bench.sms // 2)):
            clocks = bench.clocks(built, trips, 0, grid=ctas, cluster=2, block=32 * WARPS, dynamic_shared=512 * WARPS)
            moved = 512 * WARPS * trips * UNROLLED
            where = "one pair" if ctas == 2 else "every pair"
            bench.figure(f"neighbour's {name}: rate, {where}", [moved / c for c in clocks], "bytes per clock and SM", built.fault)


def measure(bench: Bench) -> None:
    rates(bench)
    latencies(bench)
    fences(bench)
    neighbours(bench)
