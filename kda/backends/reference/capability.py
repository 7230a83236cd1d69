"""The reference: the definition and the chunked algorithm in torch, on any device, in any float dtype."""

from kda.model.stages import STAGES
from kda.routing.capability import Capability, Rule

CAPABILITY = Capability(
    backend="reference",
    rank=1000,
    summary="pure torch, any device, any float dtype",
    maps=("forward", "backward", "forward in halves", "backward in halves"),
    composite=True,
    auto_rules=(
        Rule(
            "reference.auto",
            lambda p, h: not (p.is_gpu or h.simulated),
            "auto never moves a call on {p.device} to the reference",
            "pass backend='reference' if you want a slow and exact result",
        ),
    ),
    stages=tuple(STAGES),
)
