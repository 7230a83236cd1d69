"""Blackwell: the forward in the CuTe DSL, one kernel."""

from kda.capability import Capability, Rule

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
        Rule(
            "sm100.installed",
            lambda p, h: h.has("nvidia-cutlass-dsl"),
            "needs the package nvidia-cutlass-dsl",
            "pip install 'nvidia-cutlass-dsl[cu13]'",
        ),
        Rule(
            "sm100.forward",
            lambda p, h: p.op == "chunk" and p.direction == "forward",
            "has chunk forwards only, asked for {p.op} {p.direction}",
        ),
        Rule("sm100.dtype", lambda p, h: p.dtype == "bfloat16", "needs bfloat16 q, k and v, got {p.dtype}"),
        Rule("sm100.head_dim", lambda p, h: p.K == p.V == 128, "needs K=V=128, got K={p.K} V={p.V}"),
        Rule(
            "sm100.size",
            lambda p, h: p.N * p.HV < 2**31,
            "counts sequences and value heads in 32 bits, got {p.N} x {p.HV}",
        ),
        Rule(
            "sm100.beta",
            lambda p, h: not p.beta_per_value,
            "accepts one beta per token and value head",
        ),
        Rule(
            "sm100.keeps",
            lambda p, h: not p.disable_recompute,
            "keeps no intermediates, which disable_recompute asks for",
            "leave it out",
        ),
    ),
    stages=("fwd/gate+intra+wy+state+output only",),
    proof_dtypes=("bfloat16",),
)
