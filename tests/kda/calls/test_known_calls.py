"""A call of `chunk_kda` that was made before is found by one look-up, which nothing else may take for it."""

import numpy
import pytest
import torch
from naive import make

import kda
from kda.calls import api, known

PACKED = [5, 0, 30]


def never(*args, **keywords):
    raise AssertionError("a call that is known was bound again")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lengths", [None, PACKED], ids=["a batch", "packed"])
def test_a_call_that_was_made_before_is_not_bound_again_and_has_the_same_bits(lengths, training, monkeypatch):
    call = make(lengths, **{} if lengths else dict(B=2, T=9))
    call = call.requiring_grad() if training else call
    first = kda.chunk_kda(**call.arguments, output_final_state=True)
    monkeypatch.setattr(api, "prepare", never)
    again = kda.chunk_kda(**call.arguments, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert again[0].requires_grad == training



OTHERS = {  # what is accepted -> what equals it and is no such thing
    "scale": (1.0, True), "chunk_size": (64, 64.0), "max_num_seqs": (1, True), "safe_gate": (True, 1.0),
    "output_final_state": (True, 1.0), "disable_recompute": (True, 1.0), "use_graph": (False, 0.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_equals_an_argument_of_a_known_call_is_refused_all_the_same(name):
    arguments = make(None, B=1, T=9).arguments
    arguments.pop(name, None)
    good, bad = OTHERS[name]
    kda.chunk_kda(**arguments, **{name: good})
    with pytest.raises((kda.InputError, TypeError), match=name):
        kda.chunk_kda(**arguments, **{name: bad})


def test_an_option_without_a_hash_is_refused_by_its_name():
    with pytest.raises((kda.InputError, TypeError), match="scale"):
        kda.chunk_kda(**make(None, B=1, T=9).arguments | {"scale": [0.5]})


def test_offsets_of_a_known_call_are_checked_again():
    arguments = make(PACKED).arguments
    kda.chunk_kda(**arguments)
    with pytest.raises(kda.InputError, match="never decrease"):
        kda.chunk_kda(**arguments | {"cu_seqlens": torch.tensor([0, 9, 5, 35])})


def test_a_backend_that_is_named_later_is_asked():
    arguments = make(None, B=1, T=9).arguments
    kda.chunk_kda(**arguments)
    with kda.use_backend("sm90"), pytest.raises(kda.NoBackendError):
        kda.chunk_kda(**arguments)


def test_autocast_and_another_mode_of_gradients_are_other_calls():
    call = make(None, B=1, T=9, dtype=torch.float32).requiring_grad()
    assert kda.chunk_kda(**call.arguments)[0].requires_grad
    with torch.no_grad():
        assert not kda.chunk_kda(**call.arguments)[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert kda.chunk_kda(**call.arguments)[0].dtype == torch.bfloat16
    assert kda.chunk_kda(**call.arguments)[0].dtype == torch.float32


def test_flags_of_numpy_are_accepted_though_no_call_is_known_by_them():
    arguments = make(None, B=1, T=9).arguments
    for flag in (numpy.bool_(True), 1):
        assert kda.chunk_kda(**arguments, output_final_state=flag)[1] is not None
    assert not known.CALLS


def test_compiled_code_is_not_compiled_again_when_other_calls_become_known():
    compiled = torch.compile(lambda call: kda.chunk_kda(**call)[0], backend="eager")
    arguments = make(None, B=1, T=9).arguments
    compiled(arguments)
    frames = torch._dynamo.utils.counters["frames"]["total"]
    kda.chunk_kda(**make(None, B=1, T=5).arguments)
    compiled(arguments)
    assert torch._dynamo.utils.counters["frames"]["total"] == frames > 0
