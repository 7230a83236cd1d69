"""The Blackwell kernels of a step that records gradients, each alone on the CPU from its PTX, against float64."""

import functools
import itertools

import pytest
import torch
from cute_calls import kept_and_made_again, reads_nothing_before_the_kernel_ahead_is_done, rows_of
from kernel_faults import plant
from sm100_faults import RECORDED as FAULTS
from sm100_recorded import (
    BUDGET,
    RAGGED,
    SMALL,
    assert_rows,
    back_is_right,
    back_of_segments_is_right,
    both,
    case_of,
    distance,
    entering,
    keeping_config,
    kernel,
    leaving,
    one_kernel_is_right,
    operands_are_right,
    operands_config,
    operands_of,
    record_of,
    rows,
    states,
    tiles_of,
    up_is_right,
    up_of_segments_is_right,
    walk_of,
    walked,
    walked_back,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.common.cute.configs import chunk_options
from kda.backends.common.training_plan import NO_CLUSTERS
from kda.backends.sm100 import plan
from kda.backends.sm100.capability import ARCHS
from kda.backends.sm100.configs import (
    TMEM,
    KeepingConfig,
    OperandsConfig,
    RecordConfig,
    WalkConfig,
    record_tile,
)
from kda.model.problem import Problem
from ptxkit.chips import CHIPS

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]

SHARED_OF_SM = 228 * 1024

OPERANDS = {
    "bounded, GVA": dict(T=70, HV=2),
    "packed": dict(HV=2, **RAGGED),
    "softplus": dict(T=40, gate="softplus", regime="fast"),
    "given decays, no norms, given beta": dict(T=40, gate="given", l2norm=False, beta="given"),
    "bounded, no norms, a batch": dict(T=33, B=2, l2norm=False),
    "beta up to 2, gates that forget": dict(T=64, beta="2*sigmoid", regime="fast"),
    "64 channels, GVA": dict(T=70, HV=2, **SMALL),
    "64 channels, packed, softplus": dict(HV=2, gate="softplus", **RAGGED, **SMALL),
    "64 channels, given decays, no norms": dict(T=40, gate="given", l2norm=False, beta="given", **SMALL),
    "64 channels, gates that forget": dict(T=64, beta="2*sigmoid", regime="fast", **SMALL),
}


@rows_of(OPERANDS, "packed", "64 channels, GVA", commit=["bounded, GVA"])
def test_operands_are_their_formulas(name):
    operands_are_right(case_of(**OPERANDS[name]))


@pytest.mark.parametrize(("name", "columns"), [("bounded, GVA", 3 * 32), ("softplus", 2 * 128)])
def test_ctas_of_operands_share_the_tensor_memory_of_an_sm(name, columns):
    case = case_of(**OPERANDS[name])
    tiles, _, alone = operands_of(case)
    runs = [operands_of(case, schedule=seed) for seed in range(1, 5)]
    assert all(torch.equal(found, tiles) for found, *_ in runs)
    assert max(run.counters["tmem_columns"] for *_, run in runs) == columns > alone.counters["tmem_columns"]


@pytest.mark.parametrize("way", ["record", pytest.param("walk", marks=pytest.mark.exhaustive)])
def test_ctas_of_64_channels_share_the_tensor_memory_of_an_sm(way):
    case = case_of(T=70, HV=3, **SMALL)
    walks, tiles = record_of if way == "record" else walk_of, tiles_of(case)
    (*expected, _), runs = walks(case, tiles), [walks(case, tiles, schedule=seed) for seed in range(1, 4)]
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for found in runs for x, y in zip(found, expected))
    assert max(found[-1].counters["tmem_columns"] for found in runs) == TMEM

WALKS = {
    "one chunk and a part of one": dict(T=33),
    "stages used several times, GVA": dict(T=230, HV=2),
    "packed": dict(HV=2, **RAGGED),
    "a batch, gates that forget": dict(T=70, B=2, regime="fast"),
    "softplus": dict(T=70, gate="softplus"),
    "no norms, given beta": dict(T=70, l2norm=False, beta="given"),
    "sequences of no tokens": dict(lengths=(0, 0), padding=20),
    "64 channels, stages used several times, GVA": dict(T=230, HV=2, **SMALL),
    "64 channels, packed": dict(HV=2, **RAGGED, **SMALL),
    "64 channels, a batch, gates that forget": dict(T=70, B=2, regime="fast", **SMALL),
    "64 channels, softplus": dict(T=33, gate="softplus", **SMALL),
}


@pytest.mark.spread(every=7, first=2)
@pytest.mark.parametrize("name", WALKS)
def test_the_way_up_is_its_formulas(name):
    up_is_right(case_of(**WALKS[name]))


@pytest.mark.spread(every=7, first=2)
@pytest.mark.parametrize("name", WALKS)
def test_the_way_back_is_its_formulas(name):
    back_is_right(case_of(**WALKS[name]))


@pytest.mark.parametrize("K", [pytest.param(128, marks=pytest.mark.exhaustive), 64])
def test_a_backward_without_o_has_the_same_bits(K):
    case = case_of(T=70, K=K, V=K)
    asked, again = up_is_right(case), up_is_right(case, o=False)
    assert all(torch.equal(x, y) for x, y in zip(asked[1:], again[1:]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("K", [128, 64])
def test_states_may_be_v_first(K, dtype):
    case = case_of(T=70, HV=2, K=K, V=K)
    for way in (functools.partial(up_is_right, dtype=dtype), functools.partial(back_is_right, dh0=dtype)):
        for x, y in zip(way(case), way(case, v_first=True)):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.exhaustive
@pytest.mark.parametrize("K", [128, 64])
def test_states_are_zero_and_left_out_unless_requested(K):
    case = case_of(T=70, K=K, V=K)
    tiles = operands_of(case)[0]
    expected = walked(case)
    o, _, h, ht, _, _ = record_of(case, tiles, ht=False)
    assert_rows(o, rows(expected, 2, case), BUDGET)
    assert distance(h, states(expected, entering)) < BUDGET and ht.isnan().all()
    back = walked_back(case)
    dv, dh, dh0, _ = walk_of(case, tiles)
    assert_rows(dv, rows(back, 1, case), BUDGET)
    assert distance(dh, states(back, leaving)) < BUDGET and distance(dh0, both(back, 0)) < BUDGET

KEPT = {
    "stages used several times, GVA": dict(T=230, HV=2),
    "packed": dict(HV=2, **RAGGED),
    "one token": dict(T=1),
    "a batch, gates that forget": dict(T=70, B=2, regime="fast"),
    "softplus": dict(T=140, gate="softplus"),
    "decays given, no norms, given beta": dict(T=70, gate="given", l2norm=False, beta="given"),
    "sequences of no tokens": dict(lengths=(0, 0), padding=20),
}


@rows_of(KEPT, "packed", commit=["softplus", "stages used several times, GVA"])
def test_one_kernel_keeps_the_bits_of_operands_and_record(name):
    one_kernel_is_right(case_of(**KEPT[name]))

SHARED = {                                   # clusters that share walks of odd and even numbers of chunks
    "a walk of three clusters, GVA": (dict(T=230, HV=2), 5),
    "two walks and a part of one, a batch": (dict(T=70, B=3), 2),
    "packed": (dict(HV=2, **RAGGED), 3),
    "softplus": (dict(T=140, HV=3, gate="softplus"), 2),
}


@rows_of(SHARED, "a walk of three clusters, GVA", commit=["packed"])
def test_so_it_does_where_clusters_share_walks(name):
    options, clusters = SHARED[name]
    one_kernel_is_right(case_of(**options), sharing=clusters)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [dict(o=False), dict(v_first=True, dtype="bfloat16")], ids=str)
def test_so_it_does_without_o_and_with_other_states(options):
    one_kernel_is_right(case_of(T=70, HV=2), **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [True, "states"])
@pytest.mark.parametrize("rows", [dict(T=140), dict(padding=9, HV=2, **{"lengths": RAGGED["lengths"]})], ids=str)
def test_gradients_have_the_same_bits_whatever_kept_or_made_again_what_they_read(rows, keep, force):
    found = []
    for form in ("one kernel", "two kernels"):
        force(form=form)
        found += kept_and_made_again(case_of(**rows), "sm100", keep)
    assert all(torch.equal(one[name], found[1][name]) for one in found for name in found[1])


def problem(words):
    gate = "" if "softplus" in words else "bounded"
    return Problem.parse(f"bfloat16 l2norm beta=sigmoid K=128 V=128 {gate} backward {words}")


@pytest.mark.parametrize("words, sharing", {
    "T=8192 H=64": 0, "T=8192 H=32": 0, "T=8192 H=96": 74, "T=8192 H=16": None, "T=8192 H=148": 0,
    "T=8192 H=64 softplus": 0, "T=8192 H=8 batch_invariant=true": None, "T=16384 H=32 N=2 packed": 64,
    "T=8192 H=64 N=0 packed": None,
}.items())
def test_one_kernel_keeps_where_it_is_predicted_to_be_faster(words, sharing, force):
    force()
    found = getattr(plan.training_plan(problem(words), 148).making, "clusters", NO_CLUSTERS)
    assert found == (NO_CLUSTERS if sharing is None else plan.PAIRS._replace(sharing=sharing))

CUT = {
    "GVA, the last segment of six tokens": dict(T=134, HV=2),
    "a batch": dict(T=70, B=2),
    "packed": dict(lengths=(140, 0, 1, 65), padding=9, HV=2),
    "64 channels, GVA": dict(T=134, HV=2, **SMALL),
    "64 channels, packed": dict(lengths=(140, 0, 1, 65), padding=9, HV=2, **SMALL),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CUT)
def test_segments_walk_as_whole_sequences_do(name):
    """What each adds to a state and M of it, put together in float64, are the states that segments begin with."""
    case = case_of(**CUT[name])
    back_of_segments_is_right(case, up_of_segments_is_right(case))

ORDERS = [dict(schedule=n, early=n % 2 == 1) for n in range(1, 6)]


@pytest.mark.spread(every=5, first=2)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("K", [128, 64])
def test_any_order_of_warps_gives_the_same_bits(K, order):
    case = case_of(lengths=(130, 0, 1, 33), padding=9, HV=2, K=K, V=K)
    h0, dht = case.inputs.initial_state.double(), case.dht.double()
    expected = operands_of(case)[0]
    found = operands_of(case, **order)[0]
    assert torch.equal(found, expected)
    for way in (functools.partial(record_of, h0=h0), functools.partial(walk_of, dht=dht),
                functools.partial(record_of, walk="carry", segment=2)):
        for x, y in zip(way(case, expected)[:-1], way(case, expected, **order)[:-1]):
            assert x is None or torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.spread(every=5, first=2)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_any_order_of_warps_keeps_the_same_bits_in_one_kernel(order):
    one_kernel_is_right(case_of(lengths=(130, 0, 1, 33), padding=9, HV=2), **order)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", ["softplus", "given"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("K", [128, 64])
def test_any_order_of_warps_gives_the_same_operands_of_any_gate(K, order, gate):
    case = case_of(T=40, gate=gate, HV=2, K=K, V=K)
    assert torch.equal(operands_of(case, **order)[0], operands_of(case)[0])

# faults

WAYS = {
    "operands": lambda kinds: operands_are_right(case_of(HV=2, lengths=(33, 0, 40), padding=9), kinds=kinds),
    "any gate": lambda kinds: operands_are_right(case_of(T=40, gate="softplus"), kinds=kinds),
    "up": lambda kinds: up_is_right(case_of(T=200), kinds=kinds),
    "back": lambda kinds: back_is_right(case_of(T=200), kinds=kinds),
    "segments": lambda kinds: up_of_segments_is_right(case_of(T=134), kinds=kinds),
    "up, 64": lambda kinds: up_is_right(case_of(T=200, **SMALL), kinds=kinds),
    "back, 64": lambda kinds: back_is_right(case_of(T=200, **SMALL), kinds=kinds),
    "one kernel": lambda kinds: one_kernel_is_right(case_of(T=390), kinds=kinds),
    "one kernel, packed": lambda kinds: one_kernel_is_right(case_of(HV=2, **RAGGED), kinds=kinds),
    "shared": lambda kinds: one_kernel_is_right(case_of(T=230, HV=2), kinds=kinds, sharing=5),
}


@rows_of(FAULTS, "T' is read before it is there", "rows of v of another swizzle")
def test_a_planted_fault_is_noticed(name, tmp_path, monkeypatch):
    assert FAULTS[name].noticed in ways_of_noticing(FAULTS[name], tmp_path, monkeypatch)


def ways_of_noticing(fault, folder, monkeypatch):
    """Return the kinds of findings that a fault causes, and "wrong answer"."""
    plant(fault, folder, monkeypatch, "sm100")
    kinds = set()
    try:
        WAYS[fault.case](kinds)
    except AssertionError:
        kinds.add("wrong answer")
    return kinds

GATES = (
    "bounded l2norm dt_bias=true beta=sigmoid", "bounded", "bounded l2norm beta=2*sigmoid beta_dtype=float32",
    "softplus l2norm dt_bias=true beta=sigmoid", "gate=given g_dtype=float32", "bounded lower_bound=-9 l2norm",
    "softplus A_log=false", "softplus l2norm dt_bias=true g_dtype=float32",
)

HEADS = "H=2 HV=2", "H=1 HV=3"

FLAGS = (False, True)


def configs():
    """Yield configurations of all classes."""
    sizes = dict(K=128, V=128), SMALL
    for K, words, heads, packed in itertools.product((128, 64), GATES, HEADS, FLAGS):
        yield OperandsConfig(**chunk_options(Problem.parse(f"K={K} V={K} bfloat16 {words} {heads}")), packed=packed)
    dtypes = ("float32", "bfloat16")
    for size, packed, v_first in itertools.product(sizes, FLAGS, FLAGS):
        for dtype, ht, o in itertools.product((None, *dtypes), FLAGS, FLAGS):
            yield RecordConfig(packed, "sequences", dtype, ht, v_first, o, **size)
            yield WalkConfig(packed, "sequences", ht, dtype, v_first, **size)
        for ht, o in itertools.product(FLAGS, FLAGS):
            yield RecordConfig(packed, "segments", "float32", ht, v_first, o, **size)
        for dtype in (None, *dtypes):
            yield WalkConfig(packed, "segments", True, dtype, v_first, **size)
    for size, packed in itertools.product(sizes, FLAGS):
        yield RecordConfig(packed, "carry", None, False, False, False, **size)
        yield WalkConfig(packed, "carry", False, "float32", False, **size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills(arch):
    """A part of all classes, that has each option many times."""
    found = list(dict.fromkeys(configs()))[:: 5 if arch == "sm100" else 11]
    assert len(found) > 6 and not [config for config in found if kernel(config, arch).spills]

OF_SM = {                                    # with how many of them an SM has room for
    "operands": (operands_config(case_of(T=1)), 3),
    "operands of any gate": (operands_config(case_of(T=1, gate="softplus")), 2),
    "record": (RecordConfig(False, "sequences", "float32", True, False), 1),
    "record without an initial state": (RecordConfig(False, "sequences", None, True, False), 1),
    "walk": (WalkConfig(False, "sequences", True, "float32", False), 1),
    "one kernel": (keeping_config(case_of(T=1)), 1),
    "walk without an initial state": (WalkConfig(False, "sequences", True, None, False), 1),
    "operands of 64 channels": (operands_config(case_of(T=1, **SMALL)), 5),
    "operands of any gate of 64 channels": (operands_config(case_of(T=1, gate="softplus", **SMALL)), 4),
    "record of 64 channels": (RecordConfig(False, "sequences", "float32", True, False, **SMALL), 2),
    "walk of 64 channels": (WalkConfig(False, "sequences", True, "float32", False, **SMALL), 2),
}


@rows_of(OF_SM, "operands", "record", "walk", "one kernel", commit=["operands of any gate"])
def test_an_sm_has_room_for_as_many_ctas_as_configurations_say(name):
    config, ctas = OF_SM[name]
    assert ctas * config.threads * kernel(config).registers <= 65536
    assert kernel(config).spills <= 16 * isinstance(config, KeepingConfig)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OF_SM)
def test_so_has_an_sm_of_jetson_thor(name):
    """A kernel takes other registers there."""
    config, ctas = OF_SM[name]
    assert ctas * config.threads * kernel(config, "sm110").registers <= 65536


def test_memory_is_what_configurations_say():
    assert all(ctas * config.threads <= CHIPS[110].threads_sm for config, ctas in OF_SM.values())
    assert all(ctas * (config.shared + 1024) <= SHARED_OF_SM for config, ctas in OF_SM.values())
    assert all(ctas * config.columns <= TMEM for name, (config, ctas) in OF_SM.items() if name.startswith("operands"))
    walks = [(config, ctas) for config, ctas in OF_SM.values() if isinstance(config, RecordConfig | WalkConfig)]
    assert all(config.tmem.end <= config.allocated and ctas * config.allocated <= TMEM for config, ctas in walks)


def test_operands_read_nothing_before_the_tables_are_there():
    config = operands_config(case_of(HV=2, **RAGGED))
    assert config.pdl
    reads_nothing_before_the_kernel_ahead_is_done(kernel(config))


@pytest.mark.exhaustive
def test_nor_does_the_one_kernel():
    config = keeping_config(case_of(HV=2, **RAGGED))
    assert config.pdl
    reads_nothing_before_the_kernel_ahead_is_done(kernel(config))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_the_one_kernel_spills_32_bytes_at_most_and_112_where_one_product_is_not_enough(arch):
    found = {}
    for words in GATES[:: 1 if arch == "sm100" else 3]:
        for packed in FLAGS:
            p = Problem.parse(f"K=128 V=128 bfloat16 {words} H=1 HV=3 {'packed' * packed}")
            config = plan.keeping_config(p, plan.PAIRS, True)
            found[config] = kernel(config, arch).spills
    of_any_gate = 112 if arch == "sm103" else 104
    assert all(spills <= (32 if config.one_product else of_any_gate) for config, spills in found.items()), found


def test_a_kept_tile_lies_as_operands_leaves_it():
    tile, kept = keeping_config(case_of(T=1)).memory.tile, record_tile(128)
    assert (tile.bytes, tile.end) == (kept.bytes, kept.end)
    assert [field[2:] for field in tile.fields.values()] == [field[2:] for field in kept.fields.values()]
    assert [field.shape for field in tile.fields.values()] == [field.shape for field in kept.fields.values()]
