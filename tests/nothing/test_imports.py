"""Who may import whom, and what `import kda` costs."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import kda

ROOT = pathlib.Path(kda.__file__).parent

# part of the package -> what it may import of the package; "*" is everything
ARROWS = {
    "errors": set(),
    "problem": set(),
    "stages": {"bundles"},
    "bundles": set(),
    "host": set(),
    "compile": {"compile", "errors"},
    "simulator": {"simulator", "compile", "errors", "host"},
    "capability": {"host", "problem"},
    "dispatch": {"capability", "errors", "host", "problem", "backends"},
    "checks": {"errors", "problem"},
    "transforms": {"errors"},
    "autograd": {"backends", "bundles", "checks", "dispatch", "errors", "problem", "transforms"},
    "api": {"autograd", "bundles", "checks", "dispatch", "errors", "host", "problem"},
    "__init__": {"api", "bundles", "dispatch", "errors", "problem"},
    "backends": {"backends", "bundles", "capability", "checks", "compile", "host", "problem", "stages"},
    "verify": {"*"},
    "commands": {"*"},
    "cli": {"commands", "errors"},
    "__main__": {"cli"},
}
HEAVY = ("triton", "cutlass", "cuda", "matplotlib", "numpy")
TORCH_FREE = ("errors", "problem", "stages", "bundles", "host", "capability", "dispatch", "compile", "cli", "__main__")


def part(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path):
    """(level of nesting, absolute module name) of every import in a file."""
    package = ["kda", *path.relative_to(ROOT).parts[:-1]]
    tree = ast.parse(path.read_text())
    typing_only = {
        n
        for i in ast.walk(tree)
        if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test)
        for n in ast.walk(i)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        top = node in tree.body
        if isinstance(node, ast.Import):
            yield from ((top, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (
                (top, f"{module}.{a.name}" if module in ("kda", "") or not node.module else module) for a in node.names
            )


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_go_one_way(path):
    allowed = ARROWS[part(path)]
    for _, module in imports(path):
        if module.split(".")[0] == "kda" and len(module.split(".")) > 1 and "*" not in allowed:
            assert module.split(".")[1] in allowed | {part(path)}, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_heavy_is_imported_at_the_top_of_a_file(path):
    tops = {module.split(".")[0] for top, module in imports(path) if top}
    kernels = part(path) == "backends" and path.name not in ("capability.py", "plan.py", "__init__.py")
    assert not tops & set(HEAVY) or kernels
    if part(path) in TORCH_FREE or path.name in ("capability.py", "plan.py"):
        assert "torch" not in tops


def test_no_backend_imports_a_sibling():
    for path in (ROOT / "backends").rglob("*.py"):
        own = path.relative_to(ROOT / "backends").parts[0]
        for _, module in imports(path):
            if module.startswith("kda.backends."):
                assert module.split(".")[2] in (own, "common"), f"{path} imports {module}"


def test_every_part_of_the_package_has_its_arrows():
    assert {part(p) for p in FILES} <= set(ARROWS)


def fresh(code, **environment):
    variables = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)


BAN = """
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {banned!r}:
            raise ImportError(name + " is banned")
sys.meta_path.insert(0, Ban())
"""


def test_import_kda_needs_torch_alone():
    banned = (*HEAVY, "click", "packaging")
    code = (
        BAN.format(banned=tuple(b for b in banned if b != "numpy")) + "import torch, kda; print(kda.chunk_kda.__name__)"
    )
    result = fresh(code)
    assert result.stdout.strip() == "chunk_kda", result.stderr
    loaded = fresh("import torch, sys; before = set(sys.modules); import kda; print(*(set(sys.modules) - before))")
    assert not {name.split(".")[0] for name in loaded.stdout.split()} & {
        "triton",
        "cutlass",
        "cuda",
        "click",
        "packaging",
    }


def test_import_kda_registers_its_operators():
    assert fresh("import kda, torch; print(torch.ops.kda.chunk_forward)").stdout.strip() == "kda.chunk_forward"


def test_import_kda_costs_at_most_50_ms_over_import_torch(tmp_path):
    """Once its bytecode is there, as after an installation."""
    code = "import time, torch; t = time.perf_counter(); import kda; print(time.perf_counter() - t)"
    assert min(float(fresh(code, PYTHONPYCACHEPREFIX=str(tmp_path)).stdout) for _ in range(4)) < 0.05


def test_a_broken_torch_breaks_the_import_and_not_the_command(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch is gone')")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(1, {str(ROOT.parent)!r})\n"
    assert "libtorch is gone" in fresh(path + "import kda").stderr
    assert "--help" in fresh(path + "sys.argv = ['/usr/bin/kda', '--help']\nfrom kda.cli import main\nmain()").stdout


def test_all_names_can_be_reached():
    assert all(getattr(kda, name) is not None for name in kda.__all__)
    assert set(kda.__all__) <= set(dir(kda))
    with pytest.raises(AttributeError, match="chunk_kad"):
        _ = kda.chunk_kad
