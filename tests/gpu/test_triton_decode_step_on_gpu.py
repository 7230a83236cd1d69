"""The kernel of decode_step on a GPU: serving sizes, drafts bit for bit, CUDA graphs, torch.compile."""

import pytest
import torch
from drafts import beside_plain_decoding

pytest.importorskip("triton", reason="needs triton")

import kda
from kda.tools.verify.steps import UPDATED, budgets, copied, make_step, run_step, tokens_of

pytestmark = pytest.mark.gpu

MODEL = dict(K=128, V=128, dtype="bfloat16", gate="bounded")
CASES = {
    "float32 states": MODEL, "bfloat16 states": MODEL | dict(states="bfloat16"),
    "softplus gate": MODEL | dict(gate="softplus"), "float16": MODEL | dict(dtype="float16"),
    "GVA": MODEL | dict(H=4, HV=8), "four tokens": MODEL | dict(T=4), "drafts": MODEL | dict(T=4, drafts=True),
    "a tree": MODEL | dict(T=8, drafts=True, tree=True), "the recurrence alone": MODEL | dict(conv=False, norm=False),
    "float32, K=60 V=100": dict(K=60, V=100), "K=128 V=256": MODEL | dict(V=256),
    "padding": MODEL | dict(slots=[4, -1, 0]),
}


def on_gpu(x):
    return {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in x.items()}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(name):
    x = make_step(**CASES[name])
    found = run_step(on_gpu(x), backend="triton")
    for each, budget in budgets(x).items():
        measure = budget.measure(found[each])
        assert measure.used <= 1, f"{each}: {measure}"


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
@pytest.mark.parametrize("H", [8, 12, 32, 96])
def test_sizes_of_serving_agree_with_the_reference(H, states):
    x = make_step(N=5, H=H, states=states, **MODEL)
    many = make_step(N=64, H=H, states=states, **MODEL, seed=1)
    found = run_step(on_gpu(x), backend="triton")
    assert all(budget.measure(found[each]).used <= 1 for each, budget in budgets(x).items())
    rows = on_gpu(many)
    whole = run_step(copied(rows), backend="triton")["o"]
    for n in (0, 31, 63):                                                      # and each as it would be alone
        each = {name: t[n : n + 1] for name, t in tokens_of(rows).items()}
        each |= {"ssm_state_indices": rows["ssm_state_indices"][n : n + 1]}
        assert torch.equal(run_step(copied(rows | each), backend="triton")["o"], whole[n : n + 1])


@pytest.mark.parametrize("words", [dict(), dict(tree=True), dict(states="bfloat16"), dict(H=2, HV=4, tree=True)],
                         ids=["a line", "a tree", "bfloat16 states", "a tree, GVA"])
def test_drafts_leave_what_the_accepted_tokens_alone_leave(words):
    def run(x):
        moved = on_gpu(x)
        found = run_step(moved, backend="triton")
        for name in UPDATED:
            if x.get(name) is not None:
                x[name].copy_(moved[name])
        return {"o": found["o"].cpu()} | {name: x[name] for name in UPDATED if x.get(name) is not None}

    for what, a, b in beside_plain_decoding(run, turns=3, T=5, **MODEL | words):
        assert torch.equal(a, b), what


def test_a_graph_is_replayed_with_other_numbers_in_every_tensor():
    x = on_gpu(make_step(N=4, T=3, drafts=True, **MODEL))
    run_step(copied(x), backend="triton")                                      # builds the kernel
    static, graph = copied(x), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        o = kda.decode_step(**static)
    for seed in range(3):
        new = on_gpu(make_step(N=4, T=3, drafts=True, **MODEL, seed=seed + 1))
        new["num_accepted_tokens"] += seed
        for name, t in new.items():
            if isinstance(t, torch.Tensor):
                static[name].copy_(t)
        expected = run_step(copied(new), backend="triton")
        graph.replay()
        assert torch.equal(o, expected["o"])
        assert all(torch.equal(static[name], expected[name]) for name in UPDATED)


def test_a_compiled_call_gives_the_same():
    torch._dynamo.reset()
    x = on_gpu(make_step(**MODEL))
    expected = run_step(copied(x))
    step = torch.compile(lambda x: 2 * kda.decode_step(**x), fullgraph=True)
    with torch.no_grad():
        assert torch.equal(step(x), 2 * expected["o"])
    assert torch.equal(x["states"], expected["states"]) and torch.equal(x["conv_states"], expected["conv_states"])


def test_auto_takes_triton_and_never_the_reference():
    x = on_gpu(make_step(N=1, H=1, K=256, V=256))
    with pytest.raises(kda.NoBackendError, match=r"triton\.decode_state"):
        run_step(x)
