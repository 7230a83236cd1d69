"""A prefill from slots of a pool and back, with checkpoints, by the kernels of each backend: the bits of one call over
the whole sequence, whatever the offsets and slots that the GPU alone knows.
"""

import importlib

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("triton", reason="needs triton")

from cute_calls import COMMIT, TOKENS, drawn

import kda
from kda.backends.common.pool import plan
from kda.backends.common.triton_types import target_of
from kda.checks import calls as checks
from kda.model.host import host_of
from kda.model.problem import Problem
from ptxkit import capture

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]
T = 150


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


class Prefix:
    """One sequence that is computed alone and whole, and through a pool, cut at a checkpoint."""

    def __init__(self, backend, arch=None, v_first=False, dtype="float32", **words):
        self.case = drawn(lengths=(T,), initial_state=False, **words)
        self.backend, self.arch = backend, arch or backend
        self.options = dict(backend=backend, batch_invariant=True, state_v_first=v_first)
        self.findings, self.runs = [], []
        whole = self.call(0, T, output_final_state=True, return_intermediate_states=False)
        self.o, (state,) = whole
        slots = torch.full((6, state.numel() + 8), 7.0).to(getattr(torch, dtype))
        self.pool = slots[:, : state.numel()].unflatten(1, state.shape)
        self.state = state.to(self.pool.dtype)

    def call(self, start, end, lengths=None, **options):
        keywords = {n: x for n, x in self.case.keywords.items() if n not in ("output_final_state", "initial_state")}
        x = {n: keywords[n][:, start:end] for n in TOKENS}
        offsets = torch.tensor([0, *(lengths or [end - start])]).cumsum(0)
        keywords |= x | {"cu_seqlens": offsets, "return_intermediate_states": False} | self.options | options
        with capture(arch=self.arch, strict=self.backend != "triton") as session, torch.no_grad():
            found = kda.chunk_kda(**keywords)
        self.findings += session.findings
        self.runs.append(session.runs)
        return found

    def from_slots(self, start, end, slots, starts, lengths=None, **checkpoints):
        indices = dict(ssm_state_indices=index(*slots), initial_state_indices=index(*starts))
        return self.call(start, end, lengths, initial_state=self.pool, **indices, **checkpoints)[0]


def checkpoints(offsets, slots):
    return dict(checkpoint_offsets=torch.tensor(offsets), checkpoint_indices=torch.tensor(slots))


def is_one_call_over_the_whole_sequence(x):
    # an empty sequence in front, whose checkpoint is the zero that it starts from
    options = checkpoints([[0, 0, 0], [64, 128, 64]], [[0, -1, -1], [1, 2, -1]])
    o = x.from_slots(0, T, slots=(5, 3), starts=(-1, -1), lengths=[0, T], **options)
    assert torch.equal(o, x.o) and torch.equal(x.pool[3], x.state)
    assert not x.pool[0].any() and not x.pool[5].any() and (x.pool[4] == 7).all()
    if x.pool.dtype == torch.float32:
        for start, slot in ((64, 1), (128, 2)):
            o = x.from_slots(start, T, slots=(4,), starts=(slot,))
            assert torch.equal(o, x.o[:, start:]) and torch.equal(x.pool[4], x.state)
    else:
        keeper = Prefix(x.backend, x.arch, x.options["state_v_first"])
        keeper.from_slots(0, T, slots=(5, 3), starts=(-1, -1), lengths=[0, T], **options)
        assert torch.equal(x.pool[1:3], keeper.pool[1:3].to(x.pool.dtype))
    assert not x.findings, "\n".join(map(str, x.findings[:5]))


@pytest.mark.parametrize(
    "backend, arch, options",
    [
        ("sm90", "sm90", dict(K=64, V=64)),
        pytest.param("sm90", "sm90", {}, marks=COMMIT),
        ("sm90", "sm90", dict(v_first=True, dtype="bfloat16")),
        pytest.param("sm100", "sm100", {}, marks=COMMIT),
        ("sm100", "sm100", dict(v_first=True, dtype="bfloat16")),
        ("triton", "sm80", dict(K=32, V=16)),
        ("triton", "sm90", dict(K=32, V=16, v_first=True)),
        ("triton", "sm100", dict(K=32, V=16)),
        ("triton", "sm90", dict(K=32, V=16, gate_per_head=True)),
        ("sm100", "sm100", dict(K=64, V=64)),
    ],
)
@pytest.mark.spread(every=10)
def test_a_prefix_from_a_checkpoint_goes_on_with_the_bits_of_no_cut(backend, arch, options):
    is_one_call_over_the_whole_sequence(Prefix(backend, arch, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend, arch", [("triton", "sm80"), ("sm90", "sm90"), ("sm100", "sm100")])
def test_serving_has_the_bits_of_a_forward_that_records_gradients(backend, arch):
    size = dict(K=32, V=16) if backend == "triton" else {}
    keywords = drawn(lengths=(70, 30), **size).keywords | dict(backend=backend, batch_invariant=True)
    with capture(arch=arch):
        with torch.no_grad():
            served = kda.chunk_kda(**keywords)
        trained = kda.chunk_kda(**keywords | {"v": keywords["v"].clone().requires_grad_()})
    assert trained[0].requires_grad and all(map(torch.equal, served, trained))


@pytest.mark.exhaustive
def test_nothing_that_is_launched_depends_on_numbers_that_the_gpu_holds():
    """Grids, and memory: so a captured call may be replayed with others."""
    x = Prefix("triton", "sm80", K=16, V=16)
    seen = []
    for lengths, slots, options in (
        ([0, T], (5, 3), checkpoints([[0], [64]], [[0], [1]])),
        ([100, 50], (1, -1), checkpoints([[64], [0]], [[3], [-1]])),
    ):
        x.from_slots(0, T, slots=slots, starts=(-1, 2), lengths=lengths, **options)
        seen.append([(run.kernel, run.grid) for run in x.runs[-1]])
    assert seen[0] == seen[1] and len(seen[0]) > 4


@pytest.mark.exhaustive
def test_offsets_and_slots_out_of_range_touch_no_memory(monkeypatch):
    """They go to the kernels unchecked: on a GPU nobody has looked at them."""
    monkeypatch.setattr(checks, "VALUES", ())
    x = Prefix("triton", "sm80", K=16, V=16)
    before = x.pool.clone()
    options = checkpoints([[5, -64, 192, 64], [64, 128, 0, 64]], [[0, 1, 2, 6], [-7, 99, -1, 6]])
    o = x.from_slots(0, T, slots=(6, -2), starts=(99, -1), lengths=[0, T], **options)
    assert torch.equal(o, x.o) and torch.equal(x.pool, before) and not x.findings


@pytest.mark.exhaustive
def test_four_thousand_sequences_on_a_grid_beyond_65535():
    """Most of them empty; gather and scatter have 69,632 CTAs."""
    case = drawn(lengths=[17] + [0] * 4094 + [70], H=1, HV=17, K=16, V=16, initial_state=False)
    keywords = case.keywords | dict(backend="triton", batch_invariant=True)
    two = keywords | dict(cu_seqlens=torch.tensor([0, 17, 87]), output_final_state=True)
    pool, slots = torch.ones(4096, 17, 16, 16), torch.randperm(4096)
    options = dict(initial_state=pool, ssm_state_indices=slots, initial_state_indices=torch.full((4096,), -1))
    with capture(arch="sm80") as session:
        o, finals = kda.chunk_kda(**two)
        found, _ = kda.chunk_kda(**keywords | options)
    assert torch.equal(found, o) and torch.equal(pool[slots[[0, -1]]], finals) and not session.findings
    assert not pool[slots[1:-1]].any()
    assert max(run.grid[0] for run in session.runs) >= 4096 * 17


@pytest.mark.parametrize("backend, arch, rows", [("sm90", "sm90", 32), ("sm100", "sm100", 32), ("triton", "sm80", 64)])
@pytest.mark.parametrize("words", ["", "checkpoints=float32"])
def test_all_kernels_of_a_class_are_known_ahead(backend, arch, rows, words):
    p = Problem.parse(f"packed bfloat16 slots=4 inplace=true state_dtype=float32 {words}")
    found = importlib.import_module(f"kda.backends.{backend}.plan").recipes(p, host_of(arch))
    names = {recipe.name for recipe in found}
    assert {"gather", "scatter"} <= names and ("places" in names) == bool(words)
    target = target_of(host_of(arch))
    for offsets in plan.INDICES:
        of_checkpoints = ("int32", "int32") if words else ()
        known = plan.recipes_of(p, plan.Dtypes("int32", "int32", offsets, *of_checkpoints), rows, target)
        assert set(known.values()) <= set(found)
