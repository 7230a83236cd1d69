"""8 x 8 matrices of bfloat16 between shared memory and a warp's registers, and products of them."""

import cutlass.cute as cute
from cutlass import Float32, Uint32


@cute.jit
def load_matrices(pointer):
    """Of four, each lane giving the address of a row of one: [lane / 4][2 (lane % 4) + {0, 1}]."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4, read_only_args=[pointer.toint().to(Uint32)],
    )  # fmt: skip


@cute.jit
def store_matrices(pointer, words):
    """The way back."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[pointer.toint().to(Uint32), *words],
    )


@cute.jit
def mma_bf16(acc, a, b):
    """acc + a @ b, (16, 8) = (16, 16) @ (16, 8), as lanes of a warp hold them."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4, read_only_args=[*a, *b, *acc],
    )  # fmt: skip
