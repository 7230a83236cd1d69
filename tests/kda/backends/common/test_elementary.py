"""Every function of one number that a kernel computes, over the whole range of float32, within a budget that follows
from its roundings: all bfloat16 numbers, a million others of all exponents, and the neighbours of every edge.
"""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from elementary import (
    DOCUMENTED,
    EPS,
    FUNCTIONS,
    LOG2_E,
    LOWER_BOUND,
    SIMULATED,
    Backend,
    Chip,
    judge,
    numbers,
)

from kda.backends.common.triton_types import target_of
from kda.backends.reference import halving
from kda.backends.sm89 import plan
from kda.model import gates
from kda.model.host import detect
from ptxkit import capture
from ptxkit.compile import nvrtc
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]
MANY, FEW = 1 << 20, 3 << 16
RATES = 7.25, 2.0**-9, 2.0**-60, 2.0**60, 2.0**127      # beside 1; CuTe kernels have none that is larger
SEEDS = range(3, 8)
DOCS = Path(__file__).parents[4] / "docs/numerics.md"


# What each backend computes: the names of the results, and a launch that takes x, the results and a rate.


def back(gate, result):
    return f"[&] {{ float dx, of_A; log2_decay_bwd<{gate}>(1, x, rate, lower_bound, dx, of_A); return {result}; }}()"


SM89 = {
    "exp2": "exp2_(x)", "exp": "exp_(x)", "reciprocal": "reciprocal(x)", "inverse_norm": "inverse_norm(x)",
    "finite": "finite(x)", "sigmoid": "step_size<SIGMOID>(x)", "sigmoid_slope": "sigmoid_slope(x)",
    "log1p": "log1p_(x)", "softplus": "softplus(x)", "rate": "finite(exp_(x))",
    "given decay": "log2_decay<GIVEN>(x, rate, lower_bound)",
    "softplus decay": "log2_decay<SOFTPLUS>(x, rate, lower_bound)",
    "bounded decay": "log2_decay<BOUNDED>(x, rate, lower_bound)",
    "softplus decay, back": back("SOFTPLUS", "dx"), "softplus decay, back to the rate": back("SOFTPLUS", "of_A"),
    "bounded decay, back": back("BOUNDED", "dx"), "bounded decay, back to the rate": back("BOUNDED", "of_A"),
}


def sm89(target, count, header=None):
    """Compile the functions, with `header` instead of parts/numbers.cuh."""
    rows = "".join(f"\n  out[{row} * count + i] = {text};" for row, text in enumerate(SM89.values()))
    source = f"""#include "numbers.cuh"
extern "C" __global__ void functions(const float* at, float* out, i64 count, float rate, float lower_bound) {{
  const i64 i = blockIdx.x * 128 + threadIdx.x;
  const float x = at[i];{rows}
}}"""
    header = header or (Path(plan.__file__).parent / "parts/numbers.cuh").read_text()
    kernel = nvrtc.compile(source, "functions", target=target, headers={"numbers.cuh": header})
    return tuple(SM89), lambda x, out, rate: kernel.launch(count // 128, x, out, count, rate, LOWER_BOUND, block=128)


def triton(target, count):
    pytest.importorskip("triton", reason="needs triton")
    from triton_elementary import ROWS, functions

    from ptxkit.compile import triton as door

    signature = {"x": "*fp32", "out": "*fp32", "count": "i32", "rate": "fp32", "lower_bound": "fp32"}
    kernel = door.compile(functions, signature, {"BLOCK": 128}, target=target, divisible=["x", "out"])
    return ROWS, lambda x, out, rate: kernel.launch(count // 128, x, out, count, rate, LOWER_BOUND)


def cute(target, count):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from cuda.bindings.driver import CUstream
    from cute_elementary import ROWS, functions
    from cutlass import Float32
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from ptxkit.compile import cutedsl

    x = make_fake_compact_tensor(Float32, (count,), stride_order=(0,), assumed_align=128)
    out = make_fake_compact_tensor(Float32, (len(ROWS), count), stride_order=(1, 0), assumed_align=128)
    built = cutedsl.compile(functions, x, out, Float32(1), Float32(1), make_fake_stream(), target=target)
    return ROWS, lambda x, out, rate: built(x, out, rate, LOWER_BOUND, CUstream(0))


KERNELS = {"sm89": sm89, "triton": triton, "sm90": cute, "sm100": cute}
ROUNDS = {
    "sm89": Backend(SIMULATED, exponent=EPS**2, after=2 * EPS, floor=-torch.inf),   # log2(e) in two parts
    "triton": Backend(SIMULATED),
    "cute": Backend(SIMULATED, rate=EPS, fitted=True, largest_rate=2.3e38),   # rate log2(e) first
}


def how(backend):
    return ROUNDS.get(backend, ROUNDS["cute"])


def computed(kernel, arch, x, rate):
    """Return what the simulator computes, by name."""
    rows, launch = kernel
    out = torch.full((len(rows), len(x)), torch.nan)
    with capture(arch=arch, checks=False) as session:
        launch(x, out, rate)
    assert len(session.runs) == 1 and not session.findings
    return dict(zip(rows, out))


def judged(found, x, rate, rounds):
    """Judge every answer of each function, by name."""
    return {name: judge(name, answers, x, rate, rounds) for name, answers in found.items()}


def assert_within(results):
    wrong = [f"{name} of {f.x!r} is {f.got!r}, not {f.want!r}: {f.used:.3g} budgets" for name, f in results.items()
             if not f.used <= 1]
    assert not wrong, "\n".join(wrong)


@functools.cache
def swept(backend, arch):
    """Judge a million numbers, at a rate of 1."""
    x = numbers(1, MANY)
    return judged(computed(KERNELS[backend](parse(arch), MANY), arch, x, 1.0), x, 1.0, how(backend))


HERE = [("sm89", "sm89"), ("triton", "sm90"), ("sm90", "sm90"), ("sm100", "sm100")]


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("backend, arch", HERE)
def test_functions_are_as_good_as_their_roundings_everywhere(backend, arch):
    assert_within(swept(backend, arch))


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("backend, arch", HERE[:3])
def test_gates_of_other_rates_are_as_good(backend, arch):
    x, kernel = numbers(2, FEW), KERNELS[backend](parse(arch), FEW)
    for rate in RATES:
        assert_within(judged(computed(kernel, arch, x, rate), x, rate, how(backend)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "backend, arch",
    [*HERE, ("triton", "sm80"), ("triton", "sm100"), ("sm100", "sm103"), ("sm89", "sm90"), ("sm89", "sm100")],
)
def test_functions_are_as_good_on_every_arch_for_more_numbers(backend, arch):
    kernel = KERNELS[backend](parse(arch), MANY)
    for seed, rate in itertools.zip_longest(SEEDS, RATES, fillvalue=1.0):
        x = numbers(seed, MANY)
        assert_within(judged(computed(kernel, arch, x, rate), x, rate, how(backend)))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS)
def test_functions_on_a_gpu_are_as_good_as_its_documentation_says(backend):
    arch = {"sm89": "sm89", "triton": target_of(detect("cuda")).name}.get(backend, backend)
    if parse(arch).spelling[-1] == "a" and parse(arch).cc != detect("cuda").cc:
        pytest.skip(f"{arch} runs on compute capability {parse(arch).cc} alone")
    rows, launch = KERNELS[backend](parse(arch), MANY)
    for seed, rate in enumerate((1.0, *RATES)):
        x = numbers(seed, MANY)
        out = torch.full((len(rows), MANY), torch.nan, device="cuda")
        launch(x.cuda(), out, rate)
        results = judged(dict(zip(rows, out.cpu())), x, rate, how(backend)._replace(chip=DOCUMENTED))
        print(*(f"{backend} {rate:.3g} {name}: {f}" for name, f in results.items()), sep="\n")
        assert_within(results)


# the page


def on_the_page(name):
    """Return the cells of a function's row in docs/numerics.md."""
    (row,) = (line for line in DOCS.read_text().splitlines() if line.startswith(f"| {name} |"))
    return [[float(word) for word in cell.split(",") if word.strip()] for cell in row.split("|")[2:-1]]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("finite", "whole")])
def test_the_page_says_how_wrong_each_function_is(name):
    for said, (backend, arch) in zip(on_the_page(name), HERE, strict=False):
        found = swept(backend, arch).get(name)
        assert said == pytest.approx([found.near, found.far] if found else [], abs=0.06), (backend, found)


# the reference


def reference(x, rate):
    """Return what the reference computes in the dtype of x, and the rate as this dtype has it."""
    A_log = torch.tensor(rate, dtype=x.dtype).log()
    one = torch.ones_like(x)
    softplus, bounded = (gates.decay_bwd(one, x, A_log, None, bound) for bound in (None, LOWER_BOUND))
    found = {
        "exp2": halving._of_rows(x), "sigmoid": gates.beta_activation(x, "sigmoid"),
        "sigmoid_slope": gates.beta_activation_bwd(one, x, "sigmoid"),
        "inverse_norm": gates.l2norm(x.sqrt().unsqueeze(-1))[1].squeeze(-1),
        "softplus decay": gates.decay(x, A_log, None, None).double() * LOG2_E,
        "bounded decay": gates.decay(x, A_log, None, LOWER_BOUND).double() * LOG2_E,
        "softplus decay, back": softplus[0], "softplus decay, back to the rate": softplus[1],
        "bounded decay, back": bounded[0], "bounded decay, back to the rate": bounded[1],
    }
    return found, float(A_log.double().exp())


def test_the_reference_is_as_good_as_its_roundings():
    """An exponential of the CPU is good to an ulp; sqrt, square and 1 / sqrt are the norm's."""
    rounds = Backend(Chip(2 * EPS, 2 * EPS, 4 * EPS), exponent=0.0, rate=3 * EPS, floor=-torch.inf)
    x = numbers(1, FEW)
    for rate in (1.0, *RATES[:-1]):
        found, exactly = reference(x, rate)
        assert_within(judged(found, x, exactly, rounds))


# faults

FAULTS = {
    "infinity meets the low part of its exponent": ("fabsf(high) < 128.0f", "fabsf(high) < 200.0f"),
    "log2(e) in one part": ("fmaf(y, low * LN_2, y)", "y"),
    "a series that lacks a term": ("p = fmaf(p, t, 1.0f / 11.0f);", ""),
    "a logit of infinity has no gradient": ("const float y = finite(rate * x)", "const float y = rate * x"),
    "softplus of what is below zero": ("fmaxf(x, 0.0f) + log1p_", "x + log1p_"),
    "the norm's epsilon": ("NORM_EPS = 1e-6f", "NORM_EPS = 1.001e-6f"),
}


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault):
    header, (old, new) = (Path(plan.__file__).parent / "parts/numbers.cuh").read_text(), FAULTS[fault]
    assert old in header
    x = numbers(1, FEW)
    found = computed(sm89(parse("sm89"), FEW, header.replace(old, new)), "sm89", x, 1.0)
    assert any(not f.used <= 1 for f in judged(found, x, 1.0, ROUNDS["sm89"]).values())
