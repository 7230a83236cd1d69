"""Configurations of kernels say which limit they break, and are asked before a kernel is built or left out."""

import dataclasses
import importlib
import itertools
from dataclasses import dataclass

import pytest

from kda.backends.common.arguments import MAX_CLUSTER, MAX_SHARED, Arguments, KernelConfig
from kda.backends.common.cute.configs import TablesConfig
from kda.backends.common.limits import MAX_THREADS
from kda.backends.common.routine import Draft
from kda.backends.sm89 import plan as sm89_plan
from kda.backends.sm89.configs import ChainBwdConfig, ChainConfig, IntraConfig
from kda.backends.sm90.configs import FusedConfig, GradsConfig, StreamConfig
from kda.backends.sm90.kernels import fused_config
from kda.backends.sm90.plan import plan, training_plan
from kda.backends.triton.configs import TileConfig, choose
from kda.backends.triton.decode import recurrent_plan, step_plan
from kda.backends.triton.decode.recurrent_plan import RecurrentConfig, RecurrentLayout
from kda.backends.triton.decode.step_plan import StepConfig, StepLayout
from kda.model.bundles import Save
from kda.model.host import host_of
from kda.model.problem import Problem, StepProblem
from kda.tools.verify.digests import PROBLEMS
from ptxkit.compile.errors import BuildError
from ptxkit.compile.target import parse

ARCHS = ("sm90", "sm100")
MODEL = "bfloat16 bounded l2norm state_dtype=float32 final_state=true packed"
WIDE = Problem.parse(f"{MODEL} T=512 N=1 H=2 K=192 V=192")
UNASKED = TablesConfig                       # it has no head size


def configs_of(backend, problems):
    planned = importlib.import_module(f"kda.backends.{backend}.plan")
    for words in problems:
        yield from (recipe.config for recipe in planned.recipes(Problem.parse(words), host_of(backend)))


def one_of_each(backend):
    return {type(config): config for config in configs_of(backend, PROBLEMS[backend, backend])}


def widened(config):
    """Return the configuration for K = V = 192, with those that it contains."""
    parts = {name: widened(part) for name, part in vars(config).items() if isinstance(part, KernelConfig)}
    sizes = {field.name: 192 for field in dataclasses.fields(config) if field.name in ("K", "V")}
    return dataclasses.replace(config, **parts, **sizes)


def never(config):
    raise AssertionError(f"{config} must not be built")


@pytest.mark.parametrize("backend", [*ARCHS, "sm89"])
def test_every_configuration_that_plans_produce_is_valid(backend):
    found = {config: config.why_invalid() for config in configs_of(backend, PROBLEMS[backend, backend])}
    assert found and {config: reason for config, reason in found.items() if reason} == {}


@pytest.mark.parametrize("backend", ARCHS)
def test_each_configuration_refuses_heads_of_192_by_itself(backend):
    kernels = importlib.import_module(f"kda.backends.{backend}.plan").KERNELS
    configs = one_of_each(backend)
    assert configs.keys() == kernels.keys()
    reasons = {kind.__name__: widened(config).why_invalid() for kind, config in configs.items() if kind is not UNASKED}
    assert {name: reason for name, reason in reasons.items() if "192" not in (reason or "")} == {}


@pytest.mark.parametrize("configs", [
    plan(WIDE, 132).configs(None), training_plan(WIDE, 132).configs(Save.NOTHING, backward=True)
], ids=["forward", "training"])
def test_what_a_plan_for_heads_of_192_wants_is_refused(configs):
    reasons = {type(config): config.why_invalid() for config in filter(None, configs) if type(config) is not UNASKED}
    assert reasons and all("192" in reason for reason in reasons.values())


def test_a_kernel_of_no_cta_is_refused_and_not_left_out():
    config = training_plan(WIDE, 132).grads
    assert config.ctas == 0
    with pytest.raises(BuildError, match=r"GradsConfig: K must be 64 or 128; found 192\. .* Use backend='triton'"):
        Draft(never, ()).launch(config, (0, 1, 1))


@dataclass(frozen=True)
class OfNoKernel(KernelConfig):
    threads: int = 32
    shared: int = 0
    cluster: int | tuple[int, int, int] = 1
    arguments = Arguments


@pytest.mark.parametrize("values, says", {
    (("threads", MAX_THREADS),): None,
    (("threads", MAX_THREADS + 32),): "there are at most 1,024 threads of a CTA; found 1,056",
    (("shared", MAX_SHARED),): None,
    (("shared", MAX_SHARED + 1),): "there are at most 232,448 bytes of shared memory; found 232,449",
    (("cluster", (MAX_CLUSTER, 1, 1)),): None,
    (("cluster", (MAX_CLUSTER, 2, 1)),): "there are at most 8 CTAs of a cluster; found 16",
}.items())
def test_the_limits_of_a_gpu_are_those_of_every_kernel(values, says):
    assert OfNoKernel(**dict(values)).why_invalid() == says


def test_each_configuration_of_float32_refuses_heads_of_192_by_itself():
    reasons = {type(config).__name__: widened(config).why_invalid() for config in one_of_each("sm89").values()}
    assert reasons.pop("TablesConfig") is None                                # it has no head size
    assert len(reasons) == 7 and set(reasons.values()) == {"K must be 64 or 128; found 192"}


def test_no_kernel_of_float32_is_left_out_because_a_head_is_small():
    """A backward has a CTA for each 32 channels, and none for 16."""
    with pytest.raises(BuildError, match=r"PrepareConfig: K must be 64 or 128; found 16\. .* Use backend='triton'"):
        sm89_plan.plan(Problem.parse("float32 K=16 V=16 T=64 H=2 backward"), 132, None)


def test_configurations_of_float32_have_limits_beside_their_head_size():
    chain, back, intra = (one_of_each("sm89")[kind] for kind in (ChainConfig, ChainBwdConfig, IntraConfig))
    found = {
        dataclasses.replace(chain, columns=64): "a CTA holds 8 or 16 or 32 columns of a state; found 64",
        dataclasses.replace(back, columns=32): "a CTA holds 8 or 16 columns of a state; found 32",
        dataclasses.replace(intra, C=16): "C must be 32 or 64; found 16",
        dataclasses.replace(intra, K=64, V=128): "K and V must be equal; found K = 64 and V = 128",
    }
    assert {config: config.why_invalid() for config in found} == found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_configuration_of_triton_that_plans_choose_is_valid(dtype):
    for K, V, arch in itertools.product((1, 16, 60, 64, 128, 200, 256), (1, 16, 100, 128, 300), ("sm80", "sm90")):
        p, host = Problem.parse(f"{dtype} K={K} V={V} T=64 H=2 state_dtype=float32"), host_of(arch)
        configs = [choose(kernel, p, host) for kernel in ("prepare", "state", "state_bwd", "wy", "intra")]
        configs += [choose("compose", p, host, bits=32), *recurrent_plan.configs(p)]
        configs += [step_plan.config(StepProblem(dataclasses.replace(p, N=N)), host.sms) for N in (1, 500)]
        assert {config: reason for config in configs if (reason := config.why_invalid())} == {}


def test_configurations_of_triton_say_which_limit_they_break():
    found = {
        TileConfig(num_warps=3): "num_warps must be a power of two; found 3",
        TileConfig(BK=8): "BK must be at least 16; found 8",
        TileConfig(maxnreg=256): "maxnreg must be from 24 to 255; found 256",
        StepConfig(4, 32, rows=48): "rows must be a power of two; found 48",
        RecurrentConfig(8, num_warps=64): "there are at most 32 warps of a CTA; found 64",
    }
    assert {config: config.why_invalid() for config in found} == found


def test_a_decoding_kernel_whose_state_no_cta_can_hold_has_no_recipe():
    """A warp holds 4,096 elements of a state, or 256 rows of it."""
    target = parse("sm90")
    step = StepProblem(Problem.parse("decode K=512 V=512 state_dtype=float32"))
    with pytest.raises(BuildError, match=r"StepConfig: there are at most 32 warps .* found 64.*backend='reference'"):
        step_plan.recipe(step, StepLayout(()), step_plan.config(step, 132), target)
    p = Problem.parse("recurrent K=16384 V=16 state_dtype=float32")
    with pytest.raises(BuildError, match=r"RecurrentConfig: there are at most 32 warps of a CTA; found 64"):
        recurrent_plan.recipe(p, RecurrentLayout(order="kv"), recurrent_plan.config(p, 132), target)


def test_a_kernel_has_limits_beside_its_head_size():
    p = Problem.parse("bfloat16 bounded l2norm T=512 N=1 H=2")
    fused, grads = fused_config(p), training_plan(p, 132).grads
    stream = StreamConfig(fused.prepare, fused.chain, staged=False)
    small = dataclasses.replace(fused.prepare, K=64)
    wide_g = dataclasses.replace(fused.prepare, g_dtype="float32")
    found = {
        dataclasses.replace(fused, ctas=1): "for V = 128 a cluster has 2 or 4 CTAs; found 1",
        FusedConfig(wide_g, fused.chain, staged=True): "must be bfloat16; found g of float32",
        dataclasses.replace(stream, prepare=small): "K must be 128; found 64",
        GradsConfig(**{**vars(grads), "V": 64}): "K and V must be equal; found K = 128 and V = 64",
    }
    assert stream.why_invalid() is None
    assert all(says in config.why_invalid() for config, says in found.items())
