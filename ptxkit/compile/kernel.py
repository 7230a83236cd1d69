"""Kernels that can be launched: built code, and its launches on the GPU or wherever these are sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import driver
from .code import Code, Dim3, addresses, dim3
from .driver import LaunchShape
from .errors import BuildError
from .launching import Launch, LaunchSink, launch_sink


@dataclass(frozen=True)
class Kernel(Code):
    """Code with its launches."""

    def launch(
        self,
        grid: Sequence[int] | int,
        *args: Any,
        block: Sequence[int] | int,
        cluster: Sequence[int] | int = 1,
        dynamic_shared: int = 0,
        stream: int | None = None,
        pdl: bool = False,
        cooperative: bool = False,
        tensors: Mapping[str, Any] | None = None,
        config: Any = None,
    ) -> Any:
        """Run it on the GPU, or wherever `ptxkit.compile.launching.redirect` sends launches.

        `tensors` are those that the kernel may touch, by name, where the arguments do not show them all; `config` is
        what the kernel was built for.
        """
        shape = LaunchShape(dim3(block), dim3(cluster), dynamic_shared, pdl, cooperative)
        grid, values = dim3(grid), addresses(args)
        if (sink := launch_sink()) is None:
            return driver.launch(self, grid, shape, values, args, stream)
        return sink.launch(self._described(grid, shape, values, args, _tensors(args, tensors), config, stream))

    def bound(
        self,
        grid: Sequence[int] | int,
        *numbers: Any,
        block: Sequence[int] | int,
        cluster: Sequence[int] | int = 1,
        dynamic_shared: int = 0,
        pdl: bool = False,
        cooperative: bool = False,
        config: Any = None,
    ) -> Bound:
        """Return a `launch` that still needs the tensors, which come before the numbers."""
        shape, tensors = LaunchShape(dim3(block), dim3(cluster), dynamic_shared, pdl, cooperative), len(self.params)
        tensors -= len(numbers)
        return Bound(self, dim3(grid), [*[0] * tensors, *numbers], range(tensors), shape, config)

    def hold(self, values: Sequence[Any]) -> None:
        """Check what was promised of the arguments of a launch when the kernel was built; here, nothing was."""

    def _described(
        self, grid: Dim3, shape: LaunchShape, values: Sequence[Any], args: Sequence[Any], tensors: Mapping[str, Any],
        config: Any = None, stream: int | None = None,
    ) -> Launch:
        """Describe a launch to a replacement of the driver; `values` are `addresses(args)`."""
        buffer = bytearray(self.layout.size)
        self.write(buffer, values, args)
        block, cluster, dynamic_shared, pdl, cooperative = shape
        args = bytes(buffer)
        return Launch(self, grid, block, cluster, dynamic_shared, args, tensors, pdl, cooperative, config, stream)


class Bound:
    """Launches of a kernel that differ in tensors alone."""

    def __init__(
        self, kernel: Kernel, grid: Dim3, values: Sequence[Any], tensors: Sequence[int], shape: LaunchShape,
        config: Any = None, aligned: Iterable[int] = (),
    ):
        """`values` are the arguments with 0 for each tensor, whose positions are `tensors`; addresses at the positions
        `aligned` must be multiples of 16."""
        self.kernel, self.grid, self.values, self.tensors = kernel, grid, list(values), tuple(tensors)
        self.shape, self.config, self.aligned = shape, config, frozenset(aligned)
        self._ready: dict[int, Any] = {}                                     # device -> the driver's part

    def __call__(self, *tensors: Any) -> Any:
        """Launch with tensors, Places or None.  An address alone is refused: nothing would hold its memory."""
        if (sink := launch_sink()) is not None:
            return self.send(sink, tensors)
        return self.start([0 if x is None else x.data_ptr() for x in tensors])

    def send(self, sink: LaunchSink, tensors: Sequence[Any]) -> Any:
        """Describe the launch to a replacement of the driver."""
        values, named = self._with([0 if x is None else x.data_ptr() for x in tensors]), _tensors(tensors)
        return sink.launch(self.kernel._described(self.grid, self.shape, values, values, named, self.config))

    def start(self, addresses: Sequence[int], stream: int | None = None) -> None:
        """Launch on the GPU with the addresses of tensors that the caller holds."""
        values = self._with(addresses)
        driver.launch(self.kernel, self.grid, self.shape, values, values, stream, ready_on=self._ready)

    def _with(self, addresses: Sequence[int]) -> list[Any]:
        if len(addresses) != len(self.tensors):
            raise BuildError(f"{self.kernel.name} needs {len(self.tensors)} tensors; found {len(addresses)}.")
        values = self.values.copy()
        for position, address in zip(self.tensors, addresses):
            values[position] = address
        if self.aligned:
            self.kernel.hold(values)
        return values

    def described(self, device: int, addresses: Sequence[tuple[int, int] | None]) -> tuple:
        """Return the launch as launch_list.c reads it; an address is (slot, offset), or None for a null pointer."""
        params, buffer = self.kernel.params, bytearray(self.kernel.layout.size)
        self.kernel.write(buffer, self.values, self.values)
        ready, fills = driver.ready(self.kernel, self.shape, device), []
        for position, address in zip(self.tensors, addresses, strict=True):
            if address is not None:
                fills.append((address[0], params[position].offset, address[1], 15 * (position in self.aligned)))
        return (ready.described(self.grid), ready.handle, bytes(buffer), tuple(param.offset for param in params),
                tuple(fills))


def _tensors(args: Sequence[Any], known: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """What the addresses among arguments may point into: what is known of that, or else the arguments that have one."""
    if known is not None:
        return known
    return {f"argument {i}": arg for i, arg in enumerate(args) if hasattr(arg, "data_ptr")}
