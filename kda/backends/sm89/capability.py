"""float32 on every GPU from sm_89 up: CUDA C++ through NVRTC."""

from kda.model.bundles import chunk_bound
from kda.routing.capability import Capability, Rule

from ..common.rules import CHUNKS, ONE_BETA, SAVES_PRODUCTS, installed, rules_of, runs_from

GRID = 2**31 - 1                             # CTAs of a launch
NARROWEST = 8                                # columns of the state in a CTA
SLICE = 32                                   # channels of K in a CTA of a backward
SHAPES = {(64, 64), (128, 128)}


def ctas(p) -> int:
    """Return the most CTAs of a launch."""
    chunks = chunk_bound(p.B, p.T, p.N, p.C, p.packed) + p.packed
    slices = p.K // SLICE if p.direction == "backward" else 1
    return max(chunks * p.HV * slices, p.N * p.HV * (p.V // NARROWEST))


CAPABILITY = Capability(
    backend="sm89",
    rank=30,
    summary="float32 in CUDA C++ through NVRTC, compute capability 8.9 and up",
    maps=("forward", "backward"),
    archs=("sm89",),
    rules=(
        *rules_of("sm89", runs_from(8, 9), installed("cuda-bindings", "cuda-python"), CHUNKS),
        Rule(
            "sm89.dtype",
            lambda p, h: p.dtype == p.g_dtype == p.beta_dtype == "float32" and p.state_dtype in (None, "float32"),
            "needs float32 q, k, v, g, beta and states, got {p.dtype}, g {p.g_dtype}, beta {p.beta_dtype}, "
            "{p.states_in_words}",
            "cast them",
        ),
        Rule(
            "sm89.head_dim",
            lambda p, h: (p.K, p.V) in SHAPES and p.C in (32, 64),
            "needs K=V=64 or K=V=128 and chunks of 32 or 64, got K={p.K} V={p.V} and chunks of {p.C}",
        ),
        Rule(
            "sm89.size",
            lambda p, h: ctas(p) <= GRID,
            f"launches up to {GRID:,} CTAs: one per chunk and value head, in a backward per {SLICE} channels "
            f"of them, and one per {NARROWEST} columns of the state of each sequence and value head; "
            "got T={p.T} in {p.B} rows, {p.N} sequences, {p.HV} value heads",
            "split the batch",
        ),
        Rule(
            "sm89.pool",
            lambda p, h: not p.slots,
            "starts from one state per sequence, got a pool of {p.slots}",
            "pass initial_state=pool[slots]",
        ),
        *rules_of("sm89", ONE_BETA, SAVES_PRODUCTS),
    ),
    stages=("fwd/gate+intra+wy", "fwd/state+output", "bwd/output+state", "bwd/wy+intra+gate"),
)
