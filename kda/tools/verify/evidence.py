"""Levels of evidence.  The words are distinct: `simulated` is not `executed`."""

from __future__ import annotations

import enum
import importlib
from typing import NamedTuple

from kda.errors import KdaError
from kda.model.stages import find
from kda.routing.capability import Capability
from ptxkit.compile.target import Target, parse


class Evidence(enum.IntEnum):
    SIMULATED = 1                            # its PTX ran on a CPU: the numbers agree, and nothing races or deadlocks
    EXECUTED = 2                             # it ran on the hardware it is for and the numbers agree

    @property
    def word(self) -> str:
        return self.name.lower()


class Proof(NamedTuple):
    """What one prover found about one stage."""

    passed: bool
    says: str                                # the cell of the table: "64 regs, 0 spill", "o 0.31 of budget"
    details: tuple[str, ...] = ()            # lines under the row when it failed


# The provers of a stage: module and function, called with (backend, stage, target); both import torch.
PROVERS = {
    Evidence.SIMULATED: ("kda.tools.verify.simulated", "prove_simulated"),
    Evidence.EXECUTED: ("kda.tools.verify.parity", "prove_executed"),
}


def provable(c: Capability) -> tuple[Evidence, ...]:
    """Return what can be proven of a backend: each stage can be executed, and simulated if it consists of kernels."""
    return tuple(level for level in Evidence if c.stages and (c.archs or level is not Evidence.SIMULATED))


def simulated_as(c: Capability, target: Target | None) -> Target:
    """Return the arch that the simulator stands in for: the backend's first one if none is named."""
    return target or parse(c.archs[0])


def stages_of(c: Capability) -> tuple[str, ...]:
    """Return the stages and runs of stages that it declares."""
    for name in c.stages:
        try:
            find(name)
        except ValueError as error:
            raise KdaError(f"the backend {c.backend}, `stages` in its capability.py: {error}") from None
    return c.stages


def prove(level: Evidence, backend: str, stage: str, target: Target | None) -> Proof:
    module, function = PROVERS[level]
    return getattr(importlib.import_module(module), function)(backend, stage, target)
