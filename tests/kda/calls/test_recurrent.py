"""fused_recurrent_kda: prefill, decode, state pools, speculative decoding."""

import pytest
import torch
from naive import assert_is_the_definition, definition, distance, make

import kda

OPTIONS = {
    "given gate": {},
    "softplus gate": {"gate": "softplus"},
    "bounded gate": {"gate": "bounded", "A_log": False},
    "GVA": {"H": 2, "HV": 6},
    "given gate per head": {"per_head": True},
    "softplus gate per head, GVA": {"per_head": True, "gate": "softplus", "HV": 4},
    "2*sigmoid beta": {"beta": "2*sigmoid"},
    "states (V, K)": {"state_v_first": True},
    "no initial state": {"initial_state": False},
    "scale, no l2norm": {"scale": 0.2, "l2norm": False},
    "tail": {"tail": 4},
}


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def recurrent(call, **options):
    arguments = call.arguments | options
    arguments.pop("chunk_size")
    return kda.fused_recurrent_kda(**arguments)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", [[7], [0, 1, 5, 0, 12]], ids=["one", "ragged"])
def test_it_is_the_definition(options, lengths):
    call = make(lengths, **options)
    assert_is_the_definition(call, recurrent(call, output_final_state=True), 1e-13)


@pytest.mark.parametrize("gate", ["given", "softplus"])
def test_it_agrees_with_chunk_kda(gate):
    call = make([70, 3, 0], gate=gate, HV=4)
    chunk = kda.chunk_kda(**call.arguments, output_final_state=True)
    token = recurrent(call, output_final_state=True)
    assert distance(token[0], chunk[0]) < 1e-12 and distance(token[1], chunk[1]) < 1e-12


def test_beta_may_differ_for_every_value_channel():
    call = make([9, 4], beta="sigmoid")
    call.tensors["beta"] = torch.randn_like(call.tensors["v"])
    assert_is_the_definition(call, recurrent(call, output_final_state=True), 1e-13)


def test_positional_order_is_that_of_fla():
    call = make([9], gate="bounded", beta="2*sigmoid", state_v_first=True)
    x = call.tensors
    o, ht = kda.fused_recurrent_kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], x["A_log"], x["dt_bias"], 0.3, x["initial_state"], True, True, True,
        True, True, -5.0, True, x["cu_seqlens"],
    )
    assert_is_the_definition(call.with_options(scale=0.3), (o, ht), 1e-13)


def test_the_inner_function_of_fla_has_its_order_and_writes_in_place():
    call = make([9, 2], gate="bounded", beta="2*sigmoid", state_v_first=True)
    x, pool = call.tensors, torch.zeros(4, 2, 3, 5, dtype=torch.float64)
    slots = torch.tensor([3, 1])
    pool[slots] = x["initial_state"]
    o, states = kda.fused_recurrent_kda_fwd(
        x["q"], x["k"], x["v"], x["g"], x["beta"], x["A_log"], x["dt_bias"], pool, 0.3, True, True, True,
        x["cu_seqlens"], slots, None, True, True, True, True, -5.0, None,
    )
    assert states is pool
    assert_is_the_definition(call.with_options(scale=0.3), (o, pool[slots]), 1e-13)


def test_the_inner_function_of_fla_wants_a_state_unless_told_otherwise():
    call = make([9], initial_state=False, chunk_size=None)
    with pytest.raises(kda.InputError, match="used with an initial_state"):
        kda.fused_recurrent_kda_fwd(**call.arguments)
    o, ht = kda.fused_recurrent_kda_fwd(**call.arguments, inplace_final_state=False, output_final_state=True)
    expected = kda.fused_recurrent_kda(**call.arguments, output_final_state=True)
    assert torch.equal(o, expected[0]) and torch.equal(ht, expected[1])
    with pytest.raises(TypeError, match="Did you mean 'backend'"):
        kda.fused_recurrent_kda_fwd(**call.arguments, backen="reference")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes(dtype):
    call = make([5, 1], dtype=dtype)
    o, ht = recurrent(call, output_final_state=True)
    assert o.dtype == dtype and ht.dtype == torch.float32
    assert distance(o, definition(call)[0]) < torch.finfo(dtype).eps / 2 + 1e-6


def test_decoding_token_by_token_is_the_prefill():
    call = make(B=3, T=10, gate="softplus", dtype=torch.float32)
    whole, final = recurrent(call, output_final_state=True)
    state = call.tensors["initial_state"].clone()
    for t in range(10):
        token = {n: call.tensors[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta")}
        step = type(call)(call.tensors | token, call.options)
        o, returned = recurrent(step, initial_state=state, inplace_final_state=True)
        assert returned is state
        assert distance(o, whole[:, t : t + 1]) < 1e-6
    assert distance(state, final) < 1e-6


@pytest.mark.parametrize("K,V", [(5, 3), (8, 8), (64, 64)])
def test_batch_invariant_gives_the_same_bits_alone_and_packed(K, V):
    packed = make([3, 0, 9, 1], gate="softplus", beta="sigmoid", dtype=torch.float32, K=K, V=V)
    o, ht = recurrent(packed, output_final_state=True, batch_invariant=True)
    ends = packed.tensors["cu_seqlens"].tolist()
    for n, (start, end) in enumerate(zip(ends, ends[1:])):
        alone = {name: packed.tensors[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        alone |= {name: packed.tensors[name] for name in ("A_log", "dt_bias")}
        alone |= {"initial_state": packed.tensors["initial_state"][n : n + 1]}
        call = type(packed)(alone, packed.options)
        o_alone, ht_alone = recurrent(call, output_final_state=True, batch_invariant=True)
        assert torch.equal(o_alone, o[:, start:end]) and torch.equal(ht_alone, ht[n : n + 1])


def test_out_takes_the_output():
    call = make(B=2, T=3)
    out = torch.full_like(call.tensors["v"], float("nan"))
    o, _ = recurrent(call, out=out)
    assert o is out and distance(out, definition(call)[0]) < 1e-13


WRONG = {
    "another batch": lambda out: torch.cat([out, out]),
    "one row to be broadcast from": lambda out: out[:1],
    "another dtype": lambda out: out.half(),
    "another device": lambda out: out.to("meta"),
    "overlapping": lambda out: out[..., :1].expand(out.shape),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "compiled"])
def test_a_wrong_out_is_refused_and_left_alone(change, compiling):
    call = make(B=2, T=3)
    out = change(torch.zeros_like(call.tensors["v"]))
    step = compiled(recurrent) if compiling else recurrent
    with pytest.raises(Exception, match="out must be"):
        step(call, out=out)
    assert out.is_meta or not out.any()


def test_compiled_out_takes_the_output():
    call = make(B=2, T=3)
    out = torch.full_like(call.tensors["v"], float("nan"))
    o, _ = compiled(recurrent)(call, out=out)
    assert o is out and torch.equal(out, recurrent(call)[0])


@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "compiled"])
def test_out_is_refused_where_gradients_are_recorded(compiling):
    call = make(B=2, T=3).requiring_grad()
    out = torch.zeros_like(call.tensors["v"]).detach()
    step = compiled(recurrent) if compiling else recurrent
    with pytest.raises(Exception, match=r"out must be used under torch.no_grad\(\)"):
        step(call, out=out)
    assert not out.requires_grad and not out.any()


def pooled(call, slots, indices, seed=1):
    """Return the call on a pool of random states, and the states its sequences start from."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(slots, *call.tensors["initial_state"].shape[1:], generator=generator, dtype=torch.float64)
    first = indices if indices.dim() == 1 else indices[:, 0]
    call.tensors["initial_state"] = pool[first.long().clamp(min=0)].clone()
    return pool


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_a_pool_is_read_and_written_at_its_slots(index_dtype, state_v_first):
    call = make([3, 1, 0, 4], state_v_first=state_v_first)
    indices = torch.tensor([5, 0, 2, 3], dtype=index_dtype)
    pool = pooled(call, 7, indices)
    before = pool.clone()
    o, returned = recurrent(call, initial_state=pool, ssm_state_indices=indices)
    assert returned is pool
    assert_is_the_definition(call, (o, pool[indices.long()]), 1e-13)
    assert torch.equal(pool[[1, 4, 6]], before[[1, 4, 6]]) and torch.equal(pool[2], before[2])


def test_padding_slots_are_skipped():
    call = make([3, 2, 4])
    indices = torch.tensor([4, -1, 1])
    pool = pooled(call, 6, indices)
    before = pool.clone()
    for name in ("q", "k", "v", "g", "beta"):
        call.tensors[name][:, 3:5] = float("nan")
    o, _ = recurrent(call, initial_state=pool, ssm_state_indices=indices)
    assert not o[:, 3:5].any() and o.isfinite().all()
    assert torch.equal(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    assert not torch.equal(pool[4], before[4]) and not torch.equal(pool[1], before[1])


OVERLAPPING = {
    "one state for both heads": (1, 0, 3, 1),
    "windows over a row": (30, 15, 1, 1),
    "a head begins within another": (30, 7, 3, 1),
    "a slot begins within another": (15, 15, 3, 1),
}
APART = {
    "one after the other": (30, 15, 3, 1),
    "in pages": (100, 20, 4, 1),
    "(V, K)": (30, 15, 1, 5),
    "heads last": (30, 1, 6, 2),
}


@pytest.mark.parametrize("strides", OVERLAPPING.values(), ids=OVERLAPPING)
def test_states_that_share_memory_are_not_written(strides):
    call = make([3])
    pool = torch.zeros(500, dtype=torch.float64).as_strided((3, 2, 5, 3), strides)
    with pytest.raises(kda.InputError, match="without overlap"):
        recurrent(call, initial_state=pool, ssm_state_indices=torch.tensor([1]))
    assert not pool.any()


@pytest.mark.parametrize("strides", APART.values(), ids=APART)
def test_states_may_lie_in_any_order_and_with_gaps(strides):
    call = make([3])
    pool = torch.zeros(500, dtype=torch.float64).as_strided((3, 2, 5, 3), strides)
    dense = torch.zeros(3, 2, 5, 3, dtype=torch.float64)
    for states in (pool, dense):
        recurrent(call, initial_state=states, ssm_state_indices=torch.tensor([1]))
    assert dense.any() and torch.equal(pool, dense)


def test_a_pool_may_be_left_alone():
    call = make([3, 2, 4])
    indices = torch.tensor([4, -1, 1])
    pool = pooled(call, 6, indices)
    before = pool.clone()
    o, ht = recurrent(
        call, initial_state=pool, ssm_state_indices=indices, inplace_final_state=False, output_final_state=True
    )
    assert torch.equal(pool, before)
    exact = definition(call)
    assert distance(ht[[0, 2]], exact[1][[0, 2]]) < 1e-13 and not ht[1].any() and not o[:, 3:5].any()


@pytest.mark.parametrize("accepted", [None, [1, 3, 2]], ids=["from the first slot", "from the accepted slot"])
def test_speculative_decoding_stores_the_state_after_every_token(accepted):
    call = make([3, 1, 2], gate="softplus")
    indices = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    pool = pooled(call, 10, indices)
    before = pool.clone()
    counts = None if accepted is None else torch.tensor(accepted)
    start = indices[:, 0] if accepted is None else indices.gather(1, counts[:, None] - 1)[:, 0]
    o, _ = recurrent(call, initial_state=pool, ssm_state_indices=indices, num_accepted_tokens=counts)
    ends = call.tensors["cu_seqlens"].tolist()
    untouched = {9}
    for n, (begin, end) in enumerate(zip(ends, ends[1:])):
        for t in range(begin, end):
            prefix = {name: call.tensors[name][:, begin : t + 1] for name in ("q", "k", "v", "g", "beta")}
            prefix |= {name: call.tensors[name] for name in ("A_log", "dt_bias")}
            exact = definition(type(call)(prefix | {"initial_state": before[start[n]][None]}, call.options))
            assert distance(pool[indices[n, t - begin]], exact[1][0]) < 1e-13
            assert distance(o[:, t], exact[0][:, -1]) < 1e-13
        untouched |= set(indices[n, end - begin :].tolist())
    assert torch.equal(pool[sorted(untouched)], before[sorted(untouched)])


def test_a_padding_slot_in_the_middle_drops_that_state_alone():
    call = make([3, 2])
    indices = torch.tensor([[0, -1, 2], [-1, 4, 5]])
    pool = pooled(call, 6, indices)
    before = pool.clone()
    o, _ = recurrent(call, initial_state=pool, ssm_state_indices=indices)
    assert not o[:, 3:].any()
    assert torch.equal(pool[[1, 3, 4, 5]], before[[1, 3, 4, 5]])
    assert not torch.equal(pool[0], before[0]) and not torch.equal(pool[2], before[2])


@pytest.mark.parametrize("K", [257, 600])
def test_a_head_may_have_any_number_of_channels(K):
    call = make([5, 0, 3], K=K, V=2, gate="softplus")
    assert_is_the_definition(call, recurrent(call, output_final_state=True), 1e-13)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_states_of_any_dtype_are_rounded_once(q_dtype, dtype):
    call = make([3, 2], dtype=q_dtype)
    call.tensors["initial_state"] = call.tensors["initial_state"].to(dtype)
    o, ht = recurrent(call, output_final_state=True)
    exact, computed = definition(call), 1e-6
    assert ht.dtype == torch.float32 and distance(ht, exact[1]) < computed
    pool = torch.zeros(4, *call.tensors["initial_state"].shape[1:], dtype=dtype)
    pool[[3, 1]] = call.tensors["initial_state"]
    pooled_o, written = recurrent(call, initial_state=pool, ssm_state_indices=torch.tensor([3, 1]))
    assert written.dtype == dtype and torch.equal(pooled_o, o) and not written[[0, 2]].any()
    assert distance(written[[3, 1]], exact[1]) < torch.finfo(dtype).eps / 2 + computed


def test_states_of_a_lower_dtype_are_rounded_once():
    call = make([3], dtype=torch.bfloat16)
    call.tensors["initial_state"] = call.tensors["initial_state"].bfloat16()
    exact = definition(call)[1]
    _, state = recurrent(call, inplace_final_state=True)
    assert state.dtype == torch.bfloat16 and distance(state, exact) < 2**-8


def in_place(call, **options):
    """Call on a pool, whose slot 1 gets the final state in place; return the pool and the results."""
    pool = torch.zeros(3, 2, 5, 3, dtype=torch.float64)
    return pool, recurrent(call, initial_state=pool, ssm_state_indices=torch.tensor([1]), **options)


@pytest.mark.parametrize("written", [False, True], ids=["states returned", "states in place"])
@pytest.mark.parametrize("name", ["q", "g", "beta", "A_log"])
def test_its_missing_backward_says_what_to_use(written, name):
    call = make([3], gate="softplus", initial_state=False)
    call.tensors[name].requires_grad_()
    o, _ = in_place(call)[1] if written else recurrent(call)
    assert o.requires_grad
    with pytest.raises(kda.KdaError, match="Train with chunk_kda"):
        o.sum().backward()


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")           # torch tells where the forward was called
@pytest.mark.parametrize("written", [False, True], ids=["states returned", "states in place"])
def test_compiled_it_says_so_too(written):
    call = make([3], initial_state=False)
    call.tensors["k"].requires_grad_()
    with pytest.raises(Exception, match="Train with chunk_kda"):
        compiled(lambda: in_place(call)[1] if written else recurrent(call))()[0].sum().backward()


def test_a_pool_never_comes_to_require_a_gradient():
    call = make([3], initial_state=False).requiring_grad()
    pool, (expected, _) = in_place(call)
    again, (o, returned) = in_place(call)
    assert returned is again and torch.equal(o, expected) and pool[1].any() and torch.equal(pool, again)
    for _ in range(2):                                                         # and the next step may follow
        recurrent(call, initial_state=pool, ssm_state_indices=torch.tensor([1]))
        assert not pool.requires_grad and pool.grad_fn is None and pool.is_leaf


def test_compiled_a_pool_that_requires_a_gradient_is_refused():
    call = make([3])
    call.tensors["initial_state"].requires_grad_()
    with pytest.raises(Exception, match="without gradients to be written in place"):
        compiled(lambda: recurrent(call, inplace_final_state=True))()


def test_autograd_notices_that_a_state_it_kept_was_written():
    call = make([3])
    w = torch.ones_like(call.tensors["initial_state"], requires_grad=True)
    kept = w * call.tensors["initial_state"]
    with torch.no_grad():
        recurrent(call, inplace_final_state=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_vmap_over_states_writes_each_of_them():
    call = make([3])
    several = torch.randn(4, *call.tensors["initial_state"].shape, dtype=torch.float64)
    one_by_one = several.clone()
    expected = torch.stack([recurrent(call, initial_state=state, inplace_final_state=True)[0] for state in one_by_one])
    found = torch.func.vmap(lambda state: recurrent(call, initial_state=state, inplace_final_state=True)[0])(several)
    assert torch.equal(found, expected) and torch.equal(several, one_by_one)


def test_vmap_over_q_alone_would_write_one_state_and_is_refused():
    call = make([3])
    several = torch.stack([call.tensors["q"]] * 2)
    with pytest.raises(kda.KdaError, match=r"^fused_recurrent_kda: .*Map over initial_state as well"):
        torch.func.vmap(lambda q: recurrent(call, q=q, inplace_final_state=True)[0])(several)
