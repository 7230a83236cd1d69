"""The groups, and the process that each runs in: one that hangs or fails costs its own time limit and no more.

Processes are forked from one that has imported torch and has not touched the GPU. A child sends what it finds through
a pipe, message by message, so that everything up to a failure is kept.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ptxkit.compile.target import Target, code_for

from .bench import Bench, Skip
from .figures import Figure

_FORK = multiprocessing.get_context("fork")
WARM_UP = 400_000_000                        # clocks of a spin that brings the GPU's clock up
LATE = 5.0                                   # seconds that a killed child has to go


class Group(NamedTuple):
    number: int                              # in the list of what a clock needs
    limit: float                             # seconds


GROUPS = {
    "fetch": Group(1, 25), "issue": Group(2, 30), "shared": Group(3, 20), "mma": Group(4, 12), "wgmma": Group(5, 25),
    "memory": Group(6, 45), "bulk": Group(7, 30), "barriers": Group(8, 15), "launches": Group(8, 15),
    "clock": Group(9, 20), "tcgen05": Group(10, 30),
}


class Message(NamedTuple):
    kind: str                                # figure, skip, failed, done
    content: Any


class FoundGpu(NamedTuple):
    name: str
    cc: tuple[int, int]
    sms: int
    driver: str

    @property
    def target(self) -> Target | None:
        return code_for(self.cc)


def the_gpu() -> FoundGpu | None:
    """Return what torch says of the GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    driver = ""
    with contextlib.suppress(Exception):     # the management library may be missing
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    return FoundGpu(properties.name, (properties.major, properties.minor), properties.multi_processor_count, driver)


def in_child(work: Callable[[Callable[[Message], Any]], Any], limit: float) -> Iterator[Message]:
    """Yield what `work` sends from a process of its own, until it is done or its time is over."""
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_run, args=(work, sender), daemon=True)
    child.start()
    sender.close()
    ends = time.monotonic() + limit
    try:
        while receiver.poll(max(ends - time.monotonic(), 0)):
            message = receiver.recv()
            yield message
            if message.kind in ("done", "failed", "skip"):
                return
        yield Message("failed", f"no end after {limit:.0f} seconds")
    except EOFError:
        child.join(LATE)
        yield Message("failed", f"the process ended with {child.exitcode}")
    finally:
        if child.is_alive():
            child.join(0.5)
        if child.is_alive():
            child.kill()
            child.join(LATE)
        receiver.close()


def _run(work: Callable, pipe: Any) -> None:
    try:
        work(pipe.send)
        pipe.send(Message("done", None))
    except Skip as why:
        pipe.send(Message("skip", str(why)))
    except BaseException as error:
        pipe.send(Message("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"))
    finally:
        pipe.close()
        os._exit(0)                          # a context that failed may hang when it is taken down


def module_of(group: str) -> Any:
    return importlib.import_module(f".{group}", __package__)


def measuring(group: str, gpu: FoundGpu) -> Callable[[Callable[[Message], Any]], None]:
    def work(send: Callable[[Message], Any]) -> None:
        torch.cuda._sleep(WARM_UP)
        torch.cuda.synchronize()

        def report(figure: Figure) -> None:
            send(Message("figure", figure))

        module_of(group).measure(Bench(group, gpu.target, report, "gpu", gpu.sms))
        torch.cuda.synchronize()

    return work


def checking(group: str, target: Target, way: str) -> Callable[[Callable[[Message], Any]], None]:
    """Build the kernels of a group and look at their machine code ("dry"), or run few trips on a CPU, too
    ("simulated"): results are right or wrong, clocks mean nothing. A figure is sent where something is wrong."""

    def work(send: Callable[[Message], Any]) -> None:
        from ptxkit import capture

        def report(figure: Figure) -> None:
            if figure.fault:
                send(Message("figure", figure))

        if way == "dry":
            module_of(group).measure(Bench(group, target, report, way))
            return
        with capture(arch=target.spelling) as session:
            module_of(group).measure(Bench(group, target, report, way, sms=4))
        for finding in session.findings[:5]:
            report(Figure(group, "finding", 0, 0, 0, "", 1, str(finding)))

    return work
