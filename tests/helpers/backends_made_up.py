"""Backends that tests make up: the reference under another name, but for what is replaced."""

from types import SimpleNamespace

from kda.backends.reference import launch
from kda.routing import dispatch

ALL = dispatch.capabilities()
REFERENCE = [c for c in ALL if c.backend == "reference"]


def declare(monkeypatch, capability, others=REFERENCE, **replaced):
    """Make calls, `kda verify` and `kda selftest` see a backend beside others; `replaced` are functions that it runs
    instead of those of the reference's launch module."""
    module, real = SimpleNamespace(**vars(launch) | replaced), dispatch.launcher

    def launcher(name):
        return module if name == capability.backend else real(name)

    for place in ("kda.routing.dispatch", "kda.tools.verify.doors"):
        monkeypatch.setattr(f"{place}.capabilities", lambda: (capability, *others))
    for place in ("kda.routing.dispatch", "kda.tools.verify.doors", "kda.calls.autograd", "kda.calls.plain"):
        monkeypatch.setattr(f"{place}.launcher", launcher)
    for memo in ("_decided", "_routes"):
        monkeypatch.setattr(dispatch, memo, {})
