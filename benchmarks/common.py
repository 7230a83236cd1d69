"""What the programs share: the folders, the options, and the files with what was found."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def parser(program: ModuleSpec, text: str | None, json: bool = True) -> argparse.ArgumentParser:
    """Return a parser whose help is a program's docstring; with an option for a file, unless `json` is False."""
    command = f"python -m {program.name.removesuffix('.__main__')}"
    raw = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(prog=command, description=text, formatter_class=raw)
    if json:
        result.add_argument("--json", metavar="FILE", type=Path, help="write what was found")
    return result


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def off(x: Any, exact: Any) -> float:
    """Return how far a tensor is from another, relative in the norm."""
    right = exact.double()
    return ((x.double() - right).norm() / right.norm().clamp_min(1e-30)).item()


def write(file: Path | None, data: Any) -> None:
    """Write what was found, if there is a file for it: whole at once, since others may read it meanwhile."""
    if file:
        new = file.with_suffix(".new")
        new.write_text(json.dumps(data, indent=1) + "\n")
        new.replace(file)


def again(program: ModuleSpec, *options: object) -> list[str]:
    """Return the command that runs a program in a process of its own, in the folder ROOT."""
    return [sys.executable, "-m", program.name, *map(str, options)]
