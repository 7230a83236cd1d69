"""Runs single instructions over many values, one to a lane, and the values worth running them over."""

import itertools
import random

import numpy as np
import torch

from kda.simulator.launches import launch

BYTES = {"b16": 2, "b32": 4, "b64": 8, "pred": 4}
VIEWS = {2: (np.uint16, np.int16), 4: (np.uint32, np.int32), 8: (np.uint64, np.int64)}
LETTERS = "abce"

EDGES = {
    "int16": [0, 1, 2, 7, 15, 16, 17, 31, 255, 256, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x5555, 0x1234],
    "int32": [0, 1, 2, 7, 31, 32, 33, 255, 256, 0xFFFF, 0x10000, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF,
              0x55555555, 0x12345678, 0x00800000, 0xFF800000],
    "int64": [0, 1, 2, 63, 64, 65, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 2, (1 << 64) - 1,
              0x123456789ABCDEF0, 0x5555555555555555, 0xFFFFFFFF80000000, 0x7FFFFFFF],
    # zeros, subnormals, the smallest normals, around 1 and 1.5, ties, the largest, infinities, NaN with payloads
    "f16": [0, 0x8000, 1, 0x8001, 0x3FF, 0x83FF, 0x400, 0x8400, 0x401, 0x3BFF, 0x3C00, 0xBC00, 0x3C01, 0x3E00, 0x4200, 0x7BFF, 0xFBFF, 0x7C00,
            0xFC00, 0x7C01, 0x7E00, 0xFE01, 0x7FFF],
    "bf16": [0, 0x8000, 1, 0x8001, 0x7F, 0x807F, 0x80, 0x8080, 0x3F7F, 0x3F80, 0xBF80, 0x3F81, 0x3FC0, 0x4040, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80,
             0x7F81, 0x7FC0, 0xFFC1, 0x7FFF],
    "f32": [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x807FFFFF, 0x800000, 0x80800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0xBF800000, 0x3F800001,
            0x3F000000, 0x3FC00000, 0x40200000, 0x33800000, 0x477FE000, 0x477FF000, 0x4B000001, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x5F000000,
            0x7E800001, 0x7F000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFC12345],
    "f64": [0, 1 << 63, 1, (1 << 63) | 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x8010000000000001, 0x3FEFFFFFFFFFFFFF, 0x3FF0000000000000,
            0xBFF0000000000000, 0x3FF0000000000001, 0x3FE0000000000000, 0x3FF8000000000000, 0x41DFFFFFFFC00000, 0x41E0000000000000,
            0xC1E0000000000000, 0x43E0000000000000, 0xC3E0000000000000, 0x43F0000000000000, 0x47EFFFFFE0000000, 0x47EFFFFFF0000000,
            0x36A0000000000000, 0x3690000000000000, 0x3690000000000001, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 0x7FF0000000000000,
            0xFFF0000000000000, 0x7FF8000000000000],
}  # fmt: skip
# kind -> (register, exponent bits, mantissa bits); what is no float has no exponent
KINDS = {
    **{f"{s}{n}": (f"b{n}", 0, 0) for s in ("u", "s", "b") for n in (16, 32, 64)},
    "f16": ("b16", 5, 10), "bf16": ("b16", 8, 7), "f32": ("b32", 8, 23), "f64": ("b64", 11, 52), "pred": ("pred", 0, 0),
    "f16x2": ("b32", 5, 10), "bf16x2": ("b32", 8, 7), "f32x2": ("b64", 8, 23), "u16x2": ("b32", 0, 0), "s16x2": ("b32", 0, 0),
    "small": ("b32", 0, 0),  # counts and positions
}  # fmt: skip


def register(kind):
    return KINDS[kind][0]


def edges(kind):
    if kind == "pred":
        return [0, 1]
    if kind == "small":
        return [*range(36), 62, 63, 64, 65, 127, 255]
    if kind.endswith("x2"):
        element, bits = edges(kind[:-2]), 8 * BYTES[register(kind)] // 2
        return [a << bits | b for a, b in zip(element, element[5:] + element[:5])]
    return EDGES[kind] if kind in EDGES else EDGES[f"int{8 * BYTES[register(kind)]}"]


def _random(kind, dice):
    """Any bits; for floats half the time a number near 1, so that sums and products round."""
    if kind in ("pred", "small"):
        return dice.getrandbits(1 if kind == "pred" else 7)
    width, exponent, mantissa = 8 * BYTES[register(kind)], *KINDS[kind][1:]
    bits = dice.getrandbits(width)
    if exponent and not kind.endswith("x2") and dice.random() < 0.5:
        field = (1 << exponent - 1) - 1 + dice.randint(-9, 9)
        bits = bits & ~(((1 << exponent) - 1) << mantissa) | field << mantissa
    return bits


def values(*kinds, count=10_000, seed=0):
    """A list of values for each kind: all edges against each other (as many as fit in 3,000), then random bits."""
    dice = random.Random(f"{kinds}{seed}")
    lists = [edges(k) for k in kinds]
    while np.prod([len(x) for x in lists]) > 3000:
        longest = max(lists, key=len)
        lists = [dice.sample(x, len(x) * 4 // 5) if x is longest else x for x in lists]
    rows = list(itertools.product(*lists)) + [tuple(_random(k, dice) for k in kinds) for _ in range(count)]
    return [list(column) for column in zip(*rows)]


def apply(instructions, result, kinds, columns, target="sm_100a"):
    """The result's bits for each instruction and row. An instruction is an opcode, or statements on %d, %a, %b, %c, %e, %p and %q."""
    count = len(columns[0])
    letters = LETTERS[: len(kinds)]
    out = BYTES[result]
    lines = [
        f".version 8.8\n.target {target}\n.address_size 64",
        f".visible .entry k({', '.join(f'.param .u64 p{n}' for n in letters)}, .param .u64 po, .param .u32 n)\n{{",
        ".reg .pred %p, %q, %go; .reg .b32 %i, %n, %t; .reg .b64 %from, %to, %at, %step; .reg .b16 %h<4>; .reg .b32 %r<8>; .reg .b64 %x<4>;",
        *(f".reg .{register(k)} %{n};" for n, k in zip(letters, kinds)),
        f".reg .{result} %d;",
        "mov.u32 %i, %ctaid.x; mov.u32 %n, %tid.x; mad.lo.u32 %i, %i, 128, %n; ld.param.u32 %n, [n];",
        "setp.ge.u32 %go, %i, %n; @%go ret;",
        f"ld.param.u64 %to, [po]; mul.wide.u32 %at, %i, {out}; add.u64 %to, %to, %at; mul.wide.u32 %step, %n, {out};",
    ]
    for n, k in zip(letters, kinds):
        size = BYTES[register(k)]
        lines.append(f"ld.param.u64 %from, [p{n}]; mul.wide.u32 %at, %i, {size}; add.u64 %from, %from, %at;")
        load = f"ld.global.b{8 * size} {'%t' if k == 'pred' else f'%{n}'}, [%from];"
        lines.append(load + (f" setp.ne.b32 %{n}, %t, 0;" if k == "pred" else ""))
    for text in instructions:
        statement = text if ";" in text else f"{text} %d, {', '.join(f'%{n}' for n in letters)};"
        store = "selp.b32 %t, 1, 0, %d; st.global.b32 [%to], %t;" if result == "pred" else f"st.global.b{8 * out} [%to], %d;"
        lines.append(f"{statement} {store} add.u64 %to, %to, %step;")
    tensors = [_tensor(c, BYTES[register(k)]) for c, k in zip(columns, kinds)]
    results = torch.zeros(len(instructions), count, dtype={2: torch.int16, 4: torch.int32, 8: torch.int64}[out])
    run = launch("\n".join([*lines, "ret;\n}"]), grid=-(-count // 128), block=128, args=[*tensors, results, count], checks=False)
    assert not run.findings, run.findings[0].says
    return [row.view(VIEWS[out][0]).tolist() for row in results.numpy()]


def _tensor(column, size):
    unsigned, signed = VIEWS[size]
    return torch.from_numpy(np.array(column, dtype=np.uint64).astype(unsigned).view(signed))


def check(instructions, result, kinds, columns, models, **options):
    """Compares each instruction with its model, a function of the row's values; says the first rows that differ."""
    for text, model, got in zip(instructions, models, apply(instructions, result, kinds, columns, **options)):
        wanted = [model(*row) for row in zip(*columns)]
        wrong = [n for n, (g, x) in enumerate(zip(got, wanted)) if g != x]
        rows = "\n".join(f"  {', '.join(hex(c[n]) for c in columns)}: {got[n]:#x}, expected {wanted[n]:#x}" for n in wrong[:5])
        assert not wrong, f"{text}: {len(wrong)} of {len(got)} differ\n{rows}"
