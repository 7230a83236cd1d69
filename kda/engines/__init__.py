"""kda inside inference engines, by their own plug-in mechanisms: installing kda beside an engine is enough.

  vLLM      entry point vllm.general_plugins: its layer of Kimi-Linear is replaced by a subclass (vllm.py)
  SGLang    entry point sglang.srt.plugins: "kda" becomes a name for --linear-attn-{prefill,decode}-backend (sglang.py)

KDA_VLLM=0 and KDA_SGLANG=0 switch a plug-in off.  What kda does not accept goes to the engine's own kernels, with a
reason that is said once (`kda.notices`).  Importing this module imports no engine.
"""

from __future__ import annotations

import functools
import importlib
import os

from kda.model.host import detect
from kda.model.problem import Problem
from kda.routing.dispatch import backend_asked, weigh

from .. import notices
from ..errors import KdaError

SWITCHES = {"vllm": "KDA_VLLM", "sglang": "KDA_SGLANG"}


def vllm_plugin() -> None:
    """What vLLM calls in each of its processes."""
    _install("vllm")


def sglang_plugin() -> None:
    """What SGLang calls in each of its processes."""
    _install("sglang")


def _install(engine: str) -> None:
    """An engine goes on without kda if this fails: it says why, and raises nothing."""
    if switched_off(engine):
        return
    try:
        importlib.import_module(f"kda.engines.{engine}").install()
    except (KdaError, ImportError, AttributeError) as error:
        notices.say_once(f"kda.engines: {engine} runs without kda: {error}", "kda.engines", engine, "install")


def switched_off(engine: str) -> bool:
    return os.environ.get(SWITCHES[engine], "1") == "0"


@functools.lru_cache(maxsize=1024)
def refusal(p: Problem) -> str | None:
    """Why no backend accepts a kind of call; None if one does."""
    choice = weigh(p, detect(p.device), backend_asked(None))
    return None if choice.backend else str(choice)


def leave(engine: str, what: str, why: str) -> None:
    """Say that calls stay with the engine."""
    notices.say_once(
        f"kda.engines: {what} is left to {engine}: {why}\n(said once for each kind)", "kda.engines", engine, what
    )
