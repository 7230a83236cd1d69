"""Arithmetic on float32 two at a time, from sm_100 on: element by element of lists of an even length, or of such a list
and one number.  A pair lies in two neighbouring registers, so that what packs it here is no instruction of the machine.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def times(x, y):
    return in_twos("mul.rn.f32x2 x, x, y", x, y)


@cute.jit
def plus(x, y):
    return in_twos("add.rn.f32x2 x, x, y", x, y)


@cute.jit
def fused(x, y, z):
    """x * y + z."""
    return in_twos("fma.rn.f32x2 x, x, y, z", x, y, z)


@cute.jit
def in_twos(instruction: cutlass.Constexpr, *operands):
    count = max(len(x) for x in operands if isinstance(x, list))
    lists, found = [x if isinstance(x, list) else [x] * count for x in operands], []
    names = "xyz"[: len(lists)]
    packed = " ".join(f"mov.b64 {name}, {{{{$r{2 * n}}}, {{$r{2 * n + 1}}}}};" for n, name in enumerate(names))
    for i in cutlass.range_constexpr(0, count, 2):
        found += cute.arch.inline_ptx(
            f"{{.reg .b64 {', '.join(names)}; {packed} {instruction}; mov.b64 {{{{$w0}}, {{$w1}}}}, x;}}",
            write_only_types=[Float32] * 2, read_only_args=[x[i + e] for x in lists for e in range(2)],
        )  # fmt: skip
    return found
