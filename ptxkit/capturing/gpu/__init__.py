"""The GPU that host code finds during a capture, whatever it asks: torch, torch.cuda, cuda-python.

| part | stands in for |
|---|---|
| `tensors.py` | tensors of the GPU, which lie in the CPU's memory; `device="cuda"`, `.cuda()`, `.is_cuda` |
| `allocations.py` | the memory of tensors: it comes from the capture's arena |
| `modes.py` | dispatch modes: the application counts those of the program, as on a GPU |
| `operators.py` | custom operators with a kernel for CUDA alone |
| `torch_cuda.py` | torch.cuda: the device, its streams and events (`streams.py`), graphs (`graphs.py`) |
| `bindings.py` | cuda.bindings.driver and cuda.bindings.runtime (`driver.py`, `images.py`) |

Everything is there for the capture's own thread, until the block ends; in `ptxkit simulate` for those that the script
starts as well (`threads.py`). The application itself asks `ptxkit.standing` and sees tensors where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..session import Session
from . import bindings, modes, torch_cuda
from .allocations import Allocations
from .patching import Patches
from .state import Gpu
from .tensors import standing_in


@contextlib.contextmanager
def present(session: Session) -> Iterator[None]:
    """Inside the block there is a GPU."""
    gpu = session.gpu = Gpu(session)
    with Patches() as patches, standing_in(gpu, patches), Allocations(gpu.arena):
        modes.put(patches)
        torch_cuda.put(patches)
        bindings.put(patches)
        yield
        gpu.reused(all_streams=True)
