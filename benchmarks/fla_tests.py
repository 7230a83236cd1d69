"""FLA's own tests of KDA, with kda behind FLA's names.

    python -m benchmarks.fla_tests CHECKOUT [--device cuda] [--registered] [pytest's options]

CHECKOUT is one of flash-linear-attention, of which its tests, its definitions and its measure of closeness are read.
FLA itself need not be installed; einops and pytest must be.  Nothing of it is kept here.  With --registered the
installed FLA is tested instead, its registry asking kda (kda.fla), and how many calls came to kda is printed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import common

# A module of FLA: what stands there instead, and what is taken over, a file or functions of one.
MODULES = {
    "fla": ("", "", ()),
    "fla.ops": ("", "", ()),
    "fla.ops.utils": ("", "", ()),
    "fla.ops.kda": ("from kda import chunk_kda, fused_recurrent_kda\n", "", ()),
    "fla.ops.kda.fused_recurrent": ("from kda import fused_recurrent_kda_fwd\n", "", ()),
    "fla.ops.kda.naive": ("", "fla/ops/kda/naive.py", None),
    "fla.ops.kda.gate": (
        "import torch\nimport torch.nn.functional as F\nfrom kda import fused_kda_gate\n",
        "fla/ops/kda/gate.py",
        ("naive_kda_gate", "naive_kda_lowerbound_gate"),
    ),
    "fla.ops.utils.cache": ("class FLA_CACHE_MODE:\n    uses_default_config = staticmethod(lambda: False)\n", "", ()),
    "fla.utils": (
        "import logging, os, warnings\nimport torch\nlogger = logging.getLogger('fla')\n"
        "IS_INTEL_ALCHEMIST = IS_NPU = FLA_CI_ENV = False\nIS_NVIDIA = True\ndevice = os.environ['KDA_TEST_DEVICE']\n",
        "fla/utils/_testing.py",
        ("get_abs_err", "get_err_ratio", "assert_close"),
    ),
}
REGISTERED = """
import collections, os
import fla.utils
import kda.fla, kda.calls.rehearsal

fla.utils.device = os.environ["KDA_TEST_DEVICE"]                               # it takes none for cuda
came, rehearse = collections.Counter(), kda.calls.rehearsal.rehearse

def counting(function, *args, **keywords):
    came[f"calls of {function} left to FLA"] += 1
    choices = rehearse(function, *args, **keywords)
    came[f"calls of {function} left to FLA"] -= 1
    came[f"calls of {function} taken by {choices[0].backend}"] += 1
    return choices

kda.calls.rehearsal.rehearse = counting

def pytest_terminal_summary(terminalreporter):
    for what, count in sorted(came.items()):
        terminalreporter.write_line(f"{count:6} {what}")
"""


def taken(file: Path, names: tuple[str, ...] | None) -> str:
    """The source of a file, or of some functions of it."""
    source = file.read_text()
    if names is None:
        return source
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name in names)
    return "\n\n".join(ast.get_source_segment(source, node) for node in functions)


def stand_in(checkout: Path, folder: Path) -> None:
    """A package `fla` of kda and FLA's definitions, and the tests, in `folder`."""
    packages = {name.rpartition(".")[0] for name in MODULES}
    for module, (text, file, names) in MODULES.items():
        path = folder / module.replace(".", "/")
        path = path / "__init__.py" if module in packages else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + (taken(checkout / file, names) if file else ""))


def main() -> None:
    parser = common.parser(__spec__, __doc__, json=False)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--registered", action="store_true")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.registered:
            (Path(folder) / "conftest.py").write_text(REGISTERED)
        else:
            stand_in(args.checkout, Path(folder))
        (Path(folder) / "test_kda.py").write_text((args.checkout / "tests/ops/test_kda.py").read_text())
        path = os.pathsep.join(filter(None, (folder, str(common.ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"KDA_TEST_DEVICE": args.device, "PYTHONPATH": path}
        pytest = [sys.executable, "-m", "pytest", "--rootdir", folder, "-p", "no:cacheprovider", folder]
        sys.exit(subprocess.run([*pytest, *options], env=environment).returncode)


if __name__ == "__main__":
    main()
