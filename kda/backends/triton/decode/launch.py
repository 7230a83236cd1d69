"""fused_recurrent_kda on the kernel of kernel.py, decode_step on that of step.py: one launch a call, nothing read back
from the GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from kda.model.host import Host, detect
from kda.model.problem import Inputs, Problem, StepInputs, StepProblem, name_of_dtype
from ptxkit.compile.launch_list import LaunchList

from ...common.routine import described_once
from ...common.tensors import aligned, in_memory, on_device_of, on_its_device
from ...common.triton_launch import ready
from ...common.triton_types import target_of
from . import recurrent_plan, step_plan
from .plan import TensorLayout

Tensor = torch.Tensor
FLAT = ("A_log", "dt_bias", "conv_weight", "conv_bias", "norm_weight", "accepted", "path", "parents")


@on_its_device
def recurrent(p: Problem, x: Inputs) -> tuple[Tensor, Tensor | None]:
    """Return o and the final states; with p.inplace they go into x.initial_state, and None is returned for them.

    Slots, counts and offsets on a GPU are taken as kernel.py says, if they are out of range.
    """
    device = x.q.device
    o, ht = torch.empty(p.B, p.T, p.HV, p.V, dtype=x.q.dtype, device=device), None
    if p.final_state and not p.inplace:
        ht = torch.empty(p.N, *p.state_shape, dtype=torch.float32, device=device)
    if not p.N:
        return o.zero_(), ht
    state = x.initial_state if p.inplace or x.initial_state is None else in_memory(x.initial_state)
    tensors = {row: in_memory(getattr(x, row)) for row in recurrent_plan.ROWS} | {
        "A_log": _dense(x.A_log), "dt_bias": _dense(x.dt_bias), "cu_seqlens": _dense(x.cu_seqlens, device),
        "slots": x.ssm_state_indices, "accepted": _dense(x.num_accepted_tokens), "state": state,
    }
    _launch(recurrent_plan, p, p.device, tensors, o=o, ht=ht)
    return o, ht


@on_its_device
def decode_step(s: StepProblem, x: StepInputs) -> None:
    """Write o into x.out, and update x.states, x.conv_states and x.records in place."""
    _launch(step_plan, s, s.core.device, _as_read(s, x))


def decode_launch(s: StepProblem, x: StepInputs) -> Callable[[StepInputs], None] | None:
    """Return `decode_step` for tensors that lie as these do; None if one of them has to be copied first."""
    tensors = _as_read(s, x)
    if any(tensors[name] is not given for name, given in x._asdict().items()):
        return None
    launches = _launches_of(step_plan, s, s.core.device, tensors, ())
    return on_device_of(lambda x: x.q)(lambda x: launches([*x]))


def _as_read(s: StepProblem, x: StepInputs) -> dict[str, Tensor | None]:
    """Return the tensors of a step as its kernel reads them."""
    tensors = x._asdict()
    for name in FLAT:
        tensors[name] = aligned(tensors[name])
    tensors |= {"beta": in_memory(x.beta), "g": in_memory(x.g)}
    for name in step_plan.rows(s.core):
        if tensors[name] is not None:
            tensors[name] = in_memory(tensors[name] if tensors[name].stride(-1) == 1 else tensors[name].contiguous())
    return tensors


def _launch(
    plan: ModuleType, call: Problem | StepProblem, device: str, tensors: dict[str, Any], **results: Any
) -> None:
    """Launch the kernel of a plan (plan.py); `results` are contiguous tensors that the plan knows."""
    _launches_of(plan, call, device, tensors, tuple(results))([*tensors.values(), *results.values()])


def _launches_of(
    plan: ModuleType, call: Problem | StepProblem, device: str, tensors: dict[str, Any], results: tuple[str, ...]
) -> LaunchList:
    layouts = tuple(
        None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors.values()
    )
    return _prepared(plan, call, layouts, detect(device), results)


@described_once
def _prepared(
    plan: Any, call: Problem | StepProblem, layouts: tuple, host: Host, results: tuple[str, ...]
) -> LaunchList:
    """Return the launch that calls have in common if their tensors lie alike."""
    given = {
        name: TensorLayout(name_of_dtype(layout[0]), *layout[1:])
        for name, layout in zip(plan.TENSORS, layouts, strict=True) if layout
    }
    numbers, config = plan.numbers(call, given), plan.config(call, host.sms)
    recipe = plan.recipe(call, plan.layout(call, given, numbers), config, target_of(host))
    return ready(recipe, plan.grid(call, config), (*plan.TENSORS, *results), tuple(numbers.items()))


def _dense(x: Tensor | None, device: torch.device | None = None) -> Tensor | None:
    return None if x is None else in_memory(x.to(device or x.device, non_blocking=True).contiguous())
