"""Hopper: forward and backward in the CuTe DSL."""

from kda.routing.capability import Capability, Rule

from ..common.rules import BFLOAT16, CHUNKS, CUTE_DSL, GRID, ONE_BETA, rules_of, runs_on, saves_opaque

# Further rules of a backward.
BACKWARD = (
    Rule(
        "sm90.backward_shape",
        lambda p, h: p.direction == "forward" or p.K == p.V,
        "has a backward only for K = V, got K={p.K} V={p.V}",
    ),
)

CAPABILITY = Capability(
    backend="sm90",
    rank=20,
    summary="Hopper kernels in the CuTe DSL, with Triton's backward for calls that theirs does not accept",
    some_backwards=True,
    saves_opaque=True,
    maps=("forward", "backward", "forward in halves", "backward in halves"),
    archs=("sm90",),
    rules=(
        *rules_of("sm90", runs_on("sm90"), CUTE_DSL, CHUNKS, BFLOAT16),
        Rule(
            "sm90.head_dim",
            lambda p, h: p.K in (64, 128) and p.V in (64, 128),
            "needs K and V of 64 or 128, got K={p.K} V={p.V}",
        ),
        Rule(
            "sm90.size",
            lambda p, h: max(p.HV, p.N) <= GRID and (p.packed or p.T <= 32 * GRID),
            "accepts up to 65,535 value heads and sequences, and 2,097,120 tokens per row of a batch",
            "pass one long sequence with cu_seqlens",
        ),
        *rules_of("sm90", ONE_BETA, saves_opaque("sm90")),
        *BACKWARD,
    ),
    stages=("fwd/gate+intra+wy+state+output", "bwd/output+state+wy+intra+gate from inputs",
            "bwd/grads"),
    proof_dtypes=("bfloat16",),
)
