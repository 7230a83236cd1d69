"""CUDA graphs during a capture: what a block launched runs again at each replay.

While a graph is captured its kernels do not run, as on a GPU. torch's own operators run on the CPU and are noted with
their results; a replay computes them again and writes into the same tensors. An operator of the program that launches
kernels is noted as one, too, and called again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ptxkit.compile.launching import Launch

from .. import memory
from ..arena import Heap
from .modes import Unseen
from .streams import gpu_of
from .tensors import BUILTIN


class Pool:
    """The memory that a graph allocates: it stays the graph's when its tensors end."""


class CUDAGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False):
        self.gpu = gpu_of("CUDAGraph")
        self.steps: list[Callable[[], Any]] = []
        self._pool: Pool | None = None
        self._noting: contextlib.ExitStack | None = None
        self._inside = 0                     # depth of calls within an operator that is noted as a whole

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if self.gpu.graph is not None:
            raise RuntimeError("a CUDA graph is being captured already")
        self.steps, self._pool = [], Pool()
        self.gpu.graph, self.gpu.arena.pool, self._noting = self, self._pool, contextlib.ExitStack()
        self._noting.enter_context(_Noted(self))

    def capture_end(self) -> None:
        if self.gpu.graph is not self or self._noting is None:
            raise RuntimeError("capture_end() without capture_begin()")
        self._noting.close()
        self.gpu.graph = self.gpu.arena.pool = self._noting = None

    def launched(self, launch: Launch) -> None:
        """Record a launch while the graph is captured: it waits for a replay."""
        if self._inside:
            return
        arena, tensors = self.gpu.arena, launch.tensors and memory.behind(launch.tensors)
        lost = frozenset(block.address for block in Heap.from_args(arena, launch.args).given if block.freed is not None)
        known = tensors and {name: arena.without_owner(tensor) for name, tensor in tensors.items()}
        again = replace(launch, stream=None, tensors=known)                  # a replay is in one stream
        self.steps.append(lambda: self.gpu.session.launch(again, lost))

    def replay(self) -> None:
        if self.gpu.graph is not None:
            raise RuntimeError("a CUDA graph cannot be replayed while one is being captured")
        for step in self.steps:
            step()

    def reset(self) -> None:
        self.steps, self._pool = [], None

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def instantiate(self, debug_path: str = "") -> None:
        """Do nothing: a graph always is instantiated, and there is nothing to dump."""

    enable_debug_mode = debug_dump = instantiate


class _Noted(Unseen):
    """Notes the operators that run while it is on."""

    def __init__(self, graph: CUDAGraph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        is_operator = func.namespace not in BUILTIN
        self.graph._inside += is_operator
        try:
            result = func(*args, **kwargs)
        finally:
            self.graph._inside -= is_operator
        if not func.is_view and not func.__name__.startswith(("empty", "new_empty", "detach", "set_")):
            step = tree_map(self._without_owner, (args, kwargs, result))
            self.graph.steps.append(lambda: _repeated(func, *step))
        return result

    def _without_owner(self, value: Any) -> Any:
        return self.graph.gpu.arena.without_owner(value) if type(value) is torch.Tensor else value


def _repeated(func: Any, args: tuple, kwargs: dict, result: Any) -> None:
    """Run an operator again and copy its results into the tensors that it returned then."""
    for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs))):
        if isinstance(old, torch.Tensor) and old is not new and old.data_ptr() != new.data_ptr():
            old.data.copy_(new.data)         # as a replay on a GPU, of which autograd knows nothing


class graph:
    """torch.cuda.graph: captures what the block does."""

    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None,
                 capture_error_mode: str = "thread_local"):
        self.cuda_graph = cuda_graph

    def __enter__(self) -> None:
        self.cuda_graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        self.cuda_graph.capture_end()
