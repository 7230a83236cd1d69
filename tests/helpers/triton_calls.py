"""Kernels of the Triton backend for its tests: built once, in the process that tests."""

import contextlib
import functools
import importlib
import importlib.util
from pathlib import Path
from unittest import mock

import torch

from kda.backends.common import triton_launch
from kda.backends.common.routine import forget_routines
from kda.backends.triton import call, plan
from ptxkit.compile import triton as compiler

BACKEND = "kda.backends.triton"


@functools.cache
def built_here(recipe, package=BACKEND):
    """Build a kernel by the Triton of this process, which is faster and keeps what it built from run to run."""
    function = getattr(importlib.import_module(recipe.module.replace(BACKEND, package)), recipe.name)
    return compiled(function, recipe)


def compiled(function, recipe):
    options = {"divisible": recipe.divisible, **recipe.options}
    with ptx_alone():
        return compiler.compile(function, recipe.signature, recipe.constants, target=recipe.target, **options)


@contextlib.contextmanager
def ptx_alone():
    """Let Triton stop at PTX, which is all that the simulator reads: ptxas takes a third of a build.

    Tests marked `compiler` build a kernel of each name to its end.  Triton keeps what the hook changed under another
    key.
    """
    from triton import knobs

    def stages_of(*build):
        if build:
            build[1]["cubin"] = lambda ptx, metadata: b""
        return "ptx alone", "ptx alone"

    def repaired(asm, version, *build):
        return {"ptx": compiler.repaired(asm["ptx"], version)}

    stages = mock.patch.object(knobs.runtime, "add_stages_inspection_hook", stages_of)
    with stages, mock.patch.object(compiler, "with_repairs", repaired):
        yield


@contextlib.contextmanager
def building_here(monkeypatch, fetch=built_here):
    """Let launches of single kernels build them in this process inside the block, and remember no others."""
    forget_routines()
    monkeypatch.setattr(triton_launch, "fetch", fetch)
    yield
    forget_routines()


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Unbuilt:
    """A kernel that is built once somebody asks for it: plans name more than one call launches."""

    def __init__(self, recipe, package=BACKEND):
        self._made = recipe, package

    def __getattr__(self, name):
        return getattr(built_here(*self._made), name)


def with_texts(module, function, folder, edits):
    """Return a function of a copy of the module, in which texts are replaced by others."""
    text = Path(importlib.util.find_spec(f"{BACKEND}.{module}").origin).read_text()
    for old, new in edits.items():
        assert old in text, f"{old!r} is not in the kernel"
        text = text.replace(old, new)
    (folder / "broken.py").write_text(text)
    spec = importlib.util.spec_from_file_location(f"{BACKEND}.decode.broken", folder / "broken.py")
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return getattr(copied, function)


def forget_plans():
    call.prepared.cache_clear()
    plan.plan.cache_clear()
    forget_routines()
