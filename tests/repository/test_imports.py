"""Who may import whom, and what `import kda` costs."""

import ast
import functools
import json
import pathlib
import re
import subprocess
import sys

import pytest

import kda

ROOT = pathlib.Path(kda.__file__).parent

# packages whose modules, or folders, are parts of their own
GROUPS = ("calls", "checks", "model", "routing", "tools")
LEDGER = {("tools", "verify", name) for name in ("digests", "ledger", "ran")}     # a part that calls read, too
# part of the package -> what it imports of the package, and of ptxkit: compile, the simulator, and what has no weight
ARROWS = {
    "building": {"ptxkit"},
    "checks.memo": set(),
    "checks.written": set(),
    "errors": {"ptxkit"},
    "model.bundles": set(),
    "model.force": set(),
    "model.gates": set(),
    "simulator": {"ptxkit"},
    "checks.keywords": {"errors"},
    "model.host": {"ptxkit", "simulator"},
    "model.offsets": {"errors", "model.problem"},
    "model.problem": {"model.force"},
    "model.stages": {"model.bundles"},
    "model.transforms": {"errors"},
    "notices": {"errors"},
    "checks.calls": {"checks.memo", "checks.written", "errors", "model.force", "model.offsets", "model.problem"},
    "routing.capability": {"model.host", "model.problem"},
    "backends": {"compile", "model.bundles", "model.gates", "model.host", "model.offsets", "model.problem",
                 "model.stages", "routing.capability"},
    "checks.decode": {"checks.calls", "checks.written", "model.problem"},
    "checks.gate": {"checks.calls"},
    "routing.dispatch": {"backends", "compile", "errors", "model.bundles", "model.host", "model.problem", "notices",
                         "routing.capability"},
    "calls.ahead": {"compile", "model.bundles", "model.host", "model.problem", "routing.dispatch"},
    "calls.decode": {"calls.node", "checks.calls", "checks.decode", "checks.keywords", "checks.memo", "errors",
                     "model.force", "model.host", "model.problem", "model.transforms", "routing.dispatch"},
    "calls.autograd": {"checks.calls", "errors", "model.bundles", "model.force", "model.gates", "model.problem",
                       "model.transforms", "routing.dispatch"},
    "calls.node": {"checks.memo", "compile"},
    "calls.plain": {"backends", "calls.ahead", "calls.autograd", "calls.node", "compile", "model.bundles",
                    "model.force", "model.host", "model.offsets", "model.problem", "model.transforms",
                    "routing.dispatch"},
    "calls.arguments": {"checks.calls", "checks.memo", "errors", "model.bundles", "model.problem"},
    "calls.known": {"calls.arguments", "calls.node", "calls.plain", "checks.calls", "checks.memo", "model.force",
                    "model.host", "model.problem", "routing.dispatch"},
    "calls.api": {"calls.arguments", "calls.autograd", "calls.known", "checks.calls", "checks.gate", "checks.keywords",
                  "checks.memo", "errors", "model.bundles", "model.host", "model.offsets", "model.problem", "parallel",
                  "routing.dispatch"},
    "parallel": {"calls.autograd", "checks.calls", "errors", "model.bundles", "model.gates", "model.offsets",
                 "model.problem", "model.transforms", "routing.dispatch"},
    "ledger": {"backends", "compile", "model.host", "model.problem", "ptxkit"},
    "calls.planned": {"backends", "calls.ahead", "compile", "model.bundles", "model.host", "model.problem",
                      "routing.dispatch"},
    "calls.rehearsal": {"calls.api", "calls.arguments", "calls.autograd", "calls.planned", "checks.calls", "compile",
                        "errors", "ledger", "model.bundles", "model.host", "model.offsets", "model.problem",
                        "routing.dispatch"},
    "nn": {"backends", "calls.api", "calls.decode", "checks.calls", "checks.decode", "checks.keywords", "errors",
           "model.gates", "model.host", "model.problem", "model.transforms", "parallel", "routing.dispatch"},
    "engines": {"calls.api", "errors", "model.host", "model.problem", "nn", "notices", "routing.dispatch"},
    "fla": {"calls.api", "calls.rehearsal", "errors", "notices"},
    "hf": {"calls.api", "errors", "nn", "notices"},
    "hub": {"calls.api", "hf"},
    "__init__": {"building", "calls.api", "calls.decode", "calls.rehearsal", "errors", "hf", "model.bundles",
                 "model.problem", "nn", "parallel", "routing.dispatch", "simulator"},
    "tools.verify": {"__init__", "backends", "calls.ahead", "compile", "errors", "model.bundles", "model.force",
                     "model.gates", "model.host", "model.offsets", "model.problem", "model.stages",
                     "routing.capability", "routing.dispatch", "simulator"},
    "tools.measure": {"__init__", "calls.node", "compile", "model.force", "model.host", "model.problem",
                      "model.stages", "ptxkit", "simulator", "tools.verify"},
    "tools.commands": {"__init__", "calls.node", "calls.rehearsal", "compile", "errors", "fla", "ledger",
                       "model.bundles", "model.host", "model.problem", "model.stages", "output", "routing.capability",
                       "routing.dispatch", "simulator", "tools.measure", "tools.verify"},
    "cli": {"output", "tools.commands"},
    "__main__": {"cli"},
}
BARE = ("kda", "ptxkit", "", *(f"kda.{group}" for group in GROUPS))
LIGHT = {"", "application", "errors", "limits", "standing", "temporary"}
HEAVY = ("triton", "cutlass", "cuda", "matplotlib", "numpy")
TORCH_FREE = ("errors", "notices", "model.problem", "model.stages", "model.bundles", "model.host",
              "routing.capability", "routing.dispatch", "compile", "model.offsets", "cli", "__main__")


def part(path):
    return part_of(path.relative_to(ROOT).with_suffix("").parts)


def part_of(names):
    """Return "nn", or "calls.api" within a group; None for the group itself."""
    if tuple(names[:3]) in LEDGER:
        return "ledger"
    if names[0] not in GROUPS:
        return names[0]
    return ".".join(names[:2]) if names[1:] and names[1] != "__init__" else None


def part_of_ptxkit(module):
    """Return "compile", "output" (of commands), "simulator", or "ptxkit" for the modules that cost nothing."""
    first = "".join(module.split(".")[1:2])
    return {"compile": "compile", "commands": "output"}.get(first, "ptxkit" if first in LIGHT else "simulator")


@functools.cache
def imports(path):
    """(whether it stands at the top, absolute module name) of every import in a file, also of those named in text."""
    package = ["kda", *path.relative_to(ROOT).parts[:-1]]
    tree = ast.parse(path.read_text())
    top, found = set(tree.body), []
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found += [(node in top, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            bare = module in BARE or not node.module
            named = [f"{module}.{alias.name}" if bare else module for alias in node.names]
            found += [(node in top, name) for name in named]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(kda|ptxkit)(\.\w+)+(:\w+)?", str(node.value)):
            found.append((False, node.value.partition(":")[0]))
    return found


def parts_imported(path):
    """Parts of the package that a file imports; the package itself is its __init__."""
    modules = [module.split(".") for _, module in imports(path)]
    found = {part_of(m[1:]) if m[1:] else "__init__" for m in modules if m[0] == "kda"} - {"__version__"}
    return (found | {part_of_ptxkit(".".join(m)) for m in modules if m[0] == "ptxkit"}) - {part(path), None}


FILES = sorted(path for path in ROOT.rglob("*.py") if part(path))


def test_arrows_go_one_way():
    wrong = [(str(p.relative_to(ROOT)), x) for p in FILES for x in parts_imported(p) - ARROWS[part(p)]]
    assert not wrong


def test_every_part_of_the_package_has_its_arrows_and_none_that_it_does_not_need():
    found = {part(path): set() for path in FILES}
    for path in FILES:
        found[part(path)] |= parts_imported(path)
    lazy = {"__init__": ARROWS["__init__"]}                                  # names its modules in tables
    assert found | lazy == ARROWS


def test_no_arrows_make_a_circle_but_that_of_dispatch_which_finds_the_backends():
    left = {name: arrows - ({"backends"} if name == "dispatch" else set()) for name, arrows in ARROWS.items()}
    while free := [name for name, arrows in left.items() if not arrows & set(left)]:
        left = {name: arrows for name, arrows in left.items() if name not in free}
    assert not left


def test_an_import_inside_a_function_and_a_module_named_in_text_are_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "problem.py"
    file.write_text("def f():\n    from .nn import step\n\nprover = 'kda.tools.verify.parity:prove'\nimport kda\n")
    assert parts_imported(file) == {"nn", "tools.verify", "__init__"}


def test_nothing_heavy_is_imported_at_the_top_of_a_file():
    for path in FILES:
        tops = {module.split(".")[0] for top, module in imports(path) if top}
        kernels = part(path) == "backends" and path.name not in ("capability.py", "plan.py", "__init__.py")
        assert not tops & set(HEAVY) or kernels, path
        if part(path) in TORCH_FREE or path.name in ("capability.py", "plan.py"):
            assert "torch" not in tops, path


def module_of(path):
    parts = ["kda", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files_imported(path, modules):
    """Modules of the package (`modules`) that a file imports, in functions and for types, too."""
    package = ["kda", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            named = {f"{base}.{alias.name}" for alias in node.names}
            found |= named & modules | ({base} if named - modules else set())
    return (found & modules) - {module_of(path)}


def in_circles(files):
    """Modules in circles: those that stay when all are taken away, again and again, at either end of the arrows."""
    modules = {module_of(path) for path in files}
    left = {module_of(path): files_imported(path, modules) for path in files}
    while True:
        wanted = set().union(*left.values())
        inner = {name: found & set(left) for name, found in left.items() if found & set(left) and name in wanted}
        if inner == left:
            return set(left)
        left = inner


def test_no_files_import_each_other_in_a_circle():
    assert in_circles(FILES) == set()


def test_a_circle_of_files_is_seen_in_functions_and_for_types_and_through_a_package(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    texts = {
        "doors/__init__": "from .first import one",
        "doors/first": "from ..second import two",
        "second": "def f():\n    from kda import third",
        "third": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .doors import one",
        "below": "import json",
        "doors/above": "from .. import below\nfrom kda.third import one",
    }
    (tmp_path / "doors").mkdir()
    files = [tmp_path / f"{name}.py" for name in texts]
    for file, text in zip(files, texts.values()):
        file.write_text(text)
    assert in_circles(files) == {"kda.doors", "kda.doors.first", "kda.second", "kda.third"}
    files[3].write_text("from . import below")
    assert in_circles(files) == set()


def test_no_backend_imports_a_sibling():
    for path in (ROOT / "backends").rglob("*.py"):
        backend = path.relative_to(ROOT / "backends").parts[0]
        for _, module in imports(path):
            if module.startswith("kda.backends."):
                assert module.split(".")[2] in (backend, "common"), f"{path} imports {module}"


def fresh(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def imported():
    """Return what a process finds after `import kda`, beside torch alone; what torch looks for is torch's affair."""
    banned = (*HEAVY, "click", "packaging", "einops", "transformers", "fla")
    result = fresh(f"""
import json, sys, torch
kept = {{name: sys.modules.get(name) for name in {banned}}}
sys.modules |= dict.fromkeys(kept)                       # importing one of them fails
before = set(sys.modules)
import kda
found = {{"loaded": sorted(set(sys.modules) - before), "listed": "simulator" in dir(kda)}}
found["operator"] = str(torch.ops.kda.chunk_forward)
found["layer"] = [*kda.nn.KimiDeltaAttention(8, 1, 8)(torch.ones(1, 3, 8)).shape]
for name in kept:
    del sys.modules[name]
sys.modules |= {{name: module for name, module in kept.items() if module}}
found["simulator"] = str(kda.simulator.capture)
print(json.dumps(found))
""")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_import_kda_needs_torch_alone_and_so_does_the_layer(imported):
    assert imported["layer"] == [1, 3, 8]


def test_import_kda_registers_its_operators(imported):
    assert imported["operator"] == "kda.chunk_forward"


def test_import_kda_costs_a_few_files_of_its_own_over_import_torch(imported):
    """It loads no file of a backend, a compiler, the simulator or a command, and no other package."""
    parts = ("building", "calls", "calls.api", "calls.arguments", "calls.autograd", "calls.known", "calls.node",
             "checks",
             "checks.calls", "checks.gate", "checks.keywords", "checks.memo", "checks.written", "errors", "model",
             "model.bundles", "model.force", "model.gates", "model.host", "model.offsets", "model.problem",
             "model.transforms", "routing", "routing.capability", "routing.dispatch")
    light = ("ptxkit", "ptxkit.application", "ptxkit.errors", "ptxkit.standing")
    assert {*imported["loaded"]} == {"kda", *(f"kda.{part}" for part in parts), *light}


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


def test_the_simulator_is_there_after_import_kda_and_costs_nothing_until_used(imported):
    assert "kda.simulator" not in imported["loaded"] and imported["listed"]
    assert imported["simulator"].startswith("<function capture")


def test_tests_of_peers_are_skipped_where_neither_the_peers_nor_a_newer_python_are_there():
    """Python 3.10 has no tomllib: a file that cannot be imported would end a run of all tests."""
    code = f"""
import sys, pytest
class Without:                               # pytest itself reads its options with tomllib, before
    def pytest_collection(self):
        sys.modules.update(dict.fromkeys(("tomllib", "fla.layers", "sglang", "transformers", "vllm")))
pytest.main(["--co", "-q", {str(ROOT.parent / "tests" / "peers")!r}], [Without()])
"""
    found = fresh(code).stdout
    assert "tests/peers/test_in_sglang.py:8: needs sglang" in found and "ERROR" not in found


def test_no_backend_asks_whether_a_simulator_listens():
    asking = re.compile(r"\b(taker|stand_in|simulator\.capturing)\b")
    files = sorted((ROOT / "backends").rglob("*.py"))
    assert len(files) > 50 and [file.name for file in files if asking.search(file.read_text())] == []
