"""Calls of the Hopper and Blackwell backends in the simulator, held against the definition."""

import dataclasses
import importlib.util
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

import kda
from kda.backends.sm90 import launch
from kda.model.host import host_of
from kda.model.problem import Problem
from kda.routing.dispatch import weigh
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import describe, judge
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture
from ptxkit.compile.target import parse

TOKENS = ("q", "k", "v", "g", "beta")
RAGGED = dict(lengths=(65, 0, 1, 30))
LAYOUTS = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "beginning at any element": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}

SIZES = {                                    # a backend, and its channels and columns if they are not the usual ones
    "sm89": dict(K=64, V=64, dtype="float32"), "sm89, 128": dict(K=128, V=128, dtype="float32"),
    "sm90": dict(K=64, V=64), "sm90, 128": dict(K=128, V=128),
    "sm100": dict(K=128, V=128), "sm100, 64": dict(K=64, V=64),
}
HOPPER, BLACKWELL = ("sm90", "sm90, 128"), ("sm100", "sm100, 64")


def drawn(**words):
    return make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | words)


def gradients(case, backend, arch=None, **options):
    """Return the gradients of one call, by name, and the session with the simulator's findings."""
    with capture(arch=arch or backend, **dict(strict=True) | options) as session:
        found = kda.chunk_kda_bwd(do=case.do, dht=case.dht, **case.keywords, backend=backend)
    return {name: x for name, x in found._asdict().items() if x is not None}, session


def judged_gradients(case, found, backend):
    limits = budgets(case, SimulatedDoor(backend, parse(backend)).rounding(case))
    return [judge("call", name, limits[name], x, case, whole=True) for name, x in found.items()]


def check_gradients(case, backend, **options):
    """Check that the gradients of a call are those of the definition, and return them."""
    found, session = gradients(case, backend, **options)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert_right(judged_gradients(case, found, backend))
    return found


def kept_and_made_again(case, backend, keep=True):
    """Return o, ht and the gradients of a forward that saves, and the gradients of a backward that makes all again."""
    with capture(arch=backend, strict=True) as session:
        out = kda.chunk_kda_fwd(**case.keywords, disable_recompute=keep, backend=backend)
        assert out.saved is not None
        kept = kda.chunk_kda_bwd(do=case.do, dht=case.dht, **case.keywords, saved=out.saved, backend=backend)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    recomputed, _ = gradients(case, backend)
    return {"o": out.o, "ht": out.final_state} | {n: x for n, x in kept._asdict().items() if x is not None}, recomputed


def seen_trained(case, backend, simulator, **options):
    """Return o, the final states and all gradients by name, states as (K, V), and the simulator's findings."""
    turned = (lambda x: x.mT.contiguous()) if options.get("state_v_first") else (lambda x: x)
    keywords = case.keywords | {"backend": backend} | options
    if keywords.get("initial_state") is not None:
        keywords["initial_state"] = turned(keywords["initial_state"])
    with capture(**simulator) as session:
        out = kda.chunk_kda_fwd(**keywords)
        grads = kda.chunk_kda_bwd(do=case.do, dht=turned(case.dht), saved=out.saved, **keywords)
    found = {"o": out.o, "ht": out.final_state, **grads._asdict()}
    found |= {name: turned(found[name]) for name in ("ht", "dh0") if found[name] is not None}
    return {name: x for name, x in found.items() if x is not None}, session.findings


def saturated(case):
    """Return the case with gates that forget nothing and gates that forget everything."""
    most, g = -1000.0 if case.spec.gate == "given" else 1000.0, case.keywords["g"].clone()
    g[:, 20:40], g[:, 45], g[:, 50], g[:, 52] = most, math.copysign(math.inf, most), 0.0, most
    if case.spec.gate != "given":
        g[:, 55], g[:, 57] = -math.inf, -1000.0
    return changed(case, g=lambda _: g)


def changed(case, **given):
    new = {name: change(case.keywords[name]) for name, change in given.items()}
    return dataclasses.replace(case, keywords=case.keywords | new)


def called(case, state_v_first=False, backend="sm90", arch=None, **options):
    """Return o and the states, (K, V), of one call, and the session with the simulator's findings."""
    keywords = dict(case.keywords, state_v_first=state_v_first, backend=backend)
    if state_v_first:
        keywords["initial_state"] = keywords["initial_state"].mT.contiguous()
    with capture(arch=arch or backend, **dict(strict=True) | options) as session:
        out = kda.chunk_kda_fwd(**keywords)
    found = {"o": out.o, "ht": out.final_state, "h": out.h}
    found = {name: x.mT if state_v_first and name != "o" else x for name, x in found.items() if x is not None}
    return found, session


# Small calls of every backend, and what it runs on.
ANYWHERE = {
    "reference": dict(K=16, V=16, dtype="float32"), "sm89": dict(K=64, V=64, dtype="float32"),
    "triton": dict(K=32, V=16), "sm90": dict(K=64, V=64), "sm100": {},
}
ARCHS = {"reference": "sm89", "triton": "sm90"}


def called_by_door(case, backend, backward=True):
    """Return the results of a call without findings, by name, and the SimulatedDoor that made it."""
    pytest.importorskip({"triton": "triton", "sm90": "cutlass", "sm100": "cutlass"}.get(backend, "torch"))
    door = SimulatedDoor(backend, parse(ARCHS.get(backend, backend)))
    options = dict(disable_recompute=True) if backend == "triton" else {}      # then nothing is built twice
    found = door.call(case, backward, **options)
    assert not door.findings, "\n".join(map(str, door.findings[:5]))
    return found, door


def check(case, backend="sm90", **options):
    found, session = called(case, backend=backend, **options)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    limits = budgets(case, Door(backend, "cpu").rounding(case), backward=False)
    assert_right(judge("call", name, limits[name], found[name], case, whole=True) for name in found)
    return found


def assert_right(rows):
    wrong = [row for row in rows if row.wrong]
    assert not wrong, "\n".join(map(describe, wrong))


def enters_chunks_with_the_final_states_of_what_comes_before(case, backend, **options):
    """Check the states that enter chunks of packed sequences, which begin without a state, and return them."""
    options |= dict(return_intermediate_states=True, backend=backend)

    def outputs(**x):
        with capture(arch=backend, strict=True) as session:
            out = kda.chunk_kda_fwd(**x | options)
        assert not session.findings
        return out

    x = case.keywords
    found, start, number = outputs(**x).h, 0, 0
    for length in case.spec.lengths:
        for before in range(0, length, options["chunk_size"]):
            rows = {name: x[name][:, start : start + before] for name in TOKENS}
            alone = outputs(**x | rows | {"cu_seqlens": x["cu_seqlens"].new_tensor([0, before])})
            assert torch.equal(found[0, number], alone.final_state[0].to(found.dtype))
            number += 1
        start += length
    assert found.shape[:2] == (1, number)
    return found


def hands_states_through_sequences_of_no_tokens(case, backend="sm90"):
    found, session = called(case, backend=backend)
    assert not session.findings and not found["o"].any()
    assert torch.equal(found["ht"], case.keywords["initial_state"])


def has_the_bits_of_value_heads_with_q_and_k_of_their_own(case, backend):
    apart = changed(case, q=lambda x: x.repeat_interleave(2, 2), k=lambda x: x.repeat_interleave(2, 2))
    (found, _), (expected, _) = called(apart, backend=backend), called(case, backend=backend)
    assert all(torch.equal(found[x], expected[x]) for x in expected)


def for_each_channel(case):
    """Return a case of one gate per head, with the same gate for each channel."""
    K, bias = case.spec.K, case.keywords.get("dt_bias")
    case = changed(case, g=lambda x: x.unsqueeze(-1).repeat_interleave(K, -1))
    return case if bias is None else changed(case, dt_bias=lambda x: x.repeat_interleave(K))


def has_the_bits_of_the_same_gate_for_each_channel(case, backend, **options):
    found, expected = check(case, backend=backend, **options), called(for_each_channel(case), backend=backend)[0]
    assert all(torch.equal(found[x], expected[x]) for x in expected)


def has_the_same_bits_in_any_order_of_warps(case, backend="sm90", **order):
    (expected, _), (found, session) = called(case, backend=backend), called(case, backend=backend, **order)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(found[x], expected[x]) for x in expected)


def looks_at_no_later_token(case, backend, *tokens):
    expected = called(case, backend=backend)[0]["o"]
    for token in tokens:
        later = dict.fromkeys(TOKENS, lambda x, token=token: torch.cat((x[:, :token], x[:, token:].flip(1) * 3), 1))
        found = called(changed(case, **later), backend=backend)[0]["o"]
        assert torch.equal(found[:, :token], expected[:, :token]), token
        assert not torch.equal(found[:, token:], expected[:, token:]), token


def has_the_bits_that_it_has_alone(case, begin, end, backend):
    """Check the second of three sequences, tokens `begin` to `end`, between nan and inf; return o of all three."""
    nan, inf = float("nan"), float("inf")
    spoiled = {n: (lambda x: torch.cat((x[:, :begin] * nan, x[:, begin:end], x[:, end:] * inf), 1)) for n in TOKENS}
    (found, _), x = called(changed(case, **spoiled), backend=backend), case.keywords
    rows = {name: x[name][:, begin:end] for name in TOKENS}
    with capture(arch=backend):
        alone = kda.chunk_kda_fwd(**x | rows | {"cu_seqlens": None}, backend=backend)
    assert torch.equal(found["o"][:, begin:end], alone.o) and torch.equal(found["ht"][1], alone.final_state[0])
    assert alone.o.isfinite().all()
    return found["o"]


def refusals(words, backend):
    """Return the ids of the rules by which a backend refuses a problem; the refusal must say who accepts it."""
    choice = weigh(Problem.parse(words), host_of(backend), backend)
    assert "backend='triton'" in str(choice).splitlines()[-1]
    return [reason.split(":")[0] for reason in dict(choice.tried)[backend]]


def table(sizes):
    """Return calls by the size and the name of each."""
    return {f"{size}: {name}": (size, words) for size, rows in sizes.items() for name, words in rows.items()}


def call_of(row):
    """Return a call's case and its backend."""
    size, words = row
    return make_inputs(**dict(H=1, gate="bounded") | SIZES[size] | words), size.partition(",")[0]


RARE, COMMIT = (pytest.mark.exhaustive,), (pytest.mark.exhaustive, pytest.mark.commit)


def rows_of(calls, *daily, commit=()):
    """Run a test with every row of a table: all but the `daily` ones are exhaustive, and marked `commit` as listed."""
    assert {*daily, *commit} <= set(calls), {*daily, *commit} - set(calls)
    rare = [pytest.param(name, marks=COMMIT if name in commit else RARE) for name in calls if name not in daily]
    return pytest.mark.parametrize("name", [*daily, *rare])


def reads_nothing_before_the_kernel_ahead_is_done(kernel):
    """Check it in the PTX, and so for all that the kernel may read, not only for what a case reads."""
    before, wait, after = kernel.ptx.partition("griddepcontrol.wait")
    assert wait and re.search(r"ld\.global|bulk", after)
    assert not re.search(r"(ld|st)\.global|bulk|@%p\d+ bra", before)


def sass_of(kernel, folder):
    nvdisasm = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin/nvdisasm"
    if not nvdisasm.exists():
        pytest.skip("this Triton brings no nvdisasm")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.cubin)
    return subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout


def has_products_that_wait_for_no_other(kernel, folder):
    """Check the SASS: where ptxas cannot keep accumulators apart, it runs wgmmas one by one, with a mere remark."""
    sass, waits = sass_of(kernel, folder), kernel.ptx.count("wgmma.wait_group")
    assert sass.count("HGMMA") > waits > 0 and sass.count("WARPGROUP.DEPBAR") == waits


def repeats_waits_where_they_are(kernel, folder):
    """Check the SASS: ptxas may move what repeats each wait behind all roles, and then plans MATH worse as well."""
    repeats = re.findall(r"TRYWAIT[^;]*;(?:\n(?!.* BRA ).*)*\n.*@!P\d BRA .*\n(.*)", sass_of(kernel, folder))
    assert repeats and not any(re.search(r"\*/ +BRA ", after) for after in repeats)


def kept_nowhere(monkeypatch, module=launch):
    """Let routines of a module be described for each call."""
    for name in ("routine", "forward_routine", "backward_routine"):
        if function := getattr(module, name, None):
            monkeypatch.setattr(module, name, getattr(function, "__wrapped__", function))
