"""Triton's `fn[grid](...)` during a capture: a driver whose device is the simulated one.

Triton asks its active driver for the target, compiles, and hands grid and arguments to the driver's launcher. Here
the launcher is `ptxkit.compile.triton`'s, which sends the launch on to the capture. Kernels are cached by device, so
those for a simulated device and those for a real one never meet.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ptxkit.compile import elf
from ptxkit.compile import triton as door

from ..temporary import replaced
from .devices import UNKNOWN_REGISTERS
from .session import CaptureError, Session

FIRST_DEVICE = 1000                          # the device called 1090 is an sm_90: no machine has so many


class Driver:
    """The stand-in for the driver that Triton's runtime asks."""

    def __init__(self, session: Session):
        self.session = session
        self.utils = self
        self.launcher_cls = lambda src, metadata: TritonLauncher(session, src, metadata)
        # there is one device and no cache, and nothing was loaded that could be unloaded
        self.set_current_device = self.clear_cache = self.unload_module = lambda *args: None

    def get_current_device(self) -> int:
        return FIRST_DEVICE + self.session.device.target.number

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return self.session.device.target.cc

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.session.device.target.number, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, kind: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return ty_to_cpp(kind)

    def get_benchmarker(self) -> Any:
        """Autotuning has nothing to measure here: every configuration takes no time, so the first one stays."""
        return lambda call, quantiles=None, **options: [0.0] * len(quantiles or (0.5,))

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(0)

    # utils

    def get_device_properties(self, device: int | None = None) -> dict[str, int]:
        chip = self.session.device
        return {
            "max_shared_mem": chip.shared, "max_num_regs": 65536, "multiprocessor_count": chip.sms, "warpSize": 32,
            "sm_clock_rate": 1_000_000, "mem_clock_rate": 1_000_000, "mem_bus_width": 4096,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[None, int, int, int, int]:
        """Return (module, function, registers, spills, threads at most).  Nothing is loaded; registers and spills are
        what ptxas says in the cubin; spills count words, as Triton's own driver has them."""
        resources = elf.resources(kernel).get(name)
        registers, spills = (resources.registers, resources.spills // 4) if resources else (UNKNOWN_REGISTERS, 0)
        return None, 0, registers or UNKNOWN_REGISTERS, spills, 1024


class TritonLauncher:
    """One compiled kernel.  Triton keeps it for as long as the kernel; it launches into the capture of the day."""

    def __init__(self, session: Session, src: Any, metadata: Any):
        self.constant = [kind == "constexpr" for kind in src.signature.values()]
        self.kernel = door.of(_texts(src, metadata), metadata, src.signature, session.device.target)

    def __call__(self, gx: int, gy: int, gz: int, *more: Any) -> None:
        _stream, _function, _packed, _launch_metadata, _enter, _leave, *args = more
        if gx and gy and gz:
            self.kernel.launch((gx, gy, gz), *(a for a, constant in zip(args, self.constant) if not constant))


@contextlib.contextmanager
def taken(session: Session) -> Iterator[None]:
    """Inside the block Triton's driver is the session's."""
    from triton import testing
    from triton.runtime import autotuner, driver

    before, ours = driver._active, Driver(session)                       # asking for `active` would look for a GPU
    tuned = property(lambda tuner: ours.get_benchmarker())                   # with warmup=, rep= as well
    timed = dict.fromkeys(("do_bench", "do_bench_cudagraph"), _once(session))
    with replaced(autotuner.Autotuner, do_bench=tuned), replaced(testing, **timed), contextlib.ExitStack() as undo:
        undo.callback(driver.set_active, before)
        driver.set_active(ours)
        yield


def _once(session: Session) -> Any:
    """triton.testing.do_bench: one call, and the predicted time; nan without a clock."""

    def do_bench(fn: Any, *_: Any, quantiles: Any = None, return_mode: str = "mean", **options: Any) -> Any:
        before = len(session.runs)
        fn()
        took = session.gpu.milliseconds(before)
        if quantiles is not None:
            return [took] * len(quantiles) if len(quantiles) > 1 else took
        return [took] if return_mode == "all" else took

    return do_bench


def _texts(src: Any, metadata: Any) -> dict[str, Any]:
    """Return PTX and cubin of a kernel that Triton compiled; its launcher is not told, but its cache knows."""
    from triton.runtime.cache import get_cache_manager

    name = src.name[:150]                    # as Triton cuts it
    files = get_cache_manager(metadata.hash).get_group(f"{name}.json") or {}
    if f"{name}.ptx" not in files:
        raise CaptureError(
            f"Triton kept no PTX of {metadata.name}. Unset TRITON_STORE_BINARY_ONLY and compile it again "
            "(TRITON_ALWAYS_COMPILE=1)."
        )
    ptx = _with_file_of(src, Path(files[f"{name}.ptx"]).read_text())
    return {"ptx": ptx, "cubin": Path(files[f"{name}.cubin"]).read_bytes()}


FILE = re.compile(r'^(\s*\.file\s+\d+\s+)"([^"]*)"', re.MULTILINE)
TRITON = f"{os.sep}triton{os.sep}"           # in the path of each of its files, in any environment


def _with_file_of(src: Any, ptx: str) -> str:
    """Triton's cache ignores files: if the same source was first compiled in another one, the PTX names that: the one
    with the same name, or else the only one that is not Triton's own."""
    function = getattr(getattr(src, "fn", None), "fn", None)             # a kernel that was given as IR has none
    if function is None:
        return ptx
    file = os.path.abspath(function.__code__.co_filename)
    named = {match[2] for match in FILE.finditer(ptx)}
    alike = [name for name in named if os.path.basename(name) == os.path.basename(file)]
    other = alike or [name for name in named if TRITON not in name]
    if file in named or len(other) != 1:
        return ptx
    return FILE.sub(lambda match: f'{match[1]}"{file}"' if match[2] == other[0] else match[0], ptx)
