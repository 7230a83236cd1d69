"""What one lane of a warp holds of small matrices, products of those by one warp (mma.sync), and their way between
shared memory and registers.

An 8 x 8 matrix of bfloat16 lies in a warp as lane -> [lane / 4][2 (lane % 4) + {0, 1}], transposed as the reverse.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from .tile import C


def accumulator_places(thread):
    """(row of [k; q], row of k) of each element that a thread of the first four warps holds of their product."""
    warp, lane = thread >> 5, thread & 31
    return [(16 * warp + (lane >> 2) + i // 2 % 2 * 8, (lane & 3) * 2 + i // 4 * 8 + i % 2) for i in range(C // 2)]


@cute.jit
def sum_over_lanes(values, lanes: cutlass.Constexpr = 32):
    """Sums of each value over so many lanes of a warp, the i-th in their lanes `lanes` / n * i and on: at every step a
    lane keeps half of the values, sends the others, and adds what it receives."""
    lane = cute.arch.lane_idx()
    for far in [far for far in (16, 8, 4, 2, 1) if far < lanes]:
        width, upper, mine = len(values) // 2, lane & far, []
        for i in cutlass.range_constexpr(width):
            low, high = values[i], values[i + width]
            kept, sent = (high if upper != 0 else low), (low if upper != 0 else high)
            mine.append(kept + cute.arch.shuffle_sync_bfly(sent, far))
        values = mine if width else [values[0] + cute.arch.shuffle_sync_bfly(values[0], far)]
    return values[0]


def times(x, y):
    """Element by element."""
    return [a * b for a, b in zip(x, y)]


def tf32s(*values):
    """Operands of mma_tf32, rounded to nearest: the product alone would cut them off."""
    return [
        cute.arch.inline_ptx(
            "cvt.rn.tf32.f32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x.bitcast(Uint32)]
        ) for x in values
    ]


def mma(kinds: str, acc, a, b):
    """acc + a @ b of four, four and two registers of each lane."""
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.{kinds}.f32 " "{{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4, read_only_args=[*a, *b, *acc],
    )


def mma_tf32(acc, a, b):
    """acc + a @ b, (16, 8) = (16, 8) @ (8, 8)."""
    return mma("m16n8k8.row.col.f32.tf32.tf32", acc, a, b)


def mma_bf16(acc, a, b):
    """acc + a @ b, (16, 8) = (16, 16) @ (16, 8)."""
    return mma("m16n8k16.row.col.f32.bf16.bf16", acc, a, b)


def two_mma_bf16(a, b):
    """a[0] @ b[0] + a[1] @ b[1], of the same shapes."""
    one = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    return cute.arch.inline_ptx(
        "{.reg .f32 z, x, y, u, v; mov.f32 z, 0f00000000; "
        + one + " {x, y, u, v}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {z, z, z, z}; "
        + one + " {{$w0}, {$w1}, {$w2}, {$w3}}, {{$r6}, {$r7}, {$r8}, {$r9}}, {{$r10}, {$r11}}, {x, y, u, v};}",
        write_only_types=[Float32] * 4, read_only_args=[*a[0], *b[0], *a[1], *b[1]],
    )


def load_matrices(pointer, transposed: bool = False):
    """Four 8 x 8 matrices, of each of which eight lanes give the addresses of rows."""
    direction = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{direction}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=[Uint32] * 4, read_only_args=[pointer.toint().to(Uint32)],
    )


def store_matrices(pointer, words, transposed: bool = False):
    """The reverse of `load_matrices`."""
    direction = ".trans" if transposed else ""
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x4{direction}.shared.b16 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[pointer.toint().to(Uint32), *words],
    )
