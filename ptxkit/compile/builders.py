"""Builds kernels in Python processes of their own, several at a time.

Triton releases the GIL, but tracing in the CuTe DSL does not. A compiler that crashes takes its process down. Triton
also has its own cache, which other users may be able to write; a separate process gets an empty one.
It imports one compiler and what the caller could import, never the caller's script: no `if __name__ == "__main__"` is
needed, and it works from a notebook, beside threads and CUDA. Where no process can be started, kernels are built in
this one.

A process reads pickled recipes, one per line, and answers each with a line of JSON: an entry for the store, or an
error.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from .. import application
from .errors import BuildError, MissingCompilerError
from .recipes import AnyRecipe
from .store import Entry

# Like the application's command, in which its package does not import torch.
PROGRAM = (
    "import sys as s; door, *s.path[:] = s.argv[1:]; s.argv[:] = ['bin/' + {name!r}]; "
    "import ptxkit.compile.builders as b; b.main(door)"
)
READY = b"ready\n"
_HERE = threading.Lock()                     # CPython 3.11 counts the depth of syntax trees for all threads together
# Variables that would make Triton interpret, load code from elsewhere or omit the PTX.
UNWANTED = (
    "TRITON_INTERPRET", "TRITON_CACHE_MANAGER", "TRITON_REMOTE_CACHE_BACKEND", "TRITON_KERNEL_OVERRIDE",
    "TRITON_STORE_BINARY_ONLY", "TRITON_ALWAYS_COMPILE",
)


class Builders:
    """Processes that build.  `build` may be called from several threads, each of which then has one to itself."""

    def __init__(self) -> None:
        self._all: list[BuilderProcess] = []
        self._idle: defaultdict[str, list[BuilderProcess]] = defaultdict(list)      # door -> those with its compiler
        self._stopped = False

    def build(self, recipe: AnyRecipe) -> Entry:
        try:
            builder = self._idle[recipe.door].pop()
        except IndexError:
            started = BuilderProcess.started(recipe.door)
            if started is None:
                with _HERE:
                    return recipe.build()
            builder = started
            self._all.append(builder)
        if self._stopped:
            builder.kill()
        try:
            return builder.build(recipe)
        finally:
            if builder.lives():
                self._idle[recipe.door].append(builder)

    def stop(self) -> None:
        """Stop all builders: nobody waits any more for what is being built."""
        self._stopped = True
        for builder in self._all:
            builder.kill()

    def __enter__(self) -> Builders:
        return self

    def __exit__(self, *error: object) -> None:
        for builder in self._all:
            builder.end()


class BuilderProcess:
    """A process that builds kernels."""

    def __init__(self, door: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ptxkit", ignore_cleanup_errors=True)
        self._said = Path(self._folder.name, "said")
        paths = [os.path.abspath(path) for path in sys.path]
        environment = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        with open(self._said, "wb") as said:
            command = [sys.executable, "-c", PROGRAM.format(name=application.current().name), door, *paths]
            cache = {"TRITON_CACHE_DIR": str(Path(self._folder.name, "cache"))}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env=environment | cache
            )
        assert self._process.stdin and self._process.stdout                  # they are pipes
        self._asks, self._answers = self._process.stdin, self._process.stdout

    @classmethod
    def started(cls, door: str) -> BuilderProcess | None:
        """Start a process; return None if none can be started that imports the compiler of this door."""
        if "python" not in os.path.basename(sys.executable or ""):           # the program that Python is embedded in
            return None
        try:
            builder = cls(door)
        except OSError:
            return None
        if builder._answers.readline() == READY:
            return builder
        builder.end()
        return None

    def build(self, recipe: AnyRecipe) -> Entry:
        with contextlib.suppress(BrokenPipeError):
            self._asks.write(base64.b64encode(pickle.dumps(recipe)) + b"\n")
            self._asks.flush()
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise BuildError(f"building {recipe.function} for {recipe.target.spelling}: {self._death()}")
        answer = json.loads(line)
        if "missing" in answer:
            raise MissingCompilerError(*answer["missing"])
        if "error" in answer:
            raise BuildError(answer["error"])
        if answer["key"] != recipe.key:
            why = "is not what it was when this process read it. Start Python again."
            raise BuildError(f"the source of {recipe.function} {why}")
        return {name: base64.b64decode(data) for name, data in answer["entry"].items()}

    def _death(self) -> str:
        code = self._process.wait()
        said = self._said.read_text(errors="replace").strip().splitlines()[-20:]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "\n".join([f"the process that built it died with {how}.", *said])

    def lives(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """End the process; nobody may be waiting in `build`."""
        self.kill()                                                          # it holds nothing that is still wanted
        self._process.wait()
        for pipe in (self._asks, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        self._folder.cleanup()


def main(door: str) -> None:
    """Answer every recipe of stdin."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)                                                            # a compiler may print to stdout
    importlib.import_module(door).load()
    answers.write(READY)
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(line)).encode() + b"\n")
        answers.flush()


def _answer(line: str) -> dict[str, Any]:
    recipe = pickle.loads(base64.b64decode(line))
    try:
        entry = recipe.build()
    except MissingCompilerError as error:
        return {"missing": (error.asked, error.missing, error.get)}
    except BuildError as error:
        return {"error": str(error)}
    return {"key": recipe.key, "entry": {name: base64.b64encode(data).decode() for name, data in entry.items()}}
