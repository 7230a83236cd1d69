"""Which kernels the driver was asked to launch.  Lists of launches that C runs are included.

    with launched(kernels := []):
        step()                               # kernels has one entry for each launch, in order
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from . import driver
from .code import Code

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)             # cuLaunchKernelEx
_listeners: list[list[Code]] = []


@contextlib.contextmanager
def launched(kernels: list[Code]) -> Iterator[None]:
    """Append to `kernels` the kernel of each launch that the driver accepts inside the block.  Lists of launches that
    were made before the first such block of a process go unnoticed: they have the address of the driver's function."""
    _listen(driver._cuda())
    _listeners.append(kernels)
    try:
        yield
    finally:
        _listeners[:] = [each for each in _listeners if each is not kernels]


@functools.cache
def _listen(library: Any) -> None:
    """Put a function before the driver's; it stays there until the process ends, since lists in C have its address."""
    launch = library.cuLaunchKernelEx

    def told(config: int, handle: int, params: int, extra: int) -> int:
        answer = launch(config, handle, params, extra)
        if _listeners and not answer:
            kernel = next(each.kernel for each in driver._HANDLES.values() if each.handle == handle)
            for kernels in _listeners:
                kernels.append(kernel)
        return answer

    library.cuLaunchKernelEx = _FUNCTION(told)
