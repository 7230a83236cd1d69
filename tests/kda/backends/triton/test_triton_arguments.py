"""Arguments of Triton's kernels: declared once for a family, named by the signatures of its kernels."""

import pytest

from kda.backends.common import triton_recipes
from kda.backends.common.arguments import Arguments, number, tensor
from kda.backends.common.pool import plan as pool
from kda.backends.triton import plan
from kda.backends.triton.decode import recurrent_plan, step_plan
from kda.backends.triton.layer import plan as layer
from kda.model.host import host_of
from kda.model.problem import Problem
from kda.tools.verify.digests import PROBLEMS
from ptxkit.compile.errors import BuildError
from ptxkit.compile.recipes import imported
from ptxkit.compile.sources import parameters
from ptxkit.compile.target import parse

FAMILIES = {
    "common.pool": pool.PoolArguments, "triton.layer": layer.LayerArguments,
    "triton.decode.kernel": recurrent_plan.RecurrentArguments, "triton.decode.step": step_plan.StepArguments,
    "triton": plan.ChunkArguments,
}
EVERY_OPTION = "softplus dt_bias=true A_log=true l2norm packed state_dtype=float32 final_state=true"
WORDS = (*PROBLEMS["triton", "sm90"], f"bfloat16 {EVERY_OPTION} disable_recompute=true",
         f"bfloat16 {EVERY_OPTION} gate_per_head=true backward")


def shipped():
    """Return the recipe of each kernel, by its name in kda.backends."""
    asked = [(plan, words) for words in WORDS] + [(layer, words) for words in PROBLEMS["layer", "sm90"]]
    recipes = [recipe for planned, words in asked for recipe in planned.recipes(Problem.parse(words), host_of("sm90"))]
    return {recipe.function.removeprefix("kda.backends."): recipe for recipe in recipes}


KERNELS = shipped()


def family_of(function):
    return next(family for name, family in FAMILIES.items() if function.startswith(name))


def never_read(families):
    """Yield what is declared and in no kernel's signature."""
    for family in families:
        read = {n for f in KERNELS if family_of(f) is family for n in parameters(f"kda.backends.{f}")}
        yield from family.declared.keys() - read


def less(family, name):
    return type("Fewer", (Arguments,), {n: argument for n, argument in family.declared.items() if n != name})


@pytest.mark.parametrize("function", KERNELS)
def test_a_kernel_with_an_argument_that_is_not_declared_is_refused(function):
    """No argument is looked at before: no configuration is needed."""
    constants = KERNELS[function].constants
    needed = parameters(f"kda.backends.{function}")
    assert {name for name, is_constant in needed.items() if is_constant} <= constants.keys()
    for name, is_constant in needed.items():
        arguments = family_of(function) if is_constant else less(family_of(function), name)
        given = {n: value for n, value in constants.items() if needed[n] and n != name}
        with pytest.raises(BuildError, match=rf"{function}: {arguments.__name__} and the constants lack {name}\.$"):
            triton_recipes.recipe(function, arguments, None, given, parse("sm90"))


def test_every_argument_that_is_declared_is_read_by_a_kernel():
    assert not [*never_read(FAMILIES.values())]


def test_an_argument_that_no_kernel_reads_is_noticed(monkeypatch):
    spare = plan.ChunkArguments.and_more("Spare", spare=number("int32"))
    monkeypatch.setitem(FAMILIES, "triton", spare)
    assert [*never_read(FAMILIES.values())] == ["spare"]


@pytest.mark.compiler
@pytest.mark.parametrize("function", KERNELS)
def test_a_signature_in_the_source_is_that_which_triton_knows(function):
    kernel = imported(f"kda.backends.{function}")
    assert parameters(f"kda.backends.{function}") == {x.name: x.is_constexpr for x in kernel.params}


NORM = "triton.layer.norm:norm_gate"


class NormArguments(Arguments):
    x = y = tensor(None, "x")
    gate = tensor("float16", "gate", divisible="aligned")
    weight = tensor(needs=lambda config: config["weighted"], divisible=False)
    rows = number("int32", divisible=True)
    eps = number("float32")


class Config(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(("config", "types", "divisible"), [
    ({"x": "bfloat16", "gate": "float32", "aligned": True, "weighted": True},
     {"x": "*bf16", "y": "*bf16", "gate": "*fp32", "weight": "*fp32"}, ("gate", "rows", "x", "y")),
    ({"x": "float32", "gate": None, "aligned": False, "weighted": False},
     {"x": "*fp32", "y": "*fp32", "gate": "*fp16", "weight": None}, ("rows", "x", "y")),
    ({"x": None, "gate": None, "aligned": True, "weighted": True},
     {"x": None, "y": None, "gate": "*fp16", "weight": "*fp32"}, ("gate", "rows")),
])
def test_declarations_say_dtypes_multiples_of_16_and_which_tensors_there_are(config, types, divisible):
    constants = {"V": 128, "BV": 128, "ROWS": 16, "K": 64}
    recipe = triton_recipes.recipe(NORM, NormArguments, Config(config), constants, parse("sm90"))
    present = {name: kind for name, kind in types.items() if kind}
    assert recipe.signature == present | {"rows": "i32", "eps": "fp32"}
    assert recipe.constants == {"V": 128, "BV": 128, "ROWS": 16} | dict.fromkeys(types.keys() - present.keys())
    assert recipe.divisible == divisible


def test_one_kernel_may_have_a_tensor_otherwise_and_a_number_with_one_value():
    config, constants = Config(x="bfloat16", gate="float32", aligned=True, weighted=True), dict(V=64, BV=64, ROWS=8)
    recipe = triton_recipes.recipe(NORM, NormArguments, config, constants, parse("sm90"),
                                   dtypes={"y": "float32", "gate": None}, fixed={"rows": 1})
    assert recipe.signature == {"x": "*bf16", "y": "*fp32", "weight": "*fp32", "eps": "fp32"}
    assert recipe.constants == constants | {"gate": None, "rows": 1}
    assert recipe.divisible == ("x", "y")
