"""A configuration's kernel, built or out of the store."""

from __future__ import annotations

import functools

from kda.compile.fetching import fetch_here
from kda.compile.kernel import Kernel

from .plan import Config, recipe


@functools.cache
def kernel(config: Config) -> Kernel:
    return fetch_here(recipe(config))
