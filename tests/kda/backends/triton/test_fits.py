"""Every configuration of the Triton backend fits every GPU that the table gives it to."""

import dataclasses
import itertools

import pytest

from kda.backends.triton.configs import SMALLEST, TABLE, TableRow, TileConfig, choose, power_of_2
from kda.backends.triton.plan import recipes
from kda.model.host import host_of
from kda.model.problem import Problem
from ptxkit.chips import CHIPS
from ptxkit.compile.errors import BuildError
from ptxkit.compile.fetching import fetch_all

pytestmark = pytest.mark.compiler

# What a row's kernels may spill, bytes of a thread: registers are 255, and the first cache holds this for 256 threads.
SPILLS = {16: 512, 32: 1024}
KERNELS = {
    "prepare": ("prepare",), "state": ("state", "state_bwd"), "state_bwd": ("state_bwd",), "compose": ("compose",),
    "wy": ("wy_bwd",), "intra": ("intra_bwd",),
}
FAMILIES = ("sm80", "sm90", "sm100")             # mma.sync, wgmma, tcgen05
OPTIONS = "packed dt_bias=true l2norm beta=sigmoid state_dtype=float32 final_state=true"


def problem(words, gate="softplus"):
    return Problem.parse(f"{words} {gate} {OPTIONS}")


def host(arch, shared):
    """Return a GPU of an arch that allows a block `shared` KiB."""
    return dataclasses.replace(host_of(arch), smem=shared << 10)


def reached(row):
    """Return the archs on which a GPU with no more than the row's shared memory comes to this row."""
    p = problem(f"K={row.K} V=256 {'float32' if row.bits == 32 else 'bfloat16'}")
    wanted = dataclasses.replace(row.config, BK=min(row.config.BK, row.K))
    return [arch for arch in FAMILIES if choose(row.kernel, p, host(arch, row.shared), row.bits) == wanted]


def built(row, arch):
    """Build the kernels of a row, for either way of treating gates; of each the one that does the most."""
    words = f"K={row.K} V={row.K} {'float32' if row.bits == 32 else 'bfloat16'}"
    found = {}
    for way, gate in itertools.product(("forward disable_recompute=true", "backward"), ("softplus", "bounded")):
        for recipe in recipes(problem(f"{words} {way}", gate), host(arch, row.shared)):
            if recipe.name in KERNELS[row.kernel]:
                key = recipe.name, recipe.constants.get("SPAN")
                found[key] = max(found.get(key, recipe), recipe, key=lambda r: len(r.signature))
    assert {name for name, _ in found} == set(KERNELS[row.kernel])
    return fetch_all(found.values())


def too_much(row, kernels):
    """Yield a line for each kernel that does not fit."""
    for k in kernels:
        name, takes, allowed = f"{k.name} of {k.target.spelling}", k.dynamic_shared + k.shared, row.shared << 10
        if takes > allowed:
            yield f"{name} takes {takes} bytes of {allowed}: {row}"
        if k.spills > SPILLS[row.bits]:
            yield f"{name} spills {k.spills} bytes, more than {SPILLS[row.bits]}: {row}"


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def own_store(built_once, monkeypatch):
    """Give these tests a store of their own, as nobody else wants their kernels."""
    monkeypatch.setenv("KDA_CACHE_DIR", str(built_once))


def test_every_row_is_used():
    assert [row for row in TABLE if not reached(row)] == []


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "row, arch", [(row, arch) for row in TABLE for arch in reached(row)],
    ids=lambda x: x if isinstance(x, str) else f"{x.kernel}-{x.bits}-{x.K}-{x.shared}",
)
def test_a_row_takes_no_more_than_it_says(row, arch, own_store):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert list(too_much(row, built(row, arch))) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "arch, config, said",
    [("sm90", TileConfig(stages=3, BV=32), "takes 3"), ("sm80", TileConfig(BV=64), "spills 1")],
    ids=["memory", "spills"],
)
def test_a_row_that_promises_too_much_is_noticed(arch, config, said, force, own_store):
    pytest.importorskip("triton", reason="Triton is not installed")
    row = TableRow("state", 16, 256, 99, config)
    force(configs=((row.kernel, config),))
    assert f"state of {host_of(arch).device.split()[-1]} {said}" in "\n".join(too_much(row, built(row, arch)))


DIMS = (1, 16, 17, 64, 80, 128, 200, 256)


@pytest.mark.parametrize("number", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_head_dim_has_a_configuration_on_every_gpu(number, dtype):
    for K, V, kernel in itertools.product(DIMS, (*DIMS, 1000), KERNELS):
        c = choose(kernel, problem(f"K={K} V={V} {dtype}"), host_of(str(number)), 32 if kernel == "compose" else 0)
        assert 16 <= c.BK <= power_of_2(K) and 16 <= c.BV <= power_of_2(V) and c.num_warps in (4, 8)


def test_what_was_measured_is_kept():
    p, h200 = problem("K=128 V=128 bfloat16"), host_of("sm90")
    assert choose("state", p, h200) == TileConfig(num_warps=4, stages=3, BK=128, BV=64)
    assert choose("prepare", p, h200) == TileConfig(num_warps=4, BK=64, BV=128)
    assert choose("wy", p, h200) == TileConfig(num_warps=4, stages=2, BK=128, BV=64)
    assert choose("intra", p, h200) == TileConfig(num_warps=4, stages=2, BK=32, BV=64, maxnreg=168)


def test_what_was_timed_as_code_of_sm80_is_kept():
    """Where 8 warps multiply rows twice and leave no room for a second program (docs/decisions/triton.md)."""
    p, a100 = problem("K=128 V=128 bfloat16"), host_of("sm80")
    assert choose("state", p, a100) == TileConfig(num_warps=4, stages=2, BK=64, BV=64)
    assert choose("state_bwd", p, a100) == TileConfig(num_warps=4, stages=2, BK=32, BV=64)
    for arch in ("sm80", "sm86", "sm89", "sm120"):
        assert choose("intra", p, host_of(arch)) == TileConfig(num_warps=4, stages=1, BK=32, BV=128)


def test_other_archs_have_the_rows_of_their_family():
    for arch, family in {"sm103": "sm100", "sm110": "sm100", "sm120": "sm86", "sm121": "sm86"}.items():
        for kernel, dtype in itertools.product(KERNELS, ("bfloat16", "float32")):
            p, bits = problem(f"K=128 V=128 {dtype}"), 32 if kernel == "compose" else 0
            assert choose(kernel, p, host_of(arch), bits) == choose(kernel, p, host_of(family), bits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch, products", [("sm100", "tcgen05.mma"), ("sm110", "tcgen05.mma"), ("sm121", "mma.sync")])
def test_triton_multiplies_with_the_instructions_of_the_family(arch, products, own_store):
    pytest.importorskip("triton", reason="Triton is not installed")
    found = recipes(problem("K=128 V=128 bfloat16 forward"), host_of(arch))
    (kernel,) = fetch_all([next(recipe for recipe in found if recipe.name == "state")])
    assert kernel.target.name == arch and products in kernel.ptx


@pytest.mark.parametrize("arch", FAMILIES)
def test_less_memory_gives_smaller_tiles_and_too_little_an_error(arch):
    p = problem("K=128 V=128 bfloat16")
    stages = [choose("state", p, host(arch, shared)).stages for shared in (227, 226, 163, 162, 99)]
    assert stages == sorted(stages, reverse=True) and stages[0] > stages[-1]
    assert choose("state", p, host(arch, 0)) == choose("state", p, host(arch, SMALLEST))     # one that does not tell
    with pytest.raises(BuildError, match=r"needs 99 KiB of shared memory per block; .* allows 98"):
        choose("state", p, host(arch, SMALLEST - 1))


def test_a_thread_sums_the_decays_of_its_own_channel(own_store):
    """Which way lanes go has changed between versions of Triton; along rows, a sum is shuffled 13 times as much."""
    pytest.importorskip("triton", reason="Triton is not installed")
    p = problem("K=128 V=128 bfloat16 backward disable_recompute=true")
    (kernel,) = fetch_all(recipe for recipe in recipes(p, host_of("sm90")) if recipe.name == "prepare")
    assert kernel.ptx.count("shfl.sync") < 100
