"""Kernels by their recipes: of this process, of the store of built kernels, or built and kept there.

What is in the store needs no compiler.  What is missing is built in processes, several at a time (builders.py), and
somebody is told of it (watching.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import store, watching
from .builders import Builders
from .errors import BuildError
from .kernel import Kernel
from .recipes import AnyRecipe

_FETCHED: dict[AnyRecipe, Kernel] = {}       # fetched by this process
SEVERAL = 4                                  # CPUs that make it worth while to build together


def fetch(recipe: AnyRecipe) -> Any:
    """Return the kernel of a recipe."""
    return fetch_all([recipe])[0]


def fetch_all(recipes: Iterable[AnyRecipe], workers: int | None = None) -> list[Any]:
    """Return the kernels of some recipes; up to `workers` processes build what is missing: one a CPU, at most 16."""
    kernels = attempt_all(recipes, workers)
    if error := next((each for each in kernels if isinstance(each, BuildError)), None):
        raise error
    return kernels


def attempt_all(recipes: Iterable[AnyRecipe], workers: int | None = None) -> list[Any]:
    """Return the same, with a BuildError for each kernel that cannot be built."""
    recipes, kernel_store = list(recipes), store.default()
    for recipe in dict.fromkeys(recipes):
        if recipe not in _FETCHED and (kernel := _opened(kernel_store, recipe)) is not None:
            _FETCHED.setdefault(recipe, kernel)
    missing = [recipe for recipe in dict.fromkeys(recipes) if recipe not in _FETCHED]
    failed = _build_all(missing, kernel_store, workers or min(_cpus(), 16)) if missing else {}
    return [_FETCHED.get(recipe) or failed[recipe] for recipe in recipes]


def fetch_here(recipe: AnyRecipe) -> Any:
    """Return the kernel of a recipe, built in this process if it is missing, and not remembered."""
    if recipe in _FETCHED:
        return _FETCHED[recipe]
    kernel_store = store.default()
    return _opened(kernel_store, recipe) or recipe.opened(kernel_store.fetch(recipe.key, recipe.build, recipe.about))


def build_together(recipes: Iterable[AnyRecipe]) -> None:
    """Before `fetch_here`, build what is missing in processes, all at once, if the CPUs are there for it.  Each of
    these imports the compiler first, which takes a CPU as long as a small kernel.  What cannot be built is left for the
    call that wants it, which says why."""
    if _cpus() >= SEVERAL:
        attempt_all(recipes)


def _build_all(recipes: Sequence[AnyRecipe], kernel_store: store.Store, workers: int) -> dict[AnyRecipe, BuildError]:
    """Build kernels; return the errors of those that failed."""
    failed: dict[AnyRecipe, BuildError] = {}

    def build_one(recipe: AnyRecipe) -> None:
        try:
            entry = kernel_store.fetch(recipe.key, lambda: builders.build(recipe), recipe.about)
            _FETCHED.setdefault(recipe, recipe.opened(entry))
            built(recipe)
        except BuildError as error:
            failed[recipe] = error

    processes = min(workers, len(recipes))
    with watching.watched(recipes) as built, Builders() as builders, ThreadPoolExecutor(processes) as threads:
        running = [threads.submit(build_one, recipe) for recipe in recipes]
        try:
            for each in running:
                each.result()
        except BaseException:                                                # a KeyboardInterrupt as well
            threads.shutdown(wait=False, cancel_futures=True)
            builders.stop()
            raise
    return failed


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _opened(kernel_store: store.Store, recipe: AnyRecipe) -> Kernel | None:
    """Return the kernel of an entry; a readable entry with other contents is dropped."""
    if (entry := kernel_store.find(recipe.key)) is None:
        return None
    try:
        return recipe.opened(entry)
    except (KeyError, TypeError, ValueError, BuildError):
        kernel_store.forget(recipe.key)
        return None
