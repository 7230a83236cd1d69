"""ptxkit as a distribution of its own: its wheel holds all of it, and runs a kernel where only torch is beside it."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77", reason="setuptools is not installed")
pytestmark = pytest.mark.simulated

ROOT = Path(__file__).parents[2]
OTHERS = ROOT / "ptxkit" / "benchmarks" / "others"     # kernels of other projects, some of which have the name, too
KINDS = (".py", ".c", ".h", ".json", ".typed")
ALONE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("kda", "triton", "cutlass", "cuda", "packaging", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.path[:0] = [sys.argv[1]]
import torch                                             # looks for some of these itself
sys.meta_path.insert(0, Absent())
import ptxkit
assert ptxkit.__file__.startswith(sys.argv[1]), ptxkit.__file__
x = torch.arange(64, dtype=torch.int32)
run = ptxkit.launch(sys.stdin.read(), grid=2, block=32, args=[x], arch="sm_90a")
print(run.findings, x.tolist() == [3 * n for n in range(64)], ptxkit.__version__)
"""
TRIPLE = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry triple(.param .u64 x)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [x];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.s32 %r3, %r1, 32, %r2;
    mul.wide.s32 %rd2, %r3, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r4, [%rd3];
    mul.lo.s32 %r5, %r4, 3;
    st.global.u32 [%rd3], %r5;
    ret;
}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the folder into which the package's wheel was unpacked."""
    folder = tmp_path_factory.mktemp("ptxkit")
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    copy = folder / "checkout" / "ptxkit"
    ignored = {"__pycache__", "build"}
    for path in (ROOT / "ptxkit").rglob("*"):
        if path.is_file() and not ignored & {*path.parts}:
            target = copy / path.relative_to(ROOT / "ptxkit")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    command = [sys.executable, "-c", build, str(folder)]
    ran = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def test_the_wheel_has_every_file_of_the_package(installed):
    files = {path.relative_to(ROOT) for path in (ROOT / "ptxkit").rglob("*") if path.suffix in KINDS}
    files = {path for path in files if not {"__pycache__", "build", "docs", "benchmarks"} & {*path.parts}}
    assert files == {path.relative_to(installed) for path in installed.rglob("*") if path.suffix in KINDS}


def test_it_runs_a_kernel_from_ptx_where_only_torch_is_beside_it(installed):
    command = [sys.executable, "-c", ALONE, str(installed)]
    ran = subprocess.run(command, input=TRIPLE, capture_output=True, text=True, timeout=600, cwd=installed)
    assert ran.stdout.split() == ["[]", "True", "0.1.0"], ran.stderr


def test_nothing_in_it_names_the_package_that_uses_it():
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "ptxkit").rglob("*.py"))
        if path.parent != OTHERS
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if "kda" in line.lower()
    ]
    assert not named, "\n".join(named)
    used = re.compile(r"(import|from) kda\b")
    assert not [path.name for path in OTHERS.glob("*.py") if used.search(path.read_text())]
