"""Custom operators during a capture: those with a kernel for CUDA run it, on tensors of the CPU.

An operator's kernel is chosen by where its tensors lie, which is the CPU. So an operator that has a kernel for CUDA
gets it as its kernel for the CPU as well, until the block ends; the operator's autograd is above and stays. torch
switches the mode off inside an operator; its code belongs to the program, so it is on again there.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch._ops import OpOverload

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class Operators(contextlib.ExitStack):
    """The operators that were called."""

    def __init__(self, mode: Any):
        super().__init__()
        self.mode, self._seen = mode, set[str]()

    def call(self, operator: OpOverload, args: tuple, kwargs: dict) -> Any:
        self._bridge(operator)
        with self.mode.again():
            return torch._C._dispatch_call_boxed(operator._handle, *args, **kwargs)

    def _bridge(self, operator: OpOverload) -> None:
        name = operator.name()
        if name in self._seen:
            return
        self._seen.add(name)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            return

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            with self.mode.again():
                return operator.redispatch(CUDA, *args, **kwargs)

        library = torch.library.Library(operator.namespace, "IMPL")
        self.callback(library._destroy)
        over = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        options = {"allow_override": True} if over else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of an override, which is meant
            library.impl(name.split("::")[1], kernel, "CPU", with_keyset=True, **options)
