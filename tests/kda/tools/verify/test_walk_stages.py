"""The backward in two pieces, as kda/tools/verify/literal.py writes it out, against autograd of the definition."""

import pytest
import torch

from kda.model.stages import WALK, find
from kda.tools.verify import literal
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.definition import definition, from_stages

NAMES = ["fwd/gate", "fwd/intra", "fwd/wy", "fwd/state", *(stage.name for stage in WALK)]
SMALL = {"H": 2, "K": 20, "V": 12, "T": 70, "dtype": "float64", "seed": 5}
CASES = {
    "GVA": {"HV": 4, "gate": "softplus", "beta": "2*sigmoid"},
    "packed, empty, one token, tail": {"lengths": (65, 0, 3, 1, 32), "padding": 5},
    "packed, GVA, given gate": {"lengths": (0, 33, 1), "HV": 4, "gate": "given", "beta": "given"},
    "batch": {"B": 2, "gate": "softplus", "regime": "fast"},
    "no state, no norms": {"initial_state": False, "l2norm": False, "beta": "given"},
    "given gate, no norms": {"gate": "given", "l2norm": False, "beta": "2*sigmoid", "regime": "fast"},
    "fast": {"regime": "fast", "beta": "given"},
    "K = V = 64": {"K": 64, "V": 64, "H": 1},
    "K = V = 128": {"K": 128, "V": 128, "H": 1, "regime": "fast"},
}


def drawn(label, C=64):
    return make_inputs(C=C, **{**SMALL, **CASES[label]})


def after(case, names, tensors):
    return literal.chain(names, case.problem(), case.layout, tensors, torch.float64)


def gradients(case, env):
    """Return the gradients of the call: the parts of dA_log and ddt_bias are summed over chunks."""
    for n in ("dA_log", "ddt_bias"):
        parts = env[f"{n}_parts"]
        env[n] = None if parts is None else parts.sum(0)
    return {n: x for n, x in from_stages(case, env).items() if n not in ("o", "ht")}


def relative(x, exact):
    return float((x - exact).norm()) / (float(exact.norm()) or 1.0)


@pytest.mark.parametrize("C", [32, 64])
@pytest.mark.parametrize("label", CASES)
def test_walk_and_grads_make_the_gradients_of_the_definition(label, C):
    case = drawn(label, C)
    exact = definition(case, torch.float64)
    found = gradients(case, after(case, NAMES, case.stage_tensors(torch.float64)))
    assert found.keys() == exact.keys() - {"o", "ht"}
    for n, x in found.items():
        assert relative(x, exact[n]) < 1e-12, n


def test_r_is_what_is_written_before_its_b_also_where_b_is_zero():
    case = drawn("fast")
    case.keywords["beta"][:, ::3] = 0
    env = after(case, NAMES, case.stage_tensors(torch.float64))
    assert relative(env["b"] * env["r"], env["v_new"]) < 1e-12
    assert relative(gradients(case, env)["dbeta"], definition(case, torch.float64)["dbeta"]) < 1e-12


def test_dv_and_the_states_of_64_tokens_are_the_same_whatever_the_walks_chunk():
    cases = drawn("fast", 32), drawn("fast", 64)
    by_32, by_64 = (after(case, NAMES, case.stage_tensors(torch.float64)) for case in cases)
    assert relative(*(case.layout.unchunk(env["dv"]) for case, env in zip(cases, (by_32, by_64)))) < 1e-12
    ends = [1, 2]                                                             # 70 tokens: chunks 0 and 1, chunk 2
    assert relative(by_32["dh"][ends], by_64["dh"]) < 1e-12
    assert relative(by_32["dh0"], by_64["dh0"]) < 1e-12


@pytest.mark.parametrize("stage, name", [(stage.name, n) for stage in WALK[2:] for n in stage.reads])
def test_an_error_of_a_millionth_in_an_element_that_a_stage_reads_is_noticed(stage, name):
    case = drawn("GVA")
    env = after(case, NAMES, case.stage_tensors(torch.float64))
    read = {n: env[n].clone(memory_format=torch.contiguous_format) for n in find(stage).reads}
    first = read[name][0].view(-1)                                            # a whole chunk: no padding
    first[int(first.abs().argmax())] += 1e-6 * max(1.0, float(first.abs().max()))
    wrong = after(case, [stage], read)
    assert max(relative(wrong[n], env[n]) for n in find(stage).writes) > 1e-10


def test_a_millionth_of_b_left_out_is_noticed():
    case = drawn("GVA")
    env = after(case, NAMES, case.stage_tensors(torch.float64))
    wrong = after(case, ["bwd/walk", "bwd/grads"], env | {"KGB": env["KGB"] * (1 + 1e-6)})
    exact = definition(case, torch.float64)
    assert relative(gradients(case, wrong)["dk"], exact["dk"]) > 1e-9


def test_in_float32_the_stages_are_within_float32_of_themselves_in_float64():
    case = drawn("fast")
    exact = after(case, NAMES, case.stage_tensors(torch.float64))
    for stage in WALK[2:]:
        fed = {n: exact[n] for n in stage.reads}
        found = literal.run_stage(stage.name, case.problem(), case.layout, fed, torch.float32)
        for n, x in found.items():
            assert relative(x.double(), exact[n]) < 1e-4, n                   # what pairs add to ddt_bias cancels
