"""KDA_ON_SILICON=1 repeats every launch of these tests on the GPU and compares what the two leave in memory.

Launches that find something wrong are not repeated: a GPU may hang on them. KDA_ON_SILICON_LOG names a file for one
line of JSON a launch.
"""

import os
from unittest import mock

import pytest

from kda.tools.verify import literal

if os.environ.get("KDA_ON_SILICON"):
    import silicon

    silicon.install()

    @pytest.fixture(autouse=True)
    def silicon_test_name(request):
        silicon.current_test = "" if request.node.get_closest_marker("simulated_only") else request.node.nodeid
        yield
        silicon.current_test = ""


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
def one_compiler_for_all_calls(builders_that_stay):
    """New processes would import the compiler again for every call that builds, as long as a small kernel takes."""
    from ptxkit.compile import fetching

    with mock.patch.object(fetching, "Builders", builders_that_stay):
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
def kernels_apart(plan_says):
    """The Hopper forward's kernels one by one, though so short a call would take the one that does all."""
    plan_says(FUSED=False)


@pytest.fixture
def takes(plan_says, monkeypatch):
    """Makes calls take one form of the Hopper forward (sm90_forms.py), however short they are."""
    import sm90_forms

    def take(form):
        monkeypatch.setattr(sm90_forms.training_plan, "SHORTEST", form.shortest or sm90_forms.SHORTEST)
        plan_says(makers_of_stream=form.makers_of_stream, **form.constants)

    return take


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
