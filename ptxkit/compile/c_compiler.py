"""The C and C++ compilers of this machine, and the commands that build a library in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import MissingCompilerError


class Language(NamedTuple):
    name: str
    variable: str                            # environment variable that names the compiler
    usual: str
    instead: str                             # if there is no other
    debian: str                              # packages
    fedora: str


C = Language("C", "CC", "gcc", "cc", "gcc libc6-dev", "gcc")
CPP = Language("C++", "CXX", "g++", "c++", "g++", "gcc-c++")


def path(language: Language = C) -> str | None:
    """Return where the compiler is; None if there is none."""
    return shutil.which(_wanted(language)) or shutil.which(language.instead)


def required(
    asked: str, error: type[MissingCompilerError] = MissingCompilerError, language: Language = C
) -> str:
    """Return where the compiler is; without one, raise the error, which says what asked for it."""
    if not (program := path(language)):
        raise error(
            asked, f"a {language.name} compiler ({_wanted(language)} or {language.instead})",
            f"Install {language.usual} (Debian and Ubuntu: `apt-get install {language.debian}`; Fedora: `dnf install "
            f"{language.fedora}`), or set {language.variable}.",
        )
    return program


def run(command: Sequence[str], folder: Path, error: type[Exception], failure: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder and return what it says; if it fails, raise the error with that under `failure`."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise error(f"{failure}:\n{(done.stderr or done.stdout).strip()}")
    return done


def _wanted(language: Language) -> str:
    return os.environ.get(language.variable) or language.usual
