"""The Hopper forward in one kernel of any gate, in which pairs are made in blocks of 8 rows: calls against the
definition, and the bits of two kernels."""

import dataclasses

import pytest
import torch
from cute_calls import (
    RAGGED,
    Fault,
    assert_a_call_notices,
    assert_less_shared_memory_is_too_little,
    assert_the_bits_of_two_kernels,
    called,
    changed,
    has_products_that_wait_for_no_other,
    plant,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm90 import launch, plan
from kda.backends.sm90.configs import GROUPS, TILES, tile
from kda.verify.cases import make_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(**options):
    return make_inputs(**dict(H=1, K=128, V=128, gate="softplus") | options)


@pytest.fixture
def one_kernel(plan_says):
    """Ask for clusters of so many CTAs, and for so many clusters (None: a walk each); without CTAs: two kernels."""

    def ask(ctas=None, clusters=None, staged=None):
        plan_says(FUSED=bool(ctas), CTAS=ctas, CLUSTERS=clusters, STAGED=staged)

    return ask


CALLS = {
    "stages used several times, GVA": (2, None, dict(T=390, HV=2)),
    "a tile is made twice by each group": (4, None, dict(T=810)),
    "given decays": (2, None, dict(T=100, gate="given")),
    "given decays, in fours, a walk is cut between two clusters": (4, 2, dict(T=70, HV=3, gate="given")),
    "a bounded gate without l2norms, packed": (4, 2, dict(gate="bounded", l2norm=False, HV=2, **RAGGED)),
    "one token": (4, None, dict(T=1)),
    "packed, GVA, shares": (2, 2, dict(HV=2, **RAGGED)),
    "packed, many tokens of none": (4, 3, dict(lengths=(40, 33, 0, 70), padding=140)),
    "no initial state": (2, 2, dict(T=130, HV=3, initial_state=False)),
    "g of float32": (4, None, dict(T=230, g_dtype="float32")),
    "given decays of float32": (2, None, dict(T=100, g_dtype="float32", gate="given")),
}


@pytest.mark.spread(every=12)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_the_definition_and_has_the_bits_of_two_kernels(name, one_kernel):
    ctas, clusters, shape = CALLS[name]
    dtype = getattr(torch, shape.get("g_dtype", "bfloat16"))
    case = changed(case_of(**{k: v for k, v in shape.items() if k != "g_dtype"}), g=lambda x: x.to(dtype))
    one_kernel(ctas, clusters)
    config = plan.plan(case.problem(), 132).fused
    assert config.prepare.in_blocks and config.ctas == ctas and config.wrapped == bool(clusters)
    assert config.staged == (dtype == torch.bfloat16)
    assert_the_bits_of_two_kernels(case, one_kernel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ctas", [2, 4])
def test_rows_may_come_straight_to_registers(ctas, one_kernel):
    case = case_of(T=390)
    one_kernel(ctas, staged=False)
    assert not plan.plan(case.problem(), 132).fused.staged
    assert_the_bits_of_two_kernels(case, one_kernel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ctas", [2, 4])
@pytest.mark.parametrize("shape", [dict(T=450), dict(lengths=(290, 0, 1, 90), padding=9)], ids=["rows", "packed"])
@pytest.mark.parametrize("schedule", [1, 2, 3, 4])
def test_any_order_of_warps_gives_the_same_bits(schedule, shape, ctas, one_kernel):
    case = case_of(**shape)
    one_kernel(ctas, 2 if "lengths" in shape else None)
    (expected, _), (found, session) = called(case), called(case, schedule=schedule, early=schedule % 2 == 0)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.parametrize(
    "T, H, lengths, ctas, wrapped",
    [
        (8192, 64, (), 2, False), (8192, 96, (), 2, True), (1024, 64, (), 2, False), (8192, 64, (1024,) * 8, 2, True),
        (8192, 64, (128,) * 64, 2, True), (8192, 32, (), 4, True), (8192, 24, (), 4, False), (8192, 40, (), 4, True),
        (8192, 48, (), 0, None), (8192, 16, (), 0, None), (4096, 22, (), 0, None), (1024, 32, (), 0, None),
    ],
)
def test_one_kernel_is_taken_where_it_is_faster_on_an_h200(T, H, lengths, ctas, wrapped):
    """These are measured."""
    p = case_of(**(dict(lengths=(1,) * len(lengths)) if lengths else dict(T=1)), initial_state=False).problem()
    found = plan.plan(dataclasses.replace(p, T=T, H=H, HV=H), 132).fused
    assert (found.ctas if found else 0) == ctas
    assert not ctas or found.wrapped == wrapped


CHUNK, MAKING, ROWS = "sm90/parts/chunk", "sm90/parts/making", "common/cute/rows"
FAULTS = {
    "what blocks have overwrites an operand": Fault(
        CHUNK, "self.team.wait_for_product()", "pass", "race-read-write", schedule=2
    ),
    "kE overwrites an operand": Fault(
        CHUNK, "            else:\n                self.team.meet()", "", "race-read-write", schedule=2
    ),
    "the tile leaves before kE is there": Fault(
        MAKING, "        WHOLE_GROUP.sync(work.group)", "        pass", "race-write-read"
    ),
    "copies do not see kE": Fault(
        MAKING, f'cute.arch.fence_proxy("async.shared", space="cta"){21 * " "}# A_qk, kE and qg', "pass  #", "proxy"
    ),
    "dt_bias is read before it is there": Fault(
        MAKING, f"self.team.meet(){51 * ' '}# dt_bias", "pass  #", "race-write-read", schedule=2
    ),
    "the sum over a first warp is read before it is there": Fault(
        ROWS, f"self.team.meet(){55 * ' '}# the sums over first", "pass  #", "race-write-read", schedule=2
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch, one_kernel):
    one_kernel(2)
    plant(fault, tmp_path, monkeypatch)
    assert_a_call_notices(fault, case_of(T=390))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ctas", [2, 4])
def test_it_takes_the_shared_memory_that_its_configuration_says(ctas, monkeypatch, one_kernel):
    one_kernel(ctas)
    assert_less_shared_memory_is_too_little(case_of(T=100), monkeypatch)


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("ctas", [2, 4])
def test_roles_share_out_the_registers_and_the_memory_of_an_sm(ctas, tmp_path, one_kernel):
    """Rows of q wait in local memory while warps meet: 40 to 64 bytes of a thread, which are faster than 72 registers
    and 104."""
    one_kernel(ctas)
    config = plan.plan(case_of(T=33).problem(), 132).fused
    kernel = launch.kernel(config)
    of_chain, of_prepare = config.registers
    assert 128 * of_chain + 512 * of_prepare == 640 * kernel.registers <= 65536 and kernel.spills <= 64
    groups, tiles = GROUPS * config.group.bytes, GROUPS * (TILES - 1) * tile(128).bytes
    assert config.shared <= 227 * 1024 and (ctas == 2 or groups + tiles <= config.struct.full.offset)
    has_products_that_wait_for_no_other(kernel, tmp_path)
