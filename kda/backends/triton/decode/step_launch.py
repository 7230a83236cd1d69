"""decode_step on the kernel of step.py: one launch a call, nothing read back from the GPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kda.compile.fetching import fetch
from kda.compile.triton import TritonKernel
from kda.host import Host, detect
from kda.problem import Step, StepInputs

from ...common.targets import target_of
from ...common.tensors import aligned, in_memory
from . import step_plan
from .plan import Memory
from .step_plan import ROWS

Tensor = torch.Tensor
FLAT = ("A_log", "dt_bias", "conv_weight", "conv_bias", "norm_weight", "accepted", "path", "parents")


class Prepared(NamedTuple):
    """What calls have in common if their tensors lie alike."""

    kernel: TritonKernel
    programs: int
    numbers: dict[str, float]                # arguments that are no tensors


def decode_step(s: Step, x: StepInputs) -> None:
    """Write o into x.out, and update x.states, x.conv_states and x.records in place."""
    device = x.q.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return decode_step(s, x)
    given = x._asdict()
    for name in FLAT:
        given[name] = aligned(given[name])
    for name in ROWS:
        if given[name] is not None:
            given[name] = in_memory(given[name] if given[name].stride(-1) == 1 else given[name].contiguous())
    given["beta"] = in_memory(x.beta)
    lie = tuple(
        None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in given.values()
    )
    kernel, programs, others = _prepared(s, lie, detect(s.core.device))
    values = given | others
    kernel.launch(programs, *(values[name] for name in kernel.names))
    return None


@functools.lru_cache(maxsize=4096)
def _prepared(s: Step, lie: tuple, host: Host) -> Prepared:
    memory = {
        name: Memory(str(found[0]).removeprefix("torch."), *found[1:])
        for name, found in zip(StepInputs._fields, lie) if found
    }
    found = step_plan.numbers(s, memory)
    built = step_plan.recipe(s, step_plan.layout(s, memory, found), step_plan.config(s, host.sms), target_of(host))
    return Prepared(fetch(built), step_plan.grid(s), found)
