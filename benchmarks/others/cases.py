"""The projects and their versions, and how a case is registered."""

from __future__ import annotations

import importlib
import pathlib
import sys
import types
from typing import NamedTuple

import torch

import kda.simulator


class Project(NamedTuple):
    title: str
    version: str  # a commit, or a release
    url: str = ""  # of a git repository; "": one of PACKAGES


PROJECTS = {  # by the name of their folder, in the page's order
    "cuda-samples": Project("CUDA samples", "c94ff366aed1", "https://github.com/NVIDIA/cuda-samples"),
    "cutlass": Project("CUTLASS, CuTe DSL examples", "7107b05535f8", "https://github.com/NVIDIA/cutlass"),
    "liger": Project("Liger-Kernel (Triton)", "0.6.4"),
    "llm.c": Project("llm.c (CUDA)", "f1e2ace65149", "https://github.com/karpathy/llm.c"),
    "mamba": Project("Mamba (Triton)", "e9594ce1c732", "https://github.com/state-spaces/mamba"),
    "lightllm": Project("LightLLM (Triton)", "fc72ffab9a34", "https://github.com/ModelTC/lightllm"),
    "FlagGems": Project("FlagGems (Triton)", "532ff438c703", "https://github.com/FlagOpen/FlagGems"),
    "bitsandbytes": Project(
        "bitsandbytes (Triton)", "95f9af309d4d", "https://github.com/bitsandbytes-foundation/bitsandbytes"
    ),
    "flash-linear-attention": Project(
        "flash-linear-attention (Triton)", "bc3b101dcb71", "https://github.com/fla-org/flash-linear-attention"
    ),
    "quack": Project("QuACK (CuTe DSL)", "c8ec31700579", "https://github.com/Dao-AILab/quack"),
}
PACKAGES = {"liger-kernel": "0.6.4", "einops": "0.8.2", "apache-tvm-ffi": "0.1.15.post2"}  # in the folder "packages"
CASES: list = []  # (project, kernel, arch, function of the sources' folder: (correct, runs))


def case(project, kernel, arch):
    def add(function):
        CASES.append((project, kernel, arch, function))
        return function

    return add


def launch_of_nvcc(project, title, arch, source, kernel, include, make, **launch):
    """A case of one launch of a kernel in CUDA C++.

    source: a function of the project's folder. include: a folder inside it. make(): (arguments, a function that says
    whether they are correct after the launch).
    """

    @case(project, title, arch)
    def launched(folder):
        root = folder / project
        arguments, correct = make()
        run = kda.simulator.run(
            source(root), kernel, arch=arch, compiler="nvcc", args=arguments, include=[root / include], **launch
        )
        return correct(), [run]


def host_functions(project, root="", package="", bare=()):
    """A decorator of cases that call a project's host functions on CPU tensors: (kernel, arch) -> decorator.

    root: the folder with the project's packages, inside its checkout. package: the case's function gets a function
    that imports modules of it by name. bare: packages whose own __init__ is not run, for it imports what is not here
    (extensions in C++, models); the modules inside them are as they are.
    """

    def of(kernel, arch="sm_90a"):
        def add(function):
            @case(project, kernel, arch)
            def captured(folder):
                importable(folder, folder / project / root, bare)
                with kda.simulator.capture(arch=arch) as session:
                    correct = function(lambda name: importlib.import_module(f"{package}.{name}"))
                return correct, session.runs

            return function

        return add

    return of


def importable(folder: pathlib.Path, root: pathlib.Path, bare) -> None:
    for path in map(str, (folder / "packages", root)):
        if path not in sys.path:
            sys.path.insert(0, path)
    for name in bare:
        if name not in sys.modules:
            sys.modules[name] = made = types.ModuleType(name)
            made.__path__ = [str(root / name.replace(".", "/"))]


def agree(*pairs, tolerance=1e-4):
    return all(torch.allclose(got.float(), wanted.float(), rtol=tolerance, atol=tolerance) for got, wanted in pairs)
