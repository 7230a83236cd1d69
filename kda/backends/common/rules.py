"""Rules that several backends declare, without the backend's name, which is put before their ids.  No torch, no DSL."""

from __future__ import annotations

from kda.routing.capability import Rule
from ptxkit.compile.target import TARGETS

GRID = 65535                                 # the largest size of a grid in y and z


def runs_from(major: int, minor: int) -> Rule:
    return Rule(
        "gpu", lambda p, h: h.cc is not None and h.cc >= (major, minor),
        f"needs an NVIDIA GPU of compute capability {major}.{minor} or more, found {{h}}",
    )


def runs_on(*archs: str) -> Rule:
    """Return a rule that accepts the GPUs of these archs alone."""
    targets = [TARGETS[arch] for arch in archs]
    *ccs, last = (".".join(map(str, t.cc)) for t in targets)
    listed = " or ".join([", ".join(ccs), last] if ccs else [last])
    return Rule(
        "gpu", lambda p, h: any(h.cc == t.cc for t in targets),
        f"needs a GPU of compute capability {listed} ({', '.join(t.examples for t in targets)}), found {{h}}",
    )


def installed(package: str, to_install: str) -> Rule:
    return Rule("installed", lambda p, h: h.has(package), f"needs the package {package}", f"pip install {to_install}")


CUTE_DSL = installed("nvidia-cutlass-dsl", "'nvidia-cutlass-dsl[cu13]'")
TRITON = installed("triton", "triton")
CHUNKS = Rule("chunks", lambda p, h: p.op == "chunk", "works in chunks; requested: {p.op} {p.direction}")
BFLOAT16 = Rule("dtype", lambda p, h: p.dtype == "bfloat16", "needs bfloat16 q, k and v, got {p.dtype}")
ONE_BETA = Rule("beta", lambda p, h: not p.beta_per_value, "accepts one beta per token and value head")
SAVES_PRODUCTS = Rule(
    "keeps",
    lambda p, h: not p.disable_recompute,
    "keeps A_qk and A_inv, not all intermediates that disable_recompute requests",
    "leave it out",
)


def saves_opaque(*archs: str) -> Rule:
    """Return a rule that refuses calls that request more to be saved, on GPUs whose backward reads only what its own
    forward saves."""
    ccs = [TARGETS[arch].cc for arch in archs]
    return Rule(
        "keeps",
        lambda p, h: not p.disable_recompute or h.cc not in ccs,
        "keeps intermediates for its own backward alone; this call requests those that every backend reads",
        "leave disable_recompute out",
    )


def rules_of(backend: str, *rules: Rule) -> tuple[Rule, ...]:
    """Return these rules as those of a backend: "installed" of sm90 is sm90.installed."""
    return tuple(rule._replace(id=f"{backend}.{rule.id}") for rule in rules)
