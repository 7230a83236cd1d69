"""One broken call for every row of kda.checks.decode."""

import torch

import kda
from kda.tools.verify.steps import make_step

SHAPE = dict(N=2, T=3, H=2, K=5, V=3)
INDICES = ("ssm_state_indices", "num_accepted_tokens", "accepted_path", "parents")
FLOATS = ("q", "k", "v", "g", "beta", "states", "A_log", "dt_bias", "conv_states", "conv_weight", "conv_bias",
          "norm_gate", "norm_weight", "records", "out")
META = "meta"


def good(T=3, **words):
    """Return the arguments of a call that has every tensor."""
    x = make_step(**SHAPE | {"T": T}, bias=True, drafts=True, tree=True, slots=[0, 1], **words)
    path = torch.tensor([[0, 1, 2]] * 2)
    return x | {"accepted_path": path, "parents": torch.tensor([[0, 0, 1]] * 2), "out": torch.empty_like(x["v"])}


def step(drop=(), **replaced):
    x = {name: t for name, t in (good() | replaced).items() if name not in drop}
    with torch.no_grad():
        return kda.decode_step(**x)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def of_device(name):
    return step(**{name: good()[name].to(META)})


def of_dtype(name):
    wrong = {"q": torch.int32, "k": torch.float64, "v": torch.float64, "out": torch.float64, "records": torch.float16}
    dtype = wrong.get(name, torch.float32 if name in INDICES else torch.int32)
    return step(**{name: good()[name].to(dtype)})


def recording():
    x = good()
    x["q"].requires_grad_()
    return kda.decode_step(**x)


def on_a_mesh():
    class DTensor(torch.Tensor):
        pass

    return step(q=good()["q"].as_subclass(DTensor))


WITHOUT_DRAFTS = ("records", "num_accepted_tokens", "accepted_path", "parents", "conv_states", "conv_weight",
                  "conv_bias")
MISSHAPEN = {
    "q": (2, 3, 5), "k": (2, 3, 2, 4), "v": (2, 4, 2, 3), "g": (2, 3, 4), "beta": (2, 3, 2, 5), "states": (4, 2, 5, 3),
    "conv_states": (4, 26, 5), "conv_weight": (26, 9), "conv_bias": (25,), "norm_gate": (2, 3, 2), "norm_weight": (2,),
    "records": (4, 3, 2, 13), "out": (2, 3, 2, 5), "ssm_state_indices": (3,), "num_accepted_tokens": (3,),
    "accepted_path": (2, 2), "parents": (2, 2),
}


def of_shape(name):
    dtype = torch.int64 if name in INDICES else torch.float32
    return step(**{name: zeros(*MISSHAPEN[name], dtype=dtype)})


CASES = {
    **{f"decode.{n}.type": lambda n=n: step(**{n: [1.0]}) for n in (*FLOATS, *INDICES)},
    "decode.scale.type": lambda: step(scale="0.1"),
    "decode.lower_bound.type": lambda: step(lower_bound="-5"),
    "decode.norm_eps.type": lambda: step(norm_eps=None),
    "decode.first_slot.type": lambda: step(first_slot=0.5),
    "decode.backend.type": lambda: step(backend=90),
    "decode.flag.type": lambda: step(use_qk_l2norm_in_kernel="no"),
    "decode.mesh": on_a_mesh,
    "decode.grad": recording,
    **{f"decode.{n}.shape": lambda n=n: of_shape(n) for n in MISSHAPEN},
    **{f"decode.{n}.dtype": lambda n=n: of_dtype(n) for n in (*FLOATS, *INDICES)},
    **{f"decode.{n}.device": lambda n=n: of_device(n) for n in (*FLOATS[1:], *INDICES)},
    "decode.v.heads": lambda: step(v=zeros(2, 3, 3, 3), out=None),
    "decode.A_log.numel": lambda: step(A_log=zeros(3)),
    "decode.dt_bias.numel": lambda: step(dt_bias=zeros(5)),
    **{f"decode.{n}.unused": lambda n=n: step(drop={"A_log", "dt_bias"} - {n}, use_gate_in_kernel=False)
       for n in ("A_log", "dt_bias")},
    "decode.A_log.missing": lambda: step(A_log=None),
    "decode.lower_bound.value": lambda: step(lower_bound=5.0),
    "decode.allow_neg_eigval.sigmoid": lambda: step(allow_neg_eigval=True, use_beta_sigmoid_in_kernel=False),
    "decode.scale.value": lambda: step(scale=float("nan")),
    "decode.norm_eps.value": lambda: step(norm_eps=-1.0),
    "decode.first_slot.value": lambda: step(first_slot=-1),
    "decode.conv_states.alone": lambda: step(conv_weight=None),
    "decode.conv_weight.alone": lambda: step(conv_states=None),
    "decode.conv_bias.alone": lambda: step(conv_states=None, conv_weight=None),
    "decode.norm_gate.alone": lambda: step(norm_weight=None),
    "decode.norm_weight.alone": lambda: step(norm_gate=None),
    "decode.records.tokens": lambda: kda.decode_step(
        **make_step(**SHAPE | {"T": 1}, conv=False), records=zeros(4, 0, 2, 13), num_accepted_tokens=torch.ones(2).int()
    ),
    "decode.records.accepted": lambda: step(num_accepted_tokens=None, accepted_path=None),
    "decode.num_accepted_tokens.records": lambda: step(drop={*WITHOUT_DRAFTS} - {"num_accepted_tokens"}),
    "decode.accepted_path.records": lambda: step(drop={*WITHOUT_DRAFTS} - {"accepted_path"}),
    "decode.parents.records": lambda: step(drop={*WITHOUT_DRAFTS} - {"parents"}),
    "decode.parents.tokens": lambda: kda.decode_step(
        **make_step(N=1, T=65, H=1, K=2, V=2, drafts=True, tree=True, conv=False)
    ),
    "decode.ssm_state_indices.range": lambda: step(ssm_state_indices=torch.tensor([0, 4])),
    "decode.ssm_state_indices.shared": lambda: step(ssm_state_indices=torch.tensor([1, 1])),
    "decode.num_accepted_tokens.range": lambda: step(num_accepted_tokens=torch.tensor([1, 4])),
    "decode.accepted_path.values": lambda: step(
        num_accepted_tokens=torch.tensor([2, 2]), accepted_path=torch.tensor([[0, 1, 2], [0, 0, 1]])
    ),
    "decode.parents.values": lambda: step(parents=torch.tensor([[0, 0, 1], [0, 1, 1]])),
    "decode.states.memory": lambda: step(states=zeros(4, 1, 3, 5).expand(4, 2, 3, 5)),
    "decode.conv_states.memory": lambda: step(conv_states=zeros(4, 1, 26).expand(4, 5, 26)),
    "decode.records.memory": lambda: step(records=zeros(4, 2, 13, 2).mT),
    "decode.out.memory": lambda: step(out=zeros(2, 3, 3, 2).mT),
    **{f"decode.{n}.negated": lambda n=n: step(**{n: torch._neg_view(good()[n])})
       for n in ("states", "conv_states", "records", "out")},
    "decode.memory.shared": lambda: step(v=(x := zeros(2, 3, 2, 3)), out=x),
}
