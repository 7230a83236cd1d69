"""Kernels by recipe: what names one, where it is built, and what happens when that goes wrong."""

import importlib.util
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import pytest

from ptxkit.compile import builders, fetching, recipes, store
from ptxkit.compile import triton as door
from ptxkit.compile.errors import BuildError, MissingCompilerError
from ptxkit.compile.triton import Recipe

pytestmark = pytest.mark.compiler

ROOT = pathlib.Path(__file__).parents[3]
TYPES = {"x": "*fp32", "y": "*fp32", "n": "i32"}
KERNELS = """
import triton
import triton.language as tl

from . import parts

@triton.jit
def scale(x, y, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, parts.times(tl.load(x + i, mask=i < n), FACTOR), mask=i < n)
"""
PARTS = """
import triton

@triton.jit
def times(x, FACTOR):
    return x * FACTOR
"""


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Make a package of kernels that this process has not imported, and a cache of its own."""
    folder = tmp_path / "path" / "example"
    folder.mkdir(parents=True)
    for name, text in {"__init__": "", "kernels": KERNELS, "parts": PARTS}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(fetching, "_FETCHED", {})
    yield folder
    for name in [n for n in sys.modules if n.partition(".")[0] == "example"]:
        del sys.modules[name]


def recipe(module="kernels", name="scale", target="sm90", block=128, **more):
    constants = {"FACTOR": 3.0, "BLOCK": block} | more
    return Recipe(f"example.{module}:{name}", TYPES, constants, target=target, divisible=["x"])


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


# ---- what names a kernel


def test_a_recipe_is_frozen_hashable_and_can_be_sent():
    one = Recipe("m:f", {"x": "*bf16", "pair": ("i32", ("fp32",))}, {"K": 64}, target="sm_90a", divisible=["x"])
    same = Recipe("m:f", {"pair": ["i32", ["fp32"]], "x": "*bf16"}, {"K": 64}, target="sm90", divisible=("x",))
    assert one == same and hash(one) == hash(same) and len({one, same}) == 1
    assert pickle.loads(pickle.dumps(one)) == one == Recipe.read(one.text)
    assert one.target.cc == (9, 0) and one.signature["pair"] == ("i32", ("fp32",))
    with pytest.raises(AttributeError):
        one.target = "sm80"
    with pytest.raises(TypeError):
        one.constants["K"] = 65


def test_constants_that_only_compare_equal_are_different_recipes():
    values = (1, 1.0, True, "1", None, 0.1, float("inf"))
    assert len({Recipe("m:f", {}, {"K": value}, target="sm90") for value in values}) == len(values)


def test_a_constant_that_cannot_be_written_down_is_refused():
    with pytest.raises(BuildError, match=r"m:f: K must be an int, .* found dict"):
        Recipe("m:f", {}, {"K": {}}, target="sm90")


def test_neither_a_recipe_nor_its_key_imports_triton_or_the_kernel(example):
    code = "import sys; from ptxkit.compile.triton import Recipe; "
    code += "print(len(Recipe('example.kernels:scale', {}, target='sm90').key)); print(*sys.modules)"
    length, modules = script(code, example).stdout.splitlines()
    assert length == "64" and not {"triton", "example", "example.kernels"} & set(modules.split())


def test_the_key_holds_all_that_a_build_depends_on(example, monkeypatch):
    keys = [recipe().key]

    def differs():
        keys.append(recipe().key)
        assert len(set(keys)) == len(keys)

    for name in ("parts.py", "kernels.py"):
        (example / name).write_text((example / name).read_text() + "# edited\n")
        differs()
    monkeypatch.setattr(recipes.importlib.metadata, "version", lambda name: "3.99")
    differs()
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    differs()
    monkeypatch.setattr(door, "FORMAT", "triton 0")
    differs()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    (example / "notes.txt").write_text("not source")
    assert recipe().key == keys[-1]
    others = [recipe(block=64), recipe(target="sm80"), recipe(name="other"), recipe(EXTRA=None)]
    assert len({keys[-1], *(other.key for other in others)}) == 5


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(BuildError, match=r"no module nowhere to build a kernel of nowhere\.kernels from"):
        _ = Recipe("nowhere.kernels:scale", {}, target="sm90").key


def test_an_entry_shows_whether_it_is_stale(example):
    about = recipe().about
    assert (about["kernel"], about["arch"], about["module"]) == ("scale", "sm90", "example.kernels")
    assert Recipe.read(about["recipe"]) == recipe() and recipes.outdated(about) is None
    assert recipes.outdated({}) is recipes.outdated({"kernel": "of another door"}) is None
    assert recipes.outdated(about | {"triton": "3.1"}) == "Triton 3.1"
    (example / "parts.py").write_text("changed = True")
    assert recipes.outdated(about) == "other source" and recipes.outdated(recipe().about) is None
    assert recipes.outdated(about | {"module": "nowhere.kernels"}) == "source that is gone"


# ---- building


@needs_triton
def test_a_kernel_is_built_once_and_then_read_without_triton(example, monkeypatch):
    built = fetching.fetch(recipe())
    assert built.name == "scale" and built.names == ("x", "y", "n") and built.divisible == (0,)
    assert built.cubin[:4] == b"\x7fELF" and built.registers > 0
    assert fetching.fetch(recipe()) is built
    (kept,) = store.default().entries()
    assert kept.key == recipe().key and kept.about.items() >= recipe().about.items() and kept.about["seconds"] > 0
    monkeypatch.setattr(fetching, "_FETCHED", {})
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(builders.BuilderProcess, "started", None)
    again = fetching.fetch(recipe())
    assert again == built and again is not built and "example" not in sys.modules


@needs_triton
def test_a_kernel_of_this_process_costs_no_look_at_source_or_disk(example, monkeypatch):
    built = fetching.fetch(recipe())
    monkeypatch.setattr(door, "source", None)
    monkeypatch.setattr(store.Store, "find", None)
    assert [kernel is built for kernel in fetching.fetch_all([recipe(), recipe()])] == [True, True]


@needs_triton
def test_a_fetched_kernel_is_the_one_that_compile_gives(example):
    import example.kernels

    compiled = door.compile(example.kernels.scale, TYPES, {"FACTOR": 3.0, "BLOCK": 128}, target="sm90", divisible=["x"])
    assert fetching.fetch(recipe()) == compiled


@needs_triton
def test_several_are_built_at_once_each_once_and_come_in_order(example):
    blocks = [32, 64, 32, 128]
    kernels = fetching.fetch_all([recipe(block=block) for block in blocks], workers=2)
    assert kernels[0] is kernels[2] and len({k.ptx for k in kernels}) == 3
    assert kernels[3] == fetching.fetch(recipe(block=128))


@needs_triton
def test_building_leaves_triton_s_cache_and_the_environment_alone(example, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # would leave nothing to be built
    before = dict(os.environ)
    assert fetching.fetch(recipe()).name == "scale"
    assert dict(os.environ) == before and not (tmp_path / "triton").exists()


@pytest.mark.exhaustive
@needs_triton
def test_a_script_without_a_main_guard_may_build(example):
    texts = [recipe(block=block).text for block in (32, 64)]
    code = "print('once'); from ptxkit.compile import fetching as f, triton as r; "
    code += f"print(len(f.fetch_all(map(r.Recipe.read, {texts!r}), workers=2)))"
    assert script(code, example).stdout.split() == ["once", "2"]


@needs_triton
def test_what_a_kernel_s_file_prints_disturbs_nothing(example):
    (example / "kernels.py").write_text("import os; os.write(1, b'{}\\n'); print('hello')\n" + KERNELS)
    assert fetching.fetch(recipe()).name == "scale"


# ---- what goes wrong


@needs_triton
def test_the_error_is_the_one_that_compile_raises(example):
    import example.kernels

    with pytest.raises(BuildError, match="cannot build scale for sm_90a") as compile_error:
        door.compile(example.kernels.scale, TYPES, {"FACTOR": 3.0, "BLOCK": 100}, target="sm90", divisible=["x"])
    with pytest.raises(BuildError) as fetch_error:
        fetching.fetch(recipe(block=100))
    assert str(fetch_error.value) == str(compile_error.value)
    with pytest.raises(BuildError, match="no type for BLOCK"):
        fetching.fetch(Recipe("example.kernels:scale", TYPES, {"FACTOR": 3.0}, target="sm90"))
    with pytest.raises(BuildError, match=r"example\.kernels:scales cannot be imported: AttributeError"):
        fetching.fetch(recipe(name="scales"))
    assert fetching.fetch(recipe()).name == "scale"


@needs_triton
def test_a_process_that_dies_is_an_error_and_the_other_kernels_are_built(example):
    (example / "deadly.py").write_text("import os, sys; print('going down', file=sys.stderr, flush=True); os.abort()")
    with pytest.raises(BuildError, match=r"building example\.deadly:scale .* died with SIGABRT\.\ngoing down"):
        fetching.fetch_all([recipe(module="deadly"), recipe()], workers=1)
    with pytest.raises(BuildError, match="SIGABRT"):
        fetching.fetch_all([recipe(), recipe(module="deadly")], workers=2)
    assert recipe() in fetching._FETCHED


@needs_triton
@pytest.mark.parametrize("executable", ["/bin/true", "/nowhere/python", None], ids=["no python", "gone", "unknown"])
def test_where_no_process_can_be_started_kernels_are_built_here(example, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert len(fetching.fetch_all([recipe(block=32), recipe(block=64)])) == 2
    assert "example.kernels" in sys.modules


@needs_triton
def test_a_python_that_cannot_import_triton_builds_nothing(example, monkeypatch, tmp_path):
    (tmp_path / "path" / "triton.py").write_text("raise ImportError('libcuda is gone')")
    assert builders.BuilderProcess.started("ptxkit.compile.triton") is None


def test_without_triton_the_error_says_how_to_get_it(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(builders.BuilderProcess, "started", lambda door: None)
    with pytest.raises(MissingCompilerError, match="pip install triton"):
        fetching.fetch(recipe())


@needs_triton
def test_source_that_changed_after_its_key_was_made_is_not_kept_under_that_key(example):
    old = recipe()
    assert old.key
    (example / "parts.py").write_text(PARTS.replace("x * FACTOR", "x + FACTOR"))
    with pytest.raises(BuildError, match="Start Python again"):
        fetching.fetch(old)
    assert store.default().find(old.key) is None
    assert "add" in fetching.fetch(recipe()).ptx


@needs_triton
def test_an_entry_that_is_whole_and_holds_something_else_is_built_again(example):
    store.default().fetch(recipe().key, lambda: {"ptx": b"of another format"})
    assert fetching.fetch(recipe()).name == "scale"
    assert b"scale" in store.default().find(recipe().key)["ptx"]


@needs_triton
def test_an_interrupt_ends_the_builds(example):
    (example / "slow.py").write_text("import time, pathlib\npathlib.Path(__file__ + '.began').touch()\ntime.sleep(100)")
    texts = [recipe(module="slow", block=block).text for block in (32, 64, 128)]
    code = f"""import signal
from ptxkit.compile import fetching, triton
signal.signal(signal.SIGINT, signal.default_int_handler)                       # nohup and a job in background ignore it
fetching.fetch_all(map(triton.Recipe.read, {texts!r}), workers=2)"""
    process = subprocess.Popen([sys.executable, "-c", code], env=environment(example), stderr=subprocess.PIPE)
    while not (example / "slow.py.began").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # to that process alone, as a notebook does
    assert b"KeyboardInterrupt" in process.communicate(timeout=600)[1]


def environment(example):
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(example.parent), str(ROOT), *sys.path])}


def script(code, example):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(example), check=True)
