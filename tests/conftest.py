"""Fixtures and options of all tests.  What a test needs is a mark of its file; see pyproject.toml.

KDA_ON_SILICON=1 repeats every launch of the tests marked `simulated` on the GPU and compares what the two leave in
memory.  Launches that find something wrong are not repeated: a GPU may hang on them. KDA_ON_SILICON_LOG names a file
for one line of JSON a launch.
"""

import contextlib
import gc
import os
import sys
from collections import Counter
from unittest import mock

import pytest
import torch

from kda.tools.verify import literal
from ptxkit.compile import store

NEEDS = ("compiler", "gpu", "peers", "simulated")  # a file with none of these marks needs torch alone

for variable in ("COLUMNS", "KDA_QUIET", "PTXKIT_QUIET"):  # commands would fold their output, or say less
    os.environ.pop(variable, None)
os.environ.setdefault("PTXKIT_CACHE_DIR", str(store.cache_folder()))  # programs without kda find the engine there
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


if os.environ.get("KDA_ON_SILICON"):
    import silicon

    silicon.install()

    @pytest.fixture(autouse=True)
    def silicon_test_name(request):
        marks = {mark.name for mark in request.node.iter_markers()}
        silicon.current_test = request.node.nodeid if marks & {"simulated", "simulated_only"} == {"simulated"} else ""
        yield
        silicon.current_test = ""


@pytest.fixture(autouse=True, scope="module")
def without_a_gpu(request):
    """A GPU that happens to be there changes nothing for tests that need torch alone."""
    if any(map(request.node.get_closest_marker, NEEDS)):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread_for_small_tensors(request):
    """The tensors of tests that need torch alone are small, and other tests run beside these."""
    if any(map(request.node.get_closest_marker, NEEDS)):
        yield
        return
    with literal.one_thread():
        yield


@pytest.fixture(autouse=True)
def same_draws():
    """Every test draws the same numbers whatever ran before it in the process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_call_before():
    """What a test replaces is seen by its calls, though others of their kind were made before."""
    if known := sys.modules.get("kda.calls.known"):
        known.CALLS.clear()
        sys.modules["kda.routing.dispatch"]._routes.clear()
    if decode := sys.modules.get("kda.calls.decode"):
        decode._LAUNCHES.clear()


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """torch.compile gives up on a function that earlier tests compiled too often."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def force():
    """Returns a function that prescribes fields of Force from there on, and nothing else, until the test ends."""
    from kda.model.force import NOTHING, with_force

    with contextlib.ExitStack() as until_the_end:
        def prescribe(**words):
            until_the_end.enter_context(with_force(NOTHING._replace(**words)))

        yield prescribe


@pytest.fixture(scope="session")
def builders_that_stay():
    """Return what gives processes that build kernels, which last as long as the run."""
    from ptxkit.compile import builders

    class Staying(builders.Builders):
        def __exit__(self, *error):
            pass

    every = [Staying()]

    def current():
        if every[-1]._stopped:
            every.append(Staying())
        return every[-1]

    yield current
    for each in every:
        builders.Builders.__exit__(each)


@pytest.fixture(scope="module", autouse=True)
def one_compiler_for_all_calls(request):
    """New processes would import the compiler again for every call that builds, as long as a small kernel takes."""
    from ptxkit.compile import fetching

    if not request.node.get_closest_marker("simulated"):
        yield
        return
    with mock.patch.object(fetching, "Builders", request.getfixturevalue("builders_that_stay")):
        yield


@pytest.fixture(params=["a quarter of the draws", pytest.param("all draws", marks=pytest.mark.exhaustive)])
def draws(request, monkeypatch):
    """Random values beside the edges, all of which every run has; a model in Python takes long for each of them."""
    import lanes

    monkeypatch.setattr(lanes, "SHARE", 0.25 if "quarter" in request.param else 1.0)


@pytest.fixture
def one_thread():
    """Operators are as small as can be: modules of such calls ask for it."""
    with literal.one_thread():
        yield


@pytest.fixture
def kernels_apart(force):
    """The Hopper forward's kernels one by one, though so short a call would take the one that does all."""
    force(form="two kernels")


@pytest.fixture
def backend_ready(request):
    """The compiler of the backend is there, and Hopper takes two kernels however short a call is."""
    name = next(x for x in request.node.callspec.params.values() if str(x).startswith("sm"))
    if name.startswith("sm89"):
        request.getfixturevalue("libnvrtc")
        return
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    request.getfixturevalue("kernels_apart")


@pytest.fixture
def takes(force):
    """Makes calls take one form of the Hopper forward (sm90_forms.py), however short they are."""
    return lambda form: force(**form.forced)


@pytest.fixture
def kernels_built_here(monkeypatch):
    """Those of the Triton backend, by the Triton of this process; plans and calls forget those of others."""
    import triton_calls

    triton_calls.forget_plans()
    monkeypatch.setattr(triton_calls.call, "fetch_all", lambda recipes: [*map(triton_calls.Unbuilt, recipes)])
    yield
    triton_calls.forget_plans()


@pytest.fixture(scope="module")
def libnvrtc():
    """Builds the float32 kernels."""
    from ptxkit.compile import nvrtc

    try:
        nvrtc.version()
    except nvrtc.MissingCompilerError as error:
        pytest.skip(str(error))


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="run each N-th selected case, from the K-th on: 0/3, 1/3, 2/3")


class Part:
    """Leaves one part of what was selected; it comes after `-m` and `-k`."""

    def __init__(self, words):
        first, _, parts = words.partition("/")
        if not (first.isdigit() and parts.isdigit() and int(first) < int(parts)):
            raise pytest.UsageError(f"--part asks for K/N with K < N, such as 0/3; found {words!r}")
        self.chosen = slice(int(first), None, int(parts))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        others = [*items]
        del others[self.chosen]
        config.hook.pytest_deselected(items=others)
        items[:] = items[self.chosen]


def pytest_configure(config):
    if words := config.getoption("--part"):
        config.pluginmanager.register(Part(words), "part")


def pytest_collection_finish():
    """What was imported and collected stays: the garbage collector need not look through it again and again, nor what
    looks for tensors among all objects.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`spread(every=n, first=m)` leaves the cases m, m + n, ... of a test to every run; the others are `exhaustive`, as
    are those that have this mark already and do not count.
    """
    cases = Counter()
    for item in items:
        spread = item.get_closest_marker("spread")
        if spread and not item.get_closest_marker("exhaustive"):
            test = item.nodeid.partition("[")[0]
            if (cases[test] - spread.kwargs.get("first", 0)) % spread.kwargs["every"]:
                item.add_marker(pytest.mark.exhaustive)
            cases[test] += 1
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def calls_in_cpp(request):
    """Calls of simulated GPUs run as on a machine where the node in C++ is built, from the first one on."""
    if any(map(request.node.get_closest_marker, ("gpu", "simulated"))) and "kda.calls" in sys.modules:
        from kda.calls import node

        node.start()
        if request.config.rootpath / "tests" / "ptxkit" not in request.path.parents:  # those make no call
            node.wait()


@pytest.fixture
def calls_in_python(monkeypatch):
    """Calls run in Python, as where the node in C++ cannot be built."""
    from kda.calls import node

    monkeypatch.setattr(node, "_state", {"thread": node.start(), "why": "a test wants Python"})
