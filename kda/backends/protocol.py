"""The functions of a backend's modules, besides `capability.py`, that dispatch, `kda verify` and `kda compile` call.
docs/backends.md says what their results must satisfy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kda.model.host import Host
from kda.model.problem import Inputs, Problem, StepInputs, StepProblem

if TYPE_CHECKING:
    from torch import Tensor

    from kda.backends.common.directions import Direction
    from kda.model.bundles import Grads, OpaqueSaved, Outputs, Products, Save, Saved, SegmentSummary


class LaunchModule(Protocol):
    """`launch.py`: imported at its first use; it may import torch and the compiler."""

    def forward(self, p: Problem, x: Inputs, save: Save) -> Outputs:
        """Runs a forward; `save` says what to save for the backward, in `Outputs.saved`."""

    def backward(
        self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | OpaqueSaved | None
    ) -> Grads:
        """Recomputes what was not saved, or was saved by another backend.  For backends that declare `backward`."""

    def forward_direction(self, p: Problem, save: Save, offsets: str | None) -> Direction:
        """Returns that forward as a routine; `offsets` is the dtype of cu_seqlens.  Backends whose calls are routines
        have this and the next."""

    def backward_direction(self, p: Problem, save: Save, offsets: str | None, dht: bool) -> Direction:
        """Returns that backward as a routine: `save` was saved, by any backend; `dht`: final states have gradients."""

    def saved_bytes(self, p: Problem, save: Save) -> int:
        """Returns the bytes of an OpaqueSaved.  Backends that declare `saves_opaque` have it."""

    def segment_map(self, p: Problem, x: Inputs, transition: bool) -> SegmentSummary:
        """Returns how one sequence (B = 1, T >= 1, not packed) maps a state, (1, HV, K, ..): `added` is its final
        state, from x.initial_state if given; without `transition` M is meaningless.  Backends whose `maps` have
        "forward" have it."""

    def segment_map_bwd(self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
        """Returns the gradient of the state that enters that sequence, (1, HV, K, V) in float32, from dht (1, HV, K, V)
        if given.  No other gradient is computed.  Backends whose `maps` have "backward" have it."""

    def begin_forward(
        self, p: Problem, x: Inputs, save: Save, of_map: bool
    ) -> tuple[SegmentSummary | None, Any] | None:
        """Returns the map of a call whose tokens are all of one sequence, if it is wanted, and what `finish_forward`
        reads.  x.initial_state has not come yet.  None if all at once is faster.  Backends whose `maps` have
        "forward in halves" have this and the next."""

    def finish_forward(self, p: Problem, x: Inputs, begun: Any) -> Outputs:
        """Returns the results of the forward; x.initial_state has come."""

    def begin_backward(
        self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | OpaqueSaved | None
    ) -> tuple[Tensor, Any] | None:
        """Returns the gradients of the states that enter, as far as dht tells, and what `finish_backward` reads.  None
        if that would take more memory than a backward.  Backends whose `maps` have "backward in halves" have this and
        the next."""

    def finish_backward(self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, begun: Any) -> Grads:
        """Returns the gradients; dht is whole now."""

    def prefill(self, p: Problem, x: Inputs) -> Tensor:
        """Returns o of a forward from and to slots of a pool, x.initial_state.  Backends whose rules let such calls
        pass have it."""

    def recurrent(self, p: Problem, x: Inputs) -> tuple[Tensor, Tensor | None]:
        """Returns o and the final states, or None if `p.inplace` writes them into x.initial_state.  Backends whose
        rules accept such calls have it."""

    def decode_step(self, s: StepProblem, x: StepInputs) -> None:
        """Writes o into x.out and updates x.states, x.conv_states and x.records in place.  Backends whose rules let
        calls with op="decode" pass have it."""

    def decode_launch(self, s: StepProblem, x: StepInputs) -> Callable[[StepInputs], None] | None:
        """Returns `decode_step` of calls whose tensors lie as these do; None if that is no shorter.  Backends that
        launch a step as one kernel have it."""

    def stage(
        self, name: str, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
    ) -> Mapping[str, Tensor | None]:
        """Runs a stage, or a run of them, that the capability declares, alone."""

    def rounded_to(self, p: Problem) -> Mapping[str, str]:
        """Names of tensors of kda.model.stages that are rounded to less than float32 -> dtypes."""


class PlanModule(Protocol):
    """`plan.py`: it needs neither torch nor a compiler.  Backends that declare `archs` have it."""

    def recipes(self, p: Problem, host: Host, training: bool = True) -> Sequence[Any]:
        """Returns every kernel that a call of this class can want, however long and many its sequences are; unless it
        is `training`, without those that only gradients need."""

    def recipes_of_call(self, p: Problem, host: Host, offsets: str | None, save: Save) -> Sequence[Any]:
        """Returns the kernels of this forward, which saves `save`, or of this backward, for which that was saved;
        `offsets` is the dtype of cu_seqlens.  Lengths of sequences are not known: some may not be launched."""

    def call_of_stage(self, name: str, p: Problem, packed: bool) -> tuple[Problem, Save]:
        """Returns the call whose kernels a stage launches, if `p` is that of the whole call; and what it saves."""
