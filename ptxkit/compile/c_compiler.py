"""The C compiler of this machine, and the commands that build a library in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .errors import MissingCompilerError


def path() -> str | None:
    """Return where the C compiler is; None if there is none."""
    return shutil.which(_wanted()) or shutil.which("cc")


def required(asked: str, error: type[MissingCompilerError] = MissingCompilerError) -> str:
    """Return where the C compiler is; without one, raise the error, which says what asked for it."""
    if not (program := path()):
        raise error(
            asked, f"a C compiler ({_wanted()} or cc)",
            "Install gcc (Debian and Ubuntu: `apt-get install gcc libc6-dev`; Fedora: `dnf install gcc`), or set CC.",
        )
    return program


def run(command: Sequence[str], folder: Path, error: type[Exception], failure: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder and return what it says; if it fails, raise the error with that under `failure`."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise error(f"{failure}:\n{(done.stderr or done.stdout).strip()}")
    return done


def _wanted() -> str:
    return os.environ.get("CC") or "gcc"
