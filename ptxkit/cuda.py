"""`run`: a kernel in CUDA C++, compiled and launched by one call."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ptxkit.compile import nvrtc, store
from ptxkit.compile.code import Code, dim3
from ptxkit.compile.errors import BuildError, MissingCompilerError
from ptxkit.compile.launching import Launch, LaunchSink, launch_sink
from ptxkit.compile.target import Target, parse

from .launches import LaunchError, bind, launch, program
from .report import Run

COMPILERS = ("nvrtc", "nvcc")
TEXT = "<string>"                            # what a source is called that came as text
_IN_A_FOLDER = re.compile(f'(?<=")[^"\n]*/{TEXT}(?=")')    # the compiler puts it into the current folder
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
_NAME = re.compile(r"\.visible\s+\.entry\s+([\w$]+)")


def run(
    source: str | os.PathLike[str], kernel: str, *, arch: str, defines: Mapping[str, Any] | None = None,
    include: Sequence[str | os.PathLike[str]] = (), options: Sequence[str] = (), compiler: str = "nvrtc",
    **launched: Any,
) -> Run:
    """Compile a kernel in CUDA C++ and run it on the CPU.

    source: the path of a file, or the text itself.
    kernel: its name; of a template with its arguments: "scan<128>".
    arch: such as "sm_90a".
    defines, include, options: macros, folders for #include, and further options of the compiler. The file's own folder
        is searched as well, and so are the CUDA headers that are installed (of nvcc or of Triton).
    compiler: "nvrtc" needs no toolkit and sees device code alone; "nvcc" accepts a file with its host code.
    launched: arguments of `launch`: grid, block, args, and so on.

    Inside of `capture`, `mutants` or the command `simulate` it is one of their launches, with their options.
    """
    text, file = text_of(source)
    target = parse(arch.replace("compute", "sm"))
    folders = folders_of(file, include)
    included = included_by(text, folders)
    flags = [*(f"-I{folder}" for folder in (*folders, *headers())), *options]
    if compiler == "nvrtc":
        built = nvrtc.compile(text, kernel, target=target, defines=defines, headers=included, options=flags,
                              file=file or TEXT)
        code = dataclasses.replace(built, ptx=_IN_A_FOLDER.sub(TEXT, built.ptx))
    elif compiler == "nvcc":
        ptx = _nvcc(text, file or TEXT, target, [*nvrtc.macros(defines), *flags], included)
        code = Code.of(_named(ptx, kernel), ptx, None, target)
    else:
        raise ValueError(f"compiler={compiler!r}; there are {', '.join(map(repr, COMPILERS))}")
    if (session := launch_sink()) is not None:
        return _launched_in(session, code, **launched)
    return launch(code.ptx, code.name, arch=target.spelling, **launched)


def _launched_in(
    session: LaunchSink, code: Code, *, grid: Any, block: Any, cluster: Any = 1, dynamic_shared: int = 0,
    args: Any = (), config: Any = None, **options: Any,
) -> Run:
    """Launch a kernel within an open capture, whose options hold."""
    if options:
        raise LaunchError(f"{', '.join(options)} beside an open capture, whose options hold: pass them to capture, or "
                          "call run outside of it.")
    loaded = program(code.ptx, code.name, code.target.spelling)
    _, buffer, _ = bind(loaded, args)
    tensors = None                           # where an argument may bring other memory: a map, bytes
    if all(isinstance(arg, (torch.Tensor, bool, int, float)) for arg in args):
        named = zip((param.name for param in loaded.kernel.params), args)
        tensors = {name: arg for name, arg in named if isinstance(arg, torch.Tensor)}
    return session.launch(Launch(code, dim3(grid), dim3(block), dim3(cluster), dynamic_shared, buffer, tensors,
                                 config=config))


def text_of(source: str | os.PathLike[str]) -> tuple[str, str]:
    """Return (text, path; "" where the text was given)."""
    if isinstance(source, str) and ("{" in source or "\n" in source):
        return source, ""
    path = pathlib.Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"source={os.fspath(source)!r} is neither a file nor the text of a kernel")
    return path.read_text(), os.fspath(path)


def included_by(text: str, folders: Sequence[str]) -> dict[str, str]:
    """Return the headers in these folders that a text includes, and they include: what is built depends on them."""
    texts: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            path = next((p for folder in folders if (p := pathlib.Path(folder, name)).is_file()), None)
            if path and name not in texts:
                texts[name] = path.read_text()
                waiting.append(texts[name])
    return texts


def headers() -> list[str]:
    """Return the folders of installed CUDA headers: cuda_fp16.h, mma.h, and where a toolkit has them cuda/std."""
    triton = importlib.util.find_spec("triton")
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.path.join(root, "include") for root in roots if root]
    if triton and triton.submodule_search_locations:
        folders.append(os.path.join(triton.submodule_search_locations[0], "backends", "nvidia", "include"))
    first = next((folder for folder in folders if os.path.isfile(os.path.join(folder, "cuda_fp16.h"))), None)
    return [folder for folder in (first, first and os.path.join(first, "cccl")) if folder and os.path.isdir(folder)]


def nvcc_for(asked: str, get: str) -> tuple[str, str]:
    """Return nvcc's path, and what it says of its version."""
    if not (nvcc := shutil.which("nvcc")):
        raise MissingCompilerError(asked, "nvcc", get)
    return nvcc, subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout


def folders_of(file: str, include: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return where a source looks for its headers: in its own folder first."""
    return [*([os.path.dirname(os.path.abspath(file))] if file else []), *(os.fspath(each) for each in include)]


def _nvcc(text: str, file: str, target: Target, options: list[str], included: dict[str, str]) -> str:
    nvcc, version = nvcc_for('compiler="nvcc"', 'A CUDA toolkit has it; compiler="nvrtc" needs none.')
    flags = [f"-arch={target.spelling}", *options]

    def build() -> store.Entry:
        with tempfile.TemporaryDirectory() as folder:
            given = pathlib.Path(folder, "kernel.cu" if file == TEXT else os.path.basename(file))
            output = pathlib.Path(folder, "kernel.ptx")
            given.write_text(text)
            command = [nvcc, "-ptx", "-lineinfo", "-x", "cu", *flags, os.fspath(given), "-o", os.fspath(output)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                log = (done.stderr or done.stdout).replace(os.fspath(given), file).strip()
                raise BuildError(f"nvcc cannot build {file} with {' '.join(flags)}:\n{log}")
            known_as = file if file == TEXT else os.path.abspath(file)
            return {"ptx": output.read_text().replace(os.fspath(given), known_as).encode()}

    key = store.digest("nvcc 1", version, text, flags, included, file)
    about = {"kernel": os.path.basename(file), "arch": target.name, "file": file}
    return store.default().fetch(key, build, about)["ptx"].decode()


def _named(ptx: str, kernel: str) -> str:
    """Return the kernel's name in PTX: as it is, or where C++ has added its arguments, after its length."""
    names, plain = _NAME.findall(ptx), kernel.rpartition("::")[2]
    mangled = re.compile(rf"(?<!\d){len(plain)}{re.escape(plain)}")
    same = [n for n in names if n == kernel] or [n for n in names if mangled.search(n)]
    if len(same) != 1:
        raise ValueError(f"kernel={kernel!r} is {len(same) or 'none'} of {', '.join(same or names)} -> name one")
    return same[0]
