"""Builds the engine from its C files, once for each content and compiler, and keeps the library on disk."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

FOLDER = pathlib.Path(__file__).parent
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-ftree-vectorize",
    "-march=native",
    "-fPIC",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
)


class EngineError(RuntimeError):
    """The simulator's engine could not be built."""


def compiler():
    """The C compiler's path."""
    wanted = os.environ.get("CC") or "gcc"
    found = shutil.which(wanted) or shutil.which("cc")
    if not found:
        raise EngineError(
            f"kda.simulator: its engine is C and needs a compiler; looked for {wanted} and cc, found neither -> "
            "install gcc (Debian and Ubuntu: `apt-get install gcc libc6-dev`; Fedora: `dnf install gcc`), or set CC"
        )
    return found


def cache_folder():
    base = os.environ.get("KDA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kda"
    )
    return pathlib.Path(base) / "simulator"


def sources():
    """File name -> text: the C files beside this one, and the scalar handlers generated from the tables."""
    from kda.simulator.isa import generate

    texts = {p.name: p.read_text() for p in sorted(FOLDER.glob("*.[ch]"))}
    return texts | generate.sources()


def _cpu():
    """What -march=native stands for here: a library built on one machine may not run on another."""
    out = subprocess.run([compiler(), "-march=native", "-Q", "--help=target"], capture_output=True, text=True)
    return out.stdout


def library():
    """Path of the built engine; builds it if this content has not been built yet."""
    texts = sources()
    key = hashlib.sha256(
        "\0".join([compiler(), _cpu(), *FLAGS, *(f"{n}\0{t}" for n, t in texts.items())]).encode()
    ).hexdigest()[:20]
    folder = cache_folder()
    path = folder / f"engine-{key}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=folder)
    except OSError:  # a read-only home: build it for this process alone
        scratch = tempfile.mkdtemp()
        path = pathlib.Path(scratch) / path.name
    built = _build(texts, pathlib.Path(scratch))
    os.replace(built, path)
    if path.parent == folder:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _build(texts, scratch):
    for name, text in texts.items():
        (scratch / name).write_text(text)
    names = [n for n in texts if n.endswith(".c")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(
            pool.map(
                lambda name: _run([compiler(), *FLAGS, "-c", name, "-o", f"{name}.o"], scratch, f"{name}.o"), names
            )
        )
    return _run([compiler(), "-shared", "-fPIC", *objects, "-lm", "-o", "engine.so"], scratch, scratch / "engine.so")


def _run(command, folder, result):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise EngineError(f"kda.simulator: {command[0]} could not build the engine:\n{done.stderr.strip()}")
    return result
