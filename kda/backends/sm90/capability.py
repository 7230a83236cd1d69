"""Hopper: forward and backward in the CuTe DSL."""

from kda.capability import Capability, Rule

from ..common.rules import BFLOAT16, CHUNKS, CUTE_DSL, KEEPS_PRODUCTS, ONE_BETA, of

MIN_LOWER_BOUND = -5.02                      # as common/cute/tile.MIN_GATE_ONE_PRODUCT
LIMIT = 65535                                # of a grid in y and z


def one_product(p) -> bool:
    """Whether the rows of a chunk meet in one product: bfloat16 holds half of what the gate lets them lose."""
    return p.gate == "bounded" and p.lower_bound >= MIN_LOWER_BOUND and p.qk_l2norm


# What a backward is asked beside the other rules.
BACKWARD = (
    Rule(
        "sm90.backward_gate",
        lambda p, h: p.direction == "forward" or (one_product(p) and p.g_dtype == "bfloat16"),
        "has a backward for bounded gates of bfloat16 logits with lower_bound >= -5, and l2norms inside; got a "
        "{p.gate} gate, g {p.g_dtype}",
    ),
    Rule(
        "sm90.backward_shape",
        lambda p, h: p.direction == "forward" or (p.K == p.V == 128 and p.beta != "given"),
        "has a backward for K = V = 128 and beta from logits; got K={p.K} V={p.V}, beta {p.beta}",
    ),
)

CAPABILITY = Capability(
    backend="sm90",
    rank=20,
    summary="Hopper kernels in the CuTe DSL, beside Triton's backward where theirs does not accept a call",
    some_backwards=True,
    keeps_own=True,
    archs=("sm90",),
    rules=(
        Rule(
            "sm90.gpu",
            lambda p, h: h.cc == (9, 0),
            "needs a GPU of compute capability 9.0 (H100, H200, H20), found {h}",
        ),
        *of("sm90", CUTE_DSL, CHUNKS, BFLOAT16),
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
        *of("sm90", ONE_BETA, KEEPS_PRODUCTS),
        *BACKWARD,
    ),
    stages=("fwd/gate+intra+wy+state+output",),
    proof_dtypes=("bfloat16",),
)
