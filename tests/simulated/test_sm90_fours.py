"""The Hopper forward in one kernel, clusters of four, in which two CTAs only make tiles: calls against the definition,
and the bits of two kernels."""

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
    return make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | options)


@pytest.fixture
def fours(plan_says):
    """One kernel of so many clusters of four; None: of a walk each; False: two kernels."""

    def ask(count=None):
        plan_says(FUSED=count is not False, CTAS=4, CLUSTERS=count or None)

    ask()
    return ask


SHARES = {
    "every tile is made twice": (None, dict(T=650)),
    "a walk is cut between two clusters": (2, dict(T=70, HV=3)),
    "fewer chunks than groups": (None, dict(T=100)),
    "one token": (None, dict(T=1)),
    "packed, GVA": (None, dict(HV=2, **RAGGED)),
    "a walk is longer than a share": (4, dict(lengths=(300, 1, 0, 5, 40))),
    "packed, many tokens of none": (3, dict(lengths=(40, 33, 0, 70), padding=140)),
    "no initial state": (2, dict(T=130, HV=3, initial_state=False)),
    "g of float32": (None, dict(T=230, g_dtype="float32")),
}


@pytest.mark.spread(every=9)
@pytest.mark.parametrize("name", SHARES)
def test_a_call_is_the_definition_and_has_the_bits_of_two_kernels(name, fours):
    count, shape = SHARES[name]
    dtype = getattr(torch, shape.get("g_dtype", "bfloat16"))
    case = changed(case_of(**{k: v for k, v in shape.items() if k != "g_dtype"}), g=lambda x: x.to(dtype))
    fours(count)
    config = plan.plan(case.problem(), 132).fused
    assert config.ctas == 4 and config.wrapped == bool(count) and config.staged == (dtype == torch.bfloat16)
    assert_the_bits_of_two_kernels(case, lambda: fours(False))


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", range(1, 6))
def test_no_bit_depends_on_the_number_of_clusters(count, fours):
    case = case_of(lengths=(130, 0, 1, 200, 64, 31), HV=2)
    fours(count)
    found, session = called(case)
    fours(False)
    expected, _ = called(case)
    assert not session.findings and all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.spread(every=8)
@pytest.mark.parametrize("shape", [dict(T=450), dict(lengths=(290, 0, 1, 90), padding=9)], ids=["rows", "packed"])
@pytest.mark.parametrize("schedule", [1, 2, 3, 4])
def test_any_order_of_warps_gives_the_same_bits(schedule, shape, fours):
    case = case_of(**shape)
    fours(2 if "lengths" in shape else None)
    (expected, _), (found, session) = called(case), called(case, schedule=schedule, early=schedule % 2 == 0)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.exhaustive
def test_clusters_of_two_may_have_their_rows_staged(fours, monkeypatch):
    monkeypatch.setattr(plan, "CTAS", 2)
    monkeypatch.setattr(plan, "STAGED", True)
    case = case_of(T=390)
    assert plan.plan(case.problem(), 132).fused.staged
    assert_the_bits_of_two_kernels(case, lambda: fours(False))


@pytest.mark.exhaustive
def test_sequences_of_no_tokens_hand_their_states_through(fours):
    case = case_of(lengths=(0, 0, 0), HV=2, padding=40)
    fours(2)
    found, session = called(case)
    assert not session.findings and not found["o"].any()
    assert torch.equal(found["ht"], case.keywords["initial_state"])


HANDOVER, MAKING, ROWS, VALUES = (f"sm90/parts/{name}" for name in ("handover", "making", "rows", "values"))
FAULTS = {
    "a tile leaves before its stage is free": Fault(
        HANDOVER, "cute.arch.mbarrier_wait(ring.credit + group, turn & 1)", "pass", "race-read-write", schedule=2
    ),
    "a tile is overwritten before both CTAs have read it": Fault(
        HANDOVER, "mbarrier_init(ring.empty + (TILES * group + number), WALKING +",
        "mbarrier_init(ring.empty + (TILES * group + number), 1 +", "race-read-write", schedule=2
    ),
    "credit comes before the stage was read": Fault(
        HANDOVER, "mbarrier_init(ring.read + stage, 4)", "mbarrier_init(ring.read + stage, 1)", "race-read-write",
        schedule=2
    ),
    "RELAY tells the wrong CTA": Fault(
        HANDOVER, "credit + maker.group, peer_cta_rank_in_cluster=maker.rank",
        "credit + maker.group, peer_cta_rank_in_cluster=maker.rank & 1", "deadlock"
    ),
    "pairs of the next chunk come before INVERSE has read those of this one": Fault(
        HANDOVER, "cute.arch.mbarrier_wait(ring.solved + group, turn & 1 ^ 1)", "pass", "race-read-write", schedule=2
    ),
    "INVERSE reads pairs before they are there": Fault(
        MAKING, "        GROUP_INVERSE.sync(group)", "        pass", "race-write-read"
    ),
    "rows are requested before the product has read its operands": Fault(
        MAKING, "def operands_were_read(self):\n        self.team.meet()",
        "def operands_were_read(self):\n        pass", "race-read-write", schedule=2
    ),
    "rows are read before they are there": Fault(
        ROWS, "cute.arch.cp_async_wait_group(0)", "cute.arch.cp_async_wait_group(1)", "race-write-write"
    ),
    "v is overwritten before CHAIN has read it": Fault(
        VALUES, "cute.arch.mbarrier_wait(read + stage, phase_of(c, RING) ^ 1)", "pass", "race-write-write",
        schedule=2
    ),
    "LOAD does not say that v is there": Fault(VALUES, "arrive_when_copied(ring.full + stage)", "pass", "deadlock"),
    "CHAIN does not wait for all of v": Fault(
        HANDOVER, "mbarrier_init(ring.full + stage, 1 + 32)", "mbarrier_init(ring.full + stage, 1)", "mbarrier"
    ),
    "STORE reads o before it is there": Fault(
        VALUES, "cute.arch.mbarrier_wait(ring.written + place, phase_of(c, OUTPUTS))", "pass", "uninitialised"
    ),
    "o is overwritten before STORE has read it": Fault(
        VALUES, "cute.arch.mbarrier_wait(ring.taken + stage_of(c, OUTPUTS), phase_of(c, OUTPUTS) ^ 1)", "pass",
        "race-read-write", schedule=2
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch, fours):
    plant(fault, tmp_path, monkeypatch)
    assert_a_call_notices(fault, case_of(T=650))


@pytest.mark.exhaustive
def test_it_takes_the_shared_memory_that_its_configuration_says(monkeypatch, fours):
    assert_less_shared_memory_is_too_little(case_of(T=100), monkeypatch)


def test_tiles_of_a_cta_of_two_groups_fit_where_others_have_stages_and_rows(fours):
    config = plan.plan(case_of(T=33).problem(), 132).fused
    groups, tiles = GROUPS * config.group.bytes, GROUPS * (TILES - 1) * tile(128).bytes
    assert groups + tiles <= config.struct.full.offset and config.shared <= 227 * 1024


def test_roles_share_out_the_registers_of_the_launch(tmp_path, fours):
    kernel = launch.kernel(plan.plan(case_of(T=33).problem(), 132).fused)
    assert kernel.spills <= 16 and 128 * 192 + 512 * 72 <= 640 * kernel.registers <= 65536
    has_products_that_wait_for_no_other(kernel, tmp_path)
