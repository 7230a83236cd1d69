"""Group 10, Blackwell's data-centre chips alone: tcgen05.mma by shape and place of A, commit to wake, loads and stores
of tensor memory by width.

Operands are ones in shared memory (128-byte swizzle, K-major) or, for A, in tensor memory; a step is k16 of bf16 or k8
of tf32. Thread 0 of the first CTA issues; D is read at the end, and every element is the number of products summed.
"""

from __future__ import annotations

from typing import NamedTuple

from . import frame
from .bench import Bench, Skip
from .issue import bits
from .mma import DEPTHS, ONES

TRIPS, ROW = 64, 128
COLUMNS = 512                                # all columns of tensor memory
A_COLUMN = 448                               # where A lies, if it lies in tensor memory
STEPS = 1, 2, 4, 8
WIDTHS = 1, 2, 4, 8, 16, 32, 64, 128
EACH = {"32x32b": 1, "16x256b": 4}           # registers of a thread for each repetition,
COLUMNS_OF = {"32x32b": 1, "16x256b": 8}     # and columns
SASS = {"ld": "LDTM", "st": "STTM"}


class Umma(NamedTuple):
    m: int
    n: int
    a: str = "SS"                            # SS, TS: A from tensor memory
    type: str = "bf16"
    group: int = 1                           # CTAs that multiply together

    @property
    def name(self) -> str:
        more = [self.type] * (self.type != "bf16") + ["of two CTAs"] * (self.group == 2)
        return " ".join([f"m{self.m} n{self.n} {self.a}", *more])

    @property
    def descriptor(self) -> int:
        """Return the instruction's descriptor: an f32 accumulator, types, sizes."""
        format_ = 1 if self.type == "bf16" else 2
        return 1 << 4 | format_ << 7 | format_ << 10 | self.n >> 3 << 17 | self.m >> 4 << 24

    def line(self, step: int) -> str:
        kind = "f16" if self.type == "bf16" else "tf32"
        offset = step % 4 * 32 >> 4
        a = f'"r"(tmem + {A_COLUMN + 8 * (step % 4)})' if self.a == "TS" else f'"l"(desc_a + {offset})'
        mma = f"tcgen05.mma.cta_group::{self.group}.kind::{kind} [%0], {'[%1]' if self.a == 'TS' else '%1'}, %2, %3, p;"
        ins = f'"r"(tmem), {a}, "l"(desc_b + {offset}), "r"({self.descriptor}u)'
        return frame.asm(f"{{ .reg .pred p; setp.ne.b32 p, 1, 0; {mma} }}", "", ins)


HELPERS = (frame.HERE / "tcgen05.cuh").read_text()


def allocation(group: int) -> tuple[str, str]:
    """Return the code before and behind everything; warp 0 takes all columns."""
    suffix = f"cta_group::{group}.sync.aligned"
    take = f"""__shared__ u32 taken; __shared__ __align__(8) u64 bars[1];
  u32 bar = address(bars), step = 0;
  if (WARP == 0) {{
    asm volatile("tcgen05.alloc.{suffix}.shared::cta.b32 [%0], {COLUMNS};" :: "r"(address(&taken)) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.{suffix};" ::: "memory");
  }}
  if (threadIdx.x == 0) {{ init(bar, 1); fence_init(); }}
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  {"cluster_sync();" if group == 2 else ""} sync_all();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  u32 tmem = taken, mine = tmem + (WARP << 21);"""
    give = f"""asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  {"cluster_sync();" if group == 2 else ""} sync_all();
  if (WARP == 0) asm volatile("tcgen05.dealloc.{suffix}.b32 %0, {COLUMNS};" :: "r"(tmem) : "memory");"""
    return take, give


def commit(group: int) -> str:
    text = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
    if group == 2:
        return frame.asm(f"{text}.multicast::cluster.b64 [%0], %1;", "", '"r"(bar), "h"((u16)3)')
    return frame.asm(f"{text}.b64 [%0];", "", '"r"(bar)')


def source_of(one: Umma, steps: int, waits: bool) -> str:
    take, give = allocation(one.group)
    a_bytes = 128 * ROW
    setup = f"""{take}
  for (u32 i = threadIdx.x; i < {shared_bytes(one) // 4}; i += blockDim.x) ((u32*)smem)[i] = {ONES[one.type]};
  fence_async();
  clear_columns(mine, 0, {one.n});
  {f"clear_columns(mine + {A_COLUMN}, {ONES[one.type]}, 32);" if one.a == "TS" else ""}
  const u64 rest = 0x4000404000010000ull;
  u64 desc_a = rest | (address(smem) >> 4), desc_b = rest | ((address(smem) + {a_bytes}) >> 4);
  bool leads = threadIdx.x == 0{" && cluster_rank() == 0" if one.group == 2 else ""};
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  {"cluster_sync();" if one.group == 2 else ""} sync_all();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");"""
    products = "\n".join(one.line(step) for step in range(steps))
    wait = "wait(bar, step++ & 1);"
    body = f"if (leads) {{\n{products}\n{commit(one.group) if waits else ''}\n }}\n {wait if waits else ''}"
    drain = "" if waits else f"if (leads) {{ {commit(one.group)} }}\n {wait}"
    finish = f"""asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  u32 found = first_column(mine);
  if (blockIdx.x == 0) out[threadIdx.x] = found;
  {give}"""
    return frame.loop(body, setup, finish, threads=128, outside=HELPERS, drain=drain)


def shared_bytes(one: Umma) -> int:
    return 128 * ROW + one.n * ROW


def product(bench: Bench, name: str, one: Umma, steps: int, waits: bool, per: int = 1) -> None:
    built = bench.build(source_of(one, steps, waits), {"UTCHMMA": steps})
    trips = bench.trips(TRIPS)
    clocks = bench.clocks(built, trips, grid=one.group, cluster=one.group, block=128, dynamic_shared=shared_bytes(one))
    ends, result = bits(float(DEPTHS[one.type] * steps * (trips + frame.WARM))), bench.results(1)[0]
    fault = bench.wrong(f"D is {result:#x}, not {ends:#x}", result == ends)
    bench.each(name, clocks, trips * per, built.fault, fault)


def products(bench: Bench) -> None:
    shapes = [Umma(m, n, a) for m in (64, 128) for n in (32, 64, 128, 256) for a in ("SS", "TS")]
    shapes += [Umma(m, n, type="tf32") for m in (64, 128) for n in (64, 128)]
    shapes += [Umma(m, n, group=2) for m in (128, 256) for n in (64, 128, 256)]
    for one in shapes:
        product(bench, f"{one.name}: a step, no waits", one, 8, False, per=8)
        for steps in STEPS if one.group == 1 and one.type == "bf16" and one.n < 256 else (4,):
            product(bench, f"{one.name}: {steps} steps, commit and wake", one, steps, True)


def commits(bench: Bench) -> None:
    """Time a commit that has nothing to wait for until one warp wakes, and until four warps do."""
    take, give = allocation(1)
    for warps in (1, 4):
        body = f"if (threadIdx.x == 0) {{ {commit(1)} }}\n wait(bar, step++ & 1);"
        built = bench.build(frame.loop(body, take, give, threads=128), {"UTCBAR": 1})
        trips = bench.trips(TRIPS)
        clocks = bench.clocks(built, trips, block=32 * warps)
        bench.each(f"commit of nothing to the wake of {warps} warps", clocks, trips, built.fault)
    fences = [frame.asm(f"tcgen05.fence::{when}_thread_sync;") for when in ("before", "after")]
    built = bench.build(frame.loop("\n".join(fences * 8), take, give, threads=128))
    clocks = bench.clocks(built, bench.trips(TRIPS), block=128)
    bench.each("both tcgen05 fences", clocks, 8 * bench.trips(TRIPS), built.fault)


def moved(kind: str, shape: str, width: int, turn: int) -> tuple[str, list[str]]:
    """Return a load or a store of so many columns, and the registers that it has."""
    names = [f"x{turn if kind == 'ld' else 0}_{n}" for n in range(width * EACH[shape])]
    regs = "{" + ", ".join(f"%{n}" for n in range(len(names))) + "}"
    address = f"mine + {turn * COLUMNS_OF[shape] * width}"
    text = f"tcgen05.{kind}.sync.aligned.{shape}.x{width}.b32"
    if kind == "ld":
        outs = ", ".join(f'"=r"({x})' for x in names)
        return f'asm volatile("{text} {regs}, [%{len(names)}];" : {outs} : "r"({address}) : "memory");', names
    ins = ", ".join(f'"r"({x})' for x in names)
    return f'asm volatile("{text} [%{len(names)}], {regs};" :: {ins}, "r"({address}) : "memory");', names


def move(bench: Bench, kind: str, shape: str, width: int, turns: int, *warps: int) -> None:
    """Time loads or stores of so many columns, so many of which are waited for at once, by so many warps each."""
    take, give = allocation(1)
    waiting = f'asm volatile("tcgen05.wait::{kind}.sync.aligned;" ::: "memory");'
    lines, registers = zip(*(moved(kind, shape, width, turn) for turn in range(turns)))
    names = list(dict.fromkeys(x for each in registers for x in each))
    use = f"all += {' + '.join(names)};" if kind == "ld" else ""
    words = ", ".join(f"{x} = threadIdx.x" for x in names)
    setup = f"{take}\n  u32 all = 0, {words};\n  clear_columns(mine, 1, {COLUMNS});"
    finish = f"out[threadIdx.x] = all;\n  {give}"
    text = frame.loop("\n".join([*lines, waiting, use]), setup, finish, threads=128, outside=HELPERS)
    built, trips = bench.build(text, {SASS[kind]: turns}), bench.trips(TRIPS)
    for count in warps:
        clocks = bench.clocks(built, trips, block=32 * count)
        ends, total = (trips + frame.WARM) * len(names), bench.results(1)[0]
        fault = bench.wrong(f"the sum is {total}, not {ends}", kind == "st" or total == ends)
        name = f"tcgen05.{kind} {shape}.x{width}, {turns} ahead of a wait, {count} warps"
        bench.each(name, clocks, trips * turns, built.fault, fault)


def moves(bench: Bench) -> None:
    """Loads and stores by one and by four warps: each waited for, and several waited for at once."""
    for kind in SASS:
        for shape, width in ((shape, width) for shape in EACH for width in WIDTHS if width * EACH[shape] <= 128):
            for turns in sorted({1, min(8, 128 // (width * EACH[shape]))}):
                move(bench, kind, shape, width, turns, 1, 4)


def measure(bench: Bench) -> None:
    if bench.target.cc[0] != 10:
        raise Skip("tcgen05 is of B200, B300 and their like alone (sm_100a, sm_103a)")
    products(bench)
    commits(bench)
    moves(bench)
