"""What the parts of the Hopper and Blackwell backends compute of a number, one function for each row of the result."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kda.backends.common.cute import fast
from kda.backends.common.cute.gate import Gate, HeadRows, beta_of_row

THREADS = 128
GATES = ("given", "softplus", "bounded")
ROWS = (
    "exp2", "reciprocal", "inverse_norm", "whole", "sigmoid", "softplus", "rate", *(f"{gate} decay" for gate in GATES),
)


@cute.kernel
def of_each(x: cute.Tensor, out: cute.Tensor, rate: Float32, lower_bound: Float32):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    v = x[i]
    head_rows = HeadRows(None, None, None, None, rate, None, None, lower_bound)
    found = [
        fast.exp2(v), fast.reciprocal(v), fast.rsqrt(v + Float32(fast.NORM_EPS)), fast.whole(v),
        beta_of_row(x.iterator + i, "sigmoid", 1, 1, 0), fast.softplus(v),
        fast.finite(fast.exp2(v * Float32(fast.LOG2_E))),
    ]
    for gate in GATES:
        decay = Gate(SimpleNamespace(gate=gate, one_product=False), None)
        unit = Float32(fast.LOG2_E) * lower_bound if gate == "bounded" else Float32(1.0)
        found.append(decay.log2_decay(v, head_rows, unit))
    for row in cutlass.range_constexpr(len(found)):
        out[row, i] = found[row]


@cute.jit
def functions(x: cute.Tensor, out: cute.Tensor, rate: Float32, lower_bound: Float32, stream):
    of_each(x, out, rate, lower_bound).launch(
        grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )
