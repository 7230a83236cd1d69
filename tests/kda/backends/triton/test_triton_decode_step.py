"""The kernel of decode_step, run on the CPU from its PTX, against the reference in float64."""

import dataclasses
import functools
import itertools

import pytest
import torch
from drafts import beside_plain_decoding

pytest.importorskip("triton", reason="needs triton")

from triton_calls import building_here, built_here, compiled, same_bits, with_texts

import kda
from kda.backends.common import triton_launch
from kda.backends.common.routine import forget_routines
from kda.backends.common.triton_types import target_of
from kda.backends.triton.decode import step_plan
from kda.backends.triton.decode.step_plan import StepConfig
from kda.calls import decode
from kda.model.force import forcing
from kda.model.host import host_of
from kda.model.problem import Problem, StepProblem
from kda.tools.verify.steps import budgets, bytes_moved, copied, make_step, run_step
from ptxkit import capture

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]

archs = pytest.mark.parametrize("arch", ["sm90", "sm80", "sm100"])


@pytest.fixture(autouse=True)
def kernels_built_here(monkeypatch):
    with building_here(monkeypatch):
        yield


def run(x, arch="sm90", **options):
    """Return o and the updated tensors, those of x; the one launch must have no findings."""
    with capture(arch=arch, **options) as session:
        found = run_step(x)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert [each.kernel for each in session.runs] == ["decode_step"]
    return found


def step_config(*sizes, **more):
    """Return Force.configs with this configuration of the kernel."""
    return (("decode_step", StepConfig(*sizes, **more)),)


def check(x, found):
    for name, budget in budgets(x).items():
        measure = budget.measure(found[name])
        assert measure.used <= 1, f"{name}: {measure}"


BFLOAT16 = dict(dtype="bfloat16")
CASES = {
    "float32": {},
    "bfloat16, bounded gate, padding": dict(BFLOAT16, gate="bounded", slots=[4, -1, 0]),
    "bfloat16 states": dict(BFLOAT16, states="bfloat16"),
    "GVA": dict(BFLOAT16, HV=6),
    "all given, no l2norm": dict(gate="given", beta="given", l2norm=False),
    "float16, 2*sigmoid, a bias": dict(dtype="float16", states="float16", beta="2*sigmoid", bias=True),
    "a gate per head, GVA": dict(BFLOAT16, HV=6, per_head=True),
    "a decay per head, drafts": dict(T=4, gate="given", per_head=True, drafts=True),
    "no convolution": dict(BFLOAT16, conv=False),
    "no norm": dict(norm=False),
    "the recurrence alone, GVA": dict(conv=False, norm=False, HV=4),
    "K=20 V=12": dict(K=20, V=12),
    "K=60 V=100, GVA": dict(K=60, V=100, H=1, HV=2, N=2),
    "K=1 V=1": dict(K=1, V=1),
    "K=128 V=128": dict(BFLOAT16, N=1, H=1, K=128, V=128, states="bfloat16"),
    "K=256 V=16": dict(N=1, H=1, K=256),
    "K=128 V=256, eight warps": dict(BFLOAT16, N=1, H=1, K=128, V=256),
    "six tokens": dict(BFLOAT16, T=6),
    "two tokens, a wide convolution, GVA": dict(T=2, W=6, HV=4, states="bfloat16"),
    "three tokens, a narrow convolution": dict(T=3, W=2),
    "drafts": dict(BFLOAT16, T=4, drafts=True),
    "drafts, GVA, padding": dict(T=3, drafts=True, HV=4, slots=[4, -1, 0], states="bfloat16"),
    "drafts without a convolution": dict(T=3, drafts=True, conv=False),
    "a tree": dict(T=6, tree=True, drafts=True),
    "a tree, GVA": dict(BFLOAT16, T=5, tree=True, drafts=True, HV=4, W=3),
}


@archs
@pytest.mark.parametrize("name", CASES)
@pytest.mark.spread(every=17, first=1)
def test_it_is_the_definition(name, arch):
    x = make_step(**CASES[name])
    if x.get("records") is not None:
        T = x["q"].shape[1]
        x["num_accepted_tokens"] = torch.tensor([1, T, 2], dtype=torch.int32)
        x["records"].mul_(0.1)
    before = copied(x)
    found = run(x, arch)
    check(before, found)
    unused = [slot for slot in range(len(x["states"])) if slot not in x["ssm_state_indices"]]
    for name in found.keys() - {"o"}:
        assert same_bits(x[name][unused], before[name][unused])
    assert not found["o"][x["ssm_state_indices"] < 0].any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("V", [128, 256])
def test_states_k_first_fit_into_the_shared_memory_of_every_gpu(V):
    x = make_step(N=1, H=1, K=128, V=V, dtype="bfloat16")
    x |= {"states": x["states"].mT.contiguous(), "state_v_first": False}
    before = copied(x)
    with capture(arch="sm90") as session:
        found = run_step(x)
    assert not session.findings and session.launches[0].dynamic_shared <= 99 << 10
    check(before, found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("T", [1, 3])
def test_every_tensor_may_have_a_dtype_of_its_own(T):
    x = make_step(T=T, dtype="bfloat16", states="float16", bias=True)
    others = dict(g="float32", beta="float16", A_log="bfloat16", dt_bias="float16", conv_states="float32",
                  conv_weight="float32", conv_bias="float16", norm_gate="float32", norm_weight="float16")
    x |= {name: x[name].to(getattr(torch, dtype)) for name, dtype in others.items()}
    x["ssm_state_indices"] = x["ssm_state_indices"].long()
    before = copied(x)
    check(before, run(x))


@pytest.mark.exhaustive
def test_what_is_not_accepted_may_be_anything():
    """Numbers that are none in drafts that are turned down, in their records and in padding."""
    x = make_step(T=4, drafts=True, slots=[4, -1, 0])
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 2:] = torch.nan
        x[name][1] = torch.nan
    found = run(x)
    assert found["o"][:, :2].isfinite().all() and found["states"].isfinite().all()
    new = make_step(T=4, drafts=True, seed=1)
    x |= {name: new[name] for name in ("q", "k", "v", "g", "beta", "norm_gate")}
    x["num_accepted_tokens"] = torch.tensor([2, 1, 2], dtype=torch.int32)
    found = run(x)
    assert found["o"].isfinite().all() and found["states"].isfinite().all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["states with gaps", "states (K, V)", "states with gaps everywhere",
                                    "tails (C, L)", "tails with gaps"])
def test_pools_may_have_any_strides(layout):
    x = make_step(dtype="bfloat16", V=32)
    name, memory, view = {
        "states with gaps": ("states", lambda s: (s[0], 3, *s[1:]), lambda m: m[:, 1]),
        "states (K, V)": ("states", lambda s: (*s[:2], s[3], s[2]), lambda m: m.mT),
        "states with gaps everywhere": ("states", lambda s: (*s[:3], 2, s[3], 3), lambda m: m[:, :, :, 1, :, 1]),
        "tails (C, L)": ("conv_states", lambda s: (s[0], s[2], s[1]), lambda m: m.mT),
        "tails with gaps": ("conv_states", lambda s: (s[0], s[1], 2, s[2], 3), lambda m: m[:, :, 1, :, 1]),
    }[layout]
    memory = torch.full(memory(x[name].shape), torch.nan, dtype=x[name].dtype)
    view(memory).copy_(x[name])
    outside = memory.clone()
    before = copied(x)
    check(before, run(x | {name: view(memory)}))
    for each in (memory, outside):
        view(each).zero_()
    assert same_bits(memory, outside)


@pytest.mark.exhaustive
def test_inputs_may_have_any_strides_and_begin_anywhere():
    x = make_step(T=2, HV=4, dtype="bfloat16")
    plain = run(copied(x))
    apart = copied(x)
    mixed = torch.cat([x[name].flatten(2) for name in ("q", "k", "v")], -1)         # as one projection makes them
    sizes = [x[name].flatten(2).shape[2] for name in ("q", "k", "v")]
    for name, part in zip(("q", "k", "v"), mixed.split(sizes, -1)):
        apart[name] = part.unflatten(2, x[name].shape[2:])
    for name in ("g", "beta", "norm_gate", "conv_weight", "dt_bias", "norm_weight"):
        flat = torch.cat([x[name].flatten()[:1], x[name].flatten()])
        apart[name] = flat[1:].view(x[name].shape)
    apart["g"] = x["g"].mT.contiguous().mT
    found = run(apart)
    for each in found:
        assert same_bits(found[each], plain[each])


@pytest.mark.spread(every=3, first=2)
@pytest.mark.parametrize("words", [dict(T=3, HV=4), dict(N=1, T=6, tree=True, drafts=True), dict(dtype="bfloat16")],
                         ids=["GVA", "a tree", "one token"])
def test_any_order_of_warps_gives_the_same_bits_and_no_race(words):
    """The kernel has as many warps as it may have, and runs in five schedules."""
    x = make_step(**words | dict(K=32, V=64))
    if "num_accepted_tokens" in x:
        x["num_accepted_tokens"] += 2
    with forcing(configs=step_config(4, 32, rows=32)):
        first = run(copied(x))
        for schedule in range(1, 5):
            found = run(copied(x), schedule=schedule, early=bool(schedule % 2))
            for each in found:
                assert same_bits(found[each], first[each])


@pytest.mark.exhaustive
@pytest.mark.parametrize("warps,piece", [(1, 8), (2, 32), (8, 16)])
def test_every_configuration_gives_the_definition(warps, piece, force):
    force(configs=step_config(warps, piece))
    x = make_step(T=2, dtype="bfloat16", K=32, V=32)
    before = copied(x)
    check(before, run(x))


# bits


@pytest.mark.exhaustive
@pytest.mark.parametrize("T", [1, 3])
def test_blocks_of_rows_give_the_bits_of_the_whole_state(T, force):
    words = dict(T=T, dtype="bfloat16", states="bfloat16", K=32, V=64, drafts=T > 1)
    found = []
    for sizes in ((2, 32), (2, 32, 32), (2, 32, 16, 2)):
        force(configs=step_config(*sizes))
        found.append(run(make_step(**words)))
    for other in found[1:]:
        assert all(same_bits(other[each], found[0][each]) for each in other)


LINES = {
    "a line": dict(T=3), "a tree": dict(T=6, tree=True), "bfloat16 states": dict(T=3, states="bfloat16"),
    "a tree, GVA, bfloat16 states": dict(T=4, tree=True, HV=4, states="bfloat16", dtype="bfloat16"),
}


WIDE = dict(H=1, K=128, V=128, dtype="bfloat16")
for tree, states in itertools.product((False, True), ("float32", "bfloat16")):
    shape = "a tree" if tree else "a line"
    LINES[f"K=128 V=128, {shape}, {states} states"] = WIDE | dict(T=4, tree=tree, states=states)


@pytest.mark.parametrize("name", LINES)
@pytest.mark.spread(every=8, first=1)
def test_drafts_leave_what_the_accepted_tokens_alone_leave(name):
    """Bit for bit, in a call for each of them."""
    compared = 0
    for what, a, b in beside_plain_decoding(run, turns=2, N=2, **LINES[name]):
        assert same_bits(a, b), what
        compared += 1
    assert compared > 3


@pytest.mark.exhaustive
def test_tokens_one_by_one_give_the_bits_of_all_at_once():
    x = make_step(T=4, dtype="bfloat16", states="bfloat16")
    one, o = copied(x), []
    for t in range(4):
        rows = {name: x[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta", "norm_gate")}
        o.append(run(one | rows)["o"])
    found = run(x)
    assert same_bits(torch.cat(o, 1), found["o"])
    assert same_bits(one["states"], x["states"]) and same_bits(one["conv_states"], x["conv_states"])


# what nobody has looked at


@pytest.mark.exhaustive
def test_numbers_out_of_range_touch_no_other_memory():
    """On a GPU nobody looks at them: here they go to the kernel past the checks."""
    x = make_step(N=2, T=4, drafts=True, tree=True)
    x["accepted_path"] = torch.zeros(2, 4, dtype=torch.int32)
    wild = [0, -7, 2**30, 2**31 - 1, -(2**31)]
    names = ("num_accepted_tokens", "accepted_path", "parents", "ssm_state_indices")
    given = []
    with pytest.MonkeyPatch.context() as patch, capture(arch="sm90") as session:
        patch.setattr("kda.calls.decode.VALUES", ())
        for n, name in itertools.product(wild, names):
            run_step(copied(x) | {name: torch.full_like(x[name], n)})
            given.append(n)
    assert {f.kind for f in session.findings} <= {"race-write-write", "race-read-write", "race-write-read"}
    assert len(session.runs) == len(given)


@pytest.mark.exhaustive
def test_slots_out_of_range_are_padding():
    x = make_step(slots=[0, 1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kda.calls.decode.VALUES", ())
        wrong = run(copied(x) | {"ssm_state_indices": torch.tensor([0, 5, -2], dtype=torch.int32)})
    padded = run(copied(x) | {"ssm_state_indices": torch.tensor([0, -1, -1], dtype=torch.int32)})
    for each in wrong:
        assert same_bits(wrong[each], padded[each])


def test_memory_is_read_in_whole_sectors():
    """States are read and written once; beside them are rows, tails and, of one sequence alone, weights."""
    x = make_step(N=1, H=2, K=128, V=128, dtype="bfloat16", gate="bounded")
    with capture(arch="sm90") as session:
        run_step(x)
    states, counters = x["states"][:1].numel() * 4, session.runs[0].counters
    assert states < counters["global_floor_read"] < 1.15 * states
    rows = 2 * 2 * (3 * 3 * 128 + 128)                                         # tails and o of two heads, bfloat16
    assert counters["global_bytes_written"] == counters["global_floor_written"] == states + rows
    touched = counters["global_floor_read"] + counters["global_floor_written"]
    assert touched - 256 <= bytes_moved(x) <= touched                          # sectors for slots, beta and A_log


# faults


FAULTS = {
    "the taps are those of the next token": ("position - 1", "position", {}),
    "no SiLU": ("y = z * sigmoid(z)", "y = z", {}),
    "q is not normalised": ("qt * q_norm, kt * k_norm", "qt, kt * k_norm", {}),
    "v is not compared with what is recalled": ("(v - recalled)", "v", {}),
    "the output does not see its own token": ("tl.fma(qk, change, seen)", "seen", {}),
    "the mean is a sum": ("tl.sum(y * y, 1) / V", "tl.sum(y * y, 1)", {}),
    "the gate of the norm is left out": (" * sigmoid(logits[2].to(tl.float32))", "", {}),
    "channels of k are those of q": ("(H + h) * K + d", "h * K + d", {}),
    "slot -1 is read": ("(slot >= first_slot) & (slot < pool)", "slot < pool", dict(slots=[4, -1, 0])),
    "a tail is written before all have read it": ("    tl.debug_barrier()\n    for r", "    for r", dict(T=2)),
    "tails of q are written for every value head": ("        if W > 0 and not EARLY:\n            store_tail(q",
                                                   "            if W > 0 and not EARLY:\n             store_tail(q",
                                                   dict(HV=4, T=2)),
    "the state behind the last draft is kept": ("if t == 0:", "if t == tokens - 1:", dict(T=3, drafts=True)),
    "one record too few is applied": ("range(1, holds)", "range(1, holds - 1)", dict(T=3, drafts=True)),
    "a record has no decay": ("put(new + K + d, D,", "put(new + K + d, D * 0 + 1,", dict(T=3, drafts=True)),
    "a block of rows is stored where the first lies": ("put_block(S, m, state", "put_block(S, 0, state", {}),
    "a block of rows has the v of the first": ("qk, rows[m]", "qk, rows[0]", {}),
    "blocks are joined in another order": ("tl.join(parts[i], parts[i + 1])", "tl.join(parts[i + 1], parts[i])", {}),
    "a token has the logits of the one before": ("logits = new_logits", "logits = logits", dict(T=2)),
    "inputs of the convolution do not move on": ("result + (taps[j],)", "result + (taps[j + 1],)", dict(T=3)),
    "a head has the gates of its neighbours": ("gates = d if GATES == K else d * 0", "gates = d", dict(per_head=True)),
    "a tree is taken for a line": ("(parent != t - 1)", "(parent == t)", dict(T=6, tree=True, drafts=True)),
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Plant a fault in the kernel's source."""

    def plant(old, new):
        function = with_texts("decode.step", "decode_step", tmp_path, {old: new})
        monkeypatch.setattr(triton_launch, "fetch", functools.partial(compiled, function))
        forget_routines()

    return plant


@pytest.mark.spread(every=7, first=2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name, broken, force):
    old, new, words = FAULTS[name]
    force(configs=step_config(4, 32, rows=8))
    x = make_step(**words)
    if "records" in x:
        x["num_accepted_tokens"] += 1
    before = copied(x)
    broken(old, new)
    with pytest.raises(AssertionError):
        check(before, run(x))


# the plan


def step(N=64, H=32, HV=None, T=1, **words):
    core = dict(state_dtype="float32", inplace=True) | words
    return StepProblem(Problem(op="decode", B=N, T=T, N=N, H=H, HV=HV or H, **core), width=4, norm_eps=1e-5)


def test_a_state_of_every_size_fits_into_the_registers_of_its_warps():
    for K, V in itertools.product((1, 16, 60, 128, 256), (1, 16, 64, 128)):
        c = step_plan.config(step(K=K, V=V), sms=132)
        held = step_plan.width(K) * step_plan.width(V) / (32 * c.num_warps)
        assert held <= 128 and c.num_warps <= 8 and c.piece <= step_plan.width(K)
        c = step_plan.config(step(K=K, V=V, state_dtype="bfloat16"), sms=132)
        BV = step_plan.width(V)
        assert step_plan.width(K) * c.rows <= 2048 * c.num_warps and BV % c.rows == 0 and c.ahead == BV // c.rows


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafts,tree", [(False, False), (True, False), (True, True)], ids=["token", "line", "tree"])
@pytest.mark.parametrize("states", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
def test_kernels_of_the_models_spill_next_to_nothing_and_sum_in_few_shuffles(arch, states, drafts, tree):
    """A layout that Triton does not choose as step.py says takes ten times the shuffles."""
    s = step(T=4 if drafts else 1, state_dtype=states, gate="bounded", A_log=True, qk_l2norm=True, beta="sigmoid")
    s = dataclasses.replace(s, drafts=drafts, tree=tree)
    kernel = built_here(step_plan.recipes(s, host_of(arch))[0])
    allowed = 96 if tree else 32 if drafts else 0                              # what Triton 3.6 spills, which is most
    assert kernel.spills <= allowed and kernel.ptx.count("shfl.sync") < 300
    assert kernel.registers * 32 * step_plan.config(s, sms=132).num_warps <= 65536 // 2  # two CTAs share an SM


def test_a_state_of_16_bits_is_one_block_where_every_cta_has_an_sm():
    few, many = (step_plan.config(step(N=N, state_dtype="bfloat16"), sms=132) for N in (4, 5))
    assert (few, many) == (StepConfig(4, 128), StepConfig(4, 128, rows=64, ahead=2))


def test_a_kernel_is_built_for_a_class_of_calls():
    """Never for N, H, the size of a pool, or numbers."""
    x = step_plan.StepLayout((("q", "bfloat16"), ("states", "float32")))
    c, target = step_plan.config(step(), sms=132), target_of(host_of("sm90"))
    assert step_plan.recipe(step(1, slots=3), x, c, target) == step_plan.recipe(step(7, H=96, scale=0.1), x, c, target)
    assert step_plan.recipe(step(T=2), x, c, target) == step_plan.recipe(step(T=5), x, c, target)
    assert step_plan.recipe(step(), x, c, target) != step_plan.recipe(step(HV=64), x, c, target)


def test_a_call_without_a_place_for_its_state_is_refused():
    x = make_step(N=1, H=1, K=256, V=256)
    with capture(arch="sm90"), pytest.raises(kda.NoBackendError, match=r"triton\.decode_state"):
        run_step(x)


@pytest.mark.exhaustive
def test_kernels_built_ahead_of_time_are_those_that_calls_ask_for(monkeypatch):
    wanted, asked = [], decode._PROBLEMS
    monkeypatch.setattr(triton_launch, "fetch", lambda recipe: wanted.append(recipe) or built_here(recipe))
    for words in (dict(dtype="bfloat16"), dict(T=3, drafts=True), dict(conv=False, gate="given"), dict(per_head=True)):
        asked.clear()
        run(make_step(**words))
        assert wanted[-1] in step_plan.recipes(*asked.values(), host_of("sm90"))


# ---- a step that is known


@pytest.fixture(params=["C++", "Python"])
def known_step(request, monkeypatch):
    """The arguments of a step that was made before, known by a key of either; checking another like it is an error."""
    if request.param == "Python":
        request.getfixturevalue("calls_in_python")

    def never(c):
        raise AssertionError("a step that is known was checked again")

    with capture(arch="sm90") as session:
        x = {name: t.to("cuda") if isinstance(t, torch.Tensor) else t for name, t in make_step(N=2).items()}
        before = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in x.items()}
        first = {name: t.clone() for name, t in run_step(x).items()}
        monkeypatch.setattr(decode, "_checked", never)
        yield before, first
        assert not session.findings


def test_a_step_that_was_made_before_is_not_checked_again_and_has_the_same_bits(known_step):
    x, first = known_step
    again = run_step(x)
    assert all(same_bits(again[name], first[name]) for name in first)


OTHERS = {
    "other strides": lambda x: {"states": x["states"].mT.contiguous().mT},
    "another alignment": lambda x: {"q": torch.cat([x["q"].flatten()[:1], x["q"].flatten()])[1:].view_as(x["q"])},
    "memory of another": lambda x: {"norm_gate": x["v"]},
    "another dtype": lambda x: {"g": x["g"].double()},
    "another sequence": lambda x: {"ssm_state_indices": x["ssm_state_indices"].long()},
    "an equal flag": lambda x: {"use_qk_l2norm_in_kernel": 1.0},
    "a parameter": lambda x: {"A_log": torch.nn.Parameter(x["A_log"])},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_step_that_differs_in_more_than_numbers_is_checked(other, known_step):
    x, _ = known_step
    with pytest.raises(AssertionError, match="checked again"):
        run_step(x | other(x))


def test_slots_on_the_cpu_are_looked_at_in_each_call(known_step):
    x, _ = known_step
    with pytest.raises(kda.InputError, match="ssm_state_indices must be slots of the pool"):
        run_step(x | {"ssm_state_indices": x["ssm_state_indices"] + 100})


def test_a_known_step_that_records_gradients_is_checked(known_step):
    x, _ = known_step
    with pytest.raises(AssertionError, match="checked again"):
        kda.decode_step(**x)                                                   # gradients may be recorded here
