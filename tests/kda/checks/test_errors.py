"""Every check has a broken call that meets it, and docs/data/errors.json has the messages of all."""

import contextlib
import json
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))

import written
from broken import CASES, FILE, SPARSE, chunk, message, messages
from broken_parallel import building, gate_on_a_mesh, halo, of_another_world
from naive import make

import kda
from kda.checks import calls as checks
from kda.checks import decode as decoding
from kda.checks import gate as gate_checks

ROWS = (*checks.CALLER, *checks.KIND, *checks.VALUES, *gate_checks.GATE, *decoding.ALL)
# Checks that are no row of a table, because they are made where the argument is first used: id -> argument.
ELSEWHERE = {
    "keyword.unknown": "any unknown keyword",
    "flag.type": "any flag",
    "state_layout.both": "transpose_state_layout",
    "cp_context.none": "cp_context",
    **dict.fromkeys(("cp_context.type", "cp_context.world", "cp_context.agreed", "cp_context.pool"), "cp_context"),
    "cp_context.tokens": "q",
    **dict.fromkeys(("cp_group.missing", "cp_group.type"), "group"),
    "cp_layout.value": "layout",
    "cp_exchange.value": "exchange",
    "cp_conv.value": "conv1d_kernel_size",
    "cp_timeout.value": "timeout",
    "cp_lengths.value": "lengths",
    **dict.fromkeys(("cp_offsets.type", "cp_offsets.values", "cp_offsets.parts"), "cu_seqlens"),
    "cp_offsets.differs": "cu_seqlens_cpu",
    "halo.rows": "rows",
    "halo.type": "x",
    "halo.shape": "x",
    **dict.fromkeys(("mesh.op", "mesh.plain", "mesh.same", "mesh.way", "mesh.placement", "mesh.even", "mesh.pool",
                     "mesh.sequence", "mesh.group", "mesh.states"), "any tensor that is a DTensor"),
    "max_num_seqs.type": "max_num_seqs",
    "max_num_seqs.value": "max_num_seqs",
    "saved.kind": "saved",
    "saved.shape": "saved",
    "saved.options": "saved",
    "backend.name": "backend",
    **dict.fromkeys(("arch.type", "arch.name"), "arch"),
    "backend.decorated": "a decorated function",
    "backend.entered": "a block that was entered",
    "decode.flag.type": "any flag",
    "decode.mesh": "any tensor that is a DTensor",
}
IDS = {row.id for row in ROWS} | set(ELSEWHERE)


def test_there_is_a_broken_call_for_every_check():
    assert set(CASES) == IDS


@pytest.mark.parametrize("id", CASES)
def test_a_broken_call_names_its_argument_what_was_found_and_what_to_do(id):
    error = message(CASES[id])
    assert error.check == id
    assert error.argument in str(error) and error.found in str(error) and error.fix in str(error)
    assert error.asked and error.found and len(error.fix) > 8
    assert isinstance(error, ValueError)
    assert isinstance(error, TypeError) == (id.endswith(".type") or id == "keyword.unknown")


def test_the_messages_on_file_are_up_to_date():
    on_file = json.loads(FILE.read_text())
    assert on_file == messages() and [*on_file] == [*CASES], "run `python tests/helpers/broken.py`"


def test_the_page_of_errors_has_each_id_once():
    table = written.errors().partition("| ids | message |")[2]
    ids = [id for row in table.splitlines() for id in re.findall(r"`([\w.]+)`", row.partition(" | ")[0])]
    assert sorted(ids) == sorted(CASES)


def test_a_sparse_tensor_is_named():
    assert "layout" in message(lambda: chunk(q=SPARSE)).found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["q", "g", "initial_state"])
def test_a_nested_tensor_is_named(name):
    nested = torch.nested.nested_tensor([torch.zeros(3, 2, 5), torch.zeros(4, 2, 5)])
    error = message(lambda: chunk(**{name: nested}))
    assert (error.check, error.found) == (f"{name}.type", "a nested tensor")


@pytest.mark.parametrize(("x", "found"), [
    (torch.zeros(1, 9, 2, 8).numpy(), "found ndarray."), ([1, 2], "found list [1, 2]."), (None, "found None."),
], ids=["an array", "a list", "None"])
def test_a_value_of_a_wrong_type_is_repeated_if_it_is_short(x, found):
    with pytest.raises(kda.InputTypeError) as error:
        kda.chunk_kda(x, *[torch.zeros(1, 9, 2, 8)] * 3, torch.zeros(1, 9, 2))
    assert found in str(error.value)


@pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda, kda.chunk_kda_fwd])
def test_a_list_is_named_where_gradients_would_be_recorded(function):
    call = make(B=1, T=3, chunk_size=None)
    assert message(lambda: function(**call.arguments | {"q": [1.0]})).check == "q.type"


@pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda, kda.chunk_kda_fwd])
def test_an_unknown_keyword_suggests_the_nearest(function):
    call = make(B=1, T=3, chunk_size=None)
    with pytest.raises(TypeError, match="Did you mean 'initial_state'"):
        function(**call.arguments, initial_sate=None)
    with pytest.raises(TypeError, match="Did you mean 'use_gate_in_kernel'"):         # it begins so
        function(**call.arguments, use_gate=True)
    with pytest.raises(TypeError, match=r"Known: q, k, v, .*[a-z]\. ") as error:
        function(**call.arguments, wombat=None)
    assert {"cu_seqlens", "backend"} < set(error.value.fix.rstrip(".").split(", ")) and "unknown" not in error.value.fix


def test_an_unknown_keyword_of_a_gate_and_of_a_step_suggests_theirs():
    with pytest.raises(kda.InputError, match=r"fused_kda_gate: .* Did you mean 'lower_bound'"):
        kda.fused_kda_gate(torch.zeros(1, 2, 2, 16), bound=-5.0)
    with pytest.raises(kda.InputError, match=r"decode_step: .* Did you mean 'conv_states'"):
        kda.decode_step(*torch.zeros(4, 1, 1, 1, 16), torch.zeros(1, 1, 1), torch.zeros(1, 1, 16, 16), conv_state=None)


@pytest.mark.parametrize("places", ["initial_state_indices", "checkpoint_offsets"])
def test_a_pool_without_its_slots_is_not_called_a_state_of_a_wrong_shape(places):
    call, index = make(B=1, T=64), torch.zeros(1, 1, dtype=torch.long)
    given = {"initial_state_indices": index[0]} if places == "initial_state_indices" else {
        "checkpoint_offsets": index, "checkpoint_indices": index}
    v, k = call.arguments["v"], call.arguments["k"]
    pool = torch.zeros(5, v.shape[2], k.shape[-1], v.shape[-1])
    with torch.no_grad():
        error = message(lambda: kda.chunk_kda(**call.arguments | {"initial_state": pool}, **given))
    assert error.check == f"{places}.pool"


def test_a_wrong_chunk_size_is_refused_in_words_that_fit_those_of_fla():
    """FLA's own file of tests looks for them."""
    call = make(T=64, H=1, K=64, V=64, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"`chunk_size` must be either 32 or 64") as error:
        kda.chunk_kda(**call.arguments | {"chunk_size": 16})
    assert error.value.argument == "chunk_size" and str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


FUNCTIONS = ["chunk_kda", "chunk_kda_fwd", "chunk_kda_bwd", "fused_recurrent_kda", "fused_recurrent_kda_fwd"]


@pytest.mark.parametrize("profiled", [False, True], ids=["called", "profiled"])            # then by way of an operator
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_error_names_the_function_that_was_called(name, profiled):
    call = make(B=1, T=3, dtype=torch.float32, chunk_size=None)
    given = call.arguments | ({"do": call.do} if name == "chunk_kda_bwd" else {})
    other = torch.zeros(1, 4, 2, 5)
    slots = {"ssm_state_indices": torch.tensor([9])}
    wrong = [{"k": other}, {"scale": "x"}, {"use_qk_l2norm_in_kernel": 7}, {"bakend": "x"}, {"q": [1.0]}, slots]
    with torch.profiler.profile() if profiled else contextlib.nullcontext():
        for more in wrong:
            error = message(lambda more=more: getattr(kda, name)(**given | more))
            assert str(error).startswith(f"{name}: ") and error.op == name
    copy = pickle.loads(pickle.dumps(error))
    assert copy.op == name and str(copy) == str(error)


def test_a_compiled_call_of_an_inner_function_is_one_graph():
    call = make(B=1, T=3, dtype=torch.float32, chunk_size=None)
    for function in (kda.chunk_kda_fwd, kda.fused_recurrent_kda_fwd):
        more = {"inplace_final_state": False} if function is kda.fused_recurrent_kda_fwd else {}
        arguments = call.arguments | more
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert torch.equal(compiled(**arguments)[0], function(**arguments)[0])


def test_a_missing_argument_is_pythons_own_error():
    with pytest.raises(TypeError, match="beta"):
        kda.chunk_kda(1, 2, 3, 4)
    with pytest.raises(TypeError, match="multiple values"):
        kda.chunk_kda_fwd(1, 2, 3, 4, 5, q=1)


def test_errors_survive_pickling():
    error = message(CASES["k.shape"])
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.check == error.check


def test_every_call_checks_numbers_though_its_kind_is_known():
    call = make([3, 5])
    kda.chunk_kda(**call.arguments)
    call.tensors["cu_seqlens"][1] = 9
    with pytest.raises(kda.InputError, match="cu_seqlens"):
        kda.chunk_kda(**call.arguments)


@pytest.mark.parametrize("offsets", [[1, 8], [0, 9], [0, -1, 8], [0, 5, 4, 8]])
def test_wrong_offsets_are_refused(offsets):
    call = make([8] * (len(offsets) - 1))
    tensors = {n: x[:, :8] for n, x in call.tensors.items() if n in ("q", "k", "v", "g", "beta")}
    with pytest.raises(kda.InputError, match="cu_seqlens must be offsets"):
        kda.chunk_kda(**tensors, cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize(("option", "value"), [
    ("scale", True), ("scale", False), ("lower_bound", False), ("chunk_size", 64.0), ("chunk_size", True),
])
@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
def test_a_value_that_equals_a_good_one_is_not_taken_for_it(option, value, recorded):
    """Known kinds of calls are found by values, of which 64.0 equals 64, and True equals 1.0."""
    call = make(B=1, T=3, dtype=torch.float32)
    call.tensors["q"].requires_grad_(recorded)
    good = {"scale": 1.0 if value is True else 0.0, "lower_bound": -5.0, "chunk_size": 64}[option]
    kda.chunk_kda(**call.arguments | {option: good})
    error = message(lambda: kda.chunk_kda(**call.arguments | {option: value}))
    assert error.check == f"{option}.type" and repr(value) in error.found


@pytest.mark.parametrize("option", ["scale", "lower_bound"])
def test_an_int_too_large_for_a_float_is_no_number_of_a_call(option):
    assert message(lambda: chunk(options={option: -(10**400)})).check == f"{option}.value"


@pytest.mark.parametrize("option", ["use_graph", "max_num_seqs"])
def test_an_option_without_effect_must_still_be_one(option):
    assert message(lambda: chunk(options={option: [] if option == "use_graph" else True})).argument == option


def test_an_unknown_keyword_of_a_backward_suggests_its_own():
    call = make(B=1, T=3, dtype=torch.float32)
    with pytest.raises(TypeError, match="Did you mean 'saved'"):
        kda.chunk_kda_bwd(**call.arguments, do=call.do, save=None)


def elsewhere_in(kept):
    return kept._replace(tensors=type(kept.tensors)(*(x.to("meta") for x in kept.tensors)))


@pytest.mark.parametrize(("change", "check", "found"), [
    (lambda kept: kept._replace(tensors=None), "saved.kind", "a Kept with other contents"),
    (lambda kept: kept._replace(made_with=()), "saved.kind", "a Kept with other contents"),
    (lambda kept: kept._replace(tensors=tuple(kept.tensors)), "saved.kind", "a Kept with other contents"),
    (elsewhere_in, "saved.shape", "A_qk of device meta, not cpu"),
], ids=["no tensors", "no options", "a tuple", "elsewhere"])
def test_what_a_forward_saved_must_be_whole_and_on_the_device(change, check, found):
    call = make(B=1, T=3, dtype=torch.float32)
    kept = kda.chunk_kda_fwd(**call.arguments, disable_recompute=True).saved
    error = message(lambda: kda.chunk_kda_bwd(**call.arguments, do=call.do, saved=change(kept)))
    assert (error.check, error.found) == (check, found)


def test_an_out_that_requires_a_gradient_is_refused_though_nothing_else_does():
    call = make(B=1, T=3, dtype=torch.float32, chunk_size=None)
    out = torch.zeros_like(call.do).requires_grad_()
    assert message(lambda: kda.fused_recurrent_kda(**call.arguments, out=out)).check == "out.grad"
    with torch.no_grad():
        kda.fused_recurrent_kda(**call.arguments, out=out)


@pytest.mark.parametrize("rows", ["3", True, 1.5])
def test_rows_of_a_halo_that_are_no_number_are_named(rows):
    error = message(lambda: halo(1, 8, 3, rows=rows))
    assert (error.check, error.found) == ("halo.rows", repr(rows))


@pytest.mark.parametrize("lengths", ["8", 8, ["8"], [None], [8.5], [-8], [True]])
def test_lengths_that_are_no_list_of_whole_numbers_are_named(lengths):
    error = message(lambda: building(0, 8, lengths=lengths))
    assert (error.check, error.found) == ("cp_lengths.value", f"{lengths!r} for a contiguous one")


def test_a_gate_of_dtensors_with_a_plain_rate_names_its_own_argument():
    error = message(lambda: gate_on_a_mesh(torch.zeros(2)))
    assert (error.check, error.asked) == ("mesh.plain", "a DTensor beside g, which is one")


def test_a_context_of_fla_that_speaks_of_more_ranks_is_refused():
    error = message(of_another_world)
    assert (error.check, error.found) == ("cp_context.world", "3 parts before and 0 after those of rank 0")


def test_lengths_may_be_a_tensor_and_numbers_of_numpy():
    for lengths in (torch.tensor([8]), [np.int64(8)]):
        assert building(0, 8, lengths=lengths, conv1d_kernel_size=np.int64(4)).lengths == (8,)


@pytest.mark.parametrize(("name", "value", "check"), [
    ("conv1d_kernel_size", "4", "cp_conv.value"), ("conv1d_kernel_size", 4.0, "cp_conv.value"),
    ("conv1d_kernel_size", True, "cp_conv.value"), ("conv1d_kernel_size", -2, "cp_conv.value"),
    ("timeout", "5", "cp_timeout.value"), ("timeout", float("nan"), "cp_timeout.value"),
    ("timeout", -1, "cp_timeout.value"), ("timeout", True, "cp_timeout.value"),
    ("cu_seqlens_cpu", torch.tensor([0, 4]), "cp_offsets.differs"),
])
def test_what_a_context_cannot_be_built_of_is_named(name, value, check):
    error = message(lambda: building(0, 8, **{name: value}))
    assert (error.check, error.argument) == (check, name)


def chunk_kda_bwd(q, k, v, *args, **keywords):
    return kda.chunk_kda_bwd(q, k, v, *args, do=v, **keywords)


@pytest.mark.parametrize("function", [kda.explain, kda.chunk_kda, kda.chunk_kda_fwd, chunk_kda_bwd])
@pytest.mark.parametrize("name", ["op", "function", "self", "keywords"])
def test_an_unknown_keyword_is_named_whatever_it_is_called(function, name):
    with torch.no_grad(), pytest.raises(kda.InputError, match=f"{name} must be an existing keyword"):
        function(*torch.zeros(4, 1, 2, 1, 1), torch.zeros(1, 2, 1), **{name: 1})
