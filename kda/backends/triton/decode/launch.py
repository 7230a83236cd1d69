"""fused_recurrent_kda on the kernel of kernel.py: one launch a call, nothing read back from the GPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kda.compile.fetching import fetch
from kda.compile.triton import TritonKernel
from kda.host import Host, detect
from kda.problem import Inputs, Problem

from ...common.targets import target_of
from ...common.tensors import in_memory
from .plan import ROWS, Memory, config, grid, numbers, recipe, tensors

Tensor = torch.Tensor


class Prepared(NamedTuple):
    """What calls have in common if their tensors lie alike."""

    kernel: TritonKernel
    programs: int
    numbers: dict[str, float]                # arguments that are no tensors


def recurrent(p: Problem, x: Inputs) -> tuple[Tensor, Tensor | None]:
    """Return o and the final states; with p.inplace they go into x.initial_state, and None is returned for them.

    Slots, counts and offsets on a GPU are taken as kernel.py says, if they are out of range.
    """
    device = x.q.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return recurrent(p, x)
    o, ht = torch.empty(p.B, p.T, p.HV, p.V, dtype=x.q.dtype, device=device), None
    if p.final_state and not p.inplace:
        last = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        ht = torch.empty(p.N, p.HV, *last, dtype=torch.float32, device=device)
    if not p.N:
        return o.zero_(), ht
    state = x.initial_state if p.inplace or x.initial_state is None else in_memory(x.initial_state)
    given = {row: in_memory(getattr(x, row)) for row in ROWS} | {
        "A_log": _dense(x.A_log), "dt_bias": _dense(x.dt_bias), "state": state,
        "cu_seqlens": _dense(x.cu_seqlens, device), "slots": x.ssm_state_indices,
        "accepted": _dense(x.num_accepted_tokens),
    }
    lie = tuple(
        None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in given.values()
    )
    kernel, programs, others = _prepared(p, tuple(given), lie, detect(p.device))
    values = given | others | {"o": o, "ht": ht}
    kernel.launch(programs, *(values[name] for name in kernel.names))
    return o, ht


@functools.lru_cache(maxsize=4096)
def _prepared(p: Problem, names: tuple[str, ...], lie: tuple, host: Host) -> Prepared:
    memory = {
        name: Memory(str(found[0]).removeprefix("torch."), *found[1:]) for name, found in zip(names, lie) if found
    }
    found, c = numbers(p, memory), config(p, host.sms)
    return Prepared(fetch(recipe(p, tensors(p, memory, found), c, target_of(host))), grid(p, c), found)


def _dense(x: Tensor | None, device: torch.device | None = None) -> Tensor | None:
    return None if x is None else in_memory(x.to(device or x.device, non_blocking=True).contiguous())
