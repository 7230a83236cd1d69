"""KDA once more, for the tests alone: loops over sequences and tokens in float64, none of the package's code."""

from dataclasses import dataclass, field, replace

import torch


@dataclass
class Call:
    """The arguments of chunk_kda, with a gradient of each output."""

    tensors: dict
    options: dict = field(default_factory=dict)
    do: torch.Tensor | None = None
    dht: torch.Tensor | None = None

    @property
    def arguments(self):
        return self.tensors | self.options

    def with_options(self, **options):
        return replace(self, options=self.options | options)

    def requiring_grad(self):
        tensors = {n: x.detach().clone().requires_grad_(x.is_floating_point()) for n, x in self.tensors.items()}
        return replace(self, tensors=tensors)


DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def make(lengths=None, B=1, T=None, H=2, HV=None, K=5, V=3, dtype=torch.float64, gate="given", A_log=True, dt_bias=True,
         beta="given", l2norm=True, initial_state=True, state_v_first=False, tail=0, chunk_size=32, seed=0,
         per_head=False, **options):
    """Make a random call; `lengths` packs sequences, with `tail` tokens of no sequence after them.  Without a
    chunk_size the other functions take its arguments, too.  `per_head`: one gate for all channels of a head."""
    HV = H if HV is None else HV
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    N = B if lengths is None else len(lengths)
    T = T if lengths is None else sum(lengths) + tail
    x = {
        "q": rand(B, T, H, K),
        "k": rand(B, T, H, K),
        "v": rand(B, T, HV, V),
        "g": rand(B, T, HV) if per_head else rand(B, T, HV, K),
        "beta": rand(B, T, HV),
    }
    options |= {"use_qk_l2norm_in_kernel": l2norm, "state_v_first": state_v_first}
    options |= {"chunk_size": chunk_size} if chunk_size else {}
    full = torch.float64 if dtype == torch.float64 else torch.float32
    if gate == "given":
        x["g"] = -x["g"].abs()
    else:
        options["use_gate_in_kernel"] = True
        options |= {"lower_bound": -5.0} if gate == "bounded" else {}
        x |= {"A_log": rand(HV, dtype=full)} if A_log else {}
        x |= {"dt_bias": rand(HV if per_head else HV * K, dtype=full)} if dt_bias else {}
    if beta == "given":
        x["beta"] = x["beta"].sigmoid()
    else:
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": beta == "2*sigmoid"}
    if not l2norm:
        x |= {"q": x["q"] / K**0.5, "k": x["k"] / K**0.5}
    states = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    if initial_state:
        x["initial_state"] = rand(*states, dtype=full)
    if lengths is not None:
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return Call(x, options, do=rand(B, T, HV, V, dtype=dtype), dht=rand(*states, dtype=full))


# name of a case -> arguments of make(): the options that chunk_kda has
OPTIONS = {
    "given gate": {},
    "softplus gate": {"gate": "softplus"},
    "softplus gate without bias": {"gate": "softplus", "dt_bias": False},
    "bounded gate": {"gate": "bounded"},
    "bounded gate without A_log": {"gate": "bounded", "A_log": False},
    "bounded gate without both": {"gate": "bounded", "A_log": False, "dt_bias": False},
    "gate per head": {"per_head": True},
    "softplus gate per head, GVA": {"per_head": True, "gate": "softplus", "HV": 6, "tail": 7},
    "bounded gate per head": {"per_head": True, "gate": "bounded", "A_log": False},
    "promised gate": {"lower_bound": -20.0},
    "safe gate": {"gate": "bounded", "safe_gate": True},
    "sigmoid beta": {"beta": "sigmoid"},
    "2*sigmoid beta": {"beta": "2*sigmoid"},
    "no l2norm": {"l2norm": False},
    "scale": {"scale": 0.3},
    "no initial state": {"initial_state": False},
    "states (V, K)": {"state_v_first": True},
    "GVA": {"H": 2, "HV": 6},
    "GVA with everything": {"H": 1, "HV": 3, "gate": "bounded", "beta": "2*sigmoid", "state_v_first": True, "tail": 7},
    "K > V": {"K": 9, "V": 2},
    "one channel": {"K": 1, "V": 1},
    "chunks of 64": {"chunk_size": 64},
    "padded tail": {"tail": 33},
    "disable_recompute": {"disable_recompute": True, "gate": "softplus", "tail": 3},
    "states kept": {"disable_recompute": "states", "gate": "bounded", "tail": 3},
    "batch invariant": {"batch_invariant": True},
}


def definition(call):
    """Return o and the final states in float64, differentiable."""
    x = {n: t.double() for n, t in call.tensors.items() if n != "cu_seqlens"}
    options = call.options
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    g = g.unsqueeze(-1) if g.dim() == 3 else g
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    if options.get("use_gate_in_kernel"):
        logits = g + x["dt_bias"].view(HV, -1) if "dt_bias" in x else g
        rate = x["A_log"].exp().view(HV, 1) if "A_log" in x else torch.ones(HV, 1, dtype=torch.float64)
        bound = options.get("lower_bound")
        g = -rate * torch.log1p(logits.exp()) if bound is None else bound / (1 + (-rate * logits).exp())
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = (2 if options.get("allow_neg_eigval") else 1) / (1 + (-beta).exp())
    scale = options.get("scale") or K**-0.5
    ends = call.tensors["cu_seqlens"].tolist() if "cu_seqlens" in call.tensors else None
    rows = [(b, 0, T) for b in range(B)] if ends is None else [(0, s, e) for s, e in zip(ends, ends[1:])]
    o, finals = torch.zeros(B, T, HV, V, dtype=torch.float64), []
    pieces = {}
    for n, (b, start, end) in enumerate(rows):
        S = x["initial_state"][n] if "initial_state" in x else torch.zeros(HV, K, V, dtype=torch.float64)
        S = S.mT if options.get("state_v_first") and "initial_state" in x else S
        for t in range(start, end):
            qt, kt = (y[b, t].repeat_interleave(HV // H, 0) for y in (q, k))
            S = g[b, t].exp()[:, :, None] * S
            recalled = torch.einsum("hk,hkv->hv", kt, S)
            S = S + torch.einsum("hk,hv->hkv", kt, beta[b, t].view(HV, -1) * (v[b, t] - recalled))
            pieces[b, t] = scale * torch.einsum("hk,hkv->hv", qt, S)
        finals.append(S.mT if options.get("state_v_first") else S)
    empty = torch.zeros(HV, V, dtype=torch.float64)
    if B * T:
        o = torch.stack([torch.stack([pieces.get((b, t), empty) for t in range(T)]) for b in range(B)])
    shape = (0, HV, V, K) if options.get("state_v_first") else (0, HV, K, V)
    return o, torch.stack(finals) if finals else torch.zeros(shape, dtype=torch.float64)


def gradients(call):
    """Return the definition's gradients by name, from autograd."""
    call = call.requiring_grad()
    o, ht = definition(call)
    names = [n for n in DIFFERENTIABLE if n in call.tensors]
    loss = (o * call.do.double()).sum() + (ht * call.dht.double()).sum() + sum(0 * call.tensors[n].sum() for n in names)
    grads = torch.autograd.grad(loss, [call.tensors[n] for n in names], allow_unused=True)
    return {n: torch.zeros_like(call.tensors[n]) if gr is None else gr for n, gr in zip(names, grads)}


def distance(x, exact):
    """Return the largest difference, relative to the largest exact value; a nan is infinitely far."""
    x, exact = x.detach().double(), exact.detach().double()
    if x.shape != exact.shape:
        raise AssertionError(f"shape {tuple(x.shape)}, not {tuple(exact.shape)}")
    if not x.numel():
        return 0.0
    difference = (x - exact).abs().max().item()
    return float("inf") if difference != difference else difference / max(exact.abs().max().item(), 1e-30)


def assert_is_the_definition(call, found, limit=1e-12):
    """Check the outputs of a call, and its final states."""
    far = [distance(x, exact) for x, exact in zip(found, definition(call), strict=True)]
    assert all(each < limit for each in far), far
