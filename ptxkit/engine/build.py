"""Builds the engine from its C files, once per content and compiler, and keeps it with the built kernels."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import platform
import subprocess
import tempfile

from ptxkit.compile import c_compiler, store, watching
from ptxkit.compile.errors import MissingCompilerError

FOLDER = pathlib.Path(__file__).parent
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-format-nonliteral"),
)


class EngineError(RuntimeError):
    """The simulator's engine could not be built."""


class NoCompilerError(EngineError, MissingCompilerError):
    """There is no C compiler."""


def compiler():
    """Return the C compiler's path."""
    return c_compiler.required("The engine of ptxkit", NoCompilerError)


def sources():
    """Return file name -> text: the C files beside this one, and the scalar handlers generated from the tables."""
    from ptxkit.isa import generate

    texts = {p.name: p.read_text() for p in sorted(FOLDER.glob("*.[ch]"))}
    return texts | generate.sources()


def source():
    """Return one name for all that the engine is built from."""
    return store.digest(sources())


def library():
    """Return the built engine, as bytes."""
    texts = sources()
    key = store.digest("simulator engine 2", compiler(), _answers("-dumpfullversion"), _native(), FLAGS, texts)
    about = {"kernel": "engine", "arch": platform.machine(), "module": __name__, "source": store.digest(texts)}
    return store.default().fetch(key, lambda: {"engine.so": _built(texts)}, about)["engine.so"]


def _native():
    """Return what -march=native stands for here: a library built on one machine may not run on another."""
    return _answers("-march=native", "-Q", "--help=target")


def _answers(*arguments):
    """Return what gcc says, in the same words everywhere: it folds its lists to the terminal, and translates them."""
    alike = os.environ | {"COLUMNS": "80", "LC_ALL": "C"}
    return subprocess.run([compiler(), *arguments], capture_output=True, text=True, env=alike).stdout


def _built(texts):
    with watching.once("the engine of ptxkit, once for this machine"), tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _run([compiler(), "-shared", "-fPIC", *objects(texts, folder), "-lm", "-o", "engine.so"], folder)
        return (folder / "engine.so").read_bytes()


def objects(texts, folder, *flags):
    """Compile the C files of `texts` (file name -> text) in a folder, side by side, and return the objects' names."""
    for file, text in texts.items():
        (folder / file).write_text(text)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            return list(pool.map(lambda file: _object(file, folder, flags), (f for f in texts if f.endswith(".c"))))
        except BaseException:                # Ctrl-C waits for files that are being compiled, not for all
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _object(file, folder, flags):
    _run([compiler(), *FLAGS, *flags, "-c", file, "-o", f"{file}.o"], folder)
    return f"{file}.o"


def _run(command, folder):
    """Run a command in a folder and return what it says: the compiler's warnings."""
    return c_compiler.run(command, folder, EngineError, f"ptxkit: {command[0]} could not build the engine").stderr
