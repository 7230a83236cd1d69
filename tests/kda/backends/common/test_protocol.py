"""Every backend has the functions that dispatch, `kda verify` and `kda compile` call, with the arguments they pass."""

import importlib
import inspect
import re
import types
from pathlib import Path

import pytest

from kda.backends.protocol import LaunchModule, PlanModule
from kda.routing.capability import MAPS, Capability
from kda.routing.dispatch import capabilities

pytestmark = pytest.mark.compiler

pytest.importorskip("triton")

DECLARED = {"launch": LaunchModule, "plan": PlanModule}


def functions_of(capability):
    """Return, for each module, the functions that every backend of this capability has."""
    optional = {"backward": capability.backward, "saved_bytes": capability.saves_opaque,
                **{f: name in capability.maps for name, functions in MAPS.items() for f in functions}}
    of_launch = ("forward", "stage", "rounded_to", *(name for name, has_it in optional.items() if has_it))
    of_plan = ("recipes", "recipes_of_call", "call_of_stage")
    return {"launch": of_launch} | ({"plan": of_plan} if capability.archs else {})


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def assert_called_alike(function, declared, name):
    """A backend may take more than is declared, where it does without."""
    common = arguments(declared)
    assert arguments(function)[: len(common)] == common, name
    more = [*inspect.signature(function).parameters.values()][len(common) :]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in more), name


@pytest.mark.parametrize("capability", capabilities(), ids=lambda c: c.backend)
def test_a_backend_has_the_functions_that_its_capability_promises(capability):
    folder = capability.launch_module.rpartition(".")[0]
    for module, functions in functions_of(capability).items():
        found = importlib.import_module(f"{folder}.{module}")
        for name in functions:
            assert_called_alike(getattr(found, name), getattr(DECLARED[module], name), f"{module}.{name}")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_who_decodes_has_the_function_for_it(backend):
    (capability,) = (c for c in capabilities() if c.backend == backend)
    module = importlib.import_module(capability.launch_module)
    assert arguments(module.recurrent) == arguments(LaunchModule.recurrent)
    assert arguments(module.decode_step) == arguments(LaunchModule.decode_step)


@pytest.mark.parametrize("backend", ["reference", "triton", "sm90", "sm100"])
def test_who_accepts_a_pool_has_the_function_for_it(backend):
    (capability,) = (c for c in capabilities() if c.backend == backend)
    assert arguments(importlib.import_module(capability.launch_module).prefill) == arguments(LaunchModule.prefill)


@pytest.mark.parametrize("backend", ["sm89", "sm90", "sm100", "triton"])
def test_whose_calls_are_routines_has_both_directions_of_them(backend):
    (capability,) = (c for c in capabilities() if c.backend == backend)
    module = importlib.import_module(capability.launch_module)
    for name in ("forward_direction", "backward_direction"):
        assert_called_alike(getattr(module, name), getattr(LaunchModule, name), name)


def test_a_backend_of_forwards_alone_needs_no_backward():
    functions = functions_of(Capability("mine", 10, "made up", backward=False))
    assert functions == {"launch": ("forward", "stage", "rounded_to")}


@pytest.mark.parametrize("protocol", [LaunchModule, PlanModule])
def test_the_page_on_backends_has_every_function_with_its_arguments(protocol):
    page = (Path(__file__).parents[4] / "docs" / "backends.md").read_text()
    on_page = dict(re.findall(r"`(\w+)\(([^`]*)\)`", page))
    for name, function in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            assert [x.partition("=")[0] for x in on_page.get(name, "").split(", ")] == arguments(function), name


def declared_in_cuda(config, per_head):
    """Return the names of a kernel's parameters, from its source: with one gate per head, or for each channel."""
    from kda.backends.sm89 import plan

    text = (Path(plan.__file__).parent / config.file).read_text()
    text = re.sub(r"#if PER_HEAD\n(.*?)#endif\n", r"\1" if per_head else "", text, flags=re.DOTALL)
    parameters = re.search(rf"\b{config.kernel}\(([^)]*)\)", text[text.index("__global__") :])[1]
    return [re.search(r"\w+$", parameter.strip())[0] for parameter in parameters.split(",")]


@pytest.mark.parametrize("per_head", [False, True])
def test_arguments_of_float32_kernels_are_declared_in_the_order_of_their_sources(per_head):
    from kda.backends.sm89 import configs

    seen = set()
    for config in vars(configs).values():
        if isinstance(config, type) and hasattr(config, "kernel"):
            declared = config.arguments
            if isinstance(declared, property):
                seen.add(config.kernel)
                declared = declared.fget(types.SimpleNamespace(per_head=per_head))
            names = list(declared.declared)
            if config.kernel == "intra_bwd":                                   # its dg is one of several shares then
                names = ["dg" if name == "dg_shares" else name for name in names]
            assert names == declared_in_cuda(config, per_head), config.kernel
    assert seen == {"intra_bwd", "norms_bwd"}
