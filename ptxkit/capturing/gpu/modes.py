"""Dispatch modes of the capture itself, which a GPU does not have, so the application does not count them.

A package may run calls with plain tensors by a shorter way if no dispatch mode is active.  It takes that way in a
capture, too.
"""

from __future__ import annotations

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .patching import Patches, knows


class Unseen(TorchDispatchMode):
    """A mode of the capture."""


def put(patches: Patches) -> None:
    """Let the application count the program's own modes alone; all other code counts every mode."""
    every = torch._C._len_torch_dispatch_stack

    def count() -> int:
        modes = every()
        if modes and knows(sys._getframe(1)):
            return sum(not isinstance(torch._C._get_dispatch_stack_at(i), Unseen) for i in range(modes))
        return modes

    patches.put(torch._C, "_len_torch_dispatch_stack", count)
