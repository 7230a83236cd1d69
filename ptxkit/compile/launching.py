"""Where launches go: to the GPU's driver, or where `redirect` sends them.

The simulator redirects launches inside a `with` block, only in that thread (or task); this module does not depend on
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import driver
from .code import Code, Dim3


@dataclass(frozen=True)
class Launch:
    """One launch, as a driver gets it; the same for every compiler."""

    kernel: Code
    grid: Dim3                               # CTAs
    block: Dim3                              # threads of a CTA
    cluster: Dim3                            # CTAs of a cluster
    dynamic_shared: int                      # bytes of a CTA
    args: bytes = field(repr=False)          # the flat parameter buffer
    # what the addresses in it may point into, by name; None where that is not known
    tensors: Mapping[str, Any] | None = field(repr=False)
    pdl: bool = False                        # may start before the launch ahead of it has ended
    cooperative: bool = False                # all CTAs run at once
    config: Any = None                       # the configuration that the kernel was built for, if known
    stream: int | None = None                # None: the current one


class LaunchSink(Protocol):
    """A replacement for the driver."""

    def launch(self, launch: Launch) -> Any: ...

    def call(self, compiled: Any, args: tuple, kwargs: dict) -> Any:
        """Call a host function of the CuTe DSL so that its launches come here."""

    def tensor_map(self, **fields: Any) -> bytes:
        """The 128 bytes of a tensor map; the fields are those of `driver.tensor_map`."""


_SINK: ContextVar[LaunchSink | None] = ContextVar("ptxkit.launch_sink", default=None)


def launch_sink() -> LaunchSink | None:
    """The current destination of launches; None is the driver."""
    return _SINK.get()


@contextlib.contextmanager
def redirect(to: LaunchSink) -> Iterator[None]:
    """Send launches that this thread makes inside the block to `to`."""
    token = _SINK.set(to)
    try:
        yield
    finally:
        _SINK.reset(token)


def tensor_map(**fields: Any) -> bytes:
    """A tensor map for later launches, encoded by their destination."""
    sink = launch_sink()
    return driver.tensor_map(**fields) if sink is None else sink.tensor_map(**fields)
