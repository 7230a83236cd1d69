"""Hopper: the forward in the CuTe DSL."""

from kda.capability import Capability, Rule

LIMIT = 65535                                # of a grid in y and z

CAPABILITY = Capability(
    backend="sm90",
    rank=20,
    summary="Hopper kernels in the CuTe DSL: the forward, beside Triton's backward",
    backward=False,
    archs=("sm90",),
    rules=(
        Rule(
            "sm90.gpu",
            lambda p, h: h.cc == (9, 0),
            "needs a GPU of compute capability 9.0 (H100, H200, H20), found {h}",
        ),
        Rule(
            "sm90.installed",
            lambda p, h: h.has("nvidia-cutlass-dsl"),
            "needs the package nvidia-cutlass-dsl",
            "pip install 'nvidia-cutlass-dsl[cu13]'",
        ),
        Rule(
            "sm90.forward",
            lambda p, h: p.op == "chunk" and p.direction == "forward",
            "has chunk forwards only, asked for {p.op} {p.direction}",
        ),
        Rule("sm90.dtype", lambda p, h: p.dtype == "bfloat16", "needs bfloat16 q, k and v, got {p.dtype}"),
        Rule(
            "sm90.head_dim",
            lambda p, h: p.K in (64, 128) and p.V in (64, 128),
            "needs K and V of 64 or 128, got K={p.K} V={p.V}",
        ),
        Rule(
            "sm90.size",
            lambda p, h: max(p.HV, p.N) <= LIMIT and (p.packed or p.T <= 32 * LIMIT),
            "accepts up to 65,535 value heads and sequences, and 2,097,120 tokens per row of a batch",
            "pass one long sequence with cu_seqlens",
        ),
        Rule(
            "sm90.beta",
            lambda p, h: not p.beta_per_value,
            "accepts one beta per token and value head",
        ),
        Rule(
            "sm90.keeps",
            lambda p, h: not p.disable_recompute,
            "keeps A_qk and A_inv, not all intermediates that disable_recompute asks for",
            "leave it out",
        ),
    ),
    stages=("fwd/gate+intra+wy+state+output",),
    proof_dtypes=("bfloat16",),
)
