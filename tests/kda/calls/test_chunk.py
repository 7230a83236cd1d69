"""chunk_kda against the definition: every option, forward and backward."""

import pickle

import pytest
import torch
from naive import DIFFERENTIABLE, OPTIONS, assert_is_the_definition, definition, distance, gradients, make
from versions import compiles_named_tuples

import kda

LENGTHS = {"one exact chunk": [32], "a tail": [33], "empty, one token, many": [0, 1, 31, 64, 0, 5, 40, 0]}

every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
ragged = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def run(call, **options):
    return kda.chunk_kda(**call.arguments, output_final_state=True, **options)


def trained(call):
    """Return the call with gradients in its tensors, its outputs and its final states."""
    call = call.requiring_grad()
    o, ht = run(call)
    ((o * call.do).sum() + (ht * call.dht).sum()).backward()
    return call, o, ht


@every_option
@ragged
def test_forward_is_the_definition_to_1e_12(options, lengths):
    call = make(lengths, **options)
    assert_is_the_definition(call, run(call))


@every_option
def test_backward_is_that_of_the_definition_to_1e_11(options):
    call, *_ = trained(make([0, 33, 1, 20], **options))
    for name, exact in gradients(call).items():
        assert distance(call.tensors[name].grad, exact) < 1e-11, name


@every_option
def test_backward_without_autograd_gives_the_same_bits(options):
    call, *_ = trained(make([0, 33, 1, 20], **options))
    saved = kda.chunk_kda_fwd(**call.arguments).saved
    assert (saved is not None) == (call.options.get("disable_recompute") is True)
    for kept in {None, saved} if saved is None else (None, saved):
        grads = kda.chunk_kda_bwd(do=call.do, dht=call.dht, saved=kept, **call.arguments)
        for name, grad in zip(DIFFERENTIABLE, grads):
            if name not in call.tensors:
                assert grad is None
            elif kept is saved:
                assert torch.equal(grad, call.tensors[name].grad), name
            else:
                assert distance(grad, call.tensors[name].grad) < 1e-13, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_what_is_saved_has_the_dtype_of_q_but_for_the_sums_of_the_gate(dtype):
    call = make([0, 33, 1], dtype=dtype, gate="bounded", disable_recompute=True)
    saved = kda.chunk_kda_fwd(**call.arguments).saved.tensors
    found = {name: x.dtype for name, x in saved._asdict().items()}
    assert found.pop("gc_last") == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert set(found.values()) == {dtype}
    assert saved.h.shape[0] == saved.gc_last.shape[0] == 34 // 32 + 3 and not saved.gc_last[3:].any()
    assert (saved.gc_last[:3] < 0).all()


def test_what_another_dtype_saved_is_refused():
    call, other = (make([3], dtype=dtype, disable_recompute=True) for dtype in (torch.float32, torch.bfloat16))
    saved = kda.chunk_kda_fwd(**other.arguments).saved
    with pytest.raises(kda.InputError, match=r"for q=torch\.bfloat16 \[1, 3, 2, 5\], beside q=torch\.float32 \[1"):
        kda.chunk_kda_bwd(do=call.do, saved=saved, **call.arguments)


OTHER_OPTIONS = {  # what the backward is given -> what the error says of both
    "scale": (0.5, "for scale=0.25, beside scale=0.5 here"),
    "chunk_size": (64, "for chunk_size=32, beside chunk_size=64 here"),
    "use_qk_l2norm_in_kernel": (False, "for use_qk_l2norm_in_kernel=True, beside use_qk_l2norm_in_kernel=False here"),
    "use_beta_sigmoid_in_kernel": (True, "use_beta_sigmoid_in_kernel=False, beside use_beta_sigmoid_in_kernel=True"),
    "lower_bound": (-2.0, "for lower_bound=None, beside lower_bound=-2.0 here"),
    "batch_invariant": (True, "for batch_invariant=False, beside batch_invariant=True here"),
    "initial_state": (None, r"for initial_state=torch\.float32 \[1, 2, 5, 3\], beside initial_state=None here"),
}


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_what_a_call_with_other_options_saved_is_refused(name):
    call = make(B=1, T=32, dtype=torch.float32, scale=0.25, disable_recompute=True)
    saved = kda.chunk_kda_fwd(**call.arguments).saved
    other, words = OTHER_OPTIONS[name]
    for each in (saved, pickle.loads(pickle.dumps(saved))):
        with pytest.raises(kda.InputError, match=words) as error:
            kda.chunk_kda_bwd(do=call.do, saved=each, **call.arguments | {name: other})
        assert error.value.check == "saved.options"


@compiles_named_tuples
def test_what_was_saved_serves_its_own_backward_after_pickling_and_in_compiled_code():
    call = make(B=1, T=32, dtype=torch.float32, scale=0.25, disable_recompute=True)

    def both(do, **arguments):
        out = kda.chunk_kda_fwd(**arguments)
        return out.saved, kda.chunk_kda_bwd(do=do, saved=out.saved, **arguments)

    saved, grads = both(call.do, **call.arguments)
    compiled_saved, compiled = torch.compile(both, backend="aot_eager", fullgraph=True)(call.do, **call.arguments)
    assert compiled_saved.made_with == saved.made_with and saved.made_with.scale == 0.25
    read = kda.chunk_kda_bwd(do=call.do, saved=pickle.loads(pickle.dumps(compiled_saved)), **call.arguments)
    for found in (compiled, read):
        assert all(torch.equal(a, b) for a, b in zip(found, grads) if b is not None)


@compiles_named_tuples
@pytest.mark.parametrize("lengths", [[9, 23], None], ids=["packed", "of any size"])
def test_compiled_code_passes_on_what_was_saved(lengths):
    call = make(lengths, dtype=torch.float32, disable_recompute=True, **({} if lengths else {"B": 1, "T": 32}))

    def both(do, **arguments):
        return kda.chunk_kda_bwd(do=do, saved=kda.chunk_kda_fwd(**arguments).saved, **arguments).dq

    torch._dynamo.reset()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=lengths is None)
    assert torch.equal(compiled(call.do, **call.arguments), both(call.do, **call.arguments))


@pytest.mark.parametrize("gate", ["given", "softplus", "bounded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("state", [torch.float32, None], ids=["float32 state", "state in the model dtype"])
def test_gradients_come_in_the_dtype_of_their_input(gate, dtype, state):
    call = make([40, 3], dtype=dtype, gate=gate, H=1, HV=2)
    call.tensors["initial_state"] = call.tensors["initial_state"].to(state or dtype)
    call.tensors["beta"] = call.tensors["beta"].float()
    call, o, ht = trained(call)
    assert o.dtype == dtype and ht.dtype == torch.float32
    exact, eps = gradients(call), torch.finfo(dtype).eps
    for name, grad in exact.items():
        assert call.tensors[name].grad.dtype == call.tensors[name].dtype
        # fp32 arithmetic, then one rounding to the dtype of the input
        assert distance(call.tensors[name].grad, grad) < torch.finfo(call.tensors[name].dtype).eps / 2 + 2e-5, name
    assert distance(o, definition(call)[0]) < eps / 2 + 1e-5


def test_a_batch_is_its_rows_packed():
    batch = make(B=3, T=70, gate="softplus")
    packed = make([70, 70, 70], gate="softplus")
    for name in ("q", "k", "v", "g", "beta"):
        packed.tensors[name] = batch.tensors[name].flatten(0, 1).unsqueeze(0)
    packed.tensors |= {n: batch.tensors[n] for n in ("A_log", "dt_bias", "initial_state")}
    o, ht = run(batch)
    assert_is_the_definition(batch, (o, ht))
    packed_o, packed_ht = run(packed)
    assert torch.equal(o.flatten(0, 1), packed_o[0]) and torch.equal(ht, packed_ht)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_both_dtypes_are_taken(dtype):
    call = make([5, 30])
    call.tensors["cu_seqlens"] = call.tensors["cu_seqlens"].to(dtype)
    assert_is_the_definition(call, run(call, cu_seqlens_cpu=call.tensors["cu_seqlens"].clone()))


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("C", [32, 64])
def test_intermediate_states_enter_their_chunks(state_v_first, C):
    call = make([70, 0, 1, 64], state_v_first=state_v_first, chunk_size=C, tail=9)
    ends = call.tensors["cu_seqlens"].tolist()
    with torch.no_grad():
        _, ht, h = run(call, return_intermediate_states=True)
    expected = []
    for n, (start, end) in enumerate(zip(ends, ends[1:])):
        for chunk in range(start, end, C):
            prefix = {name: call.tensors[name][:, start:chunk] for name in ("q", "k", "v", "g", "beta")}
            prefix["initial_state"] = call.tensors["initial_state"][n : n + 1]
            expected.append(definition(type(call)(prefix, call.options))[1])
    assert h.shape == (1, len(expected), *ht.shape[1:]) and h.dtype == call.tensors["k"].dtype
    assert distance(h[0], torch.cat(expected)) < 1e-12


def test_intermediate_states_of_a_batch_have_its_rows():
    call = make(B=2, T=70, chunk_size=32)
    with torch.inference_mode():
        _, _, h = run(call, return_intermediate_states=True)
    assert h.shape == (2, 3, 2, 5, 3)
    assert distance(h[:, 0], call.tensors["initial_state"]) < 1e-12


@pytest.mark.parametrize("K,V", [(60, 100), (256, 1), (100, 300)])
def test_head_dims_need_not_be_powers_of_two_or_equal(K, V):
    call = make([33, 2], K=K, V=V, gate="bounded")
    assert_is_the_definition(call, run(call))


def test_parameters_of_any_shape_get_gradients_of_that_shape():
    call = make([33, 2], gate="softplus", HV=4)
    flat = gradients(call)
    call.tensors["A_log"] = call.tensors["A_log"].view(1, 1, 4, 1)
    call.tensors["dt_bias"] = call.tensors["dt_bias"].view(4, 5)
    call, *_ = trained(call)
    for name in ("A_log", "dt_bias"):
        assert call.tensors[name].grad.shape == call.tensors[name].shape
        assert distance(call.tensors[name].grad.flatten(), flat[name]) < 1e-11


def test_gates_and_betas_may_have_a_dtype_of_their_own():
    call = make([33, 2], dtype=torch.bfloat16, gate="softplus", beta="sigmoid")
    call.tensors |= {"g": call.tensors["g"].float(), "beta": call.tensors["beta"].double()}
    call.tensors |= {"A_log": call.tensors["A_log"].bfloat16(), "dt_bias": call.tensors["dt_bias"].half()}
    call, o, ht = trained(call)
    assert o.dtype == torch.bfloat16 and distance(ht, definition(call)[1]) < 1e-5
    assert all(call.tensors[n].grad.dtype == call.tensors[n].dtype for n in ("g", "beta", "A_log", "dt_bias"))


def test_without_output_final_state_there_is_none():
    call = make([5])
    assert kda.chunk_kda(**call.arguments)[1] is None
    assert kda.chunk_kda_fwd(**call.arguments)._replace(o=None) == (None, None, None, None)


def test_positional_order_is_that_of_fla():
    call = make([33], gate="bounded", beta="2*sigmoid", state_v_first=True)
    x = call.tensors
    o, ht = kda.chunk_kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], 0.3, x["initial_state"], True, True, True, True, True, True, -5.0,
        False, False, True, x["cu_seqlens"], x["cu_seqlens"], None, True, 1, A_log=x["A_log"], dt_bias=x["dt_bias"],
    )
    assert_is_the_definition(call.with_options(scale=0.3), (o, ht))


def test_the_old_name_of_the_layout_works_and_warns():
    call = make([33], state_v_first=True)
    del call.options["state_v_first"]
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        found = run(call, transpose_state_layout=True)
    assert_is_the_definition(call.with_options(state_v_first=True), found)


@pytest.mark.parametrize("use_graph", [False, True, None, 0, 1])
@pytest.mark.parametrize("max_num_seqs", [None, 3, 100])
@pytest.mark.parametrize("function", [kda.chunk_kda, kda.chunk_kda_fwd])
def test_use_graph_and_max_num_seqs_change_nothing(function, use_graph, max_num_seqs):
    call = make([3, 0, 2], tail=1)
    found = function(**call.arguments, use_graph=use_graph, max_num_seqs=max_num_seqs)
    assert torch.equal(found[0], function(**call.arguments)[0]) and found[0].isfinite().all()


def test_max_num_seqs_counts_nothing_without_offsets():
    call = make(B=3, T=4)
    assert torch.equal(run(call, max_num_seqs=1)[0], run(call)[0])


@pytest.mark.parametrize("wrong", [{"use_graph": "yes"}, {"max_num_seqs": 1.5}])
def test_what_has_no_effect_must_still_be_of_its_type(wrong):
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be"):
        run(make([3, 2]), **wrong)


def test_recomputing_is_all_or_nothing_or_of_what_is_no_state():
    call = make(B=1, T=5)
    with pytest.raises(kda.InputError, match=r"disable_recompute must be True, False or 'states'; found str 'state'"):
        kda.chunk_kda(**call.arguments, disable_recompute="state")
    found, expected = (kda.chunk_kda(**call.arguments, disable_recompute=kept) for kept in ("states", False))
    assert torch.equal(found[0], expected[0])


def test_flags_may_be_none_as_configurations_hold_them():
    call = make([3], l2norm=None, initial_state=False)
    assert kda.chunk_kda(**call.arguments, output_final_state=None, allow_neg_eigval=0)[1] is None


def test_only_requested_gradients_are_returned():
    call = make([33, 2], gate="softplus")
    call.tensors["k"].requires_grad_()
    o, _ = run(call)
    o.sum().backward()
    assert call.tensors["k"].grad is not None and call.tensors["q"].grad is None


def test_a_loss_on_the_final_state_alone_has_gradients():
    call = make([33, 2]).requiring_grad()
    _, ht = run(call)
    (ht * call.dht).sum().backward()
    call.do = torch.zeros_like(call.do)
    for name, exact in gradients(call).items():
        assert distance(call.tensors[name].grad, exact) < 1e-11, name
    assert distance(kda.chunk_kda_bwd(do=None, dht=call.dht, **call.arguments).dk, call.tensors["k"].grad) < 1e-13


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x[:, :1].zero_(), torch.relu_])
def test_what_a_recorded_call_returns_may_be_changed_in_place(change):
    def gradients_of(changed):
        call = make([33, 3]).requiring_grad()
        o, ht = (changed(x) for x in run(call))
        ((o * call.do).sum() + (ht * call.dht).sum()).backward()
        return [call.tensors[n].grad for n in DIFFERENTIABLE if n in call.tensors]

    def aside(x):
        x = x.clone()
        change(x)
        return x

    def in_place(x):
        change(x)
        return x

    assert all(torch.equal(x, y) for x, y in zip(gradients_of(in_place), gradients_of(aside), strict=True))


ONE = {"K": 1, "V": 1}


@pytest.mark.parametrize("sizes", [{}, ONE, {"state_v_first": True}, {"state_v_first": True, **ONE}], ids=str)
def test_what_was_made_without_gradients_may_be_changed_with_them(sizes):
    call = make([33, 3], gate="softplus", **sizes)
    with torch.no_grad():
        results = [*kda.chunk_kda(**call.arguments, output_final_state=True, return_intermediate_states=True)]
        out = kda.chunk_kda_fwd(**call.arguments, disable_recompute=True, output_final_state=True)
        results += [out.o, out.final_state, *out.saved.tensors]
        results += kda.chunk_kda_bwd(**call.arguments, disable_recompute=True, do=call.do, saved=out.saved)
        del call.options["chunk_size"]
        results += kda.fused_recurrent_kda(**call.arguments, output_final_state=True)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    for x in results:
        x.mul_(factor).sum().backward()


def test_numbers_and_flags_of_numpy_are_those_of_python():
    numpy = pytest.importorskip("numpy")
    call = make([33, 3], gate="bounded")
    ours = {"scale": 0.25, "lower_bound": -4.0, "chunk_size": 32, "state_v_first": False, "output_final_state": True}
    theirs = {"scale": numpy.float32, "lower_bound": numpy.float64, "chunk_size": numpy.int64}
    others = {name: theirs.get(name, numpy.bool_)(x) for name, x in ours.items()}
    for x, y in zip(kda.chunk_kda(**call.arguments | ours), kda.chunk_kda(**call.arguments | others), strict=True):
        assert torch.equal(x, y)
    x = call.tensors["g"]
    assert torch.equal(kda.fused_kda_gate(x, lower_bound=numpy.float32(-4)), kda.fused_kda_gate(x, lower_bound=-4.0))
    with pytest.raises(kda.InputTypeError, match="True or False"):
        kda.chunk_kda(**call.arguments, output_final_state=numpy.float32(1.0))


@pytest.mark.parametrize("change", [
    lambda x: {n: t.reshape(1, 128, *t.shape[2:]) for n, t in x.items()}, lambda x: x | {"g": x["g"].float()},
    lambda x: x | {n: x[n][:, :, :1] for n in ("q", "k")},
], ids=["B and T", "dtype", "heads"])
def test_what_another_call_saved_is_refused(change):
    x = make(B=2, T=64, H=2, HV=2, K=4, V=4).tensors
    x = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    saved = kda.chunk_kda_fwd(**x, disable_recompute=True).saved
    with pytest.raises(kda.InputError, match=r"saved must be what .* for (q|g)="):
        kda.chunk_kda_bwd(**change(x), do=None, saved=saved)


def test_what_was_saved_for_other_lengths_of_as_many_sequences_is_refused():
    call = make([3, 5])
    saved = kda.chunk_kda_fwd(**call.arguments | {"disable_recompute": True}).saved
    other = call.arguments | {"cu_seqlens": torch.tensor([0, 4, 8])}
    with pytest.raises(kda.InputError, match=r"offsets=\[0, 3, 8\], beside offsets=\[0, 4, 8\]"):
        kda.chunk_kda_bwd(**other, do=call.do, saved=saved)


def test_gradients_have_the_dtype_of_the_inputs_under_autocast():
    call = make(B=1, T=6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        grads = kda.chunk_kda_bwd(**call.arguments, do=call.do)
    assert {grads.dq.dtype, grads.dk.dtype, grads.dv.dtype} == {torch.float32}


def test_a_pool_works_beside_another_default_device():
    call = make(B=1, T=6)
    pool = call.tensors.pop("initial_state")
    torch.set_default_device("meta")
    try:
        slots = torch.tensor([0], device="cpu")
        o, _ = kda.chunk_kda(**call.arguments, initial_state=pool.clone(), ssm_state_indices=slots)
    finally:
        torch.set_default_device(None)
    assert torch.equal(o, kda.chunk_kda(**call.arguments, initial_state=pool)[0])
