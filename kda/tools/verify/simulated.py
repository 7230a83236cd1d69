"""The evidence `simulated`: kernels run from their PTX on this CPU; results and behaviour are checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from kda.model.host import host_of, standing_in
from kda.model.problem import Problem
from kda.routing.dispatch import Choice
from ptxkit.compile.target import Target

from .cases import Case
from .doors import Door
from .evidence import Proof, simulated_as
from .parity import prove

Tensor = torch.Tensor


class SimulatedDoor(Door):
    """A backend as it is on a GPU that is not present.  `findings` has the simulator's findings: for kernels that
    were written to the last instruction, also of rules that compilers break."""

    def __init__(self, name: str, target: Target, **options):
        super().__init__(name, "cpu")
        self.target, self.options = target, dict(strict=name != "triton") | options
        self.findings: list = []
        self.launches = 0

    def __str__(self) -> str:
        return f"{self.name} on a simulated {self.target.spelling}"

    def weighed(self, problem: Problem, requested: str) -> Choice:
        with standing_in(host_of(self.target.spelling)):
            return super().weighed(problem, requested)

    def call(self, case: Case, backward: bool, **keywords) -> dict[str, Tensor]:
        with self.simulated():
            return super().call(case, backward, **keywords)

    def stage(self, name: str, case: Case, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        with self.simulated():
            return super().stage(name, case, tensors)

    @contextlib.contextmanager
    def simulated(self) -> Iterator[None]:
        """Send launches to the simulator, and let the host look like the target."""
        from ptxkit import capture

        with capture(arch=self.target.spelling, **self.options) as session:
            yield
        self.launches += len(session.runs)
        self.findings += session.findings


def prove_simulated(backend: str, stage: str, target: Target | None) -> Proof:
    """Prove a stage from its PTX, fed by the oracle: results within budget and no findings."""
    door = SimulatedDoor(backend, simulated_as(Door(backend).capability, target))
    proof = prove(door, stage)
    if not door.launches:
        return Proof(False, "FAIL", (f"{stage}: no kernel was launched: nothing was simulated",))
    objections = tuple(f"{stage}: {line}" for finding in door.findings for line in str(finding).splitlines())
    return Proof(proof.passed and not objections, proof.says, proof.details + objections)
