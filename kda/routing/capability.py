"""What a backend can do, as data: rules with an id, a reason and a fix.  Imports neither torch nor a DSL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kda.model.host import Host
from kda.model.problem import Problem


class Rule(NamedTuple):
    id: str                                  # stable: tests, --json and docs quote it
    holds: Callable[[Problem, Host], bool]
    why: str                                 # format string over p (Problem) and h (Host)
    fix: str = ""                            # the same; empty if only another backend helps

    def refusal(self, p: Problem, h: Host) -> str:
        """The message if it does not hold."""
        fix = f" -> {self.fix.format(p=p, h=h)}" if self.fix else ""
        return f"{self.id}: {self.why.format(p=p, h=h)}{fix}"


MAPS = {
    "forward": ("segment_map",), "backward": ("segment_map_bwd",),
    "forward in halves": ("begin_forward", "finish_forward"),
    "backward in halves": ("begin_backward", "finish_backward"),
}


def computes_no_gradients(p: Problem, h: Host) -> bool:
    return p.direction != "backward"


@dataclass(frozen=True)
class Capability:
    """One backend's declaration, found as `CAPABILITY` in `kda/backends/<name>/capability.py`.

    A rule that raises is a bug of the backend and propagates.
    """

    backend: str
    rank: int                                # lower is tried first
    summary: str
    rules: tuple[Rule, ...] = ()
    auto_rules: tuple[Rule, ...] = ()        # checked only if the caller did not name the backend
    backward: bool = True                    # False: "auto" picks another backend for the backward pass,
    some_backwards: bool = False             # True: also if rules refuse it and this backend was named
    saves: bool = True                       # False: that other backend also runs training forwards
    saves_opaque: bool = False                  # its backward reads the OpaqueSaved of its forward, or recomputes
    maps: tuple[str, ...] = ()               # functions for kda.parallel that it has: names of MAPS
    composite: bool = False                  # consists of torch operations, which forward-mode AD follows
    archs: tuple[str, ...] = ()              # targets its kernels are built for; empty: no compiled kernels
    stages: tuple[str, ...] = ()  # stages of kda.model.stages, or runs of them, that its launch module can run alone
    proof_dtypes: tuple[str, ...] = ("float32",)    # dtypes of q, k and v in which the stages are proven
    proof_sizes: tuple[int, ...] = (128,)    # K = V of heads with which they are

    def rejections(self, p: Problem, h: Host, named: bool = False) -> list[str]:
        """The message of every broken rule; empty means that this backend accepts the call."""
        rules = self.rules if named else self.rules + self.auto_rules
        if not self.backward:
            rules = (Rule(f"{self.backend}.backward", computes_no_gradients, "it has no backward"), *rules)
        return [r.refusal(p, h) for r in rules if not r.holds(p, h)]

    def broken(self, kind: str, p: Problem, h: Host) -> list[str]:
        """The message of its rule of this kind if broken: "dtype" of sm90 is the rule sm90.dtype."""
        rules = [r for r in self.rules if r.id == f"{self.backend}.{kind}"]
        return [r.refusal(p, h) for r in rules if not r.holds(p, h)]

    @property
    def usual_dtype(self) -> str:
        """The dtype that commands use by default: bfloat16, or else the one that the backend is proven in."""
        return self.proof_dtypes[0] if self.broken("dtype", Problem(), Host()) else Problem.dtype

    @property
    def launch_module(self) -> str:
        return f"kda.backends.{self.backend}.launch"
