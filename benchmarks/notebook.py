"""The notebook examples/first_minutes.ipynb, without Jupyter: its code cells run as a script, and what they print.

`python -m benchmarks write --only notebook` runs them and writes what they print into the file.  Numbers of a cell with
the tag `numbers vary` depend on the machine or on versions of compilers; only their places are compared.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import common

FILE = common.ROOT / "examples" / "first_minutes.ipynb"
VARY = "numbers vary"


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def code_of(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"])


def printed_of(cell: Mapping[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"])


def varies(cell: Mapping[str, Any]) -> bool:
    return VARY in cell["metadata"].get("tags", ())


def run(notebook: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Run the code cells in their order, in an empty folder; yield each with what it prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, here(Path(folder)):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(code_of(cell), FILE.name, "exec"), names)
                yield cell, out.getvalue()


@contextlib.contextmanager
def here(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def comparable(cell: Mapping[str, Any], text: str) -> str:
    """Return what must be the same on every machine: all, or all but numbers and the widths and bars beside them."""
    if not varies(cell):
        return text
    return re.sub(r"[ █]+", " ", re.sub(r"\d[\d,.]*", "#", text))


def differences(notebook: Mapping[str, Any]) -> Iterator[str]:
    """Yield how cells differ from what they print now."""
    for cell, text in run(notebook):
        said, found = (comparable(cell, each) for each in (printed_of(cell), text))
        if said != found:
            yield f"{code_of(cell).splitlines()[0]}\n  in the file: {said!r}\n  now:         {found!r}"


def texts() -> dict[Path, str]:
    """Return the file with what its cells print now."""
    notebook = read()
    for n, (cell, text) in enumerate(run(notebook), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = n  # type: ignore[index]
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] * bool(lines)  # type: ignore[index]
    return {FILE: json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"}
