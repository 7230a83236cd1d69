"""The machine: one device and the installed packages.  Only `detect` queries it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptxkit import standing
from ptxkit.standing import standing_in as standing_in  # a Host, for which CPU tensors stand in

if TYPE_CHECKING:
    from ptxkit.chips import Chip

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "cuda-bindings", "apache-tvm-ffi")


@dataclass(frozen=True)
class Host:
    device: str = "cpu"                          # torch's name for it: "cpu", "cuda:0"
    name: str = ""                               # "NVIDIA H200"
    cc: tuple[int, int] | None = None            # compute capability; None without a GPU
    sms: int = 0
    smem: int = 0                                # bytes of shared memory that a block may request
    memory: int = 0                              # bytes of device memory
    system: tuple[str, str] = ("", "")           # ("Linux", "x86_64")
    versions: tuple[tuple[str, str], ...] = ()   # installed packages only
    simulated: bool = False                      # a GPU that the simulator stands in for, with tensors of the CPU

    def __hash__(self) -> int:
        return hash((self.device, self.cc, self.sms))        # a part, because every call looks something up by it

    def version(self, package: str) -> str | None:
        return dict(self.versions).get(package)

    def has(self, package: str) -> bool:
        return self.version(package) is not None

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda") or self.simulated

    def __str__(self) -> str:
        if self.cc is None:
            return self.name or self.device
        return f"{self.name} ({self.cc[0]}.{self.cc[1]})"


@functools.cache
def installed_versions() -> tuple[tuple[str, str], ...]:
    versions = []
    for package in PACKAGES:
        try:
            versions.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(versions)


def gpu_of(arch: str) -> Host:
    """Return a GPU of `arch` with tensors of its own, as the simulator knows it."""
    return dataclasses.replace(host_of(arch), device="cuda:0", simulated=False)


def supposed(arch: str) -> Host:
    """Return a machine with such a GPU, on which kda is installed with all that it needs."""
    gpu = gpu_of(arch)
    versions = tuple((package, gpu.version(package) or "supposed") for package in PACKAGES)
    return dataclasses.replace(gpu, name=arch, system=("Linux", "x86_64"), versions=versions)


def host_of(arch: str) -> Host:
    """Return the host that a capture of `arch` shows while CPU tensors stand for those of such a GPU."""
    from ptxkit.chips import CHIPS, number_of

    return _host_with(CHIPS[number_of(arch)])


@functools.cache
def _host_with(chip: Chip) -> Host:
    from ptxkit import limits

    return Host(
        device=f"simulated {chip.target.spelling}",
        name=f"simulated {chip.name}",
        cc=chip.target.cc,
        sms=chip.sms,
        smem=chip.shared,
        memory=limits.GLOBAL,
        system=(platform.system(), platform.machine()),
        versions=installed_versions(),
        simulated=True,
    )


def stand_in() -> Host | None:
    """Return what stands in for the machine: the chip of a capture, or the Host of a `standing_in`; else None."""
    instead = standing.stand_in()
    return instead if instead is None or isinstance(instead, Host) else _host_with(instead)


def detect(device: str = "cpu") -> Host:
    """The host, for one torch device."""
    return stand_in() or _examined(device)


@functools.cache
def _examined(device: str) -> Host:
    system = (platform.system(), platform.machine())
    if not device.startswith("cuda"):
        return Host(device=device, name=device, system=system, versions=installed_versions())
    import torch

    properties = torch.cuda.get_device_properties(device)
    return Host(
        device=device,
        name=properties.name,
        cc=(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        smem=getattr(properties, "shared_memory_per_block_optin", 0),
        memory=properties.total_memory,
        system=system,
        versions=installed_versions(),
    )
