"""torch.cuda during a capture: a table of what it answers."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ..devices import ATTRIBUTES, PROPERTIES
from ..session import CaptureError
from . import driver, graphs, streams
from .patching import Patches, Table
from .state import Gpu, only

TOOLKIT = "13.0"                             # the version of CUDA, where torch was built for none


class Properties(types.SimpleNamespace):
    """torch.cuda.get_device_properties()."""

    @classmethod
    def from_gpu(cls, gpu: Gpu) -> Properties:
        known = {name: ATTRIBUTES[number](gpu.chip) for number, (name, _) in PROPERTIES.items() if name != "-"}
        return cls(name=gpu.name, total_memory=gpu.memory, **known, is_integrated=0, is_multi_gpu_board=0,
                   gcnArchName=gpu.name)


def _nothing(gpu: Gpu, *args: Any, **kwargs: Any) -> None:
    """Do nothing: nothing is cached, pending or marked."""


def _seed(gpu: Gpu, seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _current(gpu: Gpu, device: Any = None) -> Any:
    only(device)
    return gpu.stream or _default(gpu)


def _default(gpu: Gpu, device: Any = None) -> Any:
    only(device)
    return streams.Stream(stream_ptr=streams.DEFAULT)


def _synchronize(gpu: Gpu, device: Any = None) -> None:
    gpu.order.host_waits()


def _set_stream(gpu: Gpu, stream: Any) -> None:
    gpu.stream = stream


def _allocated(gpu: Gpu, device: Any = None) -> int:
    return gpu.allocated()


def _peak(gpu: Gpu, device: Any = None) -> int:
    gpu.allocated()
    return gpu.peak


def _reset_peak(gpu: Gpu, device: Any = None) -> None:
    gpu.peak = 0


def _stats(gpu: Gpu, device: Any = None) -> dict[str, Any]:
    now = gpu.allocated()
    return {f"{kind}_bytes.all.{when}": n for kind in ("allocated", "reserved", "active")
            for when, n in (("current", now), ("peak", gpu.peak))}


def _of_graphed_callables(gpu: Gpu, *args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        "torch.cuda.make_graphed_callables is not simulated. Capture a graph with torch.cuda.graph, or call the "
        "callables as they are."
    )


class _Cudart:
    """torch.cuda.cudart(): what profilers are told."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0


# in torch.cuda and in the module of torch.cuda that defines it
ANSWERS: Table = {
    **dict.fromkeys(("is_available", "_is_compiled", "is_initialized", "is_tf32_supported"), lambda gpu: True),
    **dict.fromkeys((
        "init", "_lazy_init", "_sleep", "empty_cache", "ipc_collect", "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction",
    ), _nothing),
    "device_count": lambda gpu: 1,
    "current_device": lambda gpu: 0,
    "set_device": lambda gpu, device: only(device) and None,
    **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), lambda gpu, device: only(device)),
    "get_device_name": lambda gpu, device=None: gpu.name if only(device) == 0 else "",
    "get_device_capability": lambda gpu, device=None: gpu.chip.target.cc if only(device) == 0 else None,
    "get_device_properties": lambda gpu, device=None: Properties.from_gpu(gpu) if only(device) == 0 else None,
    "can_device_access_peer": lambda gpu, device, peer: False,
    "get_arch_list": lambda gpu: [gpu.chip.target.spelling.rstrip("af")],
    "is_bf16_supported": lambda gpu, including_emulation=True: True,
    "synchronize": _synchronize,
    "cudart": lambda gpu: _Cudart(),
    "current_stream": _current,
    "default_stream": _default,
    "get_stream_from_external": lambda gpu, data_ptr, device=None: streams.Stream(stream_ptr=data_ptr),
    "set_stream": _set_stream,
    "stream": lambda gpu, stream: streams.entered(gpu, stream),
    "is_current_stream_capturing": lambda gpu: gpu.graph is not None,
    "graph_pool_handle": lambda gpu: (0, 1),
    "make_graphed_callables": _of_graphed_callables,
    **dict.fromkeys(("memory_allocated", "memory_reserved"), _allocated),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _peak),
    "memory_stats": _stats,
    "mem_get_info": lambda gpu, device=None: driver.memory_info(gpu),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), _reset_peak),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), _seed),
    **dict.fromkeys(("seed", "seed_all"), lambda gpu: torch.default_generator.seed() and None),
    "initial_seed": lambda gpu: torch.default_generator.initial_seed(),
    "get_rng_state": lambda gpu, device="cuda": torch.default_generator.get_state(),
    "get_rng_state_all": lambda gpu: [torch.default_generator.get_state()],
    "set_rng_state": lambda gpu, state, device="cuda": torch.default_generator.set_state(state) and None,
    "set_rng_state_all": lambda gpu, states: torch.default_generator.set_state(states[0]) and None,
}
NVTX = ("range_push", "range_pop", "mark", "range_start", "range_end")
# Functions of torch._C: a CPU build has none of them, and is told from others by lacking _cuda_getDeviceCount.
INTERNAL: Table = {
    "_cuda_getDevice": lambda gpu: 0,
    "_cuda_setDevice": lambda gpu, device: only(device) and None,
    "_cuda_exchangeDevice": lambda gpu, device: only(device),
    "_cuda_getCurrentRawStream": lambda gpu, device=0: _current(gpu).cuda_stream,
    "_cuda_isCurrentStreamCapturing": lambda gpu: gpu.graph is not None,
    "_cuda_synchronize": _synchronize,
}
ACCELERATOR: Table = {name: ANSWERS[name] for name in (
    "is_available", "device_count", "current_stream", "set_stream", "synchronize", "empty_cache", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats",
)} | {
    "current_accelerator": lambda gpu, check_available=False: torch.device("cuda"),
    **dict.fromkeys(("current_device_index", "current_device_idx"), lambda gpu: 0),
    "set_device_index": ANSWERS["set_device"],
}


def put(patches: Patches) -> None:
    """Let torch.cuda answer for the capture's GPU until `patches` are undone."""
    homes = [torch.cuda, torch.cuda.memory, torch.cuda.graphs, torch.cuda.streams, torch.cuda.random]
    for home in homes:
        patches.answer(home, {n: a for n, a in ANSWERS.items() if home is torch.cuda or n in vars(home)})
        for cls in (streams.Stream, streams.ExternalStream, streams.Event, graphs.CUDAGraph, graphs.graph):
            if cls.__name__ in vars(home):
                patches.put(home, cls.__name__, cls)
    patches.answer(torch.cuda.nvtx, dict.fromkeys(NVTX, _nothing))
    patches.answer(torch._C, INTERNAL)
    if accelerator := getattr(torch, "accelerator", None):
        patches.answer(accelerator, {n: a for n, a in ACCELERATOR.items() if hasattr(accelerator, n)})
    patches.answer(torch.backends.cuda, {"is_built": lambda gpu: True})
    patches.put(torch.cuda, "default_generators", (torch.default_generator,))
    if torch.version.cuda is None:
        patches.put(torch.version, "cuda", TOOLKIT)
