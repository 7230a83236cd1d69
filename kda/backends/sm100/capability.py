"""Blackwell: forward and backward in the CuTe DSL."""

from kda.routing.capability import Capability, Rule

from ..common.rules import BFLOAT16, CHUNKS, CUTE_DSL, GRID, ONE_BETA, rules_of, runs_on, saves_opaque

ARCHS = "sm100", "sm103", "sm110"            # the same source, and but for `shares` the same PTX

CAPABILITY = Capability(
    backend="sm100",
    rank=10,
    summary="Blackwell kernels in the CuTe DSL, with Triton's backward for calls that theirs does not accept",
    saves=False,
    saves_opaque=True,
    some_backwards=True,
    maps=("backward", "backward in halves"),
    archs=ARCHS,
    rules=(
        *rules_of("sm100", runs_on(*ARCHS), CUTE_DSL, CHUNKS, BFLOAT16),
        Rule("sm100.head_dim", lambda p, h: p.K == p.V in (64, 128), "needs K=V=64 or K=V=128, got K={p.K} V={p.V}"),
        Rule(
            "sm100.size",
            lambda p, h: p.N * p.HV < 2**31,
            "counts sequences and value heads in 32 bits, got {p.N} x {p.HV}",
        ),
        Rule(
            "sm100.backward_size",
            lambda p, h: p.direction == "forward" or (max(p.HV, p.N) <= GRID and (p.packed or p.T <= 32 * GRID)),
            "has a backward for up to 65,535 value heads and sequences, and 2,097,120 tokens per row of a batch",
            "pass one long sequence with cu_seqlens",
        ),
        *rules_of("sm100", ONE_BETA, saves_opaque(*ARCHS)),
    ),
    stages=("fwd/gate+intra+wy+state+output only", "bwd/output+state+wy+intra+gate from inputs",
            "bwd/grads"),
    proof_dtypes=("bfloat16",),
    proof_sizes=(128, 64),
)
