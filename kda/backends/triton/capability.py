"""The portable backend: everything that the API accepts on a GPU, in Triton, from sm_80 up."""

from kda.routing.capability import Capability, Rule
from ptxkit.compile.target import TARGETS

from ..common.rules import TRITON, rules_of, runs_from
from ..common.triton_types import width

CAPABILITY = Capability(
    backend="triton",
    rank=100,
    summary="portable Triton kernels, compute capability 8.0 and up",
    rules=(
        *rules_of("triton", runs_from(8, 0), TRITON),
        Rule(
            "triton.dtype",
            lambda p, h: p.dtype != "float64",
            "needs bfloat16, float16 or float32 q, k and v, got {p.dtype}",
            "cast them",
        ),
        Rule(
            "triton.head_dim",
            lambda p, h: p.K <= 256 or (p.op == "recurrent" and p.K <= 1024),
            "needs K <= 256, in fused_recurrent_kda K <= 1024, got K={p.K}",
        ),
        Rule(
            "triton.decode_state",
            lambda p, h: p.op != "decode" or width(p.K) * width(p.V) <= 2**15,
            "needs K * V <= 32768 in decode_step, each rounded up to a power of 2, got K={p.K} V={p.V}",
            "call the convolution, fused_recurrent_kda and the norm one by one",
        ),
    ),
    maps=("forward", "backward"),
    archs=tuple(TARGETS),
    stages=("fwd/gate+intra+wy", "fwd/state+output", "bwd/output+state", "bwd/wy+intra+gate"),
    proof_dtypes=("bfloat16", "float32"),
)
