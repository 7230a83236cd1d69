"""`kda.explain` of a GPU that is not here: what would run on it, in which form, and what ran on one."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import kda
from kda.calls import planned
from kda.calls.ahead import recipes_of
from kda.model.host import PACKAGES, host_of, standing_in, supposed
from kda.routing.dispatch import route
from kda.tools.verify import ledger, ran
from kda.tools.verify.digests import labelled
from ptxkit.compile.target import TARGETS, parse


def call(T=8192, H=64, dtype=torch.bfloat16, training=False, K=128, device="meta", **options):
    def empty(*channels):
        return torch.empty(1, T, H, *channels, dtype=dtype, device=device, requires_grad=training)

    gate = dict(A_log=torch.empty(H, device=device), use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)
    return dict(q=empty(K), k=empty(K), v=empty(K), g=empty(K), beta=empty()) | gate | options


@pytest.mark.parametrize("arch, backend, name", [
    ("h100", "sm90", "sm90"), ("sm_90a", "sm90", "sm90"), ("NVIDIA H100 80GB HBM3", "sm90", "sm90"),
    ("b200", "sm100", "sm100"), ("GB300", "sm100", "sm103"), ("a100", "triton", "sm80"), ("rtx4090", "triton", "sm89"),
    ("gb10", "triton", "sm121"),
])
def test_a_call_is_explained_on_a_gpu_that_is_named_by_arch_or_card(arch, backend, name):
    found = kda.explain(**call(), arch=arch)
    assert found.backend == backend and found.backward is None
    assert f" on {name} (" in str(found).splitlines()[0] and "\n* " + backend in str(found)
    assert any(note.startswith(f"{name} stands for {TARGETS[name].examples}; planned for the") for note in found.notes)


def test_it_is_no_question_of_the_machine_or_of_its_packages_or_of_where_the_tensors_are(monkeypatch):
    on_meta = str(kda.explain(**call(T=70), arch="h100"))
    assert str(kda.explain(**call(T=70, device="cpu"), arch="h100")) == on_meta
    monkeypatch.setattr("kda.model.host.installed_versions", lambda: ())
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert {package for package, _ in supposed("sm90").versions} == {*PACKAGES}
    assert str(kda.explain(**call(T=70), arch="h100")) == on_meta


def test_tensors_on_meta_count_as_tensors_of_this_machine():
    """They have no device of their own, and a GPU's backends must not be refused for that."""
    found = kda.explain(**call(T=70))
    assert found.forward.problem.device == ("cuda:0" if torch.cuda.is_available() else "cpu")
    with standing_in(host_of("sm90")):
        assert kda.explain(**call(T=70)).backend == "sm90"


@pytest.mark.parametrize("arch, says", [
    ("h1000", "explain: arch must be the name of a GPU arch or card, such as sm90 or h100; found 'h1000'. No GPU arch "
     "or card is called 'h1000'; did you mean 'h100'?"),
    (90, "found int 90. Leave it out for this machine."),
])
def test_a_gpu_that_nobody_knows_is_refused(arch, says):
    with pytest.raises(kda.InputError, match=re.escape(says)):
        kda.explain(**call(T=70), arch=arch)


# ---- forms


FORMS = {                                    # arch, what is called -> what is said of each direction
    ("h100", ()): ["one kernel makes tiles and walks over them: 64 clusters of two CTAs, each with a walk"],
    ("h100", (("H", 32), ("lower_bound", -5.0))): ["30 clusters of four CTAs, which share all walks"],
    ("h100", (("H", 16), ("lower_bound", -5.0))): [r"one grid of makers and walkers: \d+ CTAs make tiles, 32 walk"],
    ("h100", (("H", 2), ("T", 65536), ("lower_bound", -5.0))): [r"walk over them, in \d+ segments that are joined"],
    ("h100", (("H", 8), ("T", 32768))): ["two kernels: .* in 8 segments of up to 4,096 tokens"],
    ("h100", (("training", True), ("disable_recompute", True))): [
        "two kernels: .*, and saves", "^a walk back and the gradients in one grid$"],
    ("h100", (("training", True), ("disable_recompute", "states"))): [
        "and saves", "^tiles are made again; a walk back, then the gradients$"],
    ("h100", (("training", True), ("H", 2))): ["", "^again two kernels: .*; a walk back, then the gradients, in "],
    ("b200", ()): ["64 clusters of two CTAs, which share all walks"],
    ("b200", (("H", 8), ("T", 32768))): ["in 5 segments that are joined at the end"],
    ("b200", (("training", True),)): ["which share all walks", "^again one kernel makes tiles .* each with a walk;"],
    ("a100", ()): ["one kernel makes the tiles of all chunks, one walks over whole sequences"],
    ("a100", (("H", 8), ("T", 32768), ("training", True))): [r"one walks in \d+ segments", r"^walks in \d+ segments"],
    ("rtx4090", (("dtype", torch.float32),)): [r"one walks over whole sequences, \d+ columns of a state in each CTA"],
}


@pytest.mark.parametrize("arch, options", FORMS)
def test_the_form_of_each_direction_is_said(arch, options):
    found = kda.explain(**call(**dict(options)), arch=arch)
    assert [each.direction for each in found.planned] == ["forward", "backward"][: len(found.planned)]
    for each, says in zip(found.planned, FORMS[arch, options], strict=True):
        assert re.search(says, each.form), each.form


def test_every_form_of_a_forward_has_words():
    from kda.backends.sm90 import forms
    from kda.backends.sm100 import plan

    assert {form.__name__ for form in (*forms.Form.__args__, *plan.Form.__args__)} == {*planned._FORWARDS}


def test_the_kernels_are_those_that_the_call_launches():
    given = call(T=2048, H=4, training=True)
    found = kda.explain(**given, arch="sm90")
    with standing_in(supposed("sm90")):
        way = route(dataclasses.replace(found.forward.problem), training=True)
        expected = [[*recipes_of("sm90", p, way.save, None)] for p in (way.forward, way.backward)]
    assert [[*each.recipes] for each in found.planned] == expected
    assert "kernels: prepare, chain" in str(found) and found.planned[1].kernels[-1] == "shares"


def test_a_backward_that_another_backend_runs_is_said_with_the_reason():
    given = call(training=True, K=64)
    given |= {"v": torch.empty(1, 8192, 64, 128, dtype=torch.bfloat16, device="meta")}
    found = kda.explain(**given, arch="h100")
    assert (found.backend, found.backward.backend) == ("sm90", "triton")
    assert "sm90.backward_shape: has a backward only for K = V, got K=64 V=128" in str(found.backward)
    assert [each.backend for each in found.planned] == ["sm90", "triton"] == [each.backend for each in found.ran]


def test_a_call_that_no_backend_of_a_gpu_accepts_launches_nothing():
    found = kda.explain(**call(dtype=torch.float64), arch="b200")
    assert found.backend is None and found.planned == found.ran == ()


# ---- what ran


@pytest.fixture
def written(monkeypatch):
    """Return a function that lets the ledger have these runs, of kernels by their label."""

    def write(arch, kernels, runs, version=None):
        labels = {label.removeprefix(f"sm90 {arch}: "): f"code {label}" for label in labelled("sm90", arch)}
        shipped = {}
        for label, code in labels.items():
            kernel, _, words = label.partition(" of ")
            shipped.setdefault(words, {})[kernel] = code
        document = {
            "compilers": {"sm90": version or f"CuTe DSL {ran.COMPILERS['cutedsl'][1]()}"},
            "kernels": {f"sm90 {arch}": shipped}, "paths": {"sm90: forward": []},
            "runs": [
                {"case": "x", "path": "sm90: forward", "outcome": "ok", "host": "old", "card": card, "date": date,
                 "codes": [labels[label] for label in labels if label.startswith(kernels)]} for card, date in runs
            ],
        }
        monkeypatch.setattr(ledger.Ledger, "read", classmethod(lambda cls: cls(document)))

    return write


LISTED = dict(lower_bound=-5.0, dt_bias=torch.empty(64 * 128, device="meta"), use_beta_sigmoid_in_kernel=True,
              output_final_state=True, initial_state=torch.empty(1, 64, 128, 128, device="meta"))


def test_kernels_that_ran_are_counted_with_their_cards(written):
    written("sm90", "fused", [("H100", "2026-11-01"), ("H200", "2026-11-02")])
    (found,) = kda.explain(**call(**LISTED), arch="h100").ran
    assert found.kernels == (1, 1) and found.alike[0] == found.alike[1] > 1 and found.paths == (0, 1)
    assert (found.cards, found.last, found.asked) == (("H100", "H200"), "2026-11-02", "")
    assert str(found).endswith("; of ways to launch them 0 of 1; on H100 and H200, last on 2026-11-02")
    (other,) = kda.explain(**call(**LISTED, state_v_first=True), arch="h100").ran
    assert other.kernels == (0, 1) and other.alike == found.alike, "a kernel with other options is another one"


def test_kernels_that_did_not_run_have_no_evidence(written):
    written("sm90", "chain", [("H100", "2026-11-01")])
    (found,) = kda.explain(**call(**LISTED), arch="h100").ran
    assert found.kernels == (0, 1) and found.alike[0] == 0 and found.cards == ()
    assert "no kernel of these names ran on a GPU as it is now" in str(found)


def test_kernels_of_another_compiler_have_no_evidence_here(written, monkeypatch):
    written("sm90", "fused", [("H100", "2026-11-01")], "CuTe DSL 4.8.0")
    monkeypatch.setitem(ran.COMPILERS, "cutedsl", ("CuTe DSL", lambda: "4.9.0"))
    (found,) = kda.explain(**call(**LISTED), arch="h100").ran
    why = "(the ledger has those of CuTe DSL 4.8.0, and CuTe DSL 4.9.0 is installed)"
    assert found.alike[0] == 0 and why in str(found)
    monkeypatch.setitem(ran.COMPILERS, "cutedsl", ("CuTe DSL", lambda: None))
    assert kda.explain(**call(**LISTED), arch="h100").ran[0].kernels == (1, 1), "a laptop without a compiler can ask"


def test_a_run_on_a_card_of_another_arch_is_told_from_one_on_the_gpu_that_was_asked_for(written):
    written("sm90", "fused", [("L40S", "2026-11-01")])
    (found,) = kda.explain(**call(**LISTED), arch="h100").ran
    assert found.asked == "sm90" and str(found).endswith("; none of them is a GPU of sm90")


def test_every_card_of_the_ledger_has_an_arch():
    assert all(parse(run["card"]) for run in ledger.Ledger.read().runs)
