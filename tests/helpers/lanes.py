"""Runs single instructions over many values, one to a lane, and the values worth running them over."""

import itertools
import random

import numpy as np
import torch

from ptxkit.launches import launch

BYTES = {"b16": 2, "b32": 4, "b64": 8, "pred": 4}
VIEWS = {2: (np.uint16, np.int16), 4: (np.uint32, np.int32), 8: (np.uint64, np.int64)}
LETTERS = "abce"
SHARE = 1.0                                  # for the random values that a test asks for; the fixture `draws` sets it

# In hexadecimal. Of floats: zeros, subnormals, the smallest normals, numbers near 1, ties, the largest, infinities, and
# NaN with payloads.
EDGES = {
    "int16": "0 1 2 7 f 10 11 1f ff 100 7ffe 7fff 8000 8001 fffe ffff 5555 1234",
    "int32": """
        0 1 2 7 1f 20 21 ff 100 ffff 10000 7ffffffe 7fffffff 80000000 80000001 fffffffe ffffffff 55555555 12345678
        800000 ff800000""",
    "int64": """
        0 1 2 3f 40 41 ffffffff 100000000 7fffffffffffffff 8000000000000000 8000000000000001 fffffffffffffffe
        ffffffffffffffff 123456789abcdef0 5555555555555555 ffffffff80000000 7fffffff""",
    "f16": """
        0 8000 1 8001 3ff 83ff 400 8400 401 3bff 3c00 bc00 3c01 3e00 4200 7bff fbff 7c00 fc00 7c01 7e00 fe01 7fff""",
    "bf16": """
        0 8000 1 8001 7f 807f 80 8080 3f7f 3f80 bf80 3f81 3fc0 4040 7f7f ff7f 7f80 ff80 7f81 7fc0 ffc1 7fff""",
    "f32": """
        0 80000000 1 80000001 7fffff 807fffff 800000 80800000 800001 3f7fffff 3f800000 bf800000 3f800001 3f000000
        3fc00000 40200000 33800000 477fe000 477ff000 4b000001 4effffff 4f000000 cf000000 5f000000 7e800001 7f000000
        7f7fffff ff7fffff 7f800000 ff800000 7f800001 7fc00000 ffc12345""",
    "f64": """
        0 8000000000000000 1 8000000000000001 fffffffffffff 10000000000000 8010000000000001 3fefffffffffffff
        3ff0000000000000 bff0000000000000 3ff0000000000001 3fe0000000000000 3ff8000000000000 41dfffffffc00000
        41e0000000000000 c1e0000000000000 43e0000000000000 c3e0000000000000 43f0000000000000 47efffffe0000000
        47effffff0000000 36a0000000000000 3690000000000000 3690000000000001 7fefffffffffffff ffefffffffffffff
        7ff0000000000000 fff0000000000000 7ff8000000000000""",
}
# kind -> (register, exponent bits, mantissa bits); what is no float has no exponent
KINDS = {
    **{f"{s}{n}": (f"b{n}", 0, 0) for s in ("u", "s", "b") for n in (16, 32, 64)},
    "f16": ("b16", 5, 10), "bf16": ("b16", 8, 7), "f32": ("b32", 8, 23), "f64": ("b64", 11, 52), "pred": ("pred", 0, 0),
    "f16x2": ("b32", 5, 10), "bf16x2": ("b32", 8, 7), "f32x2": ("b64", 8, 23), "u16x2": ("b32", 0, 0),
    "small": ("b32", 0, 0),  # counts and positions
}


def register(kind):
    return KINDS[kind][0]


def bits_of(kind):
    return int(kind[1:])


def signed(x, bits):
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> bits - 1 else x


def edges(kind):
    if kind == "pred":
        return [0, 1]
    if kind == "small":
        return [*range(36), 62, 63, 64, 65, 127, 255]
    if kind.endswith("x2"):
        element, bits = edges(kind[:-2]), 8 * BYTES[register(kind)] // 2
        return [a << bits | b for a, b in zip(element, element[5:] + element[:5])]
    return [int(x, 16) for x in EDGES[kind if kind in EDGES else f"int{8 * BYTES[register(kind)]}"].split()]


def _random(kind, dice):
    """Return any bits; for floats half the time a number near 1, so that sums and products round."""
    if kind in ("pred", "small"):
        return dice.getrandbits(1 if kind == "pred" else 7)
    width, exponent, mantissa = 8 * BYTES[register(kind)], *KINDS[kind][1:]
    bits = dice.getrandbits(width)
    if exponent and not kind.endswith("x2") and dice.random() < 0.5:
        field = (1 << exponent - 1) - 1 + dice.randint(-9, 9)
        bits = bits & ~(((1 << exponent) - 1) << mantissa) | field << mantissa
    return bits


def values(*kinds, count=10_000, seed=0):
    """Return a list of values for each kind: all edges against each other (as many as fit in 3,000), then random bits:
    `count` of them, or a share of that.
    """
    dice = random.Random(f"{kinds}{seed}")
    lists = [edges(k) for k in kinds]
    while np.prod([len(x) for x in lists]) > 3000:
        longest = max(lists, key=len)
        lists = [dice.sample(x, len(x) * 4 // 5) if x is longest else x for x in lists]
    rows = list(itertools.product(*lists)) + [tuple(_random(k, dice) for k in kinds) for _ in range(int(SHARE * count))]
    return [list(column) for column in zip(*rows)]


def apply(instructions, result, kinds, columns, target="sm_90a"):
    """Return the bits of the result, whose kind is given, for each instruction and row.

    An instruction is an opcode that takes %d, %a, %b, ... as they are, or statements on these, %p and %q.
    """
    count = len(columns[0])
    letters = LETTERS[: len(kinds)]
    result = register(result)
    out = BYTES[result]
    lines = [
        f".version 8.8\n.target {target}\n.address_size 64",
        f".visible .entry k({', '.join(f'.param .u64 p{n}' for n in letters)}, .param .u64 po, .param .u32 n)\n{{",
        ".reg .pred %p, %q, %go; .reg .b32 %i, %n, %t; .reg .b64 %from, %to, %at, %step;",
        ".reg .b16 %h<4>; .reg .b32 %r<8>; .reg .b64 %x<4>;",
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
        store = (
            "selp.b32 %t, 1, 0, %d; st.global.b32 [%to], %t;"
            if result == "pred"
            else f"st.global.b{8 * out} [%to], %d;"
        )
        lines.append(f"{statement} {store} add.u64 %to, %to, %step;")
    tensors = [_tensor(c, BYTES[register(k)]) for c, k in zip(columns, kinds)]
    results = torch.zeros(len(instructions), count, dtype={2: torch.int16, 4: torch.int32, 8: torch.int64}[out])
    run = launch(
        "\n".join([*lines, "ret;\n}"]), grid=-(-count // 128), block=128, args=[*tensors, results, count], checks=False
    )
    assert not run.findings, run.findings[0].says
    return [row.view(VIEWS[out][0]).tolist() for row in results.numpy()]


def _tensor(column, size):
    unsigned, signed = VIEWS[size]
    return torch.from_numpy(np.array(column, dtype=np.uint64).astype(unsigned).view(signed))


def check(table, result, kinds, columns=None, *, count=10_000, **options):
    """Compare instructions with their models and say which rows differ first.

    table: instruction -> model, a function of a row's values.  The rows are `columns`, or `values` of the kinds.
    """
    columns = columns or values(*kinds, count=count)
    for (text, model), got in zip(table.items(), apply(list(table), result, kinds, columns, **options)):
        wanted = [model(*row) for row in zip(*columns)]
        wrong = [n for n, (g, x) in enumerate(zip(got, wanted)) if g != x]
        rows = "\n".join(
            f"  {', '.join(hex(c[n]) for c in columns)}: {got[n]:#x}, expected {wanted[n]:#x}" for n in wrong[:5]
        )
        assert not wrong, f"{text}: {len(wrong)} of {len(got)} differ\n{rows}"
