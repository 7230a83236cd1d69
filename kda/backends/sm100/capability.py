"""Blackwell: the forward in the CuTe DSL, one kernel."""

from kda.capability import Capability, Rule

from ..common.rules import BFLOAT16, CUTE_DSL, FORWARDS, KEEPS_NOTHING, ONE_BETA, of

CAPABILITY = Capability(
    backend="sm100",
    rank=10,
    summary="one Blackwell kernel in the CuTe DSL: the forward, beside Triton's backward",
    backward=False,
    keeps=False,
    archs=("sm100", "sm103"),
    rules=(
        Rule(
            "sm100.gpu",
            lambda p, h: h.cc in ((10, 0), (10, 3)),
            "needs a GPU of compute capability 10.0 or 10.3 (B200, GB200, B300, GB300), found {h}",
        ),
        *of("sm100", CUTE_DSL, FORWARDS, BFLOAT16),
        Rule("sm100.head_dim", lambda p, h: p.K == p.V == 128, "needs K=V=128, got K={p.K} V={p.V}"),
        Rule(
            "sm100.size",
            lambda p, h: p.N * p.HV < 2**31,
            "counts sequences and value heads in 32 bits, got {p.N} x {p.HV}",
        ),
        *of("sm100", ONE_BETA, KEEPS_NOTHING),
    ),
    stages=("fwd/gate+intra+wy+state+output only",),
    proof_dtypes=("bfloat16",),
)
