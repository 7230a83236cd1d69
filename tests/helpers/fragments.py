"""One warp-wide instruction on fragments: registers in, registers out, and who holds which element."""

import re

import torch
from assembly import int32, kernel, vector

from ptxkit.launches import launch

LANES = [(lane >> 2, lane & 3) for lane in range(32)]  # (group, thread in the group)


def warp(instruction, registers, outputs, target, findings=False):
    """Run `instruction` ({0}, {1}, ... stand for vectors of `registers`, {d} for the result's) on one warp.

    registers: a list of fragments, each [register][lane]. Return the result, [register][lane], and the Run.
    """
    given = int32([row for fragment in registers for row in fragment])
    out = torch.full((outputs, 32), -1, dtype=torch.int32)
    body, names, first = "mul.wide.u32 %rd9, %r0, 4;\n add.s64 %rd1, %rd1, %rd9;\n add.s64 %rd2, %rd2, %rd9;\n", [], 1
    for fragment in registers:
        names.append(vector("r", len(fragment), first) if len(fragment) > 1 else f"%r{first}")
        first += len(fragment)
    body += "".join(f"ld.global.u32 %r{1 + n}, [%rd1+{128 * n}];\n" for n in range(first - 1))
    body += instruction.format(*names, d=vector("r", outputs, first)) + "\n"
    body += "".join(f"st.global.u32 [%rd2+{128 * n}], %r{first + n};\n" for n in range(outputs))
    run = launch(kernel(body, pointers=2, target=target), grid=1, block=32, args=[given, out])
    assert findings or not run.findings, run.findings[0].says
    return [[x & 0xFFFFFFFF for x in row] for row in out.tolist()], run


def shape_of(name):
    return tuple(map(int, re.findall(r"\d+", name)))


def places_of_a(m, k, bits):
    """Return, for each lane, (row, column) of its elements from the lowest bits of its first register on."""
    each, down = 32 // bits, m // 8
    count = m * k // 32
    return [
        [(g + 8 * (i // each % down), t * each + i % each + 4 * each * (i // each // down)) for i in range(count)]
        for g, t in LANES
    ]


def places_of_b(k, bits):
    return [[(column, row) for row, column in lane] for lane in places_of_a(8, k, bits)]


def places_of_c(m):
    return [[(g + 8 * (i >> 1), 2 * t + (i & 1)) for i in range(m // 4)] for g, t in LANES]


def packed(codes, places, bits):
    """Return registers [register][lane] that hold a matrix of codes: places[lane][element] = (row, column)."""
    each = 32 // bits
    count = len(places[0]) // each
    return [
        [sum(int(codes[lane[r * each + e]]) << bits * e for e in range(each)) for lane in places] for r in range(count)
    ]


def unpacked(registers, places, shape, bits=32):
    """Return the matrix of codes that registers hold."""
    matrix, each = torch.full(shape, -1, dtype=torch.int64), 32 // bits
    for lane, cells in enumerate(places):
        for e, place in enumerate(cells[: each * len(registers)]):
            matrix[place] = registers[e // each][lane] >> bits * (e % each) & (1 << bits) - 1
    return matrix
