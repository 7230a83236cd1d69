"""This machine as dispatch sees machines: from the facts of `kda doctor`, or by asking torch."""

from __future__ import annotations

import dataclasses

from kda.model import host as machines
from kda.model.host import PACKAGES, Host

from .probes import MachineFacts


def default_device(facts: MachineFacts) -> str:
    return "cuda:0" if facts.gpus else "cpu"


def own_host() -> Host:
    """Return what torch, which this imports, calls this machine."""
    from kda.tools.verify import doors

    return machines.detect(doors.default_device())


def host_for(device: str, facts: MachineFacts) -> Host:
    """Return the Host that `kda.model.host.detect` would find, from the facts."""
    versions = tuple((package, facts.versions[package]) for package in PACKAGES if package in facts.versions)
    bare = Host(device, device, system=facts.system, versions=versions)
    if not device.startswith("cuda"):
        return bare
    digits = device.partition(":")[2]
    index = int(digits) if digits.isdigit() else 0
    if index >= len(facts.gpus):
        return dataclasses.replace(bare, name="no such GPU")
    gpu = facts.gpus[index]
    return dataclasses.replace(bare, name=gpu.name, cc=gpu.cc, sms=gpu.sms, smem=gpu.smem, memory=gpu.memory)
