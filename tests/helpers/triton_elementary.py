"""What the parts of the Triton backend compute of a number, one function for each row of the result."""

import triton
import triton.language as tl

from kda.backends.triton.decode.kernel import decay_of
from kda.backends.triton.parts import fast, gate

ROWS = (
    "exp2", "reciprocal", "inverse_norm", "finite", "sigmoid", "sigmoid_slope", "log1p", "softplus", "rate",
    "recurrent decay", "given decay", "softplus decay", "bounded decay", "softplus decay, back",
    "softplus decay, back to the rate", "bounded decay, back", "bounded decay, back to the rate",
)


@triton.jit
def functions(x, out, count, rate, lower_bound, BLOCK: tl.constexpr):
    """Compute out (rows, count) from x (count)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < count
    v = tl.load(x + i, mask=real)
    out += i
    tl.store(out, fast.exp2(v), mask=real)
    tl.store(out + count, fast.reciprocal(v), mask=real)
    tl.store(out + 2 * count, gate.inverse_norm(v), mask=real)
    tl.store(out + 3 * count, gate.finite(v), mask=real)
    tl.store(out + 4 * count, gate.step_size(v, "sigmoid"), mask=real)
    tl.store(out + 5 * count, gate.sigmoid_slope(v), mask=real)
    tl.store(out + 6 * count, gate.log1p(v), mask=real)
    tl.store(out + 7 * count, gate.softplus(v), mask=real)
    tl.store(out + 8 * count, gate.rate_of(x, i, True), mask=real)
    tl.store(out + 9 * count, decay_of(gate.at_most(gate.at_least(v, gate.FLOOR), 128.0)), mask=real)
    tl.store(out + 10 * count, gate.log2_decay(v, rate, lower_bound, "given"), mask=real)
    tl.store(out + 11 * count, gate.log2_decay(v, rate, lower_bound, "softplus"), mask=real)
    tl.store(out + 12 * count, gate.log2_decay(v, rate, lower_bound, "bounded"), mask=real)
    dx, of_A = gate.log2_decay_bwd(1.0, v, rate, lower_bound, "softplus")
    tl.store(out + 13 * count, dx, mask=real)
    tl.store(out + 14 * count, of_A, mask=real)
    dx, of_A = gate.log2_decay_bwd(1.0, v, rate, lower_bound, "bounded")
    tl.store(out + 15 * count, dx, mask=real)
    tl.store(out + 16 * count, of_A, mask=real)
