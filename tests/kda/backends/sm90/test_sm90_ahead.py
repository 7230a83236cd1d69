"""Hopper's kernels ahead of time: `kda compile` builds all that calls want, and calls find it without the DSL."""

import dataclasses
import importlib.util
import itertools
import json
import pickle
import subprocess
import sys
import types

import pytest
from click.testing import CliRunner

from kda.backends.common.cute.configs import TablesConfig
from kda.backends.common.training_plan import OFFSETS, states_table
from kda.backends.sm90.capability import BACKWARD
from kda.backends.sm90.capability import CAPABILITY as SM90
from kda.backends.sm90.plan import TARGET, plan, recipe, recipes, training_plan
from kda.cli import cli
from kda.model import host
from kda.model.bundles import Save
from kda.model.host import host_of
from kda.model.problem import Problem
from kda.routing import dispatch
from kda.routing.capability import Capability
from kda.tools.commands import compile as command
from ptxkit.compile import fetching
from ptxkit.compile.errors import BuildError
from ptxkit.compile.recipes import outdated

pytestmark = pytest.mark.compiler

CLASSES = (
    "", "C=32", "packed bounded l2norm dt_bias=true beta=sigmoid", "K=64 V=64 softplus beta=2*sigmoid C=32 packed",
    "V=64 state_dtype=bfloat16 final_state=true g_dtype=float32",
    "K=64 intermediate_states=true state_v_first=true packed", "batch_invariant=true state_dtype=float32",
    "batch_invariant=true packed H=2 HV=4 beta_dtype=float32",
)
WORDS = "V=64 packed bounded l2norm dt_bias=true beta=sigmoid state_dtype=float32 final_state=true"
NAMES = ["tables"] * 2 + ["prepare"] * 2 + ["pairs"] + ["chain"] * 6
NAMES += ["compose", *["fused"] * 3, "stream", "stream", "compose", "join", "join"]
needs_dsl = pytest.mark.skipif(not importlib.util.find_spec("cutlass"), reason="nvidia-cutlass-dsl is not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "_FETCHED", {})
    command.host_of.cache_clear()
    yield tmp_path / "cache"
    command.host_of.cache_clear()


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, [*arguments])
    assert result.exit_code == code, result.output
    return result


# ---- what is offered


def wanted(p):
    """Return the kernels of calls, long and short, few and many, of the class of `p`."""
    found = {recipe(TablesConfig(dtype)) for dtype in OFFSETS if p.packed}
    sizes = list(itertools.product((0, 1, 33, 3000, 10**6), (1, 3, 70), (1, 4, 64), (16, 132)))
    sizes += [(T, 1, H, 132) for T in (3000, 8192) for H in (12, 16, 24, 32)]  # clusters of four
    backward = dataclasses.replace(p, direction="backward")
    has_backward = all(rule.holds(backward, host_of("sm90")) for rule in BACKWARD)
    for (T, N, H, sms), kept in itertools.product(sizes, (False,) if has_backward else (False, True)):
        call = dataclasses.replace(p, T=T, N=N, B=1 if p.packed else N, H=H, HV=H * p.HV // p.H)
        planned = plan(call, sms, kept)
        for offsets in OFFSETS if p.packed else (None,):
            found |= {recipe(c) for c in planned.configs(offsets) if c}
    if has_backward:
        found |= {recipe(states_table(dtype)) for dtype in OFFSETS if p.packed}
        for (T, N, H, sms), final_state in itertools.product(sizes, (False, True)):
            call = dataclasses.replace(
                backward, T=T, N=N, B=1 if p.packed else N, H=H, HV=H * p.HV // p.H, final_state=final_state
            )
            planned = training_plan(call, sms)
            for back, save in ((False, Save.OWN), (True, Save.OWN), (True, Save.NOTHING), (True, Save.STATES)):
                found |= {recipe(c) for c in planned.configs(save, backward=back) if c}
    return found


@pytest.mark.parametrize("words", CLASSES)
def test_what_is_offered_is_all_that_calls_of_a_class_want(words):
    p = Problem.parse(words)
    offered, needed = recipes(p, host_of("sm90")), wanted(p)
    assert needed == set(offered) and len(set(offered)) == len(offered)


def test_offering_imports_neither_torch_nor_the_dsl():
    code = (
        "import sys; sys.argv[:] = ['bin/kda']; from kda.backends.sm90.plan import recipes; "
        "from kda.model.problem import Problem; from kda.model.host import host_of; "
        "print(len(recipes(Problem(), host_of('sm90'))[0].key), *({'torch', 'cutlass'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["64"]


def test_a_recipe_can_be_sent_and_leaves_its_key_behind():
    one = recipe(TablesConfig("int32"))
    assert one.key and one.about["source"]
    sent = pickle.loads(pickle.dumps(one))
    assert sent == one and hash(sent) == hash(one) and not {"key", "about", "_source"} & set(vars(sent))
    others = (dataclasses.replace(one, function="kda.backends.sm90.fwd.chain:build"), recipe(TablesConfig("int64")))
    assert sent.key == one.key and len({one.key, *(other.key for other in others)}) == 3


def test_an_entry_shows_whether_it_is_stale():
    about = recipe(TablesConfig("int32")).about
    assert (about["kernel"], about["arch"], about["module"]) == ("tables", "sm90", "kda.backends.common.cute.tables")
    assert outdated(about) is None and outdated(about | {"cutedsl": "4.0"}) == "CuTe DSL 4.0"
    assert outdated(about | {"source": "of another day"}) == "other source"


# ---- what is built

# Calls without a GPU and without the DSL; launches are noted and forgotten.
CALLS = """
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "triton"):
            raise ImportError(name + " is banned")
sys.meta_path.insert(0, Ban())

import kda
from kda.backends.sm90 import launch
from kda.calls import node
from kda.model.bundles import Save
from ptxkit.compile import launch_list, launching, store
from kda.model.host import standing_in
from kda.model.host import host_of
from kda.tools.verify.cases import make_inputs

class Notes(list):
    def launch(self, launch):
        self.append(launch)

launch_list.in_c(), node.wait()                                                # which calls build beside kernels
notes, kept = Notes(), store.default()
before = {entry.key for entry in kept.entries()}
with launching.redirect(notes), standing_in(host_of("sm90")):
    for lengths, H in (((65, 0, 1), 1), ((33,), 100), ((1,) * 70, 8),           # one kernel, in each of its forms
                       ((2000,), 8), ((5000,), 1),                              # makers and walkers, segments
                       ((500,), 1), ((4000,) * 2, 2), ((10000,) * 2, 8)):       # two kernels, segments
        case = make_inputs(lengths, H=H, K=128, V=64, gate="bounded")
        for offsets in (case.inputs.cu_seqlens, case.inputs.cu_seqlens.int()):
            kda.chunk_kda(**{**case.keywords, "cu_seqlens": offsets}, backend="sm90")
        launch.forward(case.problem(), case.inputs, Save.PRODUCTS)              # as a recorded call has it on a GPU
assert {entry.key for entry in kept.entries()} == before
print(len({note.kernel.cubin for note in notes}))
"""


@pytest.mark.exhaustive
@needs_dsl
def test_what_was_built_ahead_is_what_calls_find(cache):
    words = ("compile", "--arch", "sm90", "--backend", "sm90", "--problem", WORDS)
    found = json.loads(run(*words, "--json").stdout)["kernels"]
    assert [k["kernel"] for k in found] == NAMES
    for k in found:
        wrapped, cut = (bool(k["constants"].get(name)) for name in ("wrapped", "cut"))
        spills = 16 * wrapped + 8 * cut                            # some registers of a role, of 96 and more per thread
        assert k["built"] and k["kept"] and k["registers"] > 0 and k["spills"] <= spills and k["seconds"] > 0
    carries = {k["constants"]["stages"]: k["shared"] for k in found if k["constants"].get("walk") == "carry"}
    assert carries[6] == 2 * carries[3] > 0
    again = run(*words).stdout.splitlines()
    assert f"{len(NAMES)} kernels: {len(NAMES)} already there, 0 built now" in again[0]
    entries = json.loads(run("cache", "--json").stdout)["entries"]
    assert sorted(e["kernel"] for e in entries) == sorted(NAMES)
    assert {(e["arch"], e["status"]) for e in entries} == {("sm90", "current")}
    assert {e["backend"] for e in entries} == {"common", "sm90"}
    called = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert called.stdout == f"{len(NAMES)}\n", called.stderr


@needs_dsl
def test_a_call_builds_what_the_command_builds(cache):
    one = recipe(TablesConfig("int32"))
    built = fetching.fetch_here(one)
    (cache / one.key[:2] / f"{one.key}.kernel").unlink()
    assert fetching.fetch(one) == built                                      # in a process of its own


LOOKED_UP = """
import sys
from kda.backends.common.cute.configs import TablesConfig
from kda.backends.sm90 import launch
from ptxkit.compile import store
for entries in (1, 0):
    kept = [*store.default().entries()]
    assert len(kept) == entries
    kernel = launch.kernel(TablesConfig("int32"))
    print("cutlass" in sys.modules, kernel.registers > 0)
    launch.kernel.cache_clear()
    for entry in kept:
        store.default().forget(entry.key)
"""


@needs_dsl
def test_a_kernel_that_was_kept_needs_no_dsl(cache):
    fetching.fetch_here(recipe(TablesConfig("int32")))
    said = subprocess.run([sys.executable, "-c", LOOKED_UP], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "True", "True", "True"]


@needs_dsl
def test_a_kernel_of_an_invalid_configuration_is_not_built():
    wide = Problem.parse("bounded l2norm T=512 N=1 H=2 K=192 V=192")
    with pytest.raises(BuildError, match="GradsConfig: K must be 64 or 128; found 192"):
        recipe(training_plan(wide, 132).grads).build()


@needs_dsl
def test_what_cannot_be_built_is_named(cache):
    one = recipe(TablesConfig("int32"))
    wrong = [dataclasses.replace(one, function=f"kda.backends.common.cute.{x}") for x in ("tables:biuld", "none:build")]
    *errors, kernel = fetching.attempt_all([*wrong, one])
    assert [isinstance(error, BuildError) for error in errors] == [True, True] and kernel.registers > 0
    assert "cute.tables:biuld cannot be imported: AttributeError" in str(errors[0])
    assert "cute.none:build cannot be imported: ModuleNotFoundError" in str(errors[1])


@pytest.fixture
def beside(cache, monkeypatch):
    """A backend whose kernels need no compiler is asked, too."""

    class Plain:
        function, name, target, key, door = "plain:scale", "scale", TARGET, "ab" * 32, "json"
        constants = options = signature = about = types.MappingProxyType({})
        build = staticmethod(lambda: {"ptx": b""})
        opened = staticmethod(lambda entry: types.SimpleNamespace(registers=8, spills=0, shared=0))
        dynamic_shared = staticmethod(lambda kernel: 64)

    plain = Capability("plain", 200, "for tests", archs=("sm90",))
    plan = {"recipes": lambda p, host, training: [Plain]}
    for name, content in {"plain": {"__path__": []}, "plain.plan": plan}.items():
        module = types.ModuleType(f"kda.backends.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    importlib.import_module("kda.tools.verify.doors")          # keeps the capabilities that it finds at its import
    monkeypatch.setattr(dispatch, "capabilities", lambda: (SM90, plain))
    monkeypatch.setattr(fetching.Builders, "build", lambda self, recipe: recipe.build())
    return cache


WITHOUT = ("compile", "--arch", "sm90", "--problem", WORDS)


def test_without_the_dsl_the_others_are_built_and_it_says_how_to_get_it(beside, monkeypatch):
    monkeypatch.setattr("kda.model.host.installed_versions", lambda: ())
    monkeypatch.setattr("kda.model.host._host_with", host._host_with.__wrapped__)    # no memo of hosts without the DSL
    summary, refused, _, _, row = run(*WITHOUT).stdout.splitlines()
    assert row.split() == ["plain", "sm90", "scale", "1", "8", "0", "64", "B", "0.0"]
    assert refused.startswith("no kernels of the backend sm90 for the arch sm90: chunk forward B=1 ")
    assert "sm90.installed: needs the package nvidia-cutlass-dsl" in refused
    assert refused.endswith("pip install 'nvidia-cutlass-dsl[cu13]'")
    assert summary.startswith("[✓] 1 kernel: 0 already there, 1 built now")
    assert "pip install" in run(*WITHOUT, "--backend", "sm90", code=3).stderr


def test_a_backend_that_works_in_chunks_is_not_missed_where_a_decoding_step_is_built(beside):
    assert "not built" not in run("compile", "--arch", "sm90", "--problem", "bfloat16 decode").stdout
    assert "works in chunks" in run("compile", "--arch", "sm90", "--problem", "bfloat16 decode", "--backend", "sm90",
                                    code=3).stderr


@needs_dsl
def test_with_a_broken_dsl_the_others_are_built_and_it_says_so_once(beside, monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)
    printed = run(*WITHOUT, code=1).stdout
    assert printed.count("pip install 'nvidia-cutlass-dsl[cu13]'") == 1 and printed.count("FAIL") == len(set(NAMES))
    assert f"{len(NAMES) + 1} kernels: 0 already there, 1 built now, {len(NAMES)} cannot be built" in printed
    assert "pip install" in run(*WITHOUT, "--backend", "sm90", code=3).stderr


def test_kernels_of_one_name_in_two_backends_need_no_more_words():
    pairs = zip(("one", "other"), OFFSETS)
    found = [command.KernelLine(backend, recipe(TablesConfig(dtype))) for backend, dtype in pairs]
    assert set(command.names(found).values()) == {"tables"}
