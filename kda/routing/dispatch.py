"""Which backend handles a call.  Errors, `kda.explain` and `kda doctor` all show the same `Choice`.

The first of these decides: the `backend=` argument, `with use_backend(...)`, the variable KDA_BACKEND, and "auto",
which picks the backend of lowest rank whose rules hold.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kda.errors import InputError, KdaError, NoBackendError, nearest
from kda.model.bundles import Save
from kda.model.host import Host, detect, stand_in
from kda.model.problem import Problem

from .capability import Capability

if TYPE_CHECKING:
    from kda.backends.protocol import LaunchModule, PlanModule

Function = TypeVar("Function", bound=Callable[..., Any])
_named_by_context: contextvars.ContextVar[str | None] = contextvars.ContextVar("kda_backend", default=None)


@functools.cache
def capabilities() -> tuple[Capability, ...]:
    """Every backend of the package, in the order in which they are tried."""
    from kda import backends

    registered = []
    for path in (path for folder in backends.__path__ for path in Path(folder).glob("*/capability.py")):
        name = f"{backends.__name__}.{path.parent.name}.capability"
        try:
            registered.append(importlib.import_module(name).CAPABILITY)
        except Exception as error:
            raise KdaError(f"{name} declares no backend: {type(error).__name__}: {error}") from error
    return tuple(sorted(registered, key=lambda c: (c.rank, c.backend)))


def backend_names() -> list[str]:
    return [c.backend for c in capabilities()]


@dataclass(frozen=True)
class Choice:
    """One direction of what `explain` returns.  `backend` accepts the call, or it is None; `tried` has each backend, in
    order of rank, with the reasons against it; `able` has those that accept the call if they are named."""

    problem: Problem
    host: Host
    asked: str                                           # "auto" or a backend's name
    backend: str | None                                  # None: no requested backend accepts it
    tried: tuple[tuple[str, tuple[str, ...]], ...]       # (name, reasons against it), all backends in order of rank
    able: tuple[str, ...] = ()                           # backends that accept it if named
    written: str = ""                                    # where `asked` was named, as it is written there

    def __str__(self) -> str:
        """Say which backend accepts the call and why others do not; if a named one does not, give only its reasons."""
        seen = _as_seen(self.problem, self.host)
        where = f"{seen} on {self.host}" if self.host.name != seen.device else str(seen)
        if self.backend:
            named = "" if self.asked == "auto" else f" (requested: {self._named})"
            return "\n".join([f"{self.backend} accepts {where}{named}", *self._reasons(self.tried)])
        who = "no backend accepts" if self.asked == "auto" else f"{self._named} does not accept"
        shown = [(name, reasons) for name, reasons in self.tried if self.asked in ("auto", name)]
        return "\n".join([f"{who} {where}", *self._reasons(shown), *self._ways_out()])

    def named_here(self) -> Choice:
        """Return the same choice with the place where its backend is named now; a cached one was named elsewhere."""
        return dataclasses.replace(self, written=place_of(self.asked).written)

    @property
    def _named(self) -> str:
        return self.written or f"backend={self.asked!r}"

    def _reasons(self, tried: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
        for name, reasons in tried:
            mark = "*" if name == self.backend else " "
            for i, reason in enumerate(reasons or ("accepts it",)):
                yield f"{mark if i == 0 else ' '} {name if i == 0 else '':<10} {reason}"

    def _ways_out(self) -> list[str]:
        names = [f"backend={name!r}" for name in self.able]
        return [f"{' and '.join(names)} accept{'s' * (len(names) == 1)} it"] if names else []


def backend_asked(argument: str | None = None) -> str:
    """The name in force for a call: argument, then context, then environment, then "auto"."""
    if argument is not None:
        return argument
    return _named_by_context.get() or os.environ.get("KDA_BACKEND") or "auto"


class BackendSource(NamedTuple):
    """The place in which a call's backend is named."""

    argument: str                                        # the name that errors use for it
    written: str                                         # how it is written there


def place_of(requested: object) -> BackendSource:
    """Return the place that a name comes from: the context or environment where it is in force, else the argument."""
    context = _named_by_context.get()
    if context and requested == context:
        return BackendSource("use_backend(name)", f"use_backend({requested!r})")
    if not context and requested and requested == os.environ.get("KDA_BACKEND"):
        return BackendSource("KDA_BACKEND", f"KDA_BACKEND={requested}")
    return BackendSource("backend", f"backend={requested!r}")


def backend_of_backward(requested: str) -> str:
    """Return the name in force for a training call's backward: the same, or "auto" if it lacks some backwards."""
    alone = any(c.backend == requested and (c.some_backwards or not c.backward) for c in capabilities())
    return "auto" if alone else requested


def check_backend_name(name: object, source: str | None = None) -> None:
    known = ["auto", *backend_names()]
    if name not in known:
        source, fix = source or place_of(name).argument, _nearest_backend(str(name).lower(), known)
        raise InputError("kda", source, "one of " + ", ".join(map(repr, known)), repr(name), fix, "backend.name")


def backends_of_gpu(name: str) -> tuple[str, list[str]]:
    """The arch of a name such as h100, and the backends with kernels for it; no backends if no GPU is called so."""
    from ptxkit.compile.target import parse

    try:
        arch = parse(name).name
    except ValueError:
        return "", []
    return arch, [c.backend for c in capabilities() if arch in c.archs]


def _nearest_backend(name: str, known: list[str]) -> str:
    """Say what to do about a wrong name."""
    arch, builders = ("", []) if name in known else backends_of_gpu(name)
    if builders:
        have = "have" if len(builders) > 1 else "has"
        return f"A GPU is no backend: {' and '.join(map(repr, builders))} {have} kernels for {arch}."
    near = nearest(name, known)
    return f"Did you mean {near!r}?" if near else "`kda doctor` lists what each one can do."


_RUN_LATER: dict[str, Callable[[Any], bool]] = {         # a `with` around the call would not reach these
    "a class": inspect.isclass,
    "an async function": inspect.iscoroutinefunction,
    "a generator": lambda f: inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f),
    "no function": lambda f: not callable(f),
}


class _Named(contextlib.ContextDecorator):
    """What `use_backend` returns.  Discarded without having been entered it says so, because it had no effect."""

    def __init__(self, name: str):
        self._name, self._entered = name, False
        self._tokens: list[contextvars.Token] = []

    def __repr__(self) -> str:
        return f"<use_backend({self._name!r}): it has an effect inside `with kda.use_backend({self._name!r}):`>"

    def __enter__(self) -> None:
        self._entered = True
        self._tokens.append(_named_by_context.set(self._name))

    def __exit__(self, *error: object) -> None:
        if not self._tokens:
            self._entered = True                         # the error says what is wrong
            raise InputError("kda", "use_backend(name)", "entered before it is left", "it was not entered",
                             f"Write `with kda.use_backend({self._name!r}):`.", "backend.entered")
        _named_by_context.reset(self._tokens.pop())

    def __call__(self, function: Function) -> Function:
        self._entered = True                             # it is used as a decorator
        found = next((kind for kind, holds in _RUN_LATER.items() if holds(function)), None)
        if found is not None:
            asked = "a function whose body runs when it is called"
            raise InputError("kda", "what @use_backend decorates", asked, found,
                             f"Write `with kda.use_backend({self._name!r}):` around the calls in its body.",
                             "backend.decorated")
        return super().__call__(function)

    def _recreate_cm(self) -> _Named:
        return _Named(self._name)                        # a decorated function may run in several threads

    def __del__(self) -> None:
        if not self._entered and not sys.is_finalizing():
            from kda.notices import say_once

            say_once(
                f"use_backend({self._name!r}) was called and never entered, which has no effect. Write `with "
                f"kda.use_backend({self._name!r}):` around the calls, or set KDA_BACKEND={self._name} for all calls of "
                "the process.", "use_backend", self._name,
            )


def use_backend(name: str) -> _Named:
    """Name the backend for every call of this thread or task inside the `with`; a `backend=` argument overrides it.

    The name is checked at once. A call without `with` has no effect; it shows a `KdaNotice`, which is a warning. For
    all calls of a process, set the variable KDA_BACKEND. As a decorator it holds inside the function, which must be
    neither async nor a generator.

    Raises:
        InputError: no backend has this name, or what is decorated runs its body after the call.

    Example:
        >>> import torch, kda
        >>> q, k, v, g = torch.randn(4, 1, 70, 2, 16).unbind()
        >>> with use_backend("reference"):
        ...     o, _ = kda.chunk_kda(q, k, v, -g.abs(), torch.rand(1, 70, 2))
        >>> o.shape
        torch.Size([1, 70, 2, 16])
    """
    from torch.compiler import is_compiling

    if is_compiling():                       # with fullgraph=True this is the message; otherwise the graph ends here
        raise RuntimeError("use_backend must be entered outside code that torch.compile traces. Or pass backend=...")
    check_backend_name(name, "use_backend(name)")
    return _Named(name)


def _as_seen(problem: Problem, host: Host) -> Problem:
    """Move CPU tensors to the GPU in the problem if that GPU is simulated: there they are its own."""
    return dataclasses.replace(problem, device=host.device) if host.simulated and not problem.is_gpu else problem


def weigh(problem: Problem, host: Host, requested: str = "auto") -> Choice:
    """Check every backend's rules; raises no error if no backend accepts the call or has the name."""
    tried, able, winner = [], [], None
    seen = _as_seen(problem, host)
    for capability in capabilities():
        name = capability.backend
        if not capability.rejections(seen, host, named=True):
            able.append(name)
        reasons = capability.rejections(seen, host, named=requested == name)
        if not reasons and winner is None and requested in ("auto", name):
            winner = name
        tried.append((name, tuple(reasons)))
    return Choice(problem, host, requested, winner, tuple(tried), tuple(able), place_of(requested).written)


_decided: dict[tuple[Problem, str, Host | None], Choice] = {}


def choose(problem: Problem, requested: str = "auto") -> Choice:
    """The decision for one call on this machine, cached; raises NoBackendError if no backend accepts it."""
    call = problem, requested, stand_in()
    try:
        return _decided[call]
    except KeyError:
        pass
    check_backend_name(requested)
    choice = weigh(problem, detect(problem.device), requested)
    if choice.backend is None:
        raise NoBackendError(choice)
    if len(_decided) >= 4096:
        _decided.clear()
    _decided[call] = choice
    return choice


def capability(backend: str) -> Capability:
    return next(c for c in capabilities() if c.backend == backend)


class Route(NamedTuple):
    """Who runs a call, and what passes from its forward to its backward."""

    choices: tuple[Choice, ...]                          # the forward's and, of a training call, the backward's
    save: Save                                           # what the forward saves
    backend: str                                         # runs the forward; "" if no backend accepts it
    forward: Problem                                     # `disable_recompute` requests Saved; `save` has the rest
    backward: Problem                                    # the same, for gradients
    requested: str                                       # the name in force for the backward
    built: set[str | None]                               # dtypes of cu_seqlens for which its kernels are built
    refused: Choice | None                               # the choice of a direction that no backend accepts

    @property
    def reader(self) -> str:
        """Return the backend of a training call's backward."""
        return self.choices[-1].backend or ""


_routes: dict[tuple[Problem, str, bool, bool, Save | None, Host | None], Route] = {}


def route(
    problem: Problem, requested: str = "auto", training: bool = False, states: bool = False, save: Save | None = None
) -> Route:
    """Return who runs a call on this machine, and what its forward saves if it is `training`: nothing on a CPU, where
    that only costs memory, and nothing for a backend with its own layout, unless `problem` requests everything, or
    `states` those alone.  `save` is known where the call was made before.  Raises NoBackendError if no backend accepts
    the call."""
    found = weigh_route(problem, requested, training, states, save)
    if found.refused is not None:
        raise NoBackendError(found.refused)
    return found


def weigh_route(
    problem: Problem, requested: str = "auto", training: bool = False, states: bool = False, save: Save | None = None
) -> Route:
    """Return the same whether backends accept the call or not; cached if they do."""
    call = problem, requested, training, states, save, stand_in()
    try:
        return _routes[call]
    except KeyError:
        pass
    check_backend_name(requested)
    found = _route(problem, requested, training, states, save)
    if found.refused is None:
        if len(_routes) >= 4096:
            _routes.clear()
        _routes[call] = found
    return found


def _route(problem: Problem, requested: str, training: bool, states: bool, save: Save | None) -> Route:
    host, for_backward = detect(problem.device), backend_of_backward(requested)

    def weighed(everything: bool) -> tuple[Problem, Problem, tuple[Choice, ...]]:
        forward = dataclasses.replace(problem, disable_recompute=everything)
        backward = dataclasses.replace(forward, direction="backward")
        directions = ((forward, requested), (backward, for_backward))[: 1 + training]
        return forward, backward, tuple(weigh(p, host, name) for p, name in directions)

    forward, backward, choices = weighed(everything=False)
    if not training:
        save = Save.NOTHING
    elif save is None:
        writer, reader = (choice.backend for choice in choices)
        save = what_is_saved(problem, writer, reader, states)
    if save is Save.ALL:
        forward, backward, choices = weighed(everything=True)
    backend = choices[0].backend
    if save is Save.PRODUCTS and backend and not capability(backend).saves:
        backend = choices[1].backend
    refused = next((choice for choice in choices if choice.backend is None), None)
    return Route(choices, save, backend or "", forward, backward, for_backward, set(), refused)


def what_is_saved(problem: Problem, writer: str | None, reader: str | None, states: bool) -> Save:
    """Return what a training forward of one backend saves for the backward of another, or of itself."""
    on_gpu = problem.is_gpu or stand_in() is not None
    if on_gpu and not (writer and reader):
        return Save.NOTHING                              # a direction is refused, so no kernel runs
    if on_gpu and writer and writer == reader and capability(writer).saves_opaque and not problem.intermediate_states:
        return Save.OWN if problem.disable_recompute else Save.STATES if states else Save.NOTHING
    if problem.disable_recompute:
        return Save.ALL
    return Save.PRODUCTS if on_gpu and not problem.intermediate_states else Save.NOTHING


@functools.cache
def launcher(backend: str) -> LaunchModule:
    """The backend's launch module, imported at its first use."""
    return importlib.import_module(capability(backend).launch_module)


def planner(backend: str) -> PlanModule | None:
    """The backend's plan module; None if it has no kernels."""
    c = capability(backend)
    return importlib.import_module(f"{c.launch_module.rpartition('.')[0]}.plan") if c.archs else None
