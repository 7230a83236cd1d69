"""Group 5, Hopper alone: wgmma by columns, k steps, place of A; waits, groups in flight, and the LSU beside it.

Operands are ones in shared memory (128-byte swizzle, K-major unless said), so that every element of D is the number of
products summed; a wrong descriptor that stays in bounds shows in clocks alone. A step is k16 of bf16 or k8 of tf32.
All four warps of a warpgroup have to issue the same products: no loop here ends by the clock of a warp.
"""

from __future__ import annotations

from typing import NamedTuple

from . import frame, shared
from .bench import Bench, Built, Skip, disassembled, opcodes
from .issue import bits
from .mma import DEPTHS, ONES

GROUP = 128                                  # threads
BLOCK_A, ROW = 8192, 128                     # bytes of 64 rows, of a row: 64 columns of bf16
STEPS = 8                                    # the most there are operands for
TRIPS = 64
COLUMNS = 8, 16, 32, 64, 128, 256
ALONE = 1, 2, 3, 4, 6, 8                     # steps ahead of a wait
FLYING = 1, 2, 4, 8
BESIDE = 16                                  # steps of a trip while others load or store
OTHERS, REGION = 8, 16384                    # warps that do, and the bytes that they go over
ANY, COMMIT = frame.asm("wgmma.fence.sync.aligned;"), frame.asm("wgmma.commit_group.sync.aligned;")


class Wgmma(NamedTuple):
    n: int
    a: str = "SS"                            # SS, RS
    type: str = "bf16"
    transposed: bool = False                 # B with its columns contiguous
    same: bool = False                       # RS: every step has A in the same registers

    @property
    def name(self) -> str:
        more = [self.type] * (self.type != "bf16") + ["B transposed"] * self.transposed + ["one A"] * self.same
        return " ".join([f"n{self.n}", self.a, *more])

    @property
    def shared(self) -> int:
        """Return the bytes of A and B."""
        return 2 * BLOCK_A + max(2 * self.n * ROW, 16384)

    def line(self, d: str, step: int) -> str:
        """Return one wgmma on accumulators d[]; `desc_a` and `desc_b` are of step 0."""
        operand = self.n // 2
        regs = ", ".join(f"%{i}" for i in range(operand))
        if self.a == "RS":
            a = "{" + ", ".join(f"%{operand + i}" for i in range(4)) + "}"
            given = [f'"r"(a{i + (0 if self.same else 4 * (step % STEPS))})' for i in range(4)]
        else:
            a, given = f"%{operand}", [f'"l"(desc_a + {(step % 4 * 32 + step // 4 % 2 * BLOCK_A) >> 4})']
        operand += len(given)
        plain = step % 4 * 32 + step // 4 % 2 * self.n * ROW
        given.append(f'"l"(desc_b + {(step % STEPS * 2048 if self.transposed else plain) >> 4})')
        tail = [int(self.transposed)] if self.a == "RS" else [0, int(self.transposed)]
        scales = ", ".join(map(str, [1, 1, *(tail if self.type == "bf16" else [])]))
        name = f"wgmma.mma_async.sync.aligned.m64n{self.n}k{DEPTHS[self.type]}.f32.{self.type}.{self.type}"
        ptx = f"{{ .reg .pred p; setp.ne.b32 p, 1, 0; {name} {{{regs}}}, {a}, %{operand}, p, {scales}; }}"
        outs = frame.registers("+f", [f"{d}[{i}]" for i in range(self.n // 2)])
        return f'      asm volatile("{ptx}" : {outs} : {", ".join(given)});'


def waiting(left: int) -> str:
    return frame.asm(f"wgmma.wait_group.sync.aligned {left};")


def group(one: Wgmma, steps: int, d: str = "d") -> str:
    return "\n".join([ANY, *(one.line(d, step) for step in range(steps)), COMMIT])


def setup(one: Wgmma, accumulators: int = 1, fill: str = "") -> str:
    """Ones, or `fill`, in shared memory: A of all warpgroups first, B behind it."""
    stride = (16384 >> 4 << 16) if one.transposed else 1 << 16
    arrays = " ".join(f"float {'de'[i]}[{one.n // 2}];" for i in range(accumulators))
    clear = " ".join(f"{'de'[i]}[j] = 0.f;" for i in range(accumulators))
    in_registers = f"u32 {', '.join(f'a{i} = {ONES[one.type]} + out[4096 + threadIdx.x]' for i in range(4 * STEPS))};"
    word = fill or ONES[one.type]
    return f"""for (u32 i = threadIdx.x; i < {one.shared // 4}; i += blockDim.x) ((u32*)smem)[i] = {word};
  fence_async(); sync_all();
  const u64 rest = (1ull << 62) | (64ull << 32);
  u64 desc_a = rest | (1 << 16) | (address(smem) >> 4);
  u64 desc_b = rest | {stride} | ((address(smem) + {2 * BLOCK_A}) >> 4);
  {in_registers if one.a == "RS" else ""}
  {arrays}
  #pragma unroll
  for (int j = 0; j < {one.n // 2}; ++j) {{ {clear} }}"""


def finish(one: Wgmma, accumulators: int = 1) -> str:
    """Return what all elements of D have in common."""
    checks = " ".join(f"same = same && {'de'[i]}[j] == d[0];" for i in range(accumulators))
    return f"""bool same = true;
  #pragma unroll
  for (int j = 0; j < {one.n // 2}; ++j) {{ {checks} }}
  out[threadIdx.x] = same ? __float_as_uint(d[0]) : 0xdeadbeef;"""


def build(bench: Bench, text: str, sass: dict[str, int]) -> Built:
    """Build, and check that ptxas does not wait for each product by itself, as it does where it fears for registers."""
    built = bench.build(text, sass)
    counts, waits = opcodes(disassembled(built.kernel) or ""), text.count("wgmma.wait_group")
    waited = sum(n for name, n in counts.items() if name.startswith("WARPGROUP.DEPBAR"))
    if waited > waits:
        return built._replace(fault=f"{waited} waits in the machine code, not {waits}")
    return built


def timed(bench: Bench, name: str, one: Wgmma, body: str, steps: int, accumulators: int = 1, drain: str = "",
          groups: int = 1, per: int = 1) -> None:
    """`body` has `steps` steps of each accumulator; the figure is clocks of a trip over `per`."""
    block, trips = GROUP * groups, bench.trips(TRIPS)
    text = frame.loop(body, setup(one, accumulators), finish(one, accumulators), threads=block, drain=drain)
    built = build(bench, text, {"HGMMA": steps * accumulators})
    clocks = bench.clocks(built, trips, block=block, dynamic_shared=one.shared)
    ends, results = bits(float(DEPTHS[one.type] * steps * (trips + frame.WARM))), bench.results(block)
    fault = bench.wrong(f"D is {results[0]:#x}, not {ends:#x}", set(results) == {ends})
    bench.each(name, clocks, trips * per, built.fault, fault)


def alone(bench: Bench) -> None:
    plain = [(Wgmma(n, a), ALONE if n > 8 else (1, 4)) for a in ("SS", "RS") for n in COLUMNS]
    others = Wgmma(64, "RS", same=True), *(Wgmma(n, type="tf32") for n in (64, 128)), Wgmma(64, transposed=True)
    for one, counts in plain + [(one, (1, 4, 8)) for one in others]:
        for steps in counts:
            timed(bench, f"{one.name}: {steps} steps and a wait", one, group(one, steps) + waiting(0), steps)


def rates(bench: Bench) -> None:
    """Groups of four steps after each other, one wait behind all of them."""
    plain = [Wgmma(n, a) for a in ("SS", "RS") for n in COLUMNS]
    tf32 = [Wgmma(n, a, "tf32") for a in ("SS", "RS") for n in (64, 128)]
    for one in (*plain, *tf32, *(Wgmma(n, transposed=True) for n in (64, 128, 256))):
        for groups in (1, 2, 3) if one in plain and one.n < 256 else (1, 2) if one.n < 256 else (1,):
            many = f", {groups} warpgroups" if groups > 1 else ""
            name, per = f"{one.name}: a step, no waits{many}", 4 * groups
            timed(bench, name, one, group(one, 4), 4, drain=waiting(0), groups=groups, per=per)


def flying(bench: Bench) -> None:
    """Two groups of different accumulators, each waited for when the next is on its way."""
    for a in ("SS", "RS"):
        for n in (64, 128):
            for steps in FLYING:
                one = Wgmma(n, a)
                body = "\n".join([group(one, steps, "d"), waiting(1), group(one, steps, "e"), waiting(1)])
                timed(bench, f"{one.name}: {steps} steps, one group ahead", one, body, steps, 2, waiting(0), per=2)
    for n in (64, 128):
        one = Wgmma(n)
        for groups in (2, 3):
            name = f"{one.name}: 4 steps and a wait, {groups} warpgroups"
            timed(bench, name, one, group(one, 4) + waiting(0), 4, groups=groups)


def handed(bench: Bench) -> None:
    """A's 64 columns written by the warpgroup, to two places in turn, then a product of four steps with them."""
    one, trips = Wgmma(64), bench.trips(TRIPS)
    stores = shared.accesses(shared.store(128), 4, 2048)
    turn = f"u32 at = place + (i & 1) * {BLOCK_A}; desc_a = begin + (i & 1) * {BLOCK_A >> 4};"
    fence, barrier, product = "fence_async();", frame.asm("bar.sync 1, 128;"), group(one, 4) + waiting(0)
    begins = setup(one) + f" u32 place = address(smem) + 16 * threadIdx.x, x = {ONES[one.type]}; u64 begin = desc_a;"
    for name, parts in (("product", [product]), ("barrier, product", [barrier, product]),
                        ("fence, barrier, product", [fence, barrier, product]),
                        ("4 STS.128, fence, barrier, product", [stores, fence, barrier, product])):
        text = frame.loop("\n".join([turn, *parts]), begins, finish(one), threads=GROUP)
        built = build(bench, text, {"HGMMA": 4})
        clocks = bench.clocks(built, trips, block=GROUP, dynamic_shared=one.shared)
        bench.each(f"n64 SS: {name}", clocks, trips, built.fault)


def beside_source(one: Wgmma, access: shared.Access | None) -> str:
    """The first warpgroup multiplies `n` times; the others load or store until it is done. (trips, clocks) of each."""
    unit = shared.accesses(access, REGION // 512, 512) if access else frame.asm("nanosleep.u32 100;")
    body = f"""
  {setup(one)}
  __shared__ volatile u32 done;
  u32 at = address(smem) + {one.shared} + {access.place if access else "0"}, x = 0, all = 0, trips = 0;
  for (u32 i = threadIdx.x; i < {REGION // 4}; i += blockDim.x) ((u32*)(smem + {one.shared}))[i] = 0;
  if (threadIdx.x == 0) done = 0;
  sync_all();
  u64 start = now();
  if (WARP < 4) {{
    #pragma unroll 1
    for (; trips < n; ++trips) {{
{group(one, BESIDE)}
{waiting(0)}
    }}
    if (threadIdx.x == 0) done = 1;
  }} else {{
    #pragma unroll 1
    for (; !done; ++trips) {{
      {shared.ANEW}
{unit}
    }}
  }}
  note(spans, trips, now() - start);
  {finish(one)}
  out[1024 + threadIdx.x] = x + all;
"""
    return frame.kernel(body, "u32 n, u32 zero", threads=GROUP + 32 * OTHERS)


def beside(bench: Bench) -> None:
    names, trips = ("LDS.32", "LDS.128", "STS.128", "LDSM.x4", "STSM.x4"), bench.trips(200, 3)
    for one in (Wgmma(64), Wgmma(256), Wgmma(64, "RS"), Wgmma(128, "RS")):
        for name, access in ({"nothing": None} | {name: shared.RATES[name] for name in names}).items():
            sass = {access.sass: REGION // 512} if access else {}
            built = build(bench, beside_source(one, access), {"HGMMA": BESIDE} | sass)
            shape = dict(block=GROUP + 32 * OTHERS, dynamic_shared=one.shared + REGION)
            runs = [s[0].double() for s in bench.spans(built, trips, 0, **shape)]
            took = [s[:4, 1].max().item() for s in runs]
            bench.each(f"{one.name}: a step beside {name}", took, BESIDE * trips, built.fault)
            if access:
                each = [(s[4:, 1].mean() / (REGION // 512 * s[4:, 0]).sum().clamp(min=1)).item() for s in runs]
                bench.figure(f"{name} beside {one.name}", each, shared.SM, built.fault)


def measure(bench: Bench) -> None:
    if not bench.hopper:
        raise Skip("wgmma is of Hopper alone; the group tcgen05 measures what took its place")
    alone(bench)
    rates(bench)
    flying(bench)
    handed(bench)
    beside(bench)
