"""Which files the key of a built kernel covers."""

import ast
import dataclasses
import importlib
import sys

import pytest

import kda
from kda.model.host import host_of
from kda.model.problem import Problem
from ptxkit.compile import recipes, sources
from ptxkit.compile.cutedsl import Recipe
from ptxkit.compile.errors import BuildError
from ptxkit.compile.target import parse

pytestmark = pytest.mark.compiler

KERNEL = "kda.backends.one.fwd.kernel"
FILES = {
    "compile/doors": "",
    "problem": "",
    "host": "",
    "backends/common/below": "",
    "backends/common/launcher": "from . import below\nfrom kda import host\n",
    "backends/one/fwd/kernel": "from ..parts import rows\nfrom kda import problem\nfrom ptxkit.compile import doors\n",
    "backends/one/parts/rows": "def f():\n    import kda.backends.common.below\n",
    "backends/one/launch": "from .fwd import kernel\nfrom ..common import launcher\n",
    "backends/one/capability": "",
    "backends/two/kernel": "",
}
PROBLEMS = {
    "sm100": ("bfloat16",), "sm90": ("bfloat16",), "sm89": ("float32 forward", "float32 packed A_log=true backward"),
    "triton": ("bfloat16 forward", "bfloat16 packed A_log=true dt_bias=true softplus backward", "float16 recurrent",
               "bfloat16 decode l2norm bounded beta=sigmoid"),
}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Make a package `kda` that is on disk and is not imported."""
    for name, text in FILES.items():
        for folder in (tmp_path / name).relative_to(tmp_path).parents:
            (tmp_path / folder).mkdir(exist_ok=True, parents=True)
            (tmp_path / folder / "__init__.py").touch()
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(kda.__spec__, "submodule_search_locations", [str(tmp_path)])
    return tmp_path


def changes(house, name, text="x = 1\n"):
    """Whether an edit of a file changes the key of the kernel."""
    path, before = house / name, recipes.source(KERNEL)
    path.write_text((path.read_text() if path.exists() else "") + text)
    return recipes.source(KERNEL) != before


COUNTED = {
    "backends/one/fwd/kernel.py": "the kernel",
    "backends/one/parts/rows.py": "what it imports",
    "backends/common/below.py": "imported by another file, inside a function",
    "problem.py": "imported from beside the backends",
    "backends/one/__init__.py": "a package that its files lie in",
    "backends/one/parts/__init__.py": "another such package",
    "backends/one/sums.cu": "a file in another language, of its backend",
    "backends/one/parts/deep.cuh": "a header of its backend",
    "backends/common/all.cuh": "a header of all backends",
}
NOT_COUNTED = {
    **dict.fromkeys(["backends/one/launch.py", "backends/one/capability.py", "backends/common/launcher.py", "host.py"],
                    "imported by host code alone"),
    **dict.fromkeys(["backends/two/kernel.py", "backends/two/sums.cu"], "another backend"),
    **dict.fromkeys(["backends/one/new.py", "backends/one/notes.txt"], "imported by nobody"),
    **dict.fromkeys(["__init__.py", "compile/__init__.py", "compile/doors.py"], "a door, or the package's version"),
}


@pytest.mark.parametrize("name", COUNTED, ids=lambda name: f"{name}, {COUNTED[name]}")
def test_an_edit_of_what_a_kernel_is_built_from_changes_its_key(house, name):
    assert changes(house, name) and changes(house, name)


@pytest.mark.parametrize("name", NOT_COUNTED, ids=lambda name: f"{name}, {NOT_COUNTED[name]}")
def test_an_edit_of_anything_else_leaves_the_key_as_it_is(house, name):
    assert not changes(house, name)


def test_a_file_counts_from_the_moment_that_it_is_imported(house):
    assert not changes(house, "backends/one/parts/new.py")
    assert changes(house, "backends/one/parts/rows.py", "from .new import x\n")
    assert changes(house, "backends/one/parts/new.py")


def test_a_key_does_not_depend_on_where_the_package_lies(house, tmp_path_factory, monkeypatch):
    (house / "backends/one/sums.cu").write_text("text")
    before, moved = recipes.source(KERNEL), tmp_path_factory.mktemp("other") / "kda"
    house.rename(moved)
    monkeypatch.setattr(kda.__spec__, "submodule_search_locations", [str(moved)])
    assert recipes.source(KERNEL) == before


def test_a_file_that_does_not_parse_counts_with_its_text(house):
    assert changes(house, "backends/one/parts/rows.py", "import (")
    assert changes(house, "backends/one/parts/rows.py", "import (")


def test_files_are_found_without_importing_them(house):
    before = set(sys.modules)
    assert "kda.backends.one.parts.rows" in sources.files(KERNEL)
    assert set(sys.modules) == before


def test_a_module_that_is_no_package_is_a_file_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "lonely_kernels.py").write_text("import os")
    monkeypatch.syspath_prepend(tmp_path)
    assert sources.files("lonely_kernels") == {"lonely_kernels": b"import os"}
    with pytest.raises(BuildError, match=r"there is no module lonelier to build a kernel of lonelier\.kernels from"):
        sources.files("lonelier.kernels")


@dataclasses.dataclass(frozen=True)
class Configuration:
    size: int
    kernel = "made_up"


def test_a_configuration_s_own_module_counts_beside_that_of_its_function():
    """What its class says takes part in a build."""
    one = Recipe("kda.backends.common.cute.tables:build", Configuration(1), parse("sm90"))
    assert one.about["source"] == recipes.source("kda.backends.common.cute.tables", __name__)
    assert one.about["source"] != recipes.source("kda.backends.common.cute.tables")
    assert recipes.outdated(one.about) is None


@pytest.mark.parametrize("backend", PROBLEMS)
def test_what_builds_of_a_backend_import_is_all_named_and_host_code_is_not_among_it(backend):
    plan = importlib.import_module(f"kda.backends.{backend}.plan")
    host = host_of("sm90" if backend == "triton" else backend)
    offered = {recipe for words in PROBLEMS[backend] for recipe in plan.recipes(Problem.parse(words), host)}
    found = {}
    for recipe in offered:
        found |= sources.files(*getattr(recipe, "modules", [recipe.module]))
    assert not {f"kda.backends.{backend}.{name}" for name in ("launch", "plan", "capability")} & set(found)
    for name, text in found.items():
        if not name.endswith((".cu", ".cuh")):
            used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
            assert not used & {"importlib", "import_module", "__import__", "exec", "eval"}, name


def test_parameters_of_a_function_are_read_from_its_source(house):
    (house / "backends/two/kernel.py").write_text(
        "def one(a, b: tl.constexpr):\n    return a, (b)\n\n\n@jit\n"
        "def several(\n    x, y=max(1, 2),\n    N: tl.constexpr = 4,\n) -> int:\n    def one(z):\n        pass\n"
    )
    assert sources.parameters("kda.backends.two.kernel:one") == {"a": False, "b": True}
    assert sources.parameters("kda.backends.two.kernel:several") == {"x": False, "y": False, "N": True}
    for function in ("kda.backends.two.kernel:sever", "kda.backends.two.gone:one"):
        with pytest.raises(BuildError, match=rf"^{function} is not in the source of kda\.$"):
            sources.parameters(function)
