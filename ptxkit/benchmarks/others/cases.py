"""The projects and their versions, and how a case is registered."""

from __future__ import annotations

import importlib
import pathlib
import sys
import types
from typing import NamedTuple

import torch

import ptxkit


class Project(NamedTuple):
    title: str
    version: str  # a commit, or a release
    url: str = ""  # a git repository; "": one of PACKAGES
    beside: tuple[str, ...] = ()  # projects that it imports or includes


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
    "flash-attention": Project(
        "FlashAttention 4 (CuTe DSL)", "0251105a2fb1", "https://github.com/Dao-AILab/flash-attention", ("quack",)
    ),
    "marlin": Project("Marlin (CUDA)", "2f6d7c10e124", "https://github.com/IST-DASLab/marlin"),
    "cuLA": Project(
        "cuLA (CuTe DSL, CUTLASS)", "fa742a23fcc6", "https://github.com/inclusionAI/cuLA",
        ("flash-linear-attention", "cutlass"),
    ),
    "attention-gym": Project(
        "attention-gym (Triton, CuTe DSL)", "7fdb85d0b966", "https://github.com/meta-pytorch/attention-gym"
    ),
    "flashinfer": Project("FlashInfer (CUDA)", "0.7.2.post1"),
    "ThunderKittens": Project(
        "ThunderKittens (CUDA)", "0b55588d2769", "https://github.com/HazyResearch/ThunderKittens"
    ),
    "cupy": Project("CuPy (CUDA)", "14.2.0"),
}
PACKAGES = {  # in the folder "packages"
    "liger-kernel": "0.6.4", "torch-c-dlpack-ext": "0.1.5",
    "flashinfer-python": "0.7.2.post1", "einops": "0.8.2", "apache-tvm-ffi": "0.1.15.post2", "cupy-cuda13x": "14.2.0",
}
NOT_RUN = [  # (project, kernels, why)
    ("cuLA", "kernels of csrc/ for sm_100", "not tried: nvcc needs minutes for each (7 for the one of sm_90)"),
    ("attention-gym", "chunk_kda, backward", "the installed CuTe DSL has no argument `mma_kind` of tcgen05_mma_ws"),
    ("attention-gym", "FlexAttention",
     "torch.compile generates code for the device that torch itself sees, which is the CPU"),
    ("ThunderKittens", "layernorm", "its file includes cuRAND's headers"),
    ("ThunderKittens", "rotary", "its host code does not compile against the headers of the same commit"),
    ("ThunderKittens", "based, hedgehog, mamba2, fftconv, flux",
     "host code for torch's C++ headers, or for files of test data"),
    ("ThunderKittens", "parallel/", "several GPUs: multicast memory and handles between processes"),
    ("cupy", "launches by CuPy itself", "the CUDA runtime is linked into its extensions and asks the driver"),
]
CASES: list = []  # (project, kernel, arch, function of the sources' folder: (correct, runs))


def case(project, kernel, arch):
    def add(function):
        CASES.append((project, kernel, arch, function))
        return function

    return add


def launch_of_nvcc(project, title, arch, source, kernel, include, make, **launch):
    """Return a case of one launch of a kernel in CUDA C++.

    source: a function of the project's folder. include: a folder inside it. make(): (arguments, a function that says
    whether they are correct after the launch).
    """

    @case(project, title, arch)
    def launched(folder):
        root = folder / project
        arguments, correct = make()
        run = ptxkit.run(
            source(root), kernel, arch=arch, compiler="nvcc", args=arguments, include=[root / include], **launch
        )
        return correct(), [run]


def host_functions(project, root="", package="", bare=()):
    """Return a decorator of cases that call a project's host functions on CPU tensors: (kernel, arch) -> decorator.

    root: the folder with the project's packages, inside its checkout. package: the case's function gets a function
    that imports modules of it by name. bare: packages whose own __init__ is not run, for it imports what is not here
    (extensions in C++, models); the modules inside them are as they are.
    """

    def decorator(kernel, arch="sm_90a"):
        def add(function):
            @case(project, kernel, arch)
            def captured(folder):
                for beside in PROJECTS[project].beside:
                    importable(folder, folder / beside, ())
                importable(folder, folder / project / root, bare)
                with ptxkit.capture(arch=arch) as session:
                    correct = function(lambda name: importlib.import_module(f"{package}.{name}"))
                return correct, session.runs

            return function

        return add

    return decorator


def importable(folder: pathlib.Path, root: pathlib.Path, bare) -> None:
    for path in map(str, (folder / "packages", root)):
        if path not in sys.path:
            sys.path.insert(0, path)
    for name in bare:
        if name not in sys.modules:
            sys.modules[name] = module = types.ModuleType(name)
            module.__path__ = [str(root / name.replace(".", "/"))]


def agree(*pairs, tolerance=1e-4):
    return all(torch.allclose(got.float(), wanted.float(), rtol=tolerance, atol=tolerance) for got, wanted in pairs)


def near(*pairs, limit=1e-2):
    return all((got.double() - wanted).norm() <= limit * wanted.norm() for got, wanted in pairs)


def both_ways(theirs, ours, inputs, dy=None):
    """Return pairs, of theirs and ours: the result of a function, and its gradients for the inputs; dy is the result's,
    which a scalar needs not."""
    sides = []
    for function in (theirs, ours):
        leaves = [x.clone().requires_grad_() for x in inputs]          # some backwards overwrite what they are given
        y = function(*leaves)
        kept = y.detach().clone()
        sides.append((kept, *torch.autograd.grad(y, leaves, None if dy is None else dy.clone())))
    return zip(*sides)
