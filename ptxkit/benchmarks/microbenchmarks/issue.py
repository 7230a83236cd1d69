"""Group 2: what instructions cost a scheduler, how long their results take, and which units they share.

A chain is one warp whose every instruction needs the one before: its clocks are the latency. A rate has several
independent chains in every warp, and is given as the clocks of a scheduler that one warp instruction takes, which is
what the clock counts: 1 is a full-rate instruction, 2 one of a unit of 16 lanes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from . import frame
from .bench import Bench

UNROLLED, TRIPS = 256, 16
CHAINS = 4                                   # independent ones of a warp, where a rate is asked for
SCHEDULERS = 4
WARPS = 1, 4                                 # per scheduler, where a rate is measured
RATE = "clocks of a scheduler"


def bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


ONE = bits(1.0)
BF16_ONES = 0x3F803F80


class Link(NamedTuple):
    """One instruction; %0 is its chain, %1 and %2 are operands."""

    ptx: str
    sass: str                                # the opcode, or several with spaces between
    x: int = 0                               # what the chain begins with
    b: int = 0
    c: int = 0
    ends: str = ""                           # with what it ends after N of them, in Python; "" where that is not said
    wide: bool = False                       # whether its chain is a pair of registers


OPS = {
    "fma.f32": Link("fma.rn.f32 %0, %0, %1, %2;", "FFMA", 0, ONE, ONE, "bits(N)"),
    "add.f32": Link("add.rn.f32 %0, %0, %1;", "FADD", 0, ONE, 0, "bits(N)"),
    "mul.f32": Link("mul.rn.f32 %0, %0, %1;", "FMUL", ONE, ONE + 1, 0, "ONE + N"),
    "max.f32, min.f32": Link("max.f32 %0, %1, %0; min.f32 %0, %2, %0;", "FMNMX FMNMX", 0, ONE, bits(2.0), "ONE"),
    "fma.bf16x2": Link("fma.rn.bf16x2 %0, %0, %1, %2;", "HFMA2", 0, BF16_ONES, 0, "0"),
    "mul.bf16x2": Link("mul.rn.bf16x2 %0, %0, %1;", "HMUL2|HFMA2", BF16_ONES, BF16_ONES, 0, "BF16_ONES"),
    "mad.s32": Link("mad.lo.s32 %0, %0, %1, %2;", "IMAD", 0, 1, 1, "N"),
    "add.s32, xor": Link("add.s32 %0, %1, %0; xor.b32 %0, %0, %2;", "VIADD|IADD3|IMAD.IADD LOP3", 0, 1, 2),
    "fma.f32, immediate": Link("fma.rn.f32 %0, %0, %1, 0f3F800000;", "FFMA", 0, ONE, 0, "bits(N)"),
    "lop3, immediate": Link("lop3.b32 %0, %0, %1, 0x55, 0x1e;", "LOP3", 0, 5, 0, ""),
    "lop3": Link("lop3.b32 %0, %0, %1, %2, 0x1e;", "LOP3", 0, 5, 2, ""),
    "shf": Link("shf.l.wrap.b32 %0, %0, %1, %2;", "SHF", 1, 7, 3, ""),
    "prmt": Link("prmt.b32 %0, %0, %1, %2;", "PRMT", 0x01020304, 0, 0x0321, "0x01020304"),
    "min.s32, max.s32": Link("min.s32 %0, %1, %0; max.s32 %0, %2, %0;", "VIMNMX VIMNMX", 7, 5, 3, "5"),
    "selp": Link("{ .reg .pred p; setp.ne.s32 p, %2, 0; selp.b32 %0, %1, %0, p; }", "SEL", 7, 5, 1, "5"),
    "setp, selp": Link("{ .reg .pred p; setp.lt.s32 p, %0, %2; selp.b32 %0, %1, %2, p; }", "ISETP SEL", 0, 3, 5, ""),
    "cvt.bf16x2.f32": Link("cvt.rn.bf16x2.f32 %0, %0, %1;", "F2FP", ONE, ONE, 0, "0x3F803F80"),
    "cvt.tf32.f32": Link("cvt.rna.tf32.f32 %0, %0;", "LOP3 FSETP IMAD.IADD", ONE, 0, 0, "ONE"),
    "cvt.f32.s32": Link("cvt.rn.f32.s32 %0, %0;", "I2FP", 0, 0, 0, "0"),
    "cvt.s32.f32": Link("cvt.rzi.s32.f32 %0, %0;", "F2I", 0, 0, 0, "0"),
    "ex2": Link("ex2.approx.ftz.f32 %0, %0;", "MUFU.EX2", 0, 0, 0, ""),
    "ex2.bf16x2": Link("ex2.approx.ftz.bf16x2 %0, %0;", "MUFU.EX2 MUFU.EX2", 0, 0, 0, ""),
    "lg2": Link("lg2.approx.ftz.f32 %0, %0;", "MUFU.LG2", ONE, 0, 0, ""),
    "rcp": Link("{ .reg .b32 t; abs.f32 t, %0; rcp.approx.ftz.f32 %0, t; }", "MUFU.RCP", bits(2.0), 0, 0, "bits(2.0)"),
    "rsqrt": Link("rsqrt.approx.ftz.f32 %0, %0;", "MUFU.RSQ", ONE, 0, 0, "ONE"),
    "sqrt": Link("sqrt.approx.ftz.f32 %0, %0;", "MUFU.SQRT", ONE, 0, 0, "ONE"),
    "tanh": Link("tanh.approx.f32 %0, %0;", "MUFU.TANH", 0, 0, 0, "0"),
    "popc": Link("popc.b32 %0, %0;", "POPC", 1, 0, 0, "1"),
    "bfind": Link("bfind.u32 %0, %0;", "FLO", 0xFFFF, 0, 0, ""),
    "shfl": Link("shfl.sync.idx.b32 %0, %0, %0, 0x1f, -1;", "SHFL", 7, 0, 0, "7"),
    "vote": Link(
        "{ .reg .pred p; setp.ne.s32 p, %0, 0; vote.sync.ballot.b32 %0, p, -1; }", "VOTE", 7, 0, 0, "2**32 - 1"
    ),
    "redux": Link("redux.sync.and.b32 %0, %0, -1;", "REDUX", 7, 0, 0, "7"),
    "movmatrix": Link("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;", "MOVM", 7, 0, 0, ""),
}
PAIRS = {                                    # Blackwell and later
    "fma.f32x2": Link(
        "{ .reg .b64 b, c; mov.b64 b, {%1, %1}; mov.b64 c, {%2, %2}; fma.rn.f32x2 %0, %0, b, c; }", "FFMA2",
        0, ONE, ONE, "bits(N)", wide=True,
    ),
}

# per instruction of a mix: one letter; the body repeats it until UNROLLED is full
LETTERS = {"f": "fma.f32", "h": "fma.bf16x2", "i": "mad.s32", "a": "lop3", "p": "prmt", "c": "cvt.bf16x2.f32",
           "m": "ex2", "s": "shfl", "l": "lds", "g": "fma.f32, immediate", "o": "lop3, immediate",
           "u": "mul.f32", "v": "fma.f32"}
OTHERS = 4                                   # registers that operands of a v go round in: none is read twice in a row
LDS = Link("ld.shared.b32 %0, [%0];", "LDS")   # reads a word that holds its own address
MIXES = (
    "v", "vu", "go", "ggo", "fo", "ga", "uo", "fa", "fi", "ai", "ac", "fc", "fh", "ap", "fffm", "fffffffm", "aaam",
    "aaaaaaam", "fffl", "fffffffl", "fffs", "ffaa", "ffaaffam", "ffafcaflfapfamfl",
)
MIXED_WARPS = 1, 2, 3, 4, 5
OWN_ADDRESS = "u32 own = address(smem) + 4 * threadIdx.x; ((u32*)smem)[threadIdx.x] = own;"
BURSTS = "ex2", "lds", "lop3", "shfl", "cvt.bf16x2.f32"
BURST = 1, 2, 4, 8, 12, 16, 24, 32


def statement(op: Link, chain: str, b: str = "b", c: str = "c") -> str:
    kept = "+l" if op.wide else "+r"
    return f'      asm volatile("{op.ptx}" : "{kept}"({chain}) : {frame.registers("r", [b, c])});'


def source_of(op: Link, chains: int) -> str:
    names = [f"x{n}" for n in range(chains)]
    word, first = ("u64", "0x100000001ull * first") if op.wide else ("u32", "first")
    halves = "all = all >> 32 == (u32)all ? all : 0xdeadbeef;" if op.wide else ""
    agree = " ".join(f"all = all == {x} ? all : 0xdeadbeef;" for x in names)
    return frame.loop(
        "\n".join(statement(op, f"x{n % chains}") for n in range(UNROLLED)),
        setup=f"{word} {', '.join(f'{x} = {first} + out[4096 + threadIdx.x]' for x in names)};",
        finish=f"{word} all = {names[0]}; {agree} {halves} out[threadIdx.x] = all;",
        params="u32 first, u32 b, u32 c",
    )


def sass_of(op: Link, times: int) -> dict[str, int]:
    words = op.sass.split()
    return {opcode: times * words.count(opcode) for opcode in words}


def expected_end(op: Link, links: int) -> int | None:
    return int(eval(op.ends, {"bits": bits, "ONE": ONE, "BF16_ONES": BF16_ONES, "N": links})) if op.ends else None


def run(bench: Bench, built, op: Link, block: int, chains: int) -> tuple[list[float], str]:
    """Return the clocks of all trips, and a fault where the chains did not end where they must."""
    trips = bench.trips(TRIPS)
    clocks = bench.clocks(built, trips, op.x, op.b, op.c, block=block)
    ends, results = expected_end(op, (trips + frame.WARM) * UNROLLED // chains), bench.results(block)
    same = len(set(results)) == 1 and results[0] != 0xDEADBEEF
    right = same and ends in (None, results[0])
    return clocks, bench.wrong(f"chains end with {results[0]:#x}, not {ends}", right)


def each(bench: Bench) -> None:
    instructions = bench.trips(TRIPS) * UNROLLED
    for name, op in (OPS | (PAIRS if bench.target.cc >= (10, 0) else {})).items():
        built = bench.build(source_of(op, 1), sass_of(op, UNROLLED))
        clocks, fault = run(bench, built, op, 32, 1)
        if name == "fma.f32":                # since Volta; else the loop or the clock is not what it seems
            four = min(clocks) > 3.9 * instructions and max(clocks) < 4.3 * instructions
            fault = fault or bench.unlikely("a chain of FMA takes four clocks", four)
        latency = bench.each(f"{name}: latency", clocks, instructions, built.fault, fault)
        built = bench.build(source_of(op, CHAINS), sass_of(op, UNROLLED))
        for warps in WARPS:
            clocks, fault = run(bench, built, op, 32 * SCHEDULERS * warps, CHAINS)
            sooner = 0.9 * latency.value * instructions / CHAINS > min(clocks)
            odd = bench.unlikely("sooner than a chain allows", not sooner)
            name_, count = f"{name}: rate, {warps} warps", instructions * warps
            bench.each(name_, clocks, count, built.fault, fault, odd, unit="clocks of a scheduler")


def op_of(letter: str) -> Link:
    return LDS if letter == "l" else OPS[LETTERS[letter]]


def places(mix: str) -> list[str]:
    """Return pairs of operands that a mix has, by letter and number."""
    return [f"{letter}{n}" for letter in sorted(set(mix)) for n in range(OTHERS if letter == "v" else 1)]


def operands(mix: str) -> list[int]:
    """Return what `given` of a mix holds."""
    return [v for place in places(mix) for v in (op_of(place[0]).b, op_of(place[0]).c)]


def mixed(mix: str, count: int) -> tuple[str, str, str, dict[str, int]]:
    """Lines, setup, finish and opcodes of `count` instructions after the pattern `mix`, in independent chains."""
    lines, sass, kinds, chains = [], {}, sorted(set(mix)), 8 if len(mix) <= 8 else 4
    for n in range(count):
        letter, before = mix[n % len(mix)], mix[: n % len(mix)]
        op, pair = op_of(letter), f"{letter}{n % OTHERS if letter == 'v' else 0}"
        chain = f"{letter}_{n // len(mix) % chains}_{before.count(letter)}"
        lines.append(statement(op, chain, f"b_{pair}", f"c_{pair}"))
        for opcode in op.sass.split():
            sass[opcode] = sass.get(opcode, 0) + 1
    names = sorted({f"{k}_{chain}_{n}" for k in kinds for chain in range(chains) for n in range(mix.count(k))})
    setup = [OWN_ADDRESS, "u32 first = zero + out[4096 + threadIdx.x];"]
    setup.append(f"u32 {', '.join(f'{name} = ' + ('own' if name[0] == 'l' else 'first') for name in names)};")
    setup += [f"u32 b_{p} = given[{2 * n}], c_{p} = given[{2 * n + 1}];" for n, p in enumerate(places(mix))]
    return "\n".join(lines), "\n  ".join(setup), f"out[threadIdx.x] = {' ^ '.join(names)};", sass


def called(mix: str) -> str:
    """Return a mix as it is printed."""
    words = {k: LETTERS[k] + (f" of {OTHERS} registers" if k == "v" else "") for k in dict.fromkeys(mix)}
    return "+".join(f"{mix.count(k)} {word}" for k, word in words.items())


def mixes(bench: Bench) -> None:
    """Instructions per clock and scheduler: 1 is all there is."""
    for mix in MIXES:
        lines, setup, finish, sass = mixed(mix, UNROLLED)
        threads = 32 * SCHEDULERS * max(MIXED_WARPS)
        text = frame.loop(lines, setup, finish, "u32 zero, const u32* given", threads=threads)
        built, given, trips = bench.build(text, sass), bench.words(operands(mix)), bench.trips(TRIPS)
        for warps in MIXED_WARPS:
            block = 32 * SCHEDULERS * warps
            clocks = bench.clocks(built, trips, 0, given, block=block, dynamic_shared=4 * block)
            issued = [trips * UNROLLED * warps / c for c in clocks]
            over = bench.unlikely("more than a scheduler can issue", max(issued) < 1.01)
            bench.figure(f"mix {called(mix)}: {warps} warps", issued, "per clock and scheduler", built.fault, over)


def burst_source(op: Link, count: int) -> str:
    names = [f"x{n}" for n in range(count)]
    lines = "\n".join(statement(op, x) for x in names)
    first = "own" if op is LDS else "first"
    return frame.loop(
        f"      u64 t = now();\n{lines}\n      took = now() - t;\n      all ^= {' ^ '.join(names)};\n      sync_all();",
        setup=f"""{OWN_ADDRESS}
  u32 first = zero + out[4096 + threadIdx.x], all = 0, b = given, c = given + 1;
  u32 {", ".join(f"{x} = {first}" for x in names)};
  u64 took = 0;""",
        finish="note(spans, 0, took); out[threadIdx.x] = all;",
        params="u32 zero, u32 given",
        threads=32,
    )


def bursts(bench: Bench) -> None:
    """Clocks until one warp has issued so many independent instructions, nobody waiting for results: queues show."""
    for name in BURSTS:
        op = LDS if name == "lds" else OPS[name]
        for count in BURST:
            built = bench.build(burst_source(op, count), sass_of(op, count))
            clocks = bench.clocks(built, bench.trips(16), 0, 1, block=32, dynamic_shared=128)
            bench.figure(f"{name}: burst of {count}", clocks, "clocks to issue", built.fault)


def measure(bench: Bench) -> None:
    each(bench)
    mixes(bench)
    bursts(bench)
