"""Group 5, Hopper alone: wgmma by columns, k steps, place of A; waits, groups in flight, and the LSU beside it.

Operands are ones in shared memory (128-byte swizzle, K-major unless said), so that every element of D is the number of
products summed; a wrong descriptor that stays in bounds shows in clocks alone. A step is k16 of bf16 or k8 of tf32.
"""

from __future__ import annotations

from typing import NamedTuple

from . import frame, shared
from .bench import Bench, Built, Skip, opcodes

GROUP = 128                                  # threads
BLOCK_A, ROW = 8192, 128                     # bytes of 64 rows, of a row: 64 columns of bf16
STEPS = 8                                    # the most there are operands for
TRIPS = 64
COLUMNS = 8, 16, 32, 64, 128, 256
ALONE = 1, 2, 3, 4, 6, 8                     # steps ahead of a wait
FLYING = 1, 2, 4, 8
BESIDE = 16                                  # steps of a trip while others load or store
WAIT = "wgmma.wait_group.sync.aligned {};"


class Product(NamedTuple):
    n: int
    a: str = "SS"                            # SS, RS
    type: str = "bf16"
    transposed: bool = False                 # B with its columns contiguous

    @property
    def name(self) -> str:
        return f"n{self.n} {self.a}" + (f" {self.type}" * (self.type != "bf16")) + (" B transposed" * self.transposed)

    @property
    def depth(self) -> int:
        return 16 if self.type == "bf16" else 8

    def line(self, d: str, step: int) -> str:
        """One wgmma on accumulators d[]; `desc_a` and `desc_b` are of step 0."""
        regs = ", ".join(f"%{i}" for i in range(self.n // 2))
        at = self.n // 2
        a, given = f"%{at}", [f'"l"(desc_a + {(step % 4 * 32 + step // 4 % 2 * BLOCK_A) >> 4})']
        if self.a == "RS":
            a, given = "{" + ", ".join(f"%{at + i}" for i in range(4)) + "}", [f'"r"(a{i})' for i in range(4)]
        at += len(given)
        b = step % STEPS * 2048 if self.transposed else step % 4 * 32 + step // 4 % 2 * self.n * ROW
        given.append(f'"l"(desc_b + {b >> 4})')
        tail = "" if self.type != "bf16" else f", {int(self.transposed)}" if self.a == "RS" else f", 0, {int(self.transposed)}"
        name = f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.depth}.f32.{self.type}.{self.type}"
        outs = ", ".join(f'"+f"({d}[{i}])' for i in range(self.n // 2))
        return (f'      asm volatile("{{ .reg .pred p; setp.ne.b32 p, 1, 0; {name} {{{regs}}}, {a}, %{at}, p, 1, 1{tail}; }}" '
                f': {outs} : {", ".join(given)});')  # fmt: skip


ANY = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'


def waiting(left: int) -> str:
    return f'asm volatile("{WAIT.format(left)}" ::: "memory");'


def group(one: Product, steps: int, d: str = "d") -> str:
    return "\n".join([ANY, *(one.line(d, step) for step in range(steps)), COMMIT])


def setup(one: Product, accumulators: int = 1) -> str:
    """Ones in shared memory: A of all warpgroups first, B behind it."""
    word = "0x3F803F80" if one.type == "bf16" else "0x3F800000"
    b_offset = 2 * BLOCK_A
    stride = (16384 >> 4 << 16) if one.transposed else 1 << 16
    arrays = " ".join(f"float {'de'[i]}[{one.n // 2}];" for i in range(accumulators))
    clear = " ".join(f"{'de'[i]}[j] = 0.f;" for i in range(accumulators))
    return f"""for (u32 i = threadIdx.x; i < {shared_bytes(one) // 4}; i += blockDim.x) ((u32*)smem)[i] = {word};
  fence_async(); sync_all();
  const u64 rest = (1ull << 62) | (64ull << 32);
  u64 desc_a = rest | (1 << 16) | (address(smem) >> 4), desc_b = rest | {stride} | ((address(smem) + {b_offset}) >> 4);
  u32 a0 = {word} + out[4096 + threadIdx.x], a1 = a0, a2 = a0, a3 = a0;
  {arrays}
  #pragma unroll
  for (int j = 0; j < {one.n // 2}; ++j) {{ {clear} }}"""


def shared_bytes(one: Product) -> int:
    return 2 * BLOCK_A + max(2 * one.n * ROW, 16384)


def finish(one: Product, accumulators: int = 1) -> str:
    """What all elements of D have in common."""
    checks = " ".join(f"same = same && {'de'[i]}[j] == d[0];" for i in range(accumulators))
    return f"""bool same = true;
  #pragma unroll
  for (int j = 0; j < {one.n // 2}; ++j) {{ {checks} }}
  out[threadIdx.x] = same ? __float_as_uint(d[0]) : 0xdeadbeef;"""


def build(bench: Bench, text: str, sass: dict[str, int]) -> Built:
    """Also that ptxas does not wait for each product by itself, as it does where it fears for registers."""
    built = bench.build(text, sass)
    found, waits = opcodes(built.kernel), text.count("wgmma.wait_group")
    waited = sum(n for name, n in (found or {}).items() if name.startswith("WARPGROUP.DEPBAR"))
    return built._replace(fault=built.fault or f"{waited} waits in the machine code, not {waits}") if waited > waits else built


def timed(bench: Bench, name: str, one: Product, body: str, steps: int, accumulators: int = 1, drain: str = "",
          groups: int = 1, per: int = 1, threads: int = 0) -> None:  # fmt: skip
    """`body` has `steps` steps of each accumulator; the figure is clocks of a trip over `per`."""
    from .issue import bits

    block = GROUP * groups
    text = frame.loop(body, setup(one, accumulators), finish(one, accumulators), threads=threads or block, drain=drain)
    built = build(bench, text, {"HGMMA": steps * accumulators})
    trips = bench.trips(TRIPS)
    clocks = bench.clocks(built, trips, block=block, dynamic_shared=shared_bytes(one))
    ends, found = bits(float(one.depth * steps * (trips + frame.WARM))), bench.results(block)
    fault = bench.wrong(f"D is {found[0]:#x}, not {ends:#x}", set(found) == {ends})
    bench.figure(name, [c / (trips * per) for c in clocks], "clocks", built.fault, fault)


def alone(bench: Bench) -> None:
    for a in ("SS", "RS"):
        for n in COLUMNS:
            for steps in ALONE if n > 8 else (1, 4):
                one = Product(n, a)
                timed(bench, f"{one.name}: {steps} steps and a wait", one, group(one, steps) + waiting(0), steps)
    for one in (Product(64, type="tf32"), Product(128, type="tf32"), Product(64, transposed=True)):
        for steps in (1, 4, 8):
            timed(bench, f"{one.name}: {steps} steps and a wait", one, group(one, steps) + waiting(0), steps)


def rates(bench: Bench) -> None:
    """Groups of four steps after each other, one wait behind all of them."""
    plain = [Product(n, a) for a in ("SS", "RS") for n in COLUMNS]
    tf32 = [Product(n, a, "tf32") for a in ("SS", "RS") for n in (64, 128)]
    for one in (*plain, *tf32, *(Product(n, transposed=True) for n in (64, 128, 256))):
        for groups in (1, 2, 3) if one in plain and one.n < 256 else (1, 2) if one.n < 256 else (1,):
            many = f", {groups} warpgroups" if groups > 1 else ""
            timed(bench, f"{one.name}: a step, no waits{many}", one, group(one, 4), 4, drain=waiting(0), groups=groups,
                  per=4 * groups)  # fmt: skip


def flying(bench: Bench) -> None:
    """Two groups of different accumulators, each waited for when the next is on its way."""
    for a in ("SS", "RS"):
        for n in (64, 128):
            for steps in FLYING:
                one = Product(n, a)
                body = "\n".join([group(one, steps, "d"), waiting(1), group(one, steps, "e"), waiting(1)])
                timed(bench, f"{one.name}: {steps} steps, one group ahead", one, body, steps, 2, waiting(0), per=2)
    for n in (64, 128):
        one = Product(n)
        for groups in (2, 3):
            timed(bench, f"{one.name}: 4 steps and a wait, {groups} warpgroups", one, group(one, 4) + waiting(0), 4, groups=groups)


def handed(bench: Bench) -> None:
    """A's 64 columns written by the warpgroup, to two places in turn, then a product of four steps with them."""
    one = Product(64)
    stores = "\n".join(
        f'      asm volatile("st.shared.v4.b32 [%0], {{%1, %1, %1, %1}};" :: "r"(at + {2048 * n}), "r"(a0) : "memory");'
        for n in range(4)
    )
    turn = f"u32 at = place + (i & 1) * {BLOCK_A}; desc_a = begin + (i & 1) * {BLOCK_A >> 4};"
    fence, barrier = "fence_async();", 'asm volatile("bar.sync 1, 128;" ::: "memory");'
    product = group(one, 4) + waiting(0)
    for name, parts in (("product", [product]), ("barrier, product", [barrier, product]),
                        ("fence, barrier, product", [fence, barrier, product]),
                        ("4 STS.128, fence, barrier, product", [stores, fence, barrier, product])):  # fmt: skip
        begins = setup(one) + " u32 place = address(smem) + 16 * threadIdx.x; u64 begin = desc_a;"
        text = frame.loop("\n".join([turn, *parts]), begins, finish(one), threads=GROUP)
        built, trips = build(bench, text, {"HGMMA": 4}), bench.trips(TRIPS)
        clocks = bench.clocks(built, trips, block=GROUP, dynamic_shared=shared_bytes(one))
        bench.figure(f"n64 SS: {name}", [c / trips for c in clocks], "clocks", built.fault)


def beside_source(one: Product, access: shared.Access | None) -> str:
    """For `window` clocks, the first warpgroup multiplies and the others load or store; (trips, clocks) of each warp."""
    lines = []
    for n in range(32 if access else 0):
        names = [f"y{w}" for w in range(access.words)]
        if access.stores:
            given = ", ".join('"r"(x)' for _ in names)
            lines.append(f'asm volatile("{access.ptx}" :: {given}, "r"(at + {512 * n}) : "memory");')
        else:
            given = ", ".join(f'"=r"({y})' for y in names)
            lines.append(f'{{ u32 {", ".join(names)}; asm volatile("{access.ptx}" : {given} : "r"(at + {512 * n})); '
                         f'x += {" + ".join(names)}; }}')  # fmt: skip
    unit = "\n".join(lines) or 'asm volatile("nanosleep.u32 100;");'
    body = f"""
  {setup(one)}
  u32 at = address(smem) + {shared_bytes(one)} + {shared.place(access) if access else "0"}, x = 0, trips = 0;
  for (u32 i = threadIdx.x; i < 4096; i += blockDim.x) ((u32*)(smem + {shared_bytes(one)}))[i] = 0;
  sync_all();
  u64 start = now(), end = start;
  if (WARP < 4) {{
    #pragma unroll 1
    for (; end - start < window; ++trips, end = now()) {{
{group(one, BESIDE)}
{waiting(0)}
    }}
  }} else {{
    #pragma unroll 1
    for (; end - start < window; ++trips, end = now()) {{
      at ^= zero;
{unit}
    }}
  }}
  note(spans, trips, end - start);
  {finish(one)}
  out[1024 + threadIdx.x] = x;
"""
    return frame.kernel(body, "u64 window, u32 zero", threads=384)


def beside(bench: Bench) -> None:
    window = bench.trips(60000, 400)
    accesses = {"nothing": None} | {name: shared.RATES[name] for name in ("LDS.32", "LDS.128", "STS.128", "LDSM.x4", "STSM.x4")}
    for one in (Product(64), Product(256), Product(64, "RS"), Product(128, "RS")):
        for name, access in accesses.items():
            built = build(bench, beside_source(one, access), {"HGMMA": BESIDE} | ({access.sass: 32} if access else {}))
            runs = bench.spans(built, window, 0, block=384, dynamic_shared=shared_bytes(one) + 16384)
            steps = [s[0, 0, 1].item() / max(BESIDE * s[0, 0, 0].item(), 1) for s in runs]
            bench.figure(f"{one.name}: a step beside {name}", steps, "clocks", built.fault)
            if access:
                each = [(s[0, 4:, 1].double().mean() / (32 * s[0, 4:, 0].double()).sum().clamp(min=1)).item() for s in runs]
                bench.figure(f"{name} beside {one.name}", each, "clocks of an SM", built.fault)


def measure(bench: Bench) -> None:
    if not bench.hopper:
        raise Skip("wgmma is of Hopper alone; the group tcgen05 measures what took its place")
    alone(bench)
    rates(bench)
    flying(bench)
    handed(bench)
    beside(bench)
